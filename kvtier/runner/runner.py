"""The runner: one kvtier engine's actions, run on its tiers within their limits, each as a task of the event loop.

It decides nothing. It opens all tiers or none, lends rows of its own mapping to a backend for one call, and posts the
outcome. **A deadline never cancels.** A late call is reported, and its rows as returned when it has really ended.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvtier import backend as api
from kvtier.config import LOADS_IN_FLIGHT_MAX, OPEN_S, EngineConfig, TierConfig, tier_fields, tier_options
from kvtier.errors import BackendClosed, BackendError, BackendUnavailable, ConfigError, LineLimit, Remedy, cause_of
from kvtier.memory import Region, is_of_a_limit, reason
from kvtier.runner.messages import (
    Acknowledge,
    Action,
    Advise,
    Answered,
    Cascade,
    Code,
    Delete,
    Finished,
    Post,
    Probe,
    Promote,
    Returned,
    code_of,
    pack_rows,
    unpack_keys,
    unpack_rows,
)
from kvtier.runner.reports import Reports, SpeedMeter

GIVEN_UP_S = 1.0  # For a cancelled opening to clean up.
TURNS_S = 0.05  # A call that has ended leaves its task a few turns of the loop from its own end.

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

Call = Callable[[], Awaitable[Sequence[api.Outcome]]]

_Answerable = Promote | Cascade | Probe | Delete


class Budget:
    """The bytes and chunks in flight of a tier in one direction, first come first served; alone, any size passes."""

    def __init__(self, bytes_max: int, chunks_max: int) -> None:
        self._bytes_max = bytes_max
        self._chunks_max = chunks_max
        self.bytes_used = 0
        self.chunks_used = 0
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()

    async def acquire(self, size_bytes: int, chunks: int) -> None:
        """Wait for a share of the budget. A cancelled call holds nothing."""
        if not self._waiting and self._fits(size_bytes, chunks):
            self._take(size_bytes, chunks)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, chunks, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size_bytes, chunks)  # The share arrived in the tick in which the waiter was cancelled.
            else:
                self._admit()  # The next waiter may fit now.
            raise

    def release(self, size_bytes: int, chunks: int) -> None:
        self.bytes_used -= size_bytes
        self.chunks_used -= chunks
        assert self.bytes_used >= 0, self.bytes_used
        assert self.chunks_used >= 0, self.chunks_used
        self._admit()

    def _fits(self, size_bytes: int, chunks: int) -> bool:
        if self.chunks_used == 0:
            return True
        return self.bytes_used + size_bytes <= self._bytes_max and self.chunks_used + chunks <= self._chunks_max

    def _take(self, size_bytes: int, chunks: int) -> None:
        self.bytes_used += size_bytes
        self.chunks_used += chunks

    def _admit(self) -> None:
        while self._waiting:
            size_bytes, chunks, turn = self._waiting[0]
            if turn.done():  # Cancelled while it waited.
                self._waiting.popleft()
            elif self._fits(size_bytes, chunks):
                self._waiting.popleft()
                self._take(size_bytes, chunks)
                turn.set_result(None)
            else:
                return


class RunnerTier(NamedTuple):
    name: str
    backend: api.Backend
    deadline_s: float
    loads: Budget
    stores: Budget


async def open_tiers(config: EngineConfig, engine: api.EngineId | None = None) -> list[RunnerTier]:
    """Open every tier on the running loop. If one fails, close those before it and raise its error."""
    mapper, engine = api.FileMapper(config.namespace), engine or api.EngineId.new()
    opened: list[RunnerTier] = []
    try:
        for index, tier in enumerate(config.secondary_tiers):
            context = api.TierContext(tier.name, mapper, config.row_bytes, config.limits.retained_share, engine)
            opened.append(await _opened_in_time(_open_tier(index, tier, context), tier))
    except BaseException:
        closings = [tier.backend.aclose(config.limits.close_s) for tier in opened]
        await asyncio.shield(asyncio.gather(*closings, return_exceptions=True))
        raise
    return opened


async def _opened_in_time(opening: Coroutine[None, None, RunnerTier], tier: TierConfig) -> RunnerTier:
    """Wait up to `OPEN_S` for a tier to open. One that hangs is left behind, with the thread that it hangs in."""
    task = asyncio.ensure_future(opening)
    try:
        done, _ = await asyncio.wait({task}, timeout=OPEN_S)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GIVEN_UP_S)
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=GIVEN_UP_S)
        raise BackendUnavailable(f"{tier.name}: does not open within {OPEN_S:g} s")
    if task.cancelled():
        raise BackendUnavailable(f"{tier.name}: its opening was cancelled from within")
    return task.result()


async def _open_tier(index: int, tier: TierConfig, context: api.TierContext) -> RunnerTier:
    where = f"secondary_tiers[{index}]"
    options = tier_options(tier, where)
    try:
        backend = await api.backend_class(tier.type).open(options, context)
    except Exception as error:
        if is_of_a_limit(error):
            raise BackendUnavailable(f"{tier.name}: cannot be opened: {reason(error)}") from error
        if isinstance(error, ConfigError):
            of_option = str(error).partition(":")[0] in tier_fields(options)  # Not of the engine, as chunk_bytes is.
            raise ConfigError(f"{where}{'.' if of_option else ': '}{error}") from error
        raise
    limits = tier.limits
    return RunnerTier(
        tier.name,
        backend,
        limits.deadline_s,
        Budget(limits.load_bytes_in_flight, LOADS_IN_FLIGHT_MAX),
        Budget(limits.store_bytes_in_flight, limits.store_chunks_in_flight),
    )


class Runner:
    """One kvtier engine's tasks. All methods belong to the loop that it was made on."""

    def __init__(
        self, tiers: Sequence[RunnerTier], region: Region, post: Post, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Take open tiers; `clock` times transfers (uvloop's own has milliseconds only)."""
        self._tiers = tiers
        self._region = region
        self._post = post
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs = {tier.name: CallLog(tier.name) for tier in tiers}
        self._changing = [0] * len(tiers)  # Stores and deletes in flight; the last one reports the tier's occupancy.
        self._meters = [SpeedMeter() for _ in tiers]
        self._reports = [
            Reports(index, tier.name, tier.backend, meter, post)
            for index, (tier, meter) in enumerate(zip(tiers, self._meters, strict=True))
        ]

    def start(self) -> None:
        """Begin to report what the tiers hold."""
        for reports in self._reports:
            reports.start()

    def submit(self, actions: Iterable[Action]) -> None:
        """Start a task for each action. Never waits."""
        for action in actions:
            match action:
                case Promote():
                    self._spawn(action, self._promote(action))
                case Cascade():
                    self._spawn(action, self._cascade(action))
                case Probe():
                    self._spawn(action, self._probe(action))
                case Delete():
                    self._spawn(action, self._delete(action))
                case Advise() | Acknowledge():
                    self._tell(action)

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    async def aclose(self, deadline_s: float) -> int:
        """Close the tiers, wait at most `deadline_s` for transfers, and return how many were left behind."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        silent = await asyncio.gather(*(reports.aclose(max(TURNS_S, deadline_s / 2)) for reports in self._reports))
        await self.close_tiers(max(0.0, ends_at - loop.time()))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(TURNS_S, ends_at - loop.time()))
        return self.in_flight + silent.count(False)

    async def close_tiers(self, deadline_s: float) -> None:
        """Close the tiers alone; if the runner's loop has been closed, on another one."""
        closings = [
            asyncio.ensure_future(_awaited(partial(tier.backend.aclose, deadline_s), bool)) for tier in self._tiers
        ]
        if closings:
            await asyncio.wait(closings, timeout=deadline_s + TURNS_S)
        for tier, closing in zip(self._tiers, closings, strict=True):
            if not closing.done():
                logger.error("tier %s does not close; see %s", tier.name, Remedy.CLOSING)
            else:
                _result(closing, self._logs[tier.name])

    def _spawn(self, action: _Answerable, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._see_through(action, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _see_through(self, action: _Answerable, work: Coroutine[Any, Any, None]) -> None:
        """Do the work; an exception is the action's outcome, so that its owner does not wait for ever."""
        begun = self._clock()
        try:
            await work
        except Exception as error:  # The supervisor's edge: an unknown row or tier.
            logger.exception("%s %d cannot be done; see %s", type(action).__name__, action.id, Remedy.CONTRACT)
            seconds, cause = self._clock() - begun, cause_of(error)
            if isinstance(action, Probe):
                self._post(Answered(action.id, b"", seconds, cause))
            else:
                failed = _all(Code.UNAVAILABLE, len(unpack_keys(action.keys)))
                self._post(Finished.of(action.id, failed, seconds, cause=cause))

    async def _promote(self, action: Promote) -> None:
        tier, meter = self._tiers[action.tier], self._meters[action.tier]
        reads = [api.Read(key, row) for key, row in self._lent(action)]
        begun = meter.begin_load(self._clock())
        size_bytes = len(reads) * self._region.row_bytes

        def ended(moved: bool) -> None:
            meter.end_load(begun, size_bytes, self._clock(), moved=moved)
            self._reports[action.tier].speed()

        await self._transfer(action, len(reads), partial(tier.backend.load, reads), ended)

    async def _cascade(self, action: Cascade) -> None:
        tier = self._tiers[action.tier]
        writes = [api.Write(key, row) for key, row in self._lent(action)]
        self._changing[action.tier] += 1
        try:
            await self._transfer(action, len(writes), partial(tier.backend.store, writes))
        finally:
            self._changing[action.tier] -= 1

    def _lent(self, action: Promote | Cascade) -> Iterable[tuple[api.OffloadKey, memoryview]]:
        """Return the keys and rows of a transfer; IndexError for an unknown row."""
        return zip(unpack_keys(action.keys), map(self._region.row, unpack_rows(action.rows)), strict=True)

    async def _transfer(
        self, action: Promote | Cascade, chunks: int, call: Call, ended: Callable[[bool], None] = lambda _: None
    ) -> None:
        """Wait for budget, then for the call, each up to the deadline. `ended(True)`: its time shows the speed."""
        tier = self._tiers[action.tier]
        budget = tier.loads if isinstance(action, Promote) else tier.stores
        begun = self._clock()
        size_bytes = chunks * self._region.row_bytes
        try:
            async with asyncio.timeout(tier.deadline_s):
                await budget.acquire(size_bytes, chunks)
        except TimeoutError:
            self._post(Finished.of(action.id, _all(Code.DEADLINE, chunks), self._clock() - begun))
            ended(True)
            return
        task, in_time = await self._begun(tier, _awaited(call, list[api.Outcome]), f"{chunks} chunks")
        budget.release(size_bytes, chunks)
        if in_time:
            failed, cause = _outcome(task, chunks, self._logs[tier.name])
            self._reports[action.tier].usage(now=isinstance(action, Cascade) and self._changing[action.tier] == 1)
            self._post(Finished.of(action.id, failed, self._clock() - begun, cause=cause))
            ended(not failed)
        else:
            self._post(Finished.of(action.id, _all(Code.DEADLINE, chunks), self._clock() - begun, lent=True))
            ended(True)
            await asyncio.wait({task})
            failed, _ = _outcome(task, chunks, self._logs[tier.name])
            self._post(Returned(action.id, pack_rows([index for index in range(chunks) if index not in failed])))
        self._reports[action.tier].usage()

    async def _probe(self, action: Probe) -> None:
        """Probe, and post one answer a key, or none."""
        tier, keys = self._tiers[action.tier], unpack_keys(action.keys)
        begun = self._clock()
        call = _awaited(partial(tier.backend.probe, keys), lambda present: bytes(map(bool, present)))
        task, in_time = await self._begun(tier, call, f"a question about {len(keys)} chunks")
        present, cause = _result(task, self._logs[tier.name]) if in_time else (None, "deadline")
        if present is None or len(present) != len(keys):
            present = b""
        self._post(Answered(action.id, present, self._clock() - begun, cause))
        await self._ended(tier, task, in_time=in_time)

    async def _delete(self, action: Delete) -> None:
        tier, keys = self._tiers[action.tier], unpack_keys(action.keys)
        begun = self._clock()
        call = _awaited(partial(tier.backend.delete, keys), bool)
        self._changing[action.tier] += 1
        try:
            task, in_time = await self._begun(tier, call, f"a deletion of {len(keys)} chunks")
            answer, cause = _result(task, self._logs[tier.name]) if in_time else (None, "")
            failed = _all(Code.UNAVAILABLE if in_time else Code.DEADLINE, len(keys)) if answer is None else {}
            self._reports[action.tier].usage(now=self._changing[action.tier] == 1)
            self._post(Finished.of(action.id, failed, self._clock() - begun, cause=cause))
            await self._ended(tier, task, in_time=in_time)
        finally:
            self._changing[action.tier] -= 1
        self._reports[action.tier].usage()

    async def _begun(self, tier: RunnerTier, call: Coroutine[Any, Any, T], what: str) -> "tuple[asyncio.Task[T], bool]":
        """Begin a call of a tier and wait for its deadline, which never cancels; return whether it has ended by then.

        A caller that gets False posts that, then waits for the task: the call's rows are lent until then.
        """
        task = asyncio.ensure_future(call)
        in_time, _ = await asyncio.wait({task}, timeout=tier.deadline_s)
        if not in_time:
            log, overdue = self._logs[tier.name], f"{what} ran out of time ({tier.deadline_s:g} s)"
            log.line(logging.WARNING, "overdue", overdue, Remedy.OVERDUE)
        return task, bool(in_time)

    async def _ended(self, tier: RunnerTier, task: "asyncio.Task[Any]", *, in_time: bool) -> None:
        """Wait for a call that was reported late, and log its failure."""
        if not in_time:
            await asyncio.wait({task})
            _result(task, self._logs[tier.name])

    def _tell(self, action: Advise | Acknowledge) -> None:
        """Carry out an action that has no answer."""
        try:
            if isinstance(action, Acknowledge):
                self._reports[action.tier].acknowledge()
            elif isinstance(backend := self._tiers[action.tier].backend, api.Advised):
                backend.advise(action.advice())
        except (Exception, SystemExit):  # The supervisor's edge: a bug costs the tier's order, nothing else.
            logger.exception(
                "tier %d: it does not take %s; see %s", action.tier, type(action).__name__, Remedy.CONTRACT
            )


async def _awaited(call: Callable[[], Awaitable[T]], taken: Callable[[T], R]) -> R:
    """Call a tier, and take its answer; every exception is the task's failure, also one before the first await."""
    try:
        return taken(await call())
    except SystemExit as error:  # It would end the loop, and with it every other tier's work.
        raise RuntimeError(f"a tier may not exit, {error.code!r}") from error


class CallLog:
    """The log of one tier's calls: at most one line of each kind a minute. The owner's line of losses counts all."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._limit = LineLimit(lambda: asyncio.get_running_loop().time())

    def line(
        self, level: int, kind: str, said: object, remedy: Remedy, *, exc_info: BaseException | None = None
    ) -> None:
        """Log a line; at DEBUG if one of its kind was logged within the last minute."""
        level = level if self._limit.allows(kind) else logging.DEBUG
        logger.log(level, "tier %s: %s; see %s", self.name, said, remedy, exc_info=exc_info, stacklevel=2)


def _result(task: "asyncio.Task[T]", log: CallLog) -> tuple[T | None, str]:
    """Return an ended call's answer, None if it failed, and the cause of its failure, which is logged."""
    if task.cancelled():
        log.line(logging.ERROR, "cancelled", "its call was cancelled from within", Remedy.CONTRACT)
        return None, ""
    if (error := task.exception()) is None:
        return task.result(), ""
    if isinstance(error, BackendClosed):  # During the runner's own closing: queued calls are given up.
        log.line(logging.INFO, "closed", error, Remedy.CLOSED)
    elif isinstance(error, BackendError):
        log.line(logging.WARNING, "unavailable", error, Remedy.UNAVAILABLE)
    else:  # The supervisor's edge: a bug in a tier costs its hits, not the others'.
        log.line(logging.ERROR, "raised", "its call raised what no tier may raise", Remedy.CONTRACT, exc_info=error)
    return None, cause_of(error)


def _outcome(task: "asyncio.Task[list[api.Outcome]]", chunks: int, log: CallLog) -> tuple[dict[int, Code], str]:
    """Return index → code of the chunks that did not move, and the cause of the worst failure."""
    outcomes, cause = _result(task, log)
    if outcomes is None:
        return _all(Code.UNAVAILABLE, chunks), cause
    if len(outcomes) != chunks:
        log.line(logging.ERROR, "outcomes", f"{len(outcomes)} outcomes for {chunks} chunks", Remedy.CONTRACT)
        return _all(Code.FAILED, chunks), ""
    failed = {index: code_of(outcome) for index, outcome in enumerate(outcomes) if outcome is not None}
    return failed, cause_of(max(filter(None, outcomes), key=code_of)) if failed else ""


def _all(code: Code, chunks: int) -> dict[int, Code]:
    return dict.fromkeys(range(chunks), code)
