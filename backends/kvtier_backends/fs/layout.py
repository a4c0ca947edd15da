"""The seam between a file-system tier and the way its chunks lie on the disk.

A layout decides where bytes go, knows the chunks, and makes room. The rest is the same for all layouts: calls and their
checks, the folder, the footer and its verification, the capacity, the counters.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from kvtier.backend import OffloadKey, Outcome, TierContext, Write
from kvtier.errors import BackendClosed, NoSpace
from kvtier.policies import LRU, Policy, policy_class
from kvtier_backends.fs.disk.capacity import Capacity, MemorySpace
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Packing, make_packing
from kvtier_backends.fs.disk.lanes import FsLanes, start_lanes
from kvtier_backends.fs.disk.reads import ONE_BY_ONE, Reads
from kvtier_backends.fs.disk.remains import PAUSE_S_LEAST, PAUSE_S_MOST, Beside, Remains
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.options import FsOptions, MemoryOptions

LOOK_S = 10.0  # The files beside the chunks are measured so often: they are a dozen.
Work = Callable[[], Coroutine[Any, Any, None]]
Scarce = Literal["capacity", "disk", "write_budget", "others", "storing"]
_WHY: dict[Scarce, str] = {
    "capacity": "all of capacity_bytes is in use, by chunks that may not go now or by what the scan has not seen yet",
    "disk": "the disk has no room, or no more than min_free_bytes",
    "write_budget": "the day's write budget, write_budget_bytes_per_day, is used up",
    "storing": "another engine is storing it",
    "others": "other processes have the directory's room, or have promised it to their stores",
}


class FsCounters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Totals since the tier was opened."""

    buffered_fallback: int = 0  # 1 if direct I/O was wanted and refused.
    unverified_accepted: int = 0  # Loads of files without a footer.
    unverified_refused: int = 0
    other_version: int = 0  # Loads of files of a later format, which are left alone.
    sealed_kind: int = 0  # Loads of chunks sealed otherwise than the option `seal` says; left alone.
    sealed_key: int = 0  # Loads of chunks sealed with a key that the tier lacks; left alone.
    corrupt: dict[str, int] = {}  # Files, by `ChunkFault`.
    corrupt_left: int = 0  # Of those, files that could not be deleted.
    scan_skipped: int = 0  # Files found at the start that no load would take: a wrong length, or refused.
    scan_swept: int = 0  # Temporaries of dead processes, removed.
    evicted: int = 0  # Files that went for room.
    expired: int = 0  # Files that went because they were not used for `ttl_s`.
    evictions_failed: int = 0  # Files that could not be removed, and take room still.
    refused: dict[str, int] = {}  # Chunks without room, by reason: see `Scarce`.
    from_others: int = 0  # Chunks loaded from a shared tier that other engines have stored.
    segments_lost: int = 0  # Segments that another program has removed, with their chunks.
    disk_full: int = 0  # Chunks that the file system had no room for, whatever the limit says.
    checkpoint_chunks: int = 0  # Chunks that the last life's checkpoint named.
    checkpoints_ignored: int = 0  # Torn, of another version or namespace.
    checkpoints_written: int = 0
    checkpoints_failed: int = 0
    scan_failed: int = 0  # Folders that could not be read: the tier then goes on asking the file system.


def by_name(counters: FsCounters) -> dict[str, int]:
    totals = msgspec.structs.asdict(counters)
    kinds: dict[str, dict[str, int]] = {name: totals.pop(name) for name in ("corrupt", "refused")}
    return totals | {f"{name}_{kind}": total for name, by in kinds.items() for kind, total in by.items()}


class Counters:
    """Counts on behalf of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals, self._corrupt, self._refused = Counter[str](), Counter[str](), Counter[str]()

    def count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self._totals[what] += times

    def corrupt(self, fault: str) -> None:
        with self._lock:
            self._corrupt[str(fault)] += 1

    def refuse(self, reason: str, chunks: int) -> None:
        if chunks:
            with self._lock:
                self._refused[reason] += chunks

    def refused(self, writes: Sequence[Write], reason: Scarce) -> list[Outcome]:
        """Count chunks without room; return their outcomes."""
        self.refuse(reason, len(writes))
        return [NoSpace(f"{write.key.hex()}: {reason}: {_WHY[reason]}") for write in writes]

    def totals(self) -> FsCounters:
        with self._lock:
            return FsCounters(**self._totals, corrupt=dict(self._corrupt), refused=dict(self._refused))


class PoolRoot:
    """The root of a pool of memory, or of what a keeper has: nothing is beside its chunks, and nothing is left."""

    direct = True
    write_budget = None

    def __init__(
        self, chunks: str, size_bytes: int, reads: Reads = ONE_BY_ONE, is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        self.chunks, self.reads, self._is_lost = chunks, reads, is_lost
        self.disk = MemorySpace(size_bytes)
        self.remains, self.beside = Remains(-1), Beside(lambda: 0)

    def is_gone(self, *, failed: bool) -> bool:  # noqa: ARG002
        return self._is_lost()

    def close(self) -> None: ...


OptionsT = TypeVar("OptionsT", bound=FsOptions | MemoryOptions, covariant=True)
RootT = TypeVar("RootT", bound=Folder | PoolRoot, covariant=True)


@dataclass(frozen=True, slots=True)
class OpenTier(Generic[OptionsT, RootT]):
    """An open tier: everything that its parts need. Belongs to the loop's thread, where no part says otherwise."""

    options: OptionsT
    context: TierContext
    root: RootT
    lanes: FsLanes
    packing: Packing
    capacity: Capacity
    counters: Counters = field(default_factory=Counters)
    clock_ns: Callable[[], int] = time.time_ns

    def retained_max(self, chunk_bytes: int) -> int:
        limit_bytes = self.options.capacity_bytes or self.root.disk.size_bytes
        return int(self.context.retained_share * (limit_bytes // chunk_bytes))

    def policy(self) -> Policy[OffloadKey] | None:
        """Return the policy that orders eviction; None: by last use, which needs no policy of its own."""
        kind, size_bytes = policy_class(self.options.eviction_policy), self.root.disk.size_bytes
        most_bytes = min(self.options.capacity_bytes or size_bytes, size_bytes)
        return None if kind is LRU else kind(max(1, most_bytes // self.context.row_bytes))

    async def allowed(self, chunks: int) -> int:
        """Return how many of the chunks the day's write budget has bytes for; they count as written."""
        budget = self.root.write_budget
        chunk_bytes = self.context.row_bytes + FOOTER_BYTES
        return chunks if budget is None or not chunks else await budget.take(chunks, chunk_bytes)

    def scarce(self, *, others: bool, disk: bool = False) -> Scarce:
        """Return what is to blame for a store without room, and without chunks that may go for it."""
        if disk or self.capacity.is_disk_scarcer:
            return "disk"
        return "others" if others else "capacity"

    async def end_transfers(self, ends_at: float) -> tuple[int, int]:
        """Wait for loads and stores; return how many of each are left. The write budget's rest is put back."""
        lanes, budget = self.lanes, self.root.write_budget
        loads, stores = await asyncio.gather(lanes.load.aclose(left_s(ends_at)), lanes.store.aclose(left_s(ends_at)))
        with suppress(BackendClosed):  # Closed before.
            if len(self.root.remains):
                lanes.evict.submit(self.root.remains.again)
            if budget is not None and not stores:
                lanes.evict.submit(budget.put_back)
        return loads, stores

    def let_go(self) -> None:
        self.lanes.scan.submit(self.root.close)  # A cancelled call's thread may still be at it.
        self.lanes.let_go()


FsTier = OpenTier[FsOptions, Folder]
SlotTier = OpenTier[FsOptions | MemoryOptions, Folder | PoolRoot]


async def open_tier(
    options: FsOptions, context: TierContext, before: FsTier | None = None, beside: FsTier | None = None
) -> FsTier:
    """Start a tier's threads, open its root and what is beside its chunks; `before`: the same tier, gone.

    `beside`: another namespace's tier of this process, which owns the root; capacity and write budget are both's.
    Raises what `Folder.open` and `make_packing` do, with nothing left open.
    """
    root = Folder(options, context, before.root.mount if before else None, beside.root.owner if beside else None)
    lanes = start_lanes(options, context.name)
    try:
        packing = await lanes.scan.run(_open, root, options, context, lanes)
    except BaseException:
        lanes.scan.submit(root.close)
        lanes.let_go()
        raise
    if beside is None:
        capacity = Capacity(root.disk, limit_bytes=options.capacity_bytes, min_free_bytes=options.min_free_bytes)
    else:
        capacity, root.write_budget = beside.capacity, beside.root.write_budget
    capacity.count(root.beside, root.remains)
    return OpenTier(options, context, root, lanes, packing, capacity, Counters() if before is None else before.counters)


def open_pool(options: MemoryOptions, context: TierContext, capacity: Capacity | None = None) -> SlotTier:
    """Start the threads of a tier in memory; `capacity`: other namespaces' of its pool."""
    root = PoolRoot("memory", options.capacity_bytes)
    capacity = capacity or Capacity(root.disk, limit_bytes=options.capacity_bytes, min_free_bytes=0)
    packing = Packing(context.mapper.fingerprint, context.row_bytes)
    return OpenTier(options, context, root, start_lanes(options, context.name), packing, capacity)


def _open(root: Folder, options: FsOptions, context: TierContext, lanes: FsLanes) -> Packing:
    packing = make_packing(options, context)  # First: what is refused leaves nothing on the disk.
    root.open()
    root.open_beside(lanes.store)
    return packing


class Left(NamedTuple):
    """Calls and jobs that are still under way when a layout's closing deadline has passed."""

    transfers: int  # Calls whose buffers are in use.
    others: int  # Jobs without lent buffers; with any of either, descriptors must stay open.


class Settling:
    """Remains are removed again, doubts settled, and files beside the chunks measured. Belongs to the loop's thread."""

    def __init__(self, tier: SlotTier, settle: Callable[[], bool] = lambda: True) -> None:
        """`settle`: settles what else is in doubt, in the lane, and returns True if nothing is left."""
        self._tier = tier
        self._settle = settle
        self._failed = False
        self._pause_s = 0.0
        self._due_s = time.monotonic() + LOOK_S

    def left_s(self) -> float:
        return left_s(self._due_s)

    def wanted(self) -> bool:
        """Schedule a round, as something is in doubt; return True if it is due sooner than before."""
        self._failed = True
        due_s = time.monotonic() + max(PAUSE_S_LEAST, self._pause_s)
        sooner, self._due_s = due_s < self._due_s, min(self._due_s, due_s)
        return sooner

    async def __call__(self) -> None:
        if self.left_s():
            return
        self._due_s = time.monotonic() + LOOK_S  # For calls that come meanwhile.
        failed, self._failed = self._failed, False
        well = await self._tier.lanes.evict.run(self._work) and not failed
        self._tier.counters.count("evictions_failed", self._tier.root.remains.take_failed())
        self._pause_s = 0.0 if well else min(PAUSE_S_MOST, max(PAUSE_S_LEAST, 2 * self._pause_s))
        self._due_s = time.monotonic() + (self._pause_s or LOOK_S)

    def _work(self) -> bool:
        root = self._tier.root
        root.remains.again()
        try:
            root.beside.look()
        except OSError:
            return False
        return self._settle() and not len(root.remains)


class Background:
    """A layout's tasks beside its calls."""

    _tasks: Sequence[asyncio.Task[None]] = ()

    def begin(self, name: str, works: Sequence[Work]) -> None:
        self._tasks = [asyncio.create_task(work(), name=f"kvtier-{name}-{work.__name__}") for work in works]

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        """Wait for cancelled tasks, unless their loop is closed, and raise what was wrong with one."""
        if ending := [task for task in self._tasks if not task.done() and not task.get_loop().is_closed()]:
            await asyncio.wait(ending)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()


def left_s(ends_at: float) -> float:
    return max(0.0, ends_at - time.monotonic())


async def until(event: Awaitable[object], seconds: float) -> bool:
    """Wait for an event, at most this long; return True if it came."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event
            return True
    return False
