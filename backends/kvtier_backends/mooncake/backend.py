"""A tier in a Mooncake Store, the asynchronous shell: it divides calls, waits for their parts, and gives them up.

A call is moved in parts of at most 16 chunks, some at once. Each part has slots of staging and a thread of its own. If
the thread is late, the rows are taken back from it, its slots are retired, and the rest of the call fails at once. So
do the calls that wait for a turn in the same queue. If the master is away, calls in every queue fail: they would wait
in vain.
"""

import asyncio
import errno
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

from kvtier.backend import (
    Abandoned,
    Backend,
    BackendUnavailable,
    Calls,
    ConfigError,
    Durability,
    Fit,
    OffloadKey,
    Outcome,
    Read,
    Seal,
    Staging,
    TierContext,
    TransferFailed,
    Write,
    in_task,
    load_each_once,
    store_each_once,
)
from kvtier_backends.mooncake.client import (
    Client,
    Meaning,
    ZeroCopy,
    caused,
    connect,
    meaning_of,
    number_of,
    transfer_s_max,
)
from kvtier_backends.mooncake.moving import GivenUp, Lent, Means, Moved, Part, load, store
from kvtier_backends.mooncake.options import MooncakeOptions
from kvtier_backends.mooncake.threads import Late, Threads

NAMES_A_CALL = 1_024  # Half a millisecond of the master's.
PART_CHUNKS_MAX = 16  # Mooncake moves four at a time, and its time-outs count for each four.
PART_CHUNKS_MIN = 4
PART_BYTES_MAX = 16 << 20  # Unless four are more. The first part of a store, and a load's last, is copied alone.
PART_BYTES_MIN = 8 << 20  # Less is copied before another part would be asked for.
ASKERS = 3  # Calls that move no bytes, at once: they never queue behind those that do.
RETIRED_BYTES_MAX = 1 << 40  # Of the address space, of which there are 128 TiB; their memory is given back.
OPEN_S = 30.0  # One try of Mooncake's takes some seconds.
GIVEN_UP_S = 1.0  # For calls that were given up to say so.
FINGERPRINT_CHARACTERS = 8  # In names: rows of other layouts have other names.

Chunk = TypeVar("Chunk", Read, Write)


class _Lost(NamedTuple):
    """The reason why waiting calls are not tried."""

    why: str
    away: bool
    number: int = errno.ETIMEDOUT  # The system's, for what lies behind it.

    def unavailable(self) -> BackendUnavailable:
        return caused(BackendUnavailable(self.why), self.number)


class Queue:
    """Those who wait for a turn, and what was found out meanwhile. A later call tries again."""

    def __init__(self, at_once: int) -> None:
        """Let so many have their turn at once."""
        self.turns = asyncio.Semaphore(at_once)
        self._found: _Lost | None = None

    def found(self, lost: _Lost) -> None:
        """Say that the calls that wait now wait in vain; from any thread."""
        self._found = lost

    def since_now(self) -> Callable[[], _Lost | None]:
        """Return a function that tells, in any thread, what was found after this call."""
        known = self._found
        return lambda: None if self._found is known else self._found


class Way(NamedTuple, Generic[Chunk]):
    """One direction: its own queue, threads and staging, so a flood of stores delays no load."""

    work: Callable[[Part[Chunk]], Moved]
    staging: Staging
    gate: threading.Semaphore
    """For the parts that are with Mooncake."""

    queue: Queue
    """For all parts under way: one more is being copied meanwhile."""

    at_once: int
    part_chunks: int


class MooncakeBackend(Backend[MooncakeOptions]):
    """Chunks as objects of a pool, sealed."""

    durability = Durability.HOST  # Our process may end: others own the memory. Their end costs what they had.
    locality = "REMOTE"
    runner = "process"
    options_type = MooncakeOptions

    @classmethod
    async def open(cls, options: MooncakeOptions, context: TierContext) -> Self:
        """Ask the master for the way; this process lends no memory."""
        threads = Threads(context.name)
        try:
            client, seal = await threads.run(
                partial(_prepared, options, context), _in(OPEN_S), unwanted=lambda made: made[0].close()
            )
            return cls(options, context, client, seal, threads)
        except Late:
            raise BackendUnavailable(f"{context.name}: the master {options.master} does not answer") from None
        finally:
            threads.shutdown()

    @classmethod
    def limit(cls, options: MooncakeOptions, rows: Sequence[memoryview]) -> ZeroCopy:
        return ZeroCopy(connect(options, "bench"), options.prefix, rows)

    def __init__(
        self, options: MooncakeOptions, context: TierContext, client: Client, seal: Seal, threads: Threads
    ) -> None:
        """Use `open` instead."""
        self._name = context.name
        self._options = options
        self._mapper = context.mapper
        self._row_bytes = context.row_bytes
        self._prefix = f"{options.prefix}{context.mapper.fingerprint.hex()[:FINGERPRINT_CHARACTERS]}/"
        self._client: Client | None = client
        self._seal = seal
        self._part_chunks_min = max(1, PART_BYTES_MIN // seal.sealed_bytes)
        self._threads = threads
        self._loads: Way[Read] = self._way(load)
        self._stores: Way[Write] = self._way(store)
        self._asking = Queue(ASKERS)
        self._queues = (self._loads.queue, self._stores.queue, self._asking)
        self._fit = Fit(context.row_bytes)
        self._counts = Counter[str]()
        self._calls = Calls(context.name)

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        with self._calls.one():
            return await self._fit.probe(keys, self._probe)

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        with self._calls.one():
            return await self._fit.load(reads, partial(load_each_once, call=partial(self._move, self._loads)))

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        with self._calls.one():
            return await self._fit.store(writes, partial(store_each_once, call=partial(self._move, self._stores)))

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Raises `BackendUnavailable` if the master does not answer, or keeps any of the chunks."""
        with self._calls.one():
            codes = await self._ask(self._open_client().remove, self._names(self._fit.keys(keys)))
        kept = [code for code in codes if code < 0 and meaning_of(code) is not Meaning.MISSING]
        if kept:
            why = f"Mooncake answers {kept[0]} ({meaning_of(kept[0]).value})"
            error = BackendUnavailable(f"{self._name}: {len(kept)} of {len(codes)} chunks are not deleted: {why}")
            raise caused(error, number_of(kept[0]))

    async def aclose(self, deadline_s: float) -> Abandoned:
        """Calls that are not over by then fail at once. A client of which a call hangs is left to the process's end."""
        ends_at = time.monotonic() + deadline_s
        left = await self._calls.close(deadline_s)
        if left.transfers:
            self._threads.give_up()
            left = await self._calls.close(GIVEN_UP_S)
        client = self._client
        if client is not None and await self._threads.ended(ends_at):
            self._client = None
            closing = Threads(self._name)
            with suppress(Late):
                await closing.run(client.close, lambda: ends_at)
            closing.shutdown()
        elif client is not None:
            client.leave()
        self._threads.shutdown()
        return left

    def counts(self) -> dict[str, int]:
        """See `Counted`."""
        return dict(self._counts)

    def description(self) -> dict[str, str]:
        """See `Described`."""
        options = self._options
        about = {"master": options.master, "protocol": options.protocol, "seal": options.seal}
        if options.tenant != "default":
            about["tenant"] = options.tenant
        if options.replicas > 1:
            about["replicas"] = str(options.replicas)
        return about

    def _way(self, work: Callable[[Part[Chunk]], Moved]) -> Way[Chunk]:
        options, slot_bytes = self._options, self._seal.sealed_bytes
        chunks = min(PART_CHUNKS_MAX, max(PART_CHUNKS_MIN, PART_BYTES_MAX // self._row_bytes))
        slots = min(options.staging_bytes // 2 // slot_bytes, (options.lanes + 1) * chunks)
        at_once = min(options.lanes + 1, slots)
        staging = Staging(self._name, slot_bytes, slots, RETIRED_BYTES_MAX // slot_bytes)
        return Way(work, staging, threading.Semaphore(options.lanes), Queue(at_once), at_once, slots // at_once)

    def _names(self, keys: Sequence[OffloadKey]) -> list[str]:
        name, prefix = self._mapper.name, self._prefix
        return [prefix + name(key) for key in keys]

    def _open_client(self) -> Client:
        assert self._client is not None, "it is closed when no call is under way"
        return self._client

    async def _probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [code == 1 for code in await self._ask(self._open_client().exist, self._names(keys))]

    async def _ask(self, call: Callable[[Sequence[str]], list[int]], names: Sequence[str]) -> list[int]:
        """Make a call that moves no bytes. Raises `BackendUnavailable` if the master does not answer in time."""
        found = self._asking.since_now()
        async with self._asking.turns:
            if lost := found():
                raise lost.unavailable()
            try:
                codes = await self._threads.run(partial(_in_batches, call, names), _in(self._options.timeout_s))
            except Late:
                self._counts["late"] += 1
                late = _Lost(f"{self._name}: {self._too_late()}", away=False)
                self._asking.found(late)
                raise late.unavailable()  # noqa: B904  # It has a cause of its own.
            if code := next((code for code in codes if code < 0 and meaning_of(code) is Meaning.AWAY), None):
                self._counts["unreachable"] += len(names)
                raise self._found_away(code).unavailable()
        return codes

    def _found_away(self, code: int) -> _Lost:
        """Have all waiting calls fail at once; from any thread."""
        why = f"{self._name}: the master {self._options.master} does not answer ({code})"
        away = _Lost(why, away=True, number=number_of(code))
        for queue in self._queues:
            queue.found(away)
        return away

    async def _move(self, way: Way[Chunk], chunks: Sequence[Chunk]) -> Sequence[Outcome]:
        ends_at = time.monotonic() + self._options.timeout_s
        names = self._names([chunk.key for chunk in chunks])
        whole: _Whole[Chunk] = _Whole(names, chunks, way.queue.since_now(), ends_at)
        parts = _parts(len(chunks), way, self._part_chunks_min)
        waiting = iter(parts)
        movers = [self._move_parts(way, whole, waiting) for _ in range(min(way.at_once, len(parts)))]
        if len(movers) == 1:
            await movers[0]
        else:
            async with asyncio.TaskGroup() as group:  # If it is cancelled, parts that have begun are waited for.
                for mover in movers:
                    group.create_task(mover)
        return whole.outcomes()

    async def _move_parts(self, way: Way[Chunk], whole: "_Whole[Chunk]", parts: Iterator[range]) -> None:
        for part in parts:
            async with way.queue.turns:
                if whole.lost() is None:
                    await in_task(self._move_part(way, whole, part))

    async def _move_part(self, way: Way[Chunk], whole: "_Whole[Chunk]", part: range) -> None:
        if time.monotonic() >= whole.ends_at:  # It has waited for so long.
            whole.lose(self._late(len(part)))
            return
        try:
            self._threads.check()
            async with way.staging.lend(len(part)) as slots:
                lent: Lent[Chunk] = Lent(whole.chunks[part.start : part.stop])
                means = Means(self._open_client(), self._seal, way.gate, partial(self._answered, way.queue))
                work = Part(means, whole.names[part.start : part.stop], lent, slots, whole.found)
                moved = await self._moved(way, whole, work)
        except BackendUnavailable as error:
            behind = error.__cause__
            number = behind.errno if isinstance(behind, OSError) else None
            whole.lose(_Lost(str(error), away=True, number=number or errno.EIO))
            return
        if moved is not None:
            self._counts += moved.counts
            whole.take(part, moved)

    async def _moved(self, way: Way[Chunk], whole: "_Whole[Chunk]", part: Part[Chunk]) -> Moved | None:
        """Have a part moved; None: the call is lost, and the part may go on, without its rows."""

        def ends_at() -> float:
            return whole.ends_at if part.entered_at is None else part.entered_at + self._options.timeout_s

        try:
            moved = await self._threads.run(partial(way.work, part), ends_at, unwanted=lambda _: part.slots.empty())
        except GivenUp:
            part.slots.retire(() if part.entered_at is None else None)
            return None
        except Late:
            part.slots.retire()
            whole.lose(late := self._late(len(part.names)))
            if part.inside:  # Else it has only waited, or is being copied.
                way.queue.found(late)
            return None
        finally:
            part.give_up()  # After what was found: it lets in the next one.
        part.slots.retire(moved.unsafe)
        return moved

    def _answered(self, queue: Queue, codes: Sequence[int], took_s: float) -> None:
        """Tell those who wait what a call of Mooncake's has found out; from any thread."""
        meanings = {meaning_of(code) if code < 0 else None for code in codes}
        if meanings == {Meaning.AWAY}:
            self._found_away(codes[0])
        elif meanings <= {Meaning.FAILED, Meaning.AWAY} and took_s >= transfer_s_max(self._options):
            queue.found(_Lost("transfers fail by Mooncake's own time-out", away=False))

    def _late(self, chunks: int) -> _Lost:
        self._counts["late"] += chunks
        return _Lost(self._too_late(), away=False)

    def _too_late(self) -> str:
        return f"no answer within timeout_s = {self._options.timeout_s:g} s"


class _Whole(Generic[Chunk]):
    """One call's chunks, and what became of them."""

    def __init__(
        self, names: Sequence[str], chunks: Sequence[Chunk], found: Callable[[], _Lost | None], ends_at: float
    ) -> None:
        self.names = names
        self.chunks: Sequence[Chunk] = chunks
        self.ends_at = ends_at
        """When no part of it goes to Mooncake any more."""

        self.found = found
        """What its queue has found since; holds no row."""

        self._lost: _Lost | None = None
        self._outcomes: dict[int, Outcome] = {}
        self._away = 0

    def lost(self) -> _Lost | None:
        """Say why what waits of it is not tried, by its own or others' findings."""
        return self._lost or self.found()

    def lose(self, lost: _Lost) -> None:
        """Have the rest not be tried."""
        self._lost = lost

    def take(self, part: range, moved: Moved) -> None:
        """Note the outcome of a part. If nothing of it moved, the rest is lost, too."""
        self._outcomes.update(zip(part, moved.outcomes, strict=True))
        if moved.wholly(Meaning.AWAY):  # Which its queue has been told.
            self._away += len(part)
        elif moved.wholly(Meaning.FAILED, Meaning.AWAY):
            self.lose(_Lost("transfers fail", away=False, number=errno.EIO))

    def outcomes(self) -> list[Outcome]:
        """Return them all. Raises `BackendUnavailable` if there is no answer for any chunk."""
        lost = self.lost()
        if lost is not None and lost.away and self._away == len(self._outcomes):
            raise lost.unavailable()
        return [self._outcomes[at] if at in self._outcomes else self._untried(at) for at in range(len(self.chunks))]

    def _untried(self, at: int) -> Outcome:
        lost = self.lost()
        assert lost is not None, "every part was tried"
        return caused(TransferFailed(f"{self.chunks[at].key.hex()}: {lost.why}"), lost.number)


def _prepared(options: MooncakeOptions, context: TierContext) -> tuple[Client, Seal]:
    """Blocks. Raises `ConfigError` for what is to be mended, and `BackendUnavailable` if no master answers."""
    seal = options.make_seal(context.mapper.fingerprint, context.row_bytes)
    if options.staging_bytes < 2 * seal.sealed_bytes:
        raise ConfigError(
            f"staging_bytes: {options.staging_bytes:,} bytes given, at least {2 * seal.sealed_bytes:,} accepted: "
            "a chunk and its seal each way"
        )
    return connect(options, context.name), seal


def _in(seconds: float) -> Callable[[], float]:
    ends_at = time.monotonic() + seconds
    return lambda: ends_at


def _in_batches(call: Callable[[Sequence[str]], list[int]], names: Sequence[str]) -> list[int]:
    codes: list[int] = []
    for start in range(0, len(names), NAMES_A_CALL):
        codes += call(names[start : start + NAMES_A_CALL])
    return codes


def _parts(count: int, way: Way[Any], least: int) -> list[range]:
    """Divide evenly, so that a part is copied while another is moved, if they are large enough for it."""
    parts = max(math.ceil(count / way.part_chunks), min(way.at_once, count // least))
    return [range(count * at // parts, count * (at + 1) // parts) for at in range(parts)]
