"""A tier's lives: each is its place from the opening until the place is gone, and the next one opens it again."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import NamedTuple, TypeVar

from kvtier import backend as api
from kvtier.errors import BackendUnavailable, ConfigError, Remedy, TransferFailed
from kvtier_backends.fs.disk.lanes import FsLanes
from kvtier_backends.fs.files.layout import FilesLayout
from kvtier_backends.fs.layout import Counters, Left, left_s, until
from kvtier_backends.fs.segments.layout import SegmentsLayout

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_EVERY_S = 10.0
END_S = 1.0  # Calls on a directory that is gone fail at once, or hang in its file system for ever.


Layout = FilesLayout | SegmentsLayout


class Life(NamedTuple):
    """An open place and the tier's chunks in it."""

    name: str  # The tier's.
    where: str
    row_bytes: int
    layout: Layout
    counters: Counters
    lanes: FsLanes
    close_place: Callable[[], None]
    is_gone: Callable[[bool], Awaitable[bool]]
    """Return True if the place is gone; the argument says whether calls have failed there."""
    again: "Callable[[], Awaitable[Life]]"
    """Open the same tier again. Raises `ConfigError` or `BackendUnavailable`."""

    @property
    def fit(self) -> api.Fit:
        return api.Fit(self.row_bytes, self.layout.key_bytes_max)

    def close_files(self) -> None:
        self.layout.close_files()
        self.close_place()

    async def aclose(self, ends_at: float, close_files: Callable[[], None]) -> Left:
        """End the life, at most until then; `close_files` is called once no lane is in a call."""
        left = await self.layout.aclose(ends_at)
        if left.transfers + left.others:
            self.lanes.when_ended(close_files)
        else:
            close_files()
        return left


class Lives:
    """The lives of one tier, one at a time.

    A directory goes with its disk or mount, or with `rm -rf`, and what engines share goes with its keeper. After a call
    that failed, the next one looks whether the place is still there, and opens the tier again before it begins. Stores
    look every so often, too: in a root that was emptied, not all of them fail. Belongs to the loop's thread.
    """

    def __init__(self, life: Life) -> None:
        self.now = life
        self.retentions_cut_before = 0
        self._doubted = False  # A call has failed, and the root was not checked since.
        self._ended = False  # The life has ended, and the next has not begun.
        self._opening: asyncio.Task[None] | None = None  # Ends a life and begins the next, also for a cancelled caller.
        self._closed = False
        self._closing_files = threading.Lock()
        self._turn = asyncio.Lock()
        self._looked_at = asyncio.get_running_loop().time()
        self._calls = 0
        self._idle = asyncio.Event()
        self._changed = asyncio.Event()  # There is another life, or the end.
        self._believed: list[api.OffloadKey] = []  # Keys of past lives, as the inventory's consumer knows them.
        self.now.layout.begin()

    async def call(self, call: Callable[[Life], Awaitable[T]], *, stores: bool = False) -> T:
        """Do a call on the directory as it is now. Raises `BackendUnavailable` if there is none."""
        looks = stores and asyncio.get_running_loop().time() >= self._looked_at + LOOK_EVERY_S
        if looks or self._doubted:
            await self._look()
        self._calls += 1
        try:
            return await call(self.now)
        except BackendUnavailable:
            self._doubted = True
            raise
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def aclose(self, ends_at: float) -> Left:
        """End the last life; see there. Raises what was wrong with its tasks, if it was not over before."""
        if (opening := self._opening) is not None:
            await asyncio.wait({opening}, timeout=left_s(ends_at))
            opening.cancel()
        left = await self.now.aclose(ends_at, partial(self._close_files, self.now))
        with suppress(*[OSError] if self._ended else []):
            await self.now.layout.background.ended()
        return left

    def note(self, outcomes: Sequence[api.Outcome]) -> None:
        """Record a call's outcomes: a failure of the file system may mean that the directory is gone."""
        if any(isinstance(outcome, TransferFailed) for outcome in outcomes):
            self._doubted = True

    async def watch(self) -> AsyncIterator[api.InventoryEvent]:
        """Yield what the directory holds. After a new life's scan, keys that did not come back are reported removed."""
        while not self._closed:
            life, believed = self.now, self._believed
            self._believed = []
            async with aclosing(life.layout.inventory.watch(believed)) as events:
                async for event in events:
                    yield event
            while life is self.now and not self._closed:
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        """End the inventory's iteration, and begin no other life."""
        self._closed = True
        self.now.layout.inventory.close()
        self._changed.set()

    def _close_files(self, life: Life) -> None:
        """Let go of every descriptor, and of the locks; idempotent. No lane may be in a call; any thread may call."""
        with self._closing_files:  # A second end may come while the last thread is at it.
            life.close_files()

    async def _look(self) -> None:
        async with self._turn:
            if self._ended or await self.now.is_gone(self._doubted):
                self._doubted = True  # Other calls wait here until there is another life.
                await self._open_again()
            self._doubted = False
            self._looked_at = asyncio.get_running_loop().time()

    async def _open_again(self) -> None:
        """End the life and begin another. A cancelled call leaves both to go on: a life half ended keeps the root."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._next(), name=f"kvtier-{self.now.name}-open-again")
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        await asyncio.wait({opening})
        if isinstance(error := opening.exception(), BackendUnavailable):
            raise BackendUnavailable(str(error))  # Its own: the other one would gather the frames of all that wait.
        opening.result()

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening = None  # Its error would hold the buffers of the calls that it was raised in.
        if not opening.cancelled():
            opening.exception()  # All callers may have been cancelled.

    async def _next(self) -> None:
        await self._end()
        await self._begin()

    async def _end(self) -> None:
        if self._ended:
            return
        life, name = self.now, self.now.name
        logger.warning("%s: %s is gone: opening it again; see %s", name, life.where, Remedy.UNAVAILABLE)
        self._idle.clear()
        if self._calls and not await until(self._idle.wait(), END_S):
            raise BackendUnavailable(f"{name}: the directory is gone, and calls hang that were begun before")
        self._believed += life.layout.inventory.believed()
        self.retentions_cut_before += life.layout.retentions_cut
        life.layout.inventory.close()
        self._ended = True
        await life.aclose(time.monotonic() + END_S, life.close_files)
        with suppress(OSError):  # Of a task that met the end.
            await life.layout.background.ended()

    async def _begin(self) -> None:
        name = self.now.name
        try:
            life = await self.now.again()
        except ConfigError as error:  # Of a start; by now it is a state that may pass.
            raise BackendUnavailable(f"{name}: {error}") from error
        if self._closed:
            life.lanes.let_go()
            life.lanes.when_ended(life.close_files)
            raise BackendUnavailable(f"{name}: closed")
        self.now = life
        self._ended = False
        life.layout.begin()
        self._changed.set()
        logger.info("%s: %s is there again", name, life.where)
