"""The dummy tier: chunks in memory, moved in a device's time.

All bytes of a call move when its last transfer ends, for stores and for loads. So wrong bytes reveal an engine that
reuses a lent row too early. Without latency and bandwidth limit a call never sleeps, and costs a copy.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Self

from kvtier.backend import (
    Abandoned,
    Advice,
    Backend,
    Calls,
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
    Write,
    make_offload_key,
)
from kvtier_backends.dummy.store import DummyDevice, DummyWriteBudget, open_store


class DummyOptions(Options, frozen=True, kw_only=True):
    """A device's figures. The defaults are those of memory: no waiting and no limit."""

    latency_s: Duration = 0.0  # From a transfer's start to its first byte; also what probing or deleting a batch takes.
    bandwidth_bytes_per_s: PositiveSize | None = None  # Of the whole device, loads and stores together; None: no limit.
    store_bandwidth_bytes_per_s: PositiveSize | None = None  # Of stores; None: that of loads.
    concurrency: Count = 64  # Concurrent transfers, as deep as an SSD's queue; more wait for a slot.
    loads_first: bool = False  # Loads go before stores that wait, as in an fs tier; False: first come, first served.
    capacity_bytes: Size | None = None  # Least recently used chunks make room; None: no limit.
    low_water: Share = 1.0  # Eviction goes down to this share, from halfway between it and the capacity.
    write_budget_bytes_per_day: PositiveSize | None = None  # As an fs tier's: beyond it nothing is stored.
    store: str | None = None  # Name of a store that outlives the tier, within the process; None: a private one.
    shared: bool = False  # Other tiers use the store in this namespace, so the inventory is not complete.


class HeldNames:
    """The keys of one namespace in a store."""

    def __init__(self, mapper: FileMapper, chunks: Mapping[str, object]) -> None:
        self._mapper = mapper
        self._chunks = chunks

    def __contains__(self, key: OffloadKey) -> bool:
        return self._mapper.name(key) in self._chunks

    def __iter__(self) -> Iterator[OffloadKey]:
        return (key for key in map(self._mapper.key, self._chunks) if key is not None)


class DummyBackend(Backend[DummyOptions]):
    """A tier in memory with a device's speed. Offers `Inventory`, `Measured` and `Advised`."""

    durability = Durability.PROCESS
    options_type = DummyOptions

    def __init__(self, options: DummyOptions, context: TierContext) -> None:
        """Open the tier at once, without waiting. Raises `ConfigError` if the named store is not to be had."""
        self._options = options
        self._context = context
        self._device = DummyDevice(
            latency_s=options.latency_s,
            bandwidth_bytes_per_s=options.bandwidth_bytes_per_s,
            slots=options.concurrency,
            store_bandwidth_bytes_per_s=options.store_bandwidth_bytes_per_s,
            loads_first=options.loads_first,
        )
        budget_bytes = options.write_budget_bytes_per_day
        self._write_budget = None if budget_bytes is None else DummyWriteBudget(budget_bytes, context.row_bytes)
        self._calls = Calls(context.name)
        self._fit = Fit(context.row_bytes)
        self._store = open_store(options.store, options.capacity_bytes)
        self._held = HeldNames(context.mapper, self._store.chunks)
        self._inventory = InventoryQueue(self._held)
        self._inventory.scan_ended(complete=not options.shared)
        namespace = context.mapper.name(make_offload_key(b""))  # Stands for all names of the namespace.
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
        await self._take_time(self._context.row_bytes * (name in self._store.chunks) for name in names)
        self._store.touch(names)
        return [self._load(*each) for each in zip(reads, names, strict=True)]

    def _load(self, read: Read, name: str) -> Outcome:
        chunk = self._store.chunks.get(name)
        if chunk is None or len(chunk) != len(read.into):
            return ChunkMissing(f"{read.key.hex()}: not in tier {self._context.name}")
        read.into[:] = chunk
        return None

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        with self._calls.one():
            return await self._fit.store(writes, self._store_all)

    async def _store_all(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        refused = writes[self._allowed(len(writes)) :]
        writes = writes[: len(writes) - len(refused)]
        names = [self._context.mapper.name(write.key) for write in writes]
        await self._take_time((len(write.row) for write in writes), storing=True)
        keep = set(names)
        self._store.retained.expire(asyncio.get_running_loop().time())
        outcomes = [self._keep(*each, keep) for each in zip(writes, names, strict=True)]
        self._store.touch(names)
        outcomes += [NoSpace(f"{write.key.hex()}: the day's write budget is used up") for write in refused]
        return outcomes

    def _allowed(self, count: int) -> int:
        if self._write_budget is None:
            return count
        return self._write_budget.take(asyncio.get_running_loop().time(), count, self._context.row_bytes)

    def _keep(self, write: Write, name: str, keep: set[str]) -> Outcome:
        if self._store.put(name, bytes(write.row), keep, low_water=self._options.low_water):
            return None
        return NoSpace(
            f"{write.key.hex()}: {len(write.row):,} bytes into tier {self._context.name}, "
            f"{self._store.used_bytes:,} of {self._store.capacity_bytes:,} bytes used"
        )

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
        if key is not None:  # Of this namespace.
            self._inventory.lost(key)

    async def _take_time(self, sizes_bytes: Iterable[int], *, storing: bool = False) -> None:
        """Wait until the device has done transfers of these sizes. A cancelled call has still used its time."""
        loop, device = asyncio.get_running_loop(), self._device
        now = loop.time()
        left_s = device.book(now, sizes_bytes, storing=storing) - now
        put_off_s = device.put_off_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = device.put_off_s - put_off_s if storing else 0.0
            put_off_s = device.put_off_s
