"""The asyncio face of a kvtier engine: `TieringOffloadingManager`.

`put` waits for room and for the tiers' budgets, `fetch` for room and for chunks in flight, and both for a reset. Every
call lets the event loop turn, unless it has turned since the last call, and so does every loop within a call.
"""

# ruff: noqa: SLF001  A face and its steps are one engine.
# pyright: reportPrivateUsage=false

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from itertools import count
from typing import Any, ClassVar, Generic, Self, TypeVar

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvtier.backend import Lanes, OffloadKey, checked_keys, in_thread
from kvtier.config import EngineConfig
from kvtier.engine.answers import Event, StorePlan
from kvtier.engine.fetches import Fetches, Progress
from kvtier.engine.metrics import EngineStats
from kvtier.engine.steps import StepManager, checked, make_region
from kvtier.engine.traffic import Observe
from kvtier.errors import Remedy, RowsStillRead
from kvtier.memory import LentRow, Region, fill_standard_streams
from kvtier.runner.bridge import InlineBridge
from kvtier.runner.runner import open_tiers
from kvtier.settings.hints import shown

Chunk = bytes | bytearray | memoryview

COPIED_BYTES_MAX = 8 << 20  # In one turn of the loop: a millisecond or two.
KEYS_NAMED = 3  # In one message, of all that it is about.
ON_LOOP_BYTES_MAX = 64 << 20  # Of memory to prepare without a thread: some milliseconds' worth.

T = TypeVar("T")
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
        self._ledger = steps.ledger
        self._progress = Progress(steps, loop)
        self._fetches = Fetches(steps, self._progress)
        self._closing: asyncio.Task[int] | None = None
        self._ids = count()
        self._turn = asyncio.Lock()  # To cascade, in order of asking: or a long put would starve among short ones.
        self._resets = asyncio.Lock()

    @classmethod
    def open(cls, config: EngineConfig, *, observer: Observe | None = None) -> "Opening[Self]":
        """Open a kvtier engine on the running loop, wherever its runner lives: `async with` the answer, or await it.

        `observer` is called with (tier, operation, seconds) after every transfer. Raises `ConfigError`, leaving nothing
        behind, if the configuration cannot be used, and `BackendUnavailable` if a tier cannot be opened now.
        """

        async def begin() -> Self:
            begun = cls._begun if config.runner == "process" else cls._begun_inline
            return cls(await begun(config, observer), asyncio.get_running_loop())

        return Opening(begin)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self.steps._described}>"

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
        """Record a step of the LLM engine: see `StepManager.note_prefill`."""
        self.steps.note_prefill(tokens, seconds)

    async def put(
        self, keys: Sequence[OffloadKey], chunks: Sequence[Chunk], *, request_id: str | None = None, hint: object = None
    ) -> int:
        """Store `chunks[i]` under `keys[i]`, in prefix order; return how many leading keys are in the primary now.

        The call waits for room and for the tiers' budgets: no chunk is dropped for the lack of either, unless transfers
        hang. Fewer than all keys are stored only if the primary cannot hold more. Keys that are present keep their
        chunk. Without a `request_id` the call is its own request. `hint` is as in `StepManager.on_new_request`.

        A cancelled call has stored some leading part. ValueError for a chunk of the wrong length, and for a key given
        twice with different bytes; TypeError for an invalid chunk or key: nothing was stored. A task that holds rows of
        `fetch` must not await this call, which may wait for these rows.
        """
        await self._progress.turn()
        keys = checked_keys(keys)
        chunks = self._checked_chunks(keys, chunks)
        with self._one(request_id, hint) as own_id:
            plan = await self._reserve(keys[: self.config.rows], own_id)
            position = dict(zip(keys, range(len(keys)), strict=True)) if plan.keys else {}
            await self._fill(plan, [chunks[position[key]] for key in plan.keys], own_id)
            return self._leading(keys)

    @asynccontextmanager
    async def fetch(
        self, keys: Sequence[OffloadKey], *, request_id: str | None = None, hint: object = None
    ) -> AsyncGenerator[Sequence[memoryview]]:
        """Bring the longest leading run of `keys` whose chunks are in any tier into the primary, and lend it.

        The answer is a sequence of read-only views, one a key and each `chunk_bytes` long, valid inside the
        `async with`. A chunk that fails to load ends the run before it, and raises nothing.

        The call waits for rows that others hold, in order of asking. It ends its run before the first chunk without a
        row if nobody holds rows that will come back, as when the run is longer than the primary (see `stream`), or if
        no waiting call was served for `limits.lease_s`: a task that awaits this call while it holds rows may wait for
        itself. What was not loaded is counted as `promotions_refused`, and logged once a minute.

        Slices and arrays of a view must be gone when the block ends, too. If one is left, the block raises
        `RowsStillRead`, or adds a note to the error that it raised itself, and the row stays out of use until the slice
        has gone. A tensor that `torch.frombuffer` makes of a view cannot be seen, and would read the row's next chunk.
        `get` gives copies.
        """
        await self._progress.turn()
        keys = checked_keys(keys)
        with self._one(request_id, hint) as own_id:
            async with self._lent(keys, own_id) as views:
                yield views

    async def stream(
        self, keys: Sequence[OffloadKey], *, request_id: str | None = None, hint: object = None
    ) -> AsyncGenerator[Sequence[memoryview]]:
        """Lend the run that `fetch` would, of any length, in parts: `async for rows in engine.stream(keys)`.

        Each part has views of the next keys, at most as many as waiting requests may lease. It is brought when it is
        asked for, and valid until the next part is. A loop that is left early returns its rows one turn of the event
        loop later, and at once with `contextlib.aclosing`.
        """
        keys, size = checked_keys(keys), self._ledger.leases.rows_max
        with self._one(request_id, hint) as own_id:
            for first in range(0, len(keys), size):
                await self._progress.turn()
                part = keys[first : first + size]
                async with self._lent(part, own_id) as views:
                    if views:
                        yield views
                    if len(views) < len(part):
                        return

    async def get(
        self, keys: Sequence[OffloadKey], *, request_id: str | None = None, hint: object = None
    ) -> list[bytes]:
        """Return copies of the chunks that `stream` would lend: of the longest leading run that is anywhere."""
        copies: list[bytes] = []
        async with aclosing(self.stream(keys, request_id=request_id, hint=hint)) as parts:
            async for rows in parts:
                copies += [bytes(row) async for row in self._in_turns(rows)]
        return copies

    async def delete(self, keys: Sequence[OffloadKey], deadline_s: float | None = None) -> bool:
        """Forget keys in the primary and in every tier; waits for all calls that hold their rows.

        False if the deadline came first: keys that were still held have stayed, and a tier may not have answered yet.
        """
        await self._progress.turn()
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

        A run longer than the share of leases comes in its leading part. The call does not wait for rows: the first
        chunk without one ends the run, and so does a chunk that fails to load. After a cancelled call, chunks in flight
        still come. Of more than a thousand calls at once, the newest return 0.
        """
        await self._progress.turn()
        await self._progress.cleared()
        self.steps._check_open()
        prefetch = self._ledger.prefetches.begin(checked_keys(keys))
        try:
            self.steps.end_step()
            while not prefetch.over:
                await self._progress.made()
        finally:
            self._ledger.prefetches.give_up(prefetch)
            self._progress.stir()
        return self._leading(prefetch.keys[: prefetch.here])  # Its leases may have ended before it did.

    def demote(self, keys: Sequence[OffloadKey]) -> int:
        """Evict keys before all others, here and in tiers; see `StepManager.demote`."""
        return self._said(self.steps.demote(keys))

    def forget(self, keys: Sequence[OffloadKey]) -> int:
        """Forget keys here and in every tier, those in use later; see `StepManager.forget`."""
        return self._said(self.steps.forget(keys))

    def retain(self, keys: Sequence[OffloadKey], seconds: float, *, priority: int = 0) -> int:
        """Keep keys from eviction for some seconds, here and in tiers; see `StepManager.retain`."""
        return self._said(self.steps.retain(keys, seconds, priority=priority))

    async def drain(self, deadline_s: float | None = None) -> bool:
        """Wait until nothing is in flight; False if the deadline came first."""
        await self._progress.turn()
        return await self._progress.rest(self.steps._deadline(deadline_s))

    async def reset(self, deadline_s: float | None = None) -> bool:
        """Clear the primary, after all rows in use have come back; tiers keep their chunks. The deadline begins then.

        Nothing is promoted meanwhile, and from the deadline's beginning on `put` and `fetch` wait for the end. False
        if a tier did not end in time: it is out of use until it has proved itself, and its rows stay lent. A cancelled
        call has changed nothing.
        """
        await self._progress.turn()
        self.steps._check_open()
        async with self._resets:
            try:
                self._ledger.promoting = False
                while self._ledger.rows_in_use:
                    await self._progress.made()
                self._progress.clearing = True
                await self.drain(deadline_s)
                return self.steps._reset()
            finally:
                self._progress.clearing = False
                self.steps.on_reset_flushed()
                self._progress.stir()

    async def aclose(self, deadline_s: float | None = None) -> int:
        """Close the engine, as `StepManager.close` does. Once begun it goes on, even if cancelled. Idempotent."""
        if self._closing is None and not self.steps._closed:
            self._progress.check_loop()
            self._closing = asyncio.ensure_future(self._close(deadline_s))
        if self._closing is None or self._closing.done():
            await asyncio.sleep(0)
            return 0 if self._closing is None else self._closing.result()
        self._progress.check_loop()
        return await asyncio.shield(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @classmethod
    async def _begun_inline(cls, config: EngineConfig, observer: Observe | None) -> StepManager:
        loop = asyncio.get_running_loop()
        region: Region | None = None
        config = checked(replace(config, runner="inline"))
        fill_standard_streams()
        if config.rows * config.row_bytes > ON_LOOP_BYTES_MAX:
            with suppress(NotImplementedError):  # A loop in virtual time has no threads, and may be blocked.
                region = await loop.run_in_executor(None, make_region, config)
        region = region or make_region(config)
        try:
            bridge = InlineBridge(await open_tiers(config), region, config.limits.close_s)
        except BaseException:
            region.close()
            raise
        return cls.step_manager(config, region, bridge, clock=loop.time, observer=observer)

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
        steps._end_drained()
        steps._closed = True
        self._progress.stir()
        if isinstance(steps._bridge, InlineBridge):
            abandoned = await steps._bridge.aclose(seconds)
        else:
            abandoned = await asyncio.get_running_loop().run_in_executor(None, steps._bridge.close, seconds)
        steps._free()
        return abandoned

    def _said(self, answer: int) -> int:
        self.steps.end_step()
        self._progress.stir()
        return answer

    @contextmanager
    def _one(self, request_id: str | None, hint: object = None) -> Generator[str]:
        """Use the caller's request, or one for this call alone; it stays known until the call is over."""
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

    @asynccontextmanager
    async def _lent(self, keys: Sequence[OffloadKey], request_id: str) -> AsyncGenerator[Sequence[memoryview]]:
        rows: list[int] = []
        lent: list[LentRow] = []
        try:
            await self._fetches.arrive(keys, request_id, rows)
            lent += [self.steps.region.lend(row, self.config.chunk_bytes) for row in rows]
            yield [each.view for each in lent]
        except BaseException as error:
            if complaint := self._give_back(keys[: len(rows)], lent, request_id):
                error.add_note(complaint)
            raise
        if complaint := self._give_back(keys[: len(rows)], lent, request_id):
            raise RowsStillRead(complaint)

    def _give_back(self, keys: Sequence[OffloadKey], lent: Sequence[LentRow], request_id: str) -> str:
        """Release the rows that a fetch pinned for these keys; return a complaint if some are still read."""
        read = [(key, each) for key, each in zip(keys, lent, strict=False) if not each.release()]
        self.steps._keep([each for _, each in read])
        self.steps.complete_load(keys, request_id)
        if not read:
            return ""
        named = ", ".join(key.hex() for key, _ in read[:KEYS_NAMED]) + ", …" * (len(read) > KEYS_NAMED)
        complaint = (
            f"{len(read)} of {len(lent)} rows are still read after their fetch ended ({named}): copy the bytes (get "
            "does), or drop slices and arrays of the views before the block ends. Until then these rows are not used."
        )
        logger.warning("%s; see %s", complaint, Remedy.LENT)
        return complaint

    async def _reserve(self, keys: Sequence[OffloadKey], request_id: str) -> StorePlan:
        """Wait for room for the keys, or for as many leading ones as there can be room for."""
        ledger, writeback = self._ledger, self._ledger.writeback
        while True:
            await self._progress.cleared()
            writeback.want(len(keys))
            self.steps.end_step()  # What a step found that nobody ends would be kept for ever.
            if not any(key in ledger.primary.filling for key in keys) and writeback.room(len(keys)):
                if (plan := self.steps.prepare_store(keys, request_id)) is not None:
                    return plan
                if len(keys) > (rows := ledger.rows_left(keys)):
                    keys = keys[:rows]  # Hung transfers, or callers, hold the other rows.
                    continue
                if not (ledger.rows_in_use or ledger.pending or ledger.leases.rows):
                    keys = keys[: len(keys) // 2]  # No row will be released.
                    continue
            await self._progress.made(for_rows=True)

    async def _fill(self, plan: StorePlan, chunks: Sequence[Chunk], request_id: str) -> None:
        """Write the chunks, and cascade them in slices that exceed no limit, unless a store hangs."""
        traffic, done = self._ledger.traffic, 0
        try:
            while done < len(plan.keys):
                if done:
                    await asyncio.sleep(0)
                end = min(done + traffic.slice_chunks, len(plan.keys))
                await self._write(plan.rows[done:end], chunks[done:end])
                async with self._turn:
                    self.steps._check_open()
                    while traffic.storing and not traffic.room(end - done):
                        await self._progress.made()
                self.steps.complete_store(plan.keys[done:end], request_id)
                done = end
                self.steps.end_step()
        finally:
            if done < len(plan.keys):
                self.steps.complete_store(plan.keys[done:], request_id, success=False)

    async def _write(self, rows: Sequence[int], chunks: Sequence[Chunk]) -> None:
        async for row, chunk in self._in_turns(list(zip(rows, chunks, strict=True))):
            self.steps._check_open()
            self.steps.region.row(row)[: self.config.chunk_bytes] = chunk

    async def _in_turns(self, copied: Sequence[T]) -> AsyncGenerator[T]:
        """Yield items, a chunk each, with turns of the loop in between, so that no other task waits for long."""
        size = max(1, COPIED_BYTES_MAX // self.config.chunk_bytes)
        for place, each in enumerate(copied):
            if place and place % size == 0:
                await asyncio.sleep(0)
            yield each

    def _leading(self, keys: Sequence[OffloadKey]) -> int:
        """Return how many leading keys are in the primary, or are being filled there."""
        row_of = self._ledger.primary.row
        return next((place for place, key in enumerate(keys) if row_of(key) is None), len(keys))

    def _checked_chunks(self, keys: Sequence[OffloadKey], chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks as bytes or views; raise, with the key and the type, for an invalid one."""
        if len(keys) != len(chunks):
            raise ValueError(f"{len(keys)} keys but {len(chunks)} chunks")
        taken: list[Chunk] = [
            each if type(each) is bytes else _as_bytes(key, each) for key, each in zip(keys, chunks, strict=True)
        ]
        first = dict(zip(reversed(keys), reversed(taken), strict=True))
        for key, chunk in zip(keys, taken, strict=True):
            if len(chunk) != self.config.chunk_bytes:
                raise ValueError(f"{key.hex()}: a chunk of {len(chunk):,} bytes, not {self.config.chunk_bytes:,}")
            if first[key] is not chunk and first[key] != chunk:
                raise ValueError(f"{key.hex()}: given twice, with different bytes: a key stands for one chunk")
        return taken


def _as_bytes(key: OffloadKey, chunk: object) -> memoryview:
    try:
        view = memoryview(chunk)  # type: ignore[arg-type]
        if view.itemsize == 1 and view.c_contiguous:
            return view.cast("B")
        given = f"a {type(chunk).__name__} with {'gaps' if view.itemsize == 1 else f'items of {view.itemsize} bytes'}"
    except TypeError:
        given = shown(chunk)
    raise TypeError(f"{key.hex()}: {given} given, bytes or a contiguous buffer of them accepted")


class Opening(Generic[M]):
    """A kvtier engine about to be opened: `async with` it, which closes it at the end, or await it."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, M]]) -> None:
        self._begin = begin

    def __await__(self) -> Generator[Any, None, M]:
        return self._begin().__await__()

    async def __aenter__(self) -> M:
        self._opened = await self
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()
