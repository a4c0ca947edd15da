"""The lives of a tier: each is its directory from the opening until the directory is gone.

A directory goes with its disk or mount, or with `rm -rf`. Calls fail then. After a call that failed, the next one looks
whether the directory is still there. If it is gone, the tier is opened again: folders are made, the root is owned and
scanned, and only then the call begins. As long as that fails, so do calls, which are few: a breaker is open. Stores
look every so often, too, because in a root that was emptied not all of them fail.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import NamedTuple, TypeVar

from kvtier.backend import Fit, InventoryEvent, OffloadKey, Outcome
from kvtier.errors import BackendUnavailable, ConfigError, Remedy, TransferFailed
from kvtier_backends.fs.layout import Layout, Left, OpenTier, left_s, open_tier, until

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_EVERY_S = 10.0
END_S = 1.0  # Calls on a directory that is gone fail at once, or hang in its file system for ever.


class Life(NamedTuple):
    """An open directory and the tier's chunks in it."""

    tier: OpenTier
    layout: Layout
    fit: Fit

    def close_files(self) -> None:
        self.layout.close_files()
        self.tier.root.close()

    async def aclose(self, ends_at: float, close_files: Callable[[], None]) -> Left:
        """End the life, at most until then; `close_files` is called once no lane is in a call."""
        left = await self.layout.aclose(ends_at)
        if left.transfers + left.others:
            self.tier.lanes.when_ended(close_files)
        else:
            close_files()
        return left


class Lives:
    """The lives of one tier, one at a time. Belongs to the loop's thread."""

    def __init__(self, tier: OpenTier, layout: Callable[[OpenTier], Layout]) -> None:
        """Begin the first one on an open directory. `layout`: makes a life's layout, and starts nothing."""
        self._make_layout = layout
        self.now = self._life(tier)
        self.retentions_cut_before = 0
        self._doubted = False  # A call has failed, and the root was not checked since.
        self._ended = False  # The life has ended, and the next has not begun.
        self._opening: asyncio.Task[None] | None = None  # Ends a life and begins the next, also for a cancelled caller.
        self._closed = False
        self._turn = asyncio.Lock()
        self._looked_at = asyncio.get_running_loop().time()
        self._calls = 0
        self._idle = asyncio.Event()
        self._changed = asyncio.Event()  # There is another life, or the end.
        self._believed: list[OffloadKey] = []  # Keys of lives that are over, as the inventory's consumer knows them.
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

    async def aclose(self, ends_at: float, close_files: Callable[[Life], None]) -> Left:
        """End the last life; see there. Raises what was wrong with its tasks, if it was not over before."""
        if (opening := self._opening) is not None:
            await asyncio.wait({opening}, timeout=left_s(ends_at))
            opening.cancel()
        left = await self.now.aclose(ends_at, partial(close_files, self.now))
        with suppress(*[OSError] if self._ended else []):
            await self.now.layout.ended()
        return left

    def note(self, outcomes: Sequence[Outcome]) -> None:
        """Record a call's outcomes: a failure of the file system may mean that the directory is gone."""
        if any(isinstance(outcome, TransferFailed) for outcome in outcomes):
            self._doubted = True

    async def watch(self) -> AsyncIterator[InventoryEvent]:
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

    def _life(self, tier: OpenTier) -> Life:
        layout = self._make_layout(tier)
        return Life(tier, layout, Fit(tier.context.row_bytes, layout.key_bytes_max))

    async def _look(self) -> None:
        """Make sure that there is a directory, by opening it again if it is gone."""
        async with self._turn:
            tier = self.now.tier
            if self._ended or await tier.lanes.load.run(partial(tier.root.is_gone, failed=self._doubted)):
                self._doubted = True  # Other calls wait here until there is another life.
                await self._open_again()
            self._doubted = False
            self._looked_at = asyncio.get_running_loop().time()

    async def _open_again(self) -> None:
        """End the life and begin another. A cancelled call leaves both to go on: a life half ended keeps the root."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._next(), name=f"kvtier-{self.now.tier.context.name}-open-again")
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
        life, name = self.now, self.now.tier.context.name
        root = life.tier.options.root
        logger.warning("%s: %s is gone: opening it again; see %s", name, root, Remedy.UNAVAILABLE)
        self._idle.clear()
        if self._calls and not await until(self._idle.wait(), END_S):
            raise BackendUnavailable(f"{name}: the directory is gone, and calls hang that were begun before")
        self._believed += life.layout.inventory.believed()
        self.retentions_cut_before += life.layout.retentions_cut
        life.layout.inventory.close()
        self._ended = True
        await life.aclose(time.monotonic() + END_S, life.close_files)
        with suppress(OSError):  # Of a task that met the end.
            await life.layout.ended()

    async def _begin(self) -> None:
        before = self.now.tier
        try:
            tier = await open_tier(before.options, before.context, before)
        except ConfigError as error:  # Of a start; by now it is a state that may pass.
            raise BackendUnavailable(f"{before.context.name}: {error}") from error
        if self._closed:
            tier.let_go()
            raise BackendUnavailable(f"{before.context.name}: closed")
        self.now = self._life(tier)
        self._ended = False
        self.now.layout.begin()
        self._changed.set()
        logger.info("%s: %s is there again", before.context.name, tier.options.root)
