"""The dummy tier: chunks in memory, a device's time, and a device's faults, all from one seed.

All bytes of a call move at the moment when its last transfer ends, for stores and for loads. So if an engine gives a
lent row to somebody else before, wrong bytes show it. With no latency and no limit to its bandwidth a call never
sleeps, and costs a copy and a checksum.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Self

import msgspec
from xxhash import xxh3_64_intdigest

from kvtier.backend import (
    Abandoned,
    Advice,
    Backend,
    Calls,
    ChunkCorrupt,
    ChunkMissing,
    Count,
    Durability,
    Duration,
    FileMapper,
    Fit,
    InventoryEvent,
    InventoryQueue,
    NoSpace,
    Occupancy,
    OffloadKey,
    Options,
    Outcome,
    PositiveSize,
    Read,
    Share,
    Size,
    TierContext,
    TransferFailed,
    Write,
    make_offload_key,
)
from kvtier_backends.dummy.store import Device, Slow, WriteBudget, open_store

Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""How many of all, 0 to 1."""
Factor = Annotated[float, msgspec.Meta(ge=1, le=1e6)]
Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # As far as it travels to another process.


class DummyOptions(Options, frozen=True, kw_only=True):
    """A device's figures. The defaults are memory's own: no waiting, no faults, no limit."""

    latency_s: Duration = 0.0  # From a transfer's start to its first byte; also what probing or deleting a batch takes.
    bandwidth_bytes_per_s: PositiveSize | None = None  # Of the whole device, loads and stores together; None: no limit.
    store_bandwidth_bytes_per_s: PositiveSize | None = None  # At which stores pass it; None: as loads.
    concurrency: Count = 64  # Transfers under way at the same time; more wait their turn. An SSD's queue is as deep.
    loads_first: bool = False  # Loads go before stores that wait, as in an fs tier; False: first come, first served.
    slow_at_s: Duration | None = None  # After its first use it is slower for a while; None: it never is.
    slow_for_s: Duration = 60.0  # That long,
    slow_factor: Factor = 20.0  # and everything takes so many times as long.
    failure_rate: Rate = 0.0  # Of chunks in loads and stores: answered TransferFailed, and nothing moves.
    corruption_rate: Rate = 0.0  # Of chunks stored: one bit of what is kept is flipped, and found when it is loaded.
    capacity_bytes: Size | None = None  # Least recently used chunks make room; None: no limit.
    low_water: Share = 1.0  # Part of the capacity down to which they do, from halfway between it and the capacity.
    write_budget_bytes_per_day: PositiveSize | None = None  # As an fs tier's: beyond it nothing is stored.
    store: str | None = None  # Name of a store that outlives the tier, within the process; None: one of its own.
    shared: bool = False  # Others have the store open in this namespace, too: what is reported is then not everything.
    seed: Seed = 0  # Of failures and corruption, together with the tier's name.


class Held:
    """The keys of one namespace in a store."""

    def __init__(self, mapper: FileMapper, chunks: Mapping[str, object]) -> None:
        self._mapper = mapper
        self._chunks = chunks

    def __contains__(self, key: OffloadKey) -> bool:
        return self._mapper.name(key) in self._chunks

    def __iter__(self) -> Iterator[OffloadKey]:
        return (key for key in map(self._mapper.key, self._chunks) if key is not None)


class DummyBackend(Backend[DummyOptions]):
    """A tier in memory with a device's speed and faults. Offers `Inventory`, `Measured` and `Advised`."""

    durability = Durability.PROCESS
    options_type = DummyOptions

    def __init__(self, options: DummyOptions, context: TierContext) -> None:
        """Open the tier at once, without waiting. Raises `ConfigError` if the named store is not to be had."""
        self._options = options
        self._context = context
        self._random = random.Random(f"{options.seed} {context.name}")
        self._device = Device(
            latency_s=options.latency_s,
            bandwidth_bytes_per_s=options.bandwidth_bytes_per_s,
            slots=options.concurrency,
            store_bandwidth_bytes_per_s=options.store_bandwidth_bytes_per_s,
            loads_first=options.loads_first,
            slow=_slow(options),
        )
        budget_bytes = options.write_budget_bytes_per_day
        self._write_budget = None if budget_bytes is None else WriteBudget(budget_bytes, context.row_bytes)
        self._calls = Calls(context.name)
        self._fit = Fit(context.row_bytes)
        self._store = open_store(options.store, options.capacity_bytes)
        self._held = Held(context.mapper, self._store.chunks)
        self._inventory = InventoryQueue(self._held)
        self._inventory.scan_ended(complete=not options.shared)
        namespace = context.mapper.name(make_offload_key(b""))  # The one name that stands for all names beside it.
        self._store.enter(namespace, self._lost, shared=options.shared)

    @classmethod
    async def open(cls, options: DummyOptions, context: TierContext) -> Self:
        return cls(options, context)

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        with self._calls.one():
            await self._take_time([0])
            fitting = set(self._fit.keys(keys))
            return [key in fitting and key in self._held for key in keys]

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        with self._calls.one():
            return await self._fit.load(reads, self._load_all)

    async def _load_all(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        names = [self._context.mapper.name(read.key) for read in reads]
        failed = self._draw(self._options.failure_rate, len(reads))
        await self._take_time(self._context.row_bytes * (name in self._store.chunks) for name in names)
        self._store.touch(names)
        return [self._load(*each) for each in zip(reads, names, failed, strict=True)]

    def _load(self, read: Read, name: str, failed: bool) -> Outcome:
        chunk = self._store.chunks.get(name)
        if failed:
            return TransferFailed(f"{read.key.hex()}: the device failed to read it (failure_rate)")
        if chunk is None or len(chunk.row) != len(read.into):
            return ChunkMissing(f"{read.key.hex()}: not in tier {self._context.name}")
        if not chunk.sound():
            self._store.lose(name)
            return ChunkCorrupt(f"{read.key.hex()}: checksum mismatch in tier {self._context.name}")
        read.into[:] = chunk.row
        return None

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        with self._calls.one():
            return await self._fit.store(writes, self._store_all)

    async def _store_all(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        refused = writes[self._allowed(len(writes)) :]
        writes = writes[: len(writes) - len(refused)]
        names = [self._context.mapper.name(write.key) for write in writes]
        failed = self._draw(self._options.failure_rate, len(writes))
        rotten = self._draw(self._options.corruption_rate, len(writes))
        await self._take_time((len(write.row) for write in writes), storing=True)
        keep = set(names)
        self._store.retained.expire(asyncio.get_running_loop().time())
        outcomes = [self._keep(*each, keep) for each in zip(writes, names, failed, rotten, strict=True)]
        self._store.touch(names)
        outcomes += [NoSpace(f"{write.key.hex()}: the day's write budget is used up") for write in refused]
        return outcomes

    def _allowed(self, count: int) -> int:
        """Return how many of so many chunks may be written."""
        if self._write_budget is None:
            return count
        return self._write_budget.take(asyncio.get_running_loop().time(), count, self._context.row_bytes)

    def _keep(self, write: Write, name: str, failed: bool, rotten: bool, keep: set[str]) -> Outcome:
        if failed:
            return TransferFailed(f"{write.key.hex()}: the device failed to write it (failure_rate)")
        block, low_water = bytes(write.row), self._options.low_water
        checksum = xxh3_64_intdigest(block)
        if not self._store.put(name, self._rot(block) if rotten else block, checksum, keep, low_water=low_water):
            return NoSpace(
                f"{write.key.hex()}: {len(block):,} bytes into tier {self._context.name}, "
                f"{self._store.used_bytes:,} of {self._store.capacity_bytes:,} bytes used"
            )
        return None

    def _rot(self, block: bytes) -> bytes:
        bit = self._random.randrange(len(block) * 8)
        damaged = bytearray(block)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        with self._calls.one():
            await self._take_time([0])
            for key in self._fit.keys(keys):
                self._store.delete(self._context.mapper.name(key))

    async def aclose(self, deadline_s: float) -> Abandoned:
        self._inventory.close()
        abandoned = await self._calls.close(deadline_s)
        self._store.leave(self._lost)
        return abandoned

    def watch(self) -> AsyncIterator[InventoryEvent]:
        return self._inventory.watch()

    def advise(self, advice: Advice[OffloadKey]) -> None:
        self._store.retained.keys_max = self._retained_max()
        names = [self._context.mapper.name(key) for key in advice.keys]
        self._store.advise(advice.of(names), asyncio.get_running_loop().time())

    def _retained_max(self) -> int:
        chunks = (self._options.capacity_bytes or 0) // self._context.row_bytes
        return int(self._context.retained_share * chunks)

    def occupancy(self) -> Occupancy:
        return Occupancy(len(self._store.chunks), self._store.used_bytes, self._store.capacity_bytes)

    def _lost(self, name: str) -> None:
        key = self._context.mapper.key(name)
        if key is not None:  # Else another namespace's.
            self._inventory.lost(key)

    async def _take_time(self, sizes_bytes: Iterable[int], *, storing: bool = False) -> None:
        """Wait until the device has done transfers of these sizes; its time is spent even if we are cancelled."""
        loop, device = asyncio.get_running_loop(), self._device
        now = loop.time()
        left_s = device.book(now, sizes_bytes, storing=storing) - now
        put_off_s = device.put_off_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = device.put_off_s - put_off_s if storing else 0.0
            put_off_s = device.put_off_s

    def _draw(self, rate: float, count: int) -> list[bool]:
        """Draw for each of so many chunks whether it is one of those that the rate means."""
        return [self._random.random() < rate for _ in range(count)] if rate else [False] * count


def _slow(options: DummyOptions) -> Slow | None:
    begin_s = options.slow_at_s
    return None if begin_s is None else Slow(begin_s, begin_s + options.slow_for_s, options.slow_factor)
