"""The dummy tier: real bytes in memory, moved in the time of a device. A model of any device.

A call's bytes all move when its last transfer ends: wrong bytes reveal an engine that reuses a lent row too early.
Without latency and bandwidth limit a call never sleeps, and costs a copy.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from typing import Self

from kvtier import backend as api
from kvtier.policies import LRU, HintedOrder


class DummyOptions(api.Options, frozen=True, kw_only=True):
    """A device's figures. The defaults are those of memory: no waiting and no limit."""

    latency_s: api.Duration = 0.0  # Time to a transfer's first byte, and of a batch's probe or delete.
    bandwidth_bytes_per_s: api.PositiveSize | None = None  # Bandwidth of loads and stores; unset: no limit.
    store_bandwidth_bytes_per_s: api.PositiveSize | None = None  # Bandwidth of stores; unset: that of loads.
    concurrency: api.Count = 64  # Concurrent transfers, as deep as an SSD's queue; more wait for a slot.
    capacity_bytes: api.Size | None = None  # Least recently used chunks make room; unset: no limit.
    store: str | None = None  # Name of a store that outlives the tier, within the process; unset: private.
    shared: bool = False  # Other tiers use the store, too: the inventory is not complete.


class DummyDevice:
    """The times at which the slots and the link of one device are free again. Time is an argument.

    A transfer takes the first free slot and waits for the latency. Then it sends its bytes over the link, which serves
    one transfer at a time. So on an idle device a burst of n chunks takes max(n / slots * latency, bytes / bandwidth)
    and about one latency more. Loads and stores share the link, and each byte takes the time of its direction. Loads go
    before waiting stores, as in an fs tier: a booked load delays every store in flight.
    """

    def __init__(self, options: DummyOptions) -> None:
        load_bytes_per_s = options.bandwidth_bytes_per_s
        store_bytes_per_s = options.store_bandwidth_bytes_per_s or load_bytes_per_s
        self.latency_s = options.latency_s
        self.load_s_per_byte = 1.0 / load_bytes_per_s if load_bytes_per_s else 0.0
        self.store_s_per_byte = 1.0 / store_bytes_per_s if store_bytes_per_s else 0.0
        self.put_off_s = 0.0  # Total delay of booked stores by later loads.
        self._load_slots = [0.0] * options.concurrency
        self._store_slots = [0.0] * options.concurrency
        self._loads_end_at = self._stores_end_at = 0.0  # On the link.

    def load(self, now: float, sizes_bytes: Iterable[int]) -> float:
        """Book loads of these sizes in order, and return the end of the last one."""
        if not self.latency_s and not self.load_s_per_byte:
            return now
        sizes_bytes = list(sizes_bytes)
        ends_at, self._loads_end_at = self._book(
            now, self._load_slots, self._loads_end_at, [size * self.load_s_per_byte for size in sizes_bytes]
        )
        if self._stores_end_at > now:
            link_s = sum(sizes_bytes) * self.load_s_per_byte
            self._stores_end_at += link_s
            self.put_off_s += link_s
        return ends_at

    def store(self, now: float, sizes_bytes: Iterable[int]) -> float:
        """Book stores, as `load` does. Any growth of `put_off_s` until then delays their end."""
        if not self.latency_s and not self.store_s_per_byte:
            return now
        ends_at, self._stores_end_at = self._book(
            now,
            self._store_slots,
            max(self._stores_end_at, self._loads_end_at),
            [size * self.store_s_per_byte for size in sizes_bytes],
        )
        return ends_at

    def _book(self, now: float, slots: list[float], link_free: float, sent_s: Sequence[float]) -> tuple[float, float]:
        ends_at = now
        for link_s in sent_s:
            ended_at = max(now, slots[0]) + self.latency_s
            if link_s:
                ended_at = link_free = max(ended_at, link_free) + link_s
            heapq.heapreplace(slots, ended_at)
            ends_at = max(ends_at, ended_at)
        return ends_at, link_free


class Store:
    """One namespace's chunks within a capacity, LRU. A named store outlives its tiers, as a disk outlives processes."""

    def __init__(self, chunks_max: int | None) -> None:
        self.chunks: dict[api.OffloadKey, bytes] = {}
        self.users: list[api.InventoryQueue] = []
        self.chunks_max = chunks_max
        self._order: LRU[api.OffloadKey] | HintedOrder[api.OffloadKey] = LRU(chunks_max or 1)

    def put(self, key: api.OffloadKey, chunk: bytes, keep: Container[api.OffloadKey]) -> bool:
        """Replace the chunk of a key; return False, and change nothing, if there is no room without those to keep."""
        if key not in self.chunks:
            if self.chunks_max is not None and len(self.chunks) >= self.chunks_max:
                if (victims := self._order.evict(1, keep.__contains__)) is None:
                    return False
                for victim in victims:
                    del self.chunks[victim]
                    for user in self.users:
                        user.lost(victim)
            self._order.insert([key])
        self.chunks[key] = chunk
        return True

    def touch(self, keys: Iterable[api.OffloadKey]) -> None:
        """Make the chunks the most recently used; the head of a prefix is evicted last."""
        self._order.touch(self._held(keys))

    def advise(self, advice: api.Advice[api.OffloadKey], retained_max: int, clock: Callable[[], float]) -> None:
        if isinstance(self._order, LRU):
            if not advice.is_hint:
                return self._order.rank(self._held(advice.keys))
            self._order = HintedOrder(self._order, retained_max, clock)
        return self._order.advise(advice.of(self._held(advice.keys)), clock())

    def delete(self, key: api.OffloadKey) -> None:
        if self.chunks.pop(key, None) is not None:
            self._order.remove([key])

    def _held(self, keys: Iterable[api.OffloadKey]) -> list[api.OffloadKey]:
        return [key for key in dict.fromkeys(keys) if key in self.chunks]


_named: dict[str, dict[tuple[str, int], Store]] = {}


def forget_store(name: str) -> None:
    """Forget a named store and its chunks. Open tiers keep it. Unknown names are ignored."""
    _named.pop(name, None)


class DummyBackend(api.Backend[DummyOptions]):
    """A tier in memory with a device's speed. Offers `Inventory`, `Measured` and `Advised`."""

    durability = api.Durability.PROCESS
    options_type = DummyOptions

    def __init__(self, options: DummyOptions, context: api.TierContext) -> None:
        self._context = context
        self._row_bytes = context.row_bytes
        self._capacity_bytes = options.capacity_bytes
        self._device = DummyDevice(options)
        self._calls = api.Calls(context.name)
        self._fit = api.Fit(context.row_bytes)
        chunks_max = None if options.capacity_bytes is None else options.capacity_bytes // context.row_bytes
        self._store = Store(chunks_max)
        if options.store is not None:
            namespaces = _named.setdefault(options.store, {})
            self._store = namespaces.setdefault((context.mapper.chunks_folder, context.row_bytes), self._store)
            if self._store.chunks_max != chunks_max:
                raise api.ConfigError("capacity_bytes: another given than at the store's opening, the same accepted")
        self._inventory = api.InventoryQueue(self._store.chunks)
        self._inventory.scan_ended(complete=not options.shared)
        self._store.users.append(self._inventory)

    @classmethod
    async def open(cls, options: DummyOptions, context: api.TierContext) -> Self:
        return cls(options, context)

    async def probe(self, keys: Sequence[api.OffloadKey]) -> Sequence[bool]:
        with self._calls.one():
            await self._load_time([0])
            return [key in self._store.chunks for key in keys]

    async def load(self, reads: Sequence[api.Read]) -> Sequence[api.Outcome]:
        with self._calls.one():
            return await self._fit.load(reads, self._load_all)

    async def _load_all(self, reads: Sequence[api.Read]) -> Sequence[api.Outcome]:
        chunks = self._store.chunks
        await self._load_time(self._row_bytes * (read.key in chunks) for read in reads)
        self._store.touch(read.key for read in reads)
        return [self._load(*read) for read in reads]

    def _load(self, key: api.OffloadKey, into: memoryview) -> api.Outcome:
        if (chunk := self._store.chunks.get(key)) is None:
            return api.ChunkMissing(f"{key.hex()}: not in tier {self._context.name}")
        into[:] = chunk
        return None

    async def store(self, writes: Sequence[api.Write]) -> Sequence[api.Outcome]:
        with self._calls.one():
            return await self._fit.store(writes, self._store_all)

    async def _store_all(self, writes: Sequence[api.Write]) -> Sequence[api.Outcome]:
        await self._store_time(len(write.row) for write in writes)
        keep = {write.key for write in writes}
        outcomes = [self._keep(*write, keep) for write in writes]
        self._store.touch(write.key for write in writes)
        return outcomes

    def _keep(self, key: api.OffloadKey, row: memoryview, keep: Container[api.OffloadKey]) -> api.Outcome:
        if self._store.put(key, bytes(row), keep):
            return None
        room = f"{self.occupancy().used_bytes:,} of {self._capacity_bytes:,} bytes used"
        return api.NoSpace(f"{key.hex()}: {len(row):,} bytes into tier {self._context.name}, {room}")

    async def delete(self, keys: Sequence[api.OffloadKey]) -> None:
        with self._calls.one():
            await self._load_time([0])
            for key in keys:
                self._store.delete(key)

    async def aclose(self, deadline_s: float) -> api.Abandoned:
        self._inventory.close()
        abandoned = await self._calls.close(deadline_s)
        self._store.users = [user for user in self._store.users if user is not self._inventory]
        return abandoned

    def watch(self) -> AsyncIterator[api.InventoryEvent]:
        return self._inventory.watch()

    def advise(self, advice: api.Advice[api.OffloadKey]) -> None:
        retained_max = int(self._context.retained_share * (self._store.chunks_max or 0))
        self._store.advise(advice, retained_max, asyncio.get_running_loop().time)

    def occupancy(self) -> api.Occupancy:
        chunks = len(self._store.chunks)
        return api.Occupancy(chunks, chunks * self._row_bytes, self._capacity_bytes)

    # A cancelled call has still used the device's time.

    async def _load_time(self, sizes_bytes: Iterable[int]) -> None:
        now = asyncio.get_running_loop().time()
        if (left_s := self._device.load(now, sizes_bytes) - now) > 0:
            await asyncio.sleep(left_s)

    async def _store_time(self, sizes_bytes: Iterable[int]) -> None:
        device, now = self._device, asyncio.get_running_loop().time()
        left_s = device.store(now, sizes_bytes) - now
        put_off_s = device.put_off_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s, put_off_s = device.put_off_s - put_off_s, device.put_off_s
