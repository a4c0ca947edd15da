"""A tier in a Mooncake Store, the asynchronous shell: it divides calls, waits for their parts, and gives them up.

A call moves in parts of at most 16 chunks, each with slots of staging and its own thread. If that is late, its rows are
taken back, its slots retired, and the rest of the call and of its queue fails; all queues, if the master is away.
"""

import asyncio
import errno
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Self

from kvtier import backend as api
from kvtier.backend.remote import RemoteBackend, caused, name_prefix
from kvtier_backends.mooncake.client import (
    Meaning,
    MooncakeOptions,
    PoolClient,
    answer_of,
    connect,
    meaning_of,
    number_of,
    transfer_s_max,
)
from kvtier_backends.mooncake.moving import Chunk, GivenUp, Late, Load, Means, Moved, Part, Store, Threads

NAMES_A_CALL = 1_024  # Half a millisecond of the master's.
PART_CHUNKS_MAX = 16  # Mooncake moves four at a time, each four with its own time-out.
PART_CHUNKS_MIN = 4
PART_BYTES_MAX = 16 << 20  # Unless four are more. The first part of a store, and a load's last, is copied alone.
PART_BYTES_MIN = 8 << 20  # A smaller part is copied before the next would be requested.
PARTS_AT_ONCE = 2  # In each direction: one moves, the next is copied.
ASKERS = 3  # Concurrent calls that move no bytes: they never queue behind those that do.
RETIRED_BYTES_MAX = 1 << 40  # Address space only, of 128 TiB: their memory is given back.
OPEN_S = 30.0  # One try of Mooncake's takes some seconds.
GIVEN_UP_S = 1.0  # For calls that were given up to return.


class _Lost(NamedTuple):
    why: str
    number: int  # The system's number for the cause.
    away: bool = False

    def unavailable(self) -> api.BackendUnavailable:
        return caused(api.BackendUnavailable(self.why), self.number)


class Queue:
    """Calls that wait for a turn, and the last failure that concerns all of them. A later call tries again."""

    def __init__(self, at_once: int) -> None:
        self.turns = asyncio.Semaphore(at_once)
        self.found: _Lost | None = None  # Fails the calls that wait now. For any thread.

    def since_now(self) -> Callable[[], _Lost | None]:
        """Return a function that returns, in any thread, the failure found after this call."""
        known = self.found
        return lambda: None if self.found is known else self.found


class Way(NamedTuple, Generic[Chunk]):
    """One direction: its own queue, threads and staging, so a flood of stores delays no load."""

    part_type: type[Part[Chunk]]
    means: Means
    staging: api.Staging
    queue: Queue
    at_once: int  # Parts in flight: one inside Mooncake, and one that is copied meanwhile.
    part_chunks: int


class MooncakeBackend(RemoteBackend[MooncakeOptions]):
    """Chunks as objects of a pool, sealed."""

    durability = api.Durability.HOST  # Other processes own the memory. The end of one costs the chunks in its memory.
    runner = "process"
    options_type = MooncakeOptions
    described = ("master", "protocol", "tenant", "replicas")

    @classmethod
    async def open(cls, options: MooncakeOptions, context: api.TierContext) -> Self:
        """Connect to the master. This process lends no memory to the pool."""
        threads = Threads(context.name)
        try:
            client, seal = await threads.run(
                partial(_prepared, options, context), _in(OPEN_S), unwanted=lambda made: made[0].close()
            )
            return cls(options, context, client, seal, threads)
        except Late:
            raise api.BackendUnavailable(f"{context.name}: the master {options.master} does not answer") from None
        finally:
            threads.shutdown()

    def __init__(
        self, options: MooncakeOptions, context: api.TierContext, client: PoolClient, seal: api.Seal, threads: Threads
    ) -> None:
        super().__init__(options, context)
        self._mapper = context.mapper
        self._prefix = name_prefix(options.prefix, context.mapper)
        self._client = client
        self._open = True
        self._seal = seal
        self._threads = threads
        self._loads: Way[api.Read] = self._way(Load)
        self._stores: Way[api.Write] = self._way(Store)
        self._asking = Queue(ASKERS)
        self._queues = (self._loads.queue, self._stores.queue, self._asking)

    async def _load(self, reads: Sequence[api.Read]) -> Sequence[api.Outcome]:
        return await self._move(self._loads, reads)

    async def _store(self, writes: Sequence[api.Write]) -> Sequence[api.Outcome]:
        return await self._move(self._stores, writes)

    async def _probe(self, keys: Sequence[api.OffloadKey]) -> Sequence[bool]:
        return [code == 1 for code in await self._ask(self._client.exist, keys)]

    async def _delete(self, keys: Sequence[api.OffloadKey]) -> None:
        codes = await self._ask(self._client.remove, keys)
        kept = [code for code in codes if meaning_of(code) not in (None, Meaning.MISSING)]
        if kept:
            why = f"{len(kept)} of {len(codes)} chunks are not deleted: {answer_of(kept[0])}"
            raise caused(api.BackendUnavailable(f"{self._name}: {why}"), number_of(kept[0]))

    async def aclose(self, deadline_s: float) -> api.Abandoned:
        """Close; late calls fail at once. A client with a call that hangs stays open until the process ends."""
        ends_at = time.monotonic() + deadline_s
        left = await self._calls.close(deadline_s)
        if left.transfers:
            self._threads.give_up()
            left = await self._calls.close(GIVEN_UP_S)
        if self._open and await self._threads.ended(ends_at):
            self._open = False
            closing = Threads(self._name)
            with suppress(Late):
                await closing.run(self._client.close, lambda: ends_at)
            closing.shutdown()
        elif self._open:
            self._client.leave()
        self._threads.shutdown()
        return left

    def _way(self, part_type: type[Part[Chunk]]) -> Way[Chunk]:
        slot_bytes = self._seal.sealed_bytes
        chunks = min(PART_CHUNKS_MAX, max(PART_CHUNKS_MIN, PART_BYTES_MAX // self._seal.row_bytes))
        slots = min(self._options.staging_bytes // 2 // slot_bytes, PARTS_AT_ONCE * chunks)
        at_once = min(PARTS_AT_ONCE, slots)
        staging = api.Staging(self._name, slot_bytes, slots, RETIRED_BYTES_MAX // slot_bytes)
        queue = Queue(at_once)
        means = Means(self._client, self._seal, threading.Lock(), partial(self._answered, queue))
        return Way(part_type, means, staging, queue, at_once, slots // at_once)

    def _names(self, keys: Sequence[api.OffloadKey]) -> list[str]:
        name, prefix = self._mapper.name, self._prefix
        return [prefix + name(key) for key in keys]

    async def _ask(self, call: Callable[[Sequence[str]], list[int]], keys: Sequence[api.OffloadKey]) -> list[int]:
        """Make a call that moves no bytes. Raises `BackendUnavailable` if the master does not answer in time."""
        names, found = self._names(keys), self._asking.since_now()
        async with self._asking.turns:
            if lost := found():
                raise lost.unavailable()
            try:
                codes = await self._threads.run(partial(_in_batches, call, names), _in(self._options.timeout_s))
            except Late:
                self._asking.found = late = self._late(1, f"{self._name}: ")
                raise late.unavailable()  # noqa: B904  # It has its own cause.
            if code := next((code for code in codes if meaning_of(code) is Meaning.AWAY), None):
                self._counts.count("unreachable", len(names))
                raise self._found_away(code).unavailable()
        return codes

    def _found_away(self, code: int) -> _Lost:
        """Fail all waiting calls. For any thread."""
        why = f"{self._name}: the master {self._options.master} does not answer ({code})"
        away = _Lost(why, number_of(code), away=True)
        for queue in self._queues:
            queue.found = away
        return away

    async def _move(self, way: Way[Chunk], chunks: Sequence[Chunk]) -> Sequence[api.Outcome]:
        ends_at = time.monotonic() + self._options.timeout_s
        names = self._names([chunk.key for chunk in chunks])
        whole: _Whole[Chunk] = _Whole(names, chunks, way.queue.since_now(), ends_at)
        parts = iter(_parts(len(chunks), way, max(1, PART_BYTES_MIN // self._seal.sealed_bytes)))
        async with asyncio.TaskGroup() as group:  # A cancelled group waits for parts that have begun.
            for _ in range(way.at_once):
                group.create_task(self._move_parts(way, whole, parts))
        return whole.outcomes()

    async def _move_parts(self, way: Way[Chunk], whole: "_Whole[Chunk]", parts: Iterator[range]) -> None:
        for part in parts:
            async with way.queue.turns:
                if whole.lost() is None:
                    await api.in_task(self._move_part(way, whole, part))

    async def _move_part(self, way: Way[Chunk], whole: "_Whole[Chunk]", part: range) -> None:
        if time.monotonic() >= whole.ends_at:  # It has used up its time in the queue.
            whole.own = self._late(len(part))
            return
        try:
            self._threads.check()
            async with way.staging.lend(len(part)) as slots:
                names, chunks = whole.names[part.start : part.stop], whole.chunks[part.start : part.stop]
                done = await self._moved(way, whole, way.part_type(way.means, names, chunks, slots, whole.found))
        except api.BackendUnavailable as error:
            whole.own = _Lost(str(error), getattr(error.__cause__, "errno", None) or errno.EIO, away=True)
            return
        if done is not None:
            for what, times in done.counts.items():
                self._counts.count(what, times)
            whole.take(part, done)

    async def _moved(self, way: Way[Chunk], whole: "_Whole[Chunk]", part: Part[Chunk]) -> Moved | None:
        """Move a part. None: the call is lost, and the part's thread may go on without its rows."""

        def ends_at() -> float:
            return whole.ends_at if part.entered_at is None else part.entered_at + self._options.timeout_s

        try:
            done = await self._threads.run(part.move, ends_at, unwanted=lambda _: part.slots.empty())
        except GivenUp:
            if part.entered_at is not None:
                part.slots.retire()
            return None
        except Late:
            part.slots.retire()
            whole.own = late = self._late(len(part.names))
            if part.inside:  # A part outside only waits or is copied.
                way.queue.found = late
            return None
        finally:
            part.give_up()  # After `found`: it lets the next part in.
        part.slots.retire(done.unsafe())
        return done

    def _answered(self, queue: Queue, codes: Sequence[int], took_s: float) -> None:
        """Fail waiting calls if an answer of Mooncake's concerns all of them. For any thread."""
        if (meanings := set(map(meaning_of, codes))) == {Meaning.AWAY}:
            self._found_away(codes[0])
        elif meanings <= {Meaning.FAILED, Meaning.AWAY} and took_s >= transfer_s_max(self._options):
            queue.found = _Lost("transfers fail by Mooncake's own time-out", errno.ETIMEDOUT)

    def _late(self, chunks: int, whose: str = "") -> _Lost:
        self._counts.count("late", chunks)
        return _Lost(f"{whose}no answer within timeout_s = {self._options.timeout_s:g} s", errno.ETIMEDOUT)


@dataclass
class _Whole(Generic[Chunk]):
    names: Sequence[str]
    chunks: Sequence[Chunk]
    found: Callable[[], _Lost | None]  # Returns the queue's failure since the call began; holds no row.
    ends_at: float  # No part enters Mooncake later.
    own: _Lost | None = None
    _outcomes: dict[int, api.Outcome] = field(default_factory=dict[int, api.Outcome])
    _away: int = 0

    def lost(self) -> _Lost | None:
        """Return why the rest is not tried, if there is a reason of its own or of its queue."""
        return self.own or self.found()

    def take(self, part: range, moved: Moved) -> None:
        """Record a part. If nothing of it moved, the rest is lost, too."""
        self._outcomes.update(zip(part, moved.outcomes, strict=True))
        if moved.wholly(Meaning.AWAY):  # Its queue knows already.
            self._away += len(part)
        elif moved.wholly(Meaning.FAILED, Meaning.AWAY):
            self.own = _Lost("transfers fail", errno.EIO)

    def outcomes(self) -> list[api.Outcome]:
        """Return all outcomes. Raises `BackendUnavailable` if no chunk has an answer."""
        if (lost := self.lost()) is not None:
            if lost.away and self._away == len(self._outcomes):
                raise lost.unavailable()
            for at, chunk in enumerate(self.chunks):
                if at not in self._outcomes:
                    self._outcomes[at] = caused(api.TransferFailed(f"{chunk.key.hex()}: {lost.why}"), lost.number)
        return [self._outcomes[at] for at in range(len(self.chunks))]


def _prepared(options: MooncakeOptions, context: api.TierContext) -> tuple[PoolClient, api.Seal]:
    """Blocks. Raises `ConfigError`, and `BackendUnavailable` if the master does not answer."""
    seal = options.make_seal(context.mapper.fingerprint, context.row_bytes)
    if options.staging_bytes < 2 * seal.sealed_bytes:
        raise api.ConfigError(
            f"staging_bytes: {options.staging_bytes:,} bytes given, at least {2 * seal.sealed_bytes:,} accepted: "
            "a chunk and its seal each way"
        )
    return connect(options, context.name), seal


def _in(seconds: float) -> Callable[[], float]:
    ends_at = time.monotonic() + seconds
    return lambda: ends_at


def _in_batches(call: Callable[[Sequence[str]], list[int]], names: Sequence[str]) -> list[int]:
    return [code for start in range(0, len(names), NAMES_A_CALL) for code in call(names[start : start + NAMES_A_CALL])]


def _parts(count: int, way: Way[Any], least: int) -> list[range]:
    """Divide evenly, so that one part is copied while another moves, if they are large enough."""
    parts = max(math.ceil(count / way.part_chunks), min(way.at_once, count // least))
    return [range(count * at // parts, count * (at + 1) // parts) for at in range(parts)]
