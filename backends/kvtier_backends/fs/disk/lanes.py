"""A tier's lanes: threads that read, threads that write, their shares of a batch, and their order.

While there are loads, stores go on in one lane, a slice at a time: that costs a load little, and starves no store.
"""

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from kvtier.backend import Lanes
from kvtier_backends.fs.options import FsOptions, MemoryOptions

T = TypeVar("T")

SHARE_CHUNKS_MAX = 32  # Beyond that, the call to a lane is under 2 % of the time that small chunks take.
SHARE_BYTES_MAX = 16 << 20  # Large chunks are spread over the lanes; a cancelled call waits no longer than this takes.
SLICE_BYTES = 1 << 20  # Written between two looks beside loads: a fraction of a millisecond of a fast disk.
CALM_SLICE_BYTES = 8 << 20  # Else: more would make the next load wait, less leave the disk idle between two calls.
CALM_S = 0.01  # After a load another one may follow, and what lanes begin meanwhile would be in its way.
PATIENCE_S = 1.0  # A lane waits no longer for another one, which may hang.


class Pages:
    """Aligned pages for footers, as direct I/O wants them: one for each transfer at once. Any thread may borrow one."""

    def __init__(self, count: int, page_bytes: int) -> None:
        assert page_bytes % mmap.PAGESIZE == 0, page_bytes
        whole = memoryview(mmap.mmap(-1, count * page_bytes))
        self._free = deque(whole[start : start + page_bytes] for start in range(0, count * page_bytes, page_bytes))

    @contextmanager
    def one(self) -> Generator[memoryview]:
        """Lend a page for as long as the block lasts; its content is undefined."""
        page = self._free.pop()  # Empty: a bug, there is a page for every lane.
        try:
            yield page
        finally:
            self._free.append(page)


class LoadsFirst:
    """The right of way that one tier's loads have over its stores. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = threading.Condition()
        self._clock = clock
        self._loads = 0
        self._calm_at = 0.0
        self._going: int | None = None  # The thread that goes on beside loads.

    @property
    def slice_bytes(self) -> int:
        return SLICE_BYTES if self._left_s() else CALM_SLICE_BYTES

    @contextmanager
    def loading(self) -> Generator[None]:
        """Make stores give way for as long as the block lasts. Never waits."""
        with self._changed:
            self._loads += 1
        try:
            yield
        finally:
            with self._changed:
                self._loads -= 1
                self._calm_at = self._clock() + CALM_S

    @contextmanager
    def storing(self) -> Generator[None]:
        """Write a chunk in the block, when it is this lane's turn."""
        try:
            self.give_way()
            yield
        finally:
            if self._going == threading.get_ident():
                with self._changed:
                    self._going = None
                    self._changed.notify_all()  # After the last load, no other call wakes them.

    def give_way(self) -> None:
        """Wait until there are no loads, or until no other lane goes on beside them. Free where there are none."""
        this = threading.get_ident()
        if not self._left_s() or self._going == this:
            return
        with self._changed:
            ends_at = self._clock() + PATIENCE_S
            while self._going is not None and (left_s := min(self._left_s(), ends_at - self._clock())) > 0:
                self._changed.wait(left_s)
            if self._going is None and self._left_s():
                self._going = this

    def _left_s(self) -> float:
        """Return how long loads are expected to go on at least; 0 without loads."""
        return PATIENCE_S if self._loads else max(0.0, self._calm_at - self._clock())


class FsLanes(NamedTuple):
    """A tier's threads, by what they may be held up by, and what has loads go before stores."""

    load: Lanes
    store: Lanes
    scan: Lanes
    evict: Lanes
    loads_first: LoadsFirst

    def let_go(self) -> None:
        for lanes in self[:4]:
            lanes.shutdown(wait=False)

    def when_ended(self, call: Callable[[], object]) -> None:
        """Call it when the last of the threads has ended, in that thread; at once if that was before."""
        for lanes in self[:4]:
            call = partial(lanes.when_ended, call)
        call()


def start_lanes(options: FsOptions | MemoryOptions, name: str) -> FsLanes:
    """Start a tier's threads, all of them or none."""
    counts = {"load": options.load_lanes, "store": options.store_lanes, "scan": 1, "evict": 1}
    with ExitStack() as undo:  # A process may have no more threads.
        lanes: list[Lanes] = []
        for what, count in counts.items():
            lanes.append(Lanes(count, f"kvtier-{name}-{what}"))
            undo.callback(lanes[-1].shutdown, wait=False)
        undo.pop_all()
    load, store, scan, evict = lanes
    return FsLanes(load, store, scan, evict, LoadsFirst())


def share_chunks(row_bytes: int) -> int:
    """Return how many chunks of this length a lane is sent at most at once."""
    return min(SHARE_CHUNKS_MAX, max(1, SHARE_BYTES_MAX // row_bytes))


def share_least(row_bytes: int, queue_bytes: int) -> int:
    """Return how many loads are worth a lane's call, with `queue_bytes` in flight at once."""
    return max(1, min(share_chunks(row_bytes), queue_bytes // 2 // row_bytes))


def share_out(batch: Sequence[T], lanes: int, most: int, least: int = 1) -> list[Sequence[T]]:
    """Split a batch into pieces of at most `most` items, one lane each, or fewer lanes for fewer than `least`."""
    parts = max(1, min(lanes, -(-len(batch) // least)))
    size = max(1, min(most, -(-len(batch) // parts)))
    return [batch[start : start + size] for start in range(0, len(batch), size)]
