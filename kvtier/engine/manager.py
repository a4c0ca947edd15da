"""The asyncio face of a kvtier engine: `TieringOffloadingManager`.

`put` waits for room and for the tiers' budgets, `fetch` for chunks on their way, and both for a reset. A call that
waits for rows waits for the calls that have them. It holds no rows itself that others wait for, except those that it
has fetched already.
"""

# ruff: noqa: SLF001  A face and its steps are one engine.
# pyright: reportPrivateUsage=false

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from prometheus_client import CollectorRegistry

from kvtier.backend import Lanes, OffloadKey, checked_keys, in_thread
from kvtier.config import EngineConfig
from kvtier.engine.answers import Event, LookupResult, StorePlan
from kvtier.engine.inbox import Observe
from kvtier.engine.metrics import EngineStats
from kvtier.engine.progress import Progress
from kvtier.engine.steps import StepManager, checked, make_region
from kvtier.errors import RowsStillRead
from kvtier.memory import LentRow, Region, fill_standard_streams
from kvtier.remedies import Remedy
from kvtier.runner.bridge import InlineBridge
from kvtier.runner.tiers import open_tiers

Chunk = bytes | bytearray | memoryview

KEYS_NAMED = 3  # In one message, of all that it is about.
ON_LOOP_BYTES_MAX = 64 << 20  # Of memory to prepare without a thread: some milliseconds' worth.

M = TypeVar("M", bound="TieringOffloadingManager")

logger = logging.getLogger(__name__)


class TieringOffloadingManager:
    """Tiers chunks over a primary in host memory and any number of secondary tiers, for asyncio programs.

    All calls belong to one event loop. A chunk is `config.chunk_bytes` long. `steps` is the step protocol of the same
    engine, for a program that uses both. Its calls `reset`, `drain` and `close` would block the loop.
    """

    step_manager: ClassVar[type[StepManager]] = StepManager
    """The class of the steps that `open` makes; an audit overrides it."""

    def __init__(self, steps: StepManager, loop: asyncio.AbstractEventLoop) -> None:
        """Take over a kvtier engine whose runner is up; `open` makes both."""
        self.steps = steps
        self.config: EngineConfig = steps.config
        self._ledger = steps._ledger
        self._progress = Progress(steps, loop)
        self._closing: asyncio.Task[int] | None = None
        self._clearing = False  # A reset has waited for all rows in use: until it is done nobody gets any.
        self._ids = count()
        self._turn = asyncio.Lock()  # To cascade, in order of asking: or a long put would starve among short ones.
        self._resets = asyncio.Lock()

    @classmethod
    def open(cls, config: EngineConfig, *, observer: Observe | None = None) -> "Opening[Self]":
        """Open a kvtier engine on the running loop, wherever its runner lives: `async with` the answer, or await it.

        `observer` is called with (tier, operation, seconds) after every transfer.

        Raises:
            ConfigError: the configuration cannot be used; nothing was left behind.
            BackendUnavailable: a tier cannot be opened now.
        """

        async def begin() -> Self:
            begun = cls._begun_inline if config.runner == "inline" else cls._begun
            return cls(await begun(config, observer), asyncio.get_running_loop())

        return Opening(begin)

    @property
    def metrics(self) -> CollectorRegistry:
        """A Prometheus registry with everything that this kvtier engine counts."""
        return self.steps.metrics

    def stats(self) -> EngineStats:
        """Return the counts of this kvtier engine and its tiers, and how many chunks they hold now."""
        return self.steps.stats()

    def take_events(self) -> list[Event]:
        """Return the events of chunks since the last call; none unless the configuration says `events`."""
        return self.steps.take_events()

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Take note of a step of the LLM engine: see `StepManager.note_prefill`."""
        self.steps.note_prefill(tokens, seconds)

    async def put(
        self, keys: Sequence[OffloadKey], chunks: Sequence[Chunk], *, request_id: str | None = None, hint: object = None
    ) -> int:
        """Store `chunks[i]` under `keys[i]`, in prefix order; return how many leading keys are in the primary now.

        The call waits for room in the primary and for budget of the tiers. So no chunk is dropped for the lack of
        either, unless transfers hang: the call does not wait for these. Fewer than all keys are stored only if the
        primary cannot hold more. Keys that are present keep their chunk. Without a `request_id` the call is a request
        of its own. `hint` is the application's word on the request, as `StepManager.on_new_request` takes it.

        A cancelled call has stored some leading part. ValueError for a chunk of the wrong length: nothing was stored.
        Do not await this call while the same task holds rows of `fetch`, because the call may wait for these rows.
        """
        keys = checked_keys(keys)
        self._check_chunks(keys, chunks)
        async with self._one(request_id, hint) as own_id:
            plan = await self._reserve(keys[: self.config.rows], own_id)
            position = dict(zip(keys, range(len(keys)), strict=True)) if plan.keys else {}
            await self._fill(plan, [chunks[position[key]] for key in plan.keys], own_id)
            return self._leading(keys)

    @asynccontextmanager
    async def fetch(
        self, keys: Sequence[OffloadKey], *, request_id: str | None = None, hint: object = None
    ) -> AsyncGenerator[Sequence[memoryview]]:
        """Bring the longest leading run of `keys` whose chunks are in any tier into the primary, and lend it.

        The answer is a sequence of read-only views, one a key and each `chunk_bytes` long. They are valid inside the
        `async with`, and released after it. A run longer than the primary can hold gives its leading part. A chunk that
        fails on its way ends the run before it, and raises nothing. `hint`: as `put` takes it.

        Slices and arrays that are made of a view must be gone when the block ends, too. If one is left, the block
        raises `RowsStillRead`, or adds a note to the error that it raised itself. Such a row has no other use until the
        slice has gone. A tensor that `torch.frombuffer` makes of a view cannot be seen, and would read the row's next
        chunk. `get` gives copies.
        """
        keys = checked_keys(keys)
        async with self._one(request_id, hint) as own_id:
            rows: list[int] = []
            lent: list[LentRow] = []
            try:
                await self._arrive(keys, own_id, rows)
                lent += [self.steps.region.lend(row, self.config.chunk_bytes) for row in rows]
                yield [each.view for each in lent]
            except BaseException as error:
                if complaint := self._give_back(keys[: len(rows)], lent, own_id):
                    error.add_note(complaint)
                raise
            if complaint := self._give_back(keys[: len(rows)], lent, own_id):
                raise RowsStillRead(complaint)

    async def get(
        self, keys: Sequence[OffloadKey], *, request_id: str | None = None, hint: object = None
    ) -> list[bytes]:
        """Return copies of the chunks that `fetch` would lend: of the longest leading run that is anywhere."""
        async with self.fetch(keys, request_id=request_id, hint=hint) as rows:
            return [bytes(row) for row in rows]

    async def delete(self, keys: Sequence[OffloadKey], deadline_s: float | None = None) -> bool:
        """Forget keys in the primary and in every tier; waits for all calls that hold their rows.

        False if the deadline came first. Then keys that were still held have stayed. The others were forgotten, though
        a tier may not have answered yet.
        """
        held = self.steps.delete(keys)
        try:
            async with asyncio.timeout(self.steps._deadline(deadline_s)):
                while held:
                    await self._progress.made(for_rows=True)
                    held = self.steps.delete(held)
                while self._ledger.pending:
                    await self._progress.made()
        except TimeoutError:
            return False
        return True

    async def prefetch(self, keys: Sequence[OffloadKey]) -> int:
        """Bring the longest leading run of keys whose chunks are in any tier into the primary; return its length there.

        It holds no rows when it returns. A run longer than the share of leases comes in its leading part. A chunk that
        fails on its way ends the run before it. After a cancelled call, chunks on their way still come. Of more than a
        thousand calls at once, the newest return 0.
        """
        while self._clearing:
            await self._progress.made()
        prefetch = self.steps._prefetch(keys)
        try:
            self.steps.end_step()
            while not prefetch.over:
                await self._progress.made()
        finally:
            self._ledger.prefetches.give_up(prefetch)
            self._progress.stir()
        return self._leading(prefetch.keys[: prefetch.here])  # Its leases may have ended before it did.

    def demote(self, keys: Sequence[OffloadKey]) -> int:
        """Have keys go before all others when room is made, here and in tiers; see `StepManager.demote`."""
        return self._said(self.steps.demote(keys))

    def forget(self, keys: Sequence[OffloadKey]) -> int:
        """Forget keys here and in every tier; a key in use is forgotten when its use is over. See `StepManager.forget`.

        It waits for nothing. `drain` waits for the tiers, and `delete` also for all calls that hold rows.
        """
        return self._said(self.steps.forget(keys))

    def retain(self, keys: Sequence[OffloadKey], seconds: float, *, priority: int = 0) -> int:
        """Let keys stay for so long when room is made, here and in tiers; see `StepManager.retain`."""
        return self._said(self.steps.retain(keys, seconds, priority=priority))

    async def drain(self, deadline_s: float | None = None) -> bool:
        """Wait until nothing is under way; False if the deadline came first."""
        return await self._progress.rest(self.steps._deadline(deadline_s))

    async def reset(self, deadline_s: float | None = None) -> bool:
        """Clear the primary, after all rows in use have come back; tiers keep their chunks. The deadline begins then.

        Nothing is promoted meanwhile, and from the deadline's beginning on `put` and `fetch` wait for the end. False
        if a tier did not end in time: it is out of use until it has proved itself, and its rows stay lent. A cancelled
        call has changed nothing.
        """
        self.steps._check_open()
        async with self._resets:
            try:
                self._ledger.promoting = False
                while self._ledger.rows_in_use:
                    await self._progress.made()
                self._clearing = True
                await self.drain(deadline_s)
                return self.steps._reset()
            finally:
                self._clearing = False
                self.steps.on_reset_flushed()
                self._progress.stir()

    async def aclose(self, deadline_s: float | None = None) -> int:
        """Let transfers end, close the tiers and the runner; return how many transfers were left behind.

        Tiers with `cascade = "evict"` are first sent what the primary still owes them, within the same deadline.

        Takes at most the deadline for the transfers and once more for the closing. Once begun it goes on, even if
        cancelled. Idempotent.
        """
        if self._closing is None:
            if self.steps._closed:
                return 0
            self._closing = asyncio.ensure_future(self._close(deadline_s))
        return await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # How it begins and ends.

    @classmethod
    async def _begun_inline(cls, config: EngineConfig, observer: Observe | None) -> StepManager:
        loop = asyncio.get_running_loop()
        config = checked(config)
        fill_standard_streams()
        region = await cls._region(config, loop)
        try:
            bridge = InlineBridge(await open_tiers(config), region)
        except BaseException:
            region.close()
            raise
        return cls.step_manager(config, region, bridge, clock=loop.time, observer=observer)

    @staticmethod
    async def _region(config: EngineConfig, loop: asyncio.AbstractEventLoop) -> Region:
        if config.rows * config.row_bytes > ON_LOOP_BYTES_MAX:
            with suppress(NotImplementedError):  # A loop in virtual time has no threads, and nobody waits for it.
                return await loop.run_in_executor(None, make_region, config)
        return make_region(config)

    @classmethod
    async def _begun(cls, config: EngineConfig, observer: Observe | None) -> StepManager:
        """Start in a thread; a cancelled call waits for it, and leaves nothing of what it started."""
        started: list[StepManager] = []
        lanes = Lanes(1, "kvtier-start")
        try:
            await in_thread(lanes, lambda: started.append(cls.step_manager.start(config, observer=observer)))
        except asyncio.CancelledError:
            for steps in started:
                await in_thread(lanes, steps.close, 0.0)
            raise
        finally:
            lanes.shutdown(wait=False)
        return started[0]

    async def _close(self, deadline_s: float | None) -> int:
        steps, seconds = self.steps, self.steps._deadline(deadline_s)
        steps._begin_end()
        await self.drain(deadline_s)
        steps._say_owed()
        steps._tier_log.look(steps._clock(), last=True)
        steps._closed = True
        self._progress.stir()
        if isinstance(steps._bridge, InlineBridge):
            abandoned = await steps._bridge.aclose(seconds)
        else:
            abandoned = await asyncio.get_running_loop().run_in_executor(None, steps._bridge.close, seconds)
        steps._free()
        return abandoned

    # How the face waits.

    def _said(self, answer: int) -> int:
        """Have the tiers hear of it now."""
        self.steps.end_step()
        self._progress.stir()
        return answer

    @asynccontextmanager
    async def _one(self, request_id: str | None, hint: object = None) -> AsyncGenerator[str]:
        """Give the caller's request, or one for this call alone; it stays known until the call is over."""
        steps = self.steps
        steps._check_open()
        own_id = f"#{next(self._ids)}" if request_id is None else request_id
        if request_id is None:
            steps.on_new_request(own_id)
        request = steps._call_began(own_id)
        self._ledger.hint(request, hint)
        try:
            yield own_id
        finally:
            if request_id is None:
                steps.on_request_finished(own_id)
            steps._call_ended(request)
            if request.finished:
                steps.end_step()

    async def _arrive(self, keys: Sequence[OffloadKey], request_id: str, rows: list[int]) -> None:
        """Wait until the leading run of keys is in the primary, and pin it: `rows` are its rows, so far.

        What waiting requests may lease is less than the primary holds. What has come is pinned, leased no more, and so
        leaves its share to what comes after it.
        """
        while True:
            while self._clearing:
                await self._progress.made()
            self.steps._receive()
            hits, waits = 0, False
            for key in keys[len(rows) :]:
                result = self.steps.lookup(key, request_id)
                if result is LookupResult.MISS:
                    break
                if result is not LookupResult.HIT:
                    waits = True  # And look on, so that the rest sets out, too.
                elif not waits:
                    hits += 1
            if waits:
                await self._progress.made(loads_of=self.steps._known(request_id))
                continue
            rows += self.steps.prepare_load(keys[len(rows) : len(rows) + hits], request_id)
            self.steps.end_step()
            if not hits or len(rows) == len(keys):
                return

    def _give_back(self, keys: Sequence[OffloadKey], lent: Sequence[LentRow], request_id: str) -> str:
        """Give back the rows that a fetch pinned for these keys; say what is wrong if some are still read."""
        read = [(key, each) for key, each in zip(keys, lent, strict=False) if not each.release()]
        self.steps._keep([each for _, each in read])
        self.steps.complete_load(keys, request_id)
        if not read:
            return ""
        named = ", ".join(key.hex() for key, _ in read[:KEYS_NAMED]) + ", …" * (len(read) > KEYS_NAMED)
        complaint = (
            f"{len(read)} of {len(lent)} rows are still read when their fetch is over ({named}): copy the bytes (get "
            "does), or drop what was made of the views before the block ends. Until it has gone nobody gets these rows."
        )
        logger.warning("%s; see %s", complaint, Remedy.LENT)
        return complaint

    async def _reserve(self, keys: Sequence[OffloadKey], request_id: str) -> StorePlan:
        """Wait for room for the keys, or for as many leading ones as there can be room for."""
        cascades = self._ledger.cascades
        while True:
            while self._clearing:
                await self._progress.made()
            cascades.want(len(keys))
            self.steps.end_step()  # What a step found that nobody ends would be kept for ever.
            if not any(key in self._ledger.primary.filling for key in keys) and cascades.room(len(keys)):
                plan = self.steps.prepare_store(keys, request_id)
                if plan is not None:
                    return plan
                if not (self._ledger.rows_in_use or self._ledger.pending or self._ledger.leases.rows):
                    keys = keys[: len(keys) // 2]  # Nobody will give rows back: some are lost to hung transfers.
                    continue
            await self._progress.made(for_rows=True)

    async def _fill(self, plan: StorePlan, chunks: Sequence[Chunk], request_id: str) -> None:
        """Write the chunks, and have them cascade in slices that exceed no limit, unless what does is stuck."""
        done = 0
        try:
            while done < len(plan.keys):
                end = min(done + self._ledger.outbox.slice_chunks, len(plan.keys))
                async with self._turn:
                    self.steps._check_open()
                    while self._ledger.pending and not self._ledger.outbox.room(end - done):
                        await self._progress.made()
                for row, chunk in zip(plan.rows[done:end], chunks[done:end], strict=True):
                    self.steps.region.row(row)[: self.config.chunk_bytes] = chunk
                self.steps.complete_store(plan.keys[done:end], request_id)
                done = end
                self.steps.end_step()
        finally:
            if done < len(plan.keys):
                self.steps.complete_store(plan.keys[done:], request_id, success=False)

    def _leading(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading keys are in the primary, or are being filled there."""
        row_of = self._ledger.primary.row
        return next((place for place, key in enumerate(keys) if row_of(key) is None), len(keys))

    def _check_chunks(self, keys: Sequence[OffloadKey], chunks: Sequence[Chunk]) -> None:
        if len(keys) != len(chunks):
            raise ValueError(f"{len(keys)} keys but {len(chunks)} chunks")
        for key, chunk in zip(keys, chunks, strict=True):
            if len(chunk) != self.config.chunk_bytes:
                raise ValueError(f"{key.hex()}: a chunk of {len(chunk):,} bytes, not {self.config.chunk_bytes:,}")


class Opening(Generic[M]):
    """A kvtier engine about to be opened: `async with` it to have it closed at the end, or await it."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, M]]) -> None:
        self._begin = begin
        self._opened: M | None = None

    def __await__(self) -> Generator[Any, None, M]:
        return self._begin().__await__()

    async def __aenter__(self) -> M:
        self._opened = await self
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._opened is not None
        await self._opened.aclose()
