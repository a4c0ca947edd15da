"""The queue of one worker's transfers: which may start next, and who gets the result.

All state is behind one lock. Threads that copy take jobs from it and give results back to it. Loads start in the order
of their submission, and so do stores. Loads go before stores, because a request waits for a load, and none waits for a
store. Only if a load and a store touch the same block or row does the later wait for the earlier.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection
from enum import Enum
from typing import NamedTuple, Protocol, Self

from kvtier.errors import TransferFailed
from kvtier.kvcache.transfer.pages import BlockPages


class Direction(Enum):
    """The direction in which a transfer copies."""

    LOAD = "load"  # From the primary into the LLM engine's blocks.
    STORE = "store"


class TransferResult(NamedTuple):
    """The end of a transfer. Nothing is known of the bytes of one that failed."""

    job_id: int
    direction: Direction
    size_bytes: int
    seconds: float  # From submission on.
    error: TransferFailed | None


class CopyJob:
    """A transfer: which pages of each group it copies, and which transfers must be done before it."""

    __slots__ = ("after", "begun", "direction", "groups", "job_id", "mark", "size_bytes", "touched")

    def __init__(
        self,
        job_id: int,
        direction: Direction,
        groups: tuple[BlockPages, ...],
        *,
        size_bytes: int,
        begun: float,
        mark: object = None,
    ) -> None:
        self.job_id = job_id
        self.direction = direction
        self.groups = groups
        self.size_bytes = size_bytes
        self.begun = begun
        self.mark = mark  # An event that the device has to reach first.
        self.after = frozenset[int]()
        self.touched: tuple[frozenset[int], frozenset[int]] | None = None

    def shares_bytes_with(self, other: Self) -> bool:
        """Return True if both touch a block, or a row."""
        mine, theirs = self._touched(), other._touched()
        return not all(one.isdisjoint(another) for one, another in zip(mine, theirs, strict=True))

    def _touched(self) -> tuple[frozenset[int], frozenset[int]]:
        if self.touched is None:
            blocks = (block for pages in self.groups for block in pages.blocks.tolist())
            rows = (row for pages in self.groups for row in pages.rows.tolist())
            self.touched = (frozenset(blocks), frozenset(rows))
        return self.touched


Finish = Callable[[], None]
"""Blocks until a copy has ended; raises `RuntimeError` or `MemoryError` if it failed."""


class Copier(Protocol):
    """A copier: takes transfers from one thread, one after the other."""

    @property
    def directions(self) -> Collection[Direction]:
        """The directions that it takes, the more urgent first."""
        ...

    @property
    def ahead(self) -> int:
        """The number of transfers that it can begin before the first has ended."""
        ...

    def mark(self) -> object:
        """Mark, in the submitting thread, the work that the LLM engine has launched on the device until now."""
        ...

    def begin(self, job: CopyJob) -> Finish:
        """Begin a transfer, behind those begun before and behind its mark."""
        ...


class _Waiter(NamedTuple):
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[TransferResult]


class CopyJobs:
    """All transfers of one worker. Each result is returned once: by the `done` that awaits it, or by the next poll."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[Direction, deque[CopyJob]] = {direction: deque() for direction in Direction}
        self._unfinished = dict[int, CopyJob]()
        self._results = dict[int, TransferResult]()
        self._waiters = dict[int, _Waiter]()
        self._telling = set[int]()  # Ids of results being passed to an awaiting loop.
        self._closed = False

    def submit(self, job: CopyJob) -> None:
        """Queue a transfer; `ValueError` for an id in use, `RuntimeError` once closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the transfer worker is closed")
            if job.job_id in self._unfinished or job.job_id in self._results:
                raise ValueError(f"transfer {job.job_id} is still in use")
            others = [other for other in self._unfinished.values() if other.direction is not job.direction]
            job.after = frozenset(other.job_id for other in others if other.shares_bytes_with(job))
            self._unfinished[job.job_id] = job
            self._waiting[job.direction].append(job)
            self._changed.notify_all()

    def take(self, directions: Collection[Direction], *, wait: bool) -> CopyJob | None:
        """Return the next transfer in one of these directions.

        None once closed and empty or, without `wait`, if none may start.
        """
        with self._changed:
            while True:
                for queue in (self._waiting[direction] for direction in directions):
                    if queue and self._unfinished.keys().isdisjoint(queue[0].after):
                        return queue.popleft()
                if not wait or (self._closed and not any(self._waiting[direction] for direction in directions)):
                    return None
                self._changed.wait()

    def finish(self, job: CopyJob, error: TransferFailed | None) -> None:
        """Record a transfer's end, and pass on its result."""
        result = TransferResult(job.job_id, job.direction, job.size_bytes, self._clock() - job.begun, error)
        with self._changed:
            del self._unfinished[job.job_id]
            self._results[job.job_id] = result
            waiter = self._waiters.pop(job.job_id, None)
            if waiter is not None:
                self._telling.add(job.job_id)
            self._changed.notify_all()
        if waiter is not None:
            try:
                waiter.loop.call_soon_threadsafe(self._tell, job.job_id, waiter.future)
            except RuntimeError:  # The loop is closed; its awaiter is gone, and the next poll is told.
                with self._changed:
                    self._telling.discard(job.job_id)

    def poll(self) -> list[TransferResult]:
        """Return the results that are not awaited, in the order of their ends."""
        with self._changed:
            told = [job_id for job_id in self._results if job_id not in self._telling]
            return [self._results.pop(job_id) for job_id in told]

    async def done(self, job_id: int) -> TransferResult:
        """Return a transfer's result; `KeyError` if there is none. Cancelled, it leaves the result to the next poll."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if job_id in self._results and job_id not in self._telling:
                return self._results.pop(job_id)
            if job_id not in self._unfinished or job_id in self._waiters:
                raise KeyError(job_id)
            future: asyncio.Future[TransferResult] = loop.create_future()
            self._waiters[job_id] = _Waiter(loop, future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # Set in the tick of the cancel, so not returned.
                with self._changed:
                    self._results[job_id] = future.result()
            raise
        finally:
            with self._changed:
                self._waiters.pop(job_id, None)

    def wait(self, job_ids: Collection[int], timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished.keys().isdisjoint(job_ids), timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._unfinished, timeout_s)

    def _tell(self, job_id: int, future: asyncio.Future[TransferResult]) -> None:
        with self._changed:
            self._telling.discard(job_id)
            if not future.cancelled():
                future.set_result(self._results.pop(job_id))
