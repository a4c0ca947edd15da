"""The queue of one worker's transfers: which may start next, and the results of those that ended.

All state is behind one lock. Loads start in the order of their submission, and so do stores. Loads go before stores,
for which no request waits, unless both touch the same block or row: then the later waits for the earlier.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import msgspec

from kvtier.errors import TransferFailed
from kvtier.kvcache.transfer.pages import BlockPages, Direction


class TransferResult(NamedTuple):
    """The end of a transfer. Nothing is known of the bytes of one that failed."""

    job_id: int
    direction: Direction
    size_bytes: int
    seconds: float  # From submission on.
    error: TransferFailed | None


class CopyJob(msgspec.Struct, eq=False, dict=True):
    """A transfer: which pages of each group it copies, and which transfers must be done before it."""

    job_id: int
    direction: Direction
    groups: tuple[BlockPages, ...]
    size_bytes: int = 0
    mark: object = None  # An event that the device has to reach first.
    begun: float = 0.0
    after: frozenset[int] = frozenset()

    def shares_bytes_with(self, other: Self) -> bool:
        """Return True if both touch a block, or a row."""
        return not all(one.isdisjoint(another) for one, another in zip(self._touched, other._touched, strict=True))

    @cached_property
    def _touched(self) -> tuple[frozenset[int], frozenset[int]]:
        blocks = (block for pages in self.groups for block in pages.blocks.tolist())
        return frozenset(blocks), frozenset(row for pages in self.groups for row in pages.rows.tolist())


Finish = Callable[[], None]
"""Blocks until a copy has ended; raises `RuntimeError` or `MemoryError` if it failed."""


class Copier(Protocol):
    """A copier: takes transfers from one thread, one after the other."""

    @property
    def directions(self) -> Collection[Direction]: ...  # That it takes, the more urgent first.

    @property
    def ahead(self) -> int: ...  # Transfers that it can begin before the first has ended.

    def mark(self) -> object:
        """Mark, in the submitting thread, the work that the LLM engine has launched on the device until now."""
        ...

    def begin(self, job: CopyJob) -> Finish:
        """Begin a transfer, behind those begun before and behind its mark."""
        ...


class CopyJobs:
    """All transfers of one worker."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[Direction, deque[CopyJob]] = {direction: deque() for direction in Direction}
        self._unfinished = dict[int, CopyJob]()
        self._results = dict[int, TransferResult]()
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
            job.begun = self._clock()
            self._unfinished[job.job_id] = job
            self._waiting[job.direction].append(job)
            self._changed.notify_all()

    def take(self, directions: Collection[Direction], *, wait: bool) -> CopyJob | None:
        """Return the next transfer in `directions`; None if closed and empty or, without `wait`, if none may start."""
        with self._changed:
            while True:
                for queue in (self._waiting[direction] for direction in directions):
                    if queue and self._unfinished.keys().isdisjoint(queue[0].after):
                        return queue.popleft()
                if not wait or (self._closed and not any(self._waiting[direction] for direction in directions)):
                    return None
                self._changed.wait()

    def finish(self, job: CopyJob, error: TransferFailed | None) -> None:
        """Record a transfer's end."""
        with self._changed:
            del self._unfinished[job.job_id]
            seconds = self._clock() - job.begun
            self._results[job.job_id] = TransferResult(job.job_id, job.direction, job.size_bytes, seconds, error)
            self._changed.notify_all()

    def poll(self) -> list[TransferResult]:
        """Return each result once, in the order of their ends."""
        with self._changed:
            results, self._results = list(self._results.values()), {}
            return results

    def wait(self, job_ids: Collection[int], timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished.keys().isdisjoint(job_ids), timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._unfinished, timeout_s)
