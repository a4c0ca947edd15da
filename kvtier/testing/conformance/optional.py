"""Promises of the optional protocols, of a tier with a capacity, and of a tier that wraps another one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, Self

import msgspec
import pytest

from kvtier import backend as api
from kvtier.errors import ChunkMissing, NoSpace
from kvtier.testing.conformance.lender import PATIENCE_S, Lender, Promises, ended, key_of, keys_of, label

Provoke = Callable[[], Awaitable[None]]


class BoundedConformance(Promises):
    """Needs the fixture `small`: an empty tier with room for at least `room_chunks` chunks, and for less than twice."""

    room_chunks: ClassVar[int] = 16

    async def test_the_capacity_is_never_exceeded(self, small: api.Backend, lender: Lender) -> None:
        """The tier stays within its capacity, whatever is stored, in order or concurrently."""
        for start in range(0, 8 * self.room_chunks, self.room_chunks // 2):
            batches = [keys_of(self.room_chunks // 4, start=1_000 * number + start) for number in range(3)]
            stores = [asyncio.create_task(small.store(lender.writes(batch))) for batch in batches]
            pending = set(stores)
            while pending:
                assert 0 <= occupancy(small).used_bytes <= (occupancy(small).capacity_bytes or 0)
                _, pending = await asyncio.wait(pending, timeout=0.001)
            assert {type(outcome).__name__ for store in stores for outcome in store.result()} <= {"NoneType", "NoSpace"}
        assert occupancy(small).chunks <= 2 * self.room_chunks

    async def test_the_newest_chunks_are_there(self, small: api.Backend, lender: Lender) -> None:
        """A full tier makes room: a chunk that was just stored can be loaded."""
        for start in range(0, 4 * self.room_chunks, self.room_chunks // 4):
            keys = keys_of(self.room_chunks // 4, start)
            outcomes = await small.store(lender.writes(keys))
            told = await lender.recall(small, keys)
            assert outcomes.count(None) > 0, "a full tier must make room"
            for key, outcome, chunk in zip(keys, outcomes, told, strict=True):
                assert chunk == (label(key) if outcome is None else "ChunkMissing")

    async def test_a_batch_that_does_not_fit_is_stored_in_part(self, small: api.Backend, lender: Lender) -> None:
        """A chunk without room is `NoSpace`, or is evicted for a later one. Nothing else fails."""
        keys = keys_of(4 * self.room_chunks)
        outcomes = await small.store(lender.writes(keys))
        assert {type(outcome).__name__ for outcome in outcomes} <= {"NoneType", "NoSpace"}
        told = await lender.recall(small, keys)
        assert {label(key) for key in keys} | {"ChunkMissing"} >= set(told)
        assert self.room_chunks // 2 <= len(keys) - told.count("ChunkMissing") <= 2 * self.room_chunks

    async def test_deleting_makes_room(self, small: api.Backend, lender: Lender) -> None:
        """A deleted chunk leaves its room to others."""
        for round_number in range(6):
            keys = keys_of(self.room_chunks, start=1_000 * round_number)
            await lender.keep(small, keys)
            assert await lender.recall(small, keys) == [label(key) for key in keys]
            await small.delete(keys)
        assert occupancy(small)[:2] == (0, 0)

    async def test_storing_again_takes_no_second_place(self, small: api.Backend, lender: Lender) -> None:
        """A full tier takes new versions of all its chunks without losing one."""
        keys = keys_of(self.room_chunks)
        for version in range(4):
            for start in range(0, len(keys), 4):
                await lender.keep(small, keys[start : start + 4], version)
        assert await lender.recall(small, keys) == [label(key, 3) for key in keys]

    async def test_what_went_for_room_is_reported(self, small: api.Backend, lender: Lender) -> None:
        """A tier whose scan is complete reports every eviction."""
        if not isinstance(small, api.Inventory):
            return
        follower = Follower(small)
        await follower.until(lambda: follower.scanned)
        every: list[api.OffloadKey] = []
        for start in range(0, 4 * self.room_chunks, 4):
            keys = keys_of(4, start)
            outcomes = await small.store(lender.writes(keys))
            follower.held.update(key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None)
            every += keys
        if follower.complete:
            present = {key for key, there in zip(every, await small.probe(every), strict=True) if there}
            await follower.until(lambda: follower.held == present)
        await small.aclose(PATIENCE_S)
        await ended(follower.task)


class InventoryConformance(Promises):
    """Needs no further fixture. `BoundedConformance` covers the report of evictions."""

    many_chunks: ClassVar[int] = api.INVENTORY_BATCH_KEYS + 1
    """Chunks that are stored to prove that a report comes in batches."""

    async def test_what_is_there_is_reported_before_the_scan_is_done(
        self, backend: api.Backend, lender: Lender
    ) -> None:
        """Every present chunk is `Added` before `ScanDone`, and nothing else. An empty tier is `ScanDone`, too."""
        keys = keys_of(20)
        assert [type(event) for event in await _scan(_watch(backend))] == [api.ScanDone]
        await lender.keep(backend, keys)
        await backend.delete(keys[15:])
        assert _added(await _scan(_watch(backend))) == set(keys[:15])

    async def test_reports_come_in_batches(self, backend: api.Backend, lender: Lender) -> None:
        """No event has more than `INVENTORY_BATCH_KEYS` keys: one of them is a millisecond of an engine's step."""
        keys = keys_of(self.many_chunks)
        row = lender.rows(1)[0]
        for start in range(0, len(keys), 256):
            batch = [api.Write(key, row) for key in keys[start : start + 256]]
            assert list(await backend.store(batch)) == [None] * len(batch)
        events = await _scan(_watch(backend))
        assert _added(events) == set(keys)
        assert all(len(each.keys) <= api.INVENTORY_BATCH_KEYS for each in events if not isinstance(each, api.ScanDone))

    async def test_a_report_is_true_until_it_ends_with_the_tier(self, backend: api.Backend, lender: Lender) -> None:
        """An event is true when it is yielded. Closing ends the iteration, with one `ScanDone` in all of it."""
        keys = keys_of(6)
        follower = Follower(backend)
        await follower.until(lambda: follower.scanned)
        for version in range(4):
            await lender.keep(backend, keys, version)
            await backend.delete(keys[:3])
            await lender.keep(backend, keys, version)
        follower.held.update(keys)
        await asyncio.sleep(self.settle_s)
        assert follower.held == set(keys)
        await backend.aclose(PATIENCE_S)
        await ended(follower.task)
        follower.task.result()
        assert follower.held == set(keys)
        assert [type(event) for event in follower.events].count(api.ScanDone) == 1

    async def test_a_consumer_may_go_away(self, backend: api.Backend, lender: Lender) -> None:
        """A cancelled consumer costs the tier nothing."""
        await lender.keep(backend, keys_of(3))
        follower = Follower(backend)
        await follower.until(lambda: follower.scanned)
        follower.task.cancel()
        await ended(follower.task)
        assert follower.task.cancelled()
        await lender.keep(backend, keys_of(3, start=10))
        assert list(await backend.probe([key_of(0), key_of(10), key_of(20)])) == [True, True, False]


class Follower:
    """Follows a tier's report in its own task, and keeps its events."""

    def __init__(self, backend: api.Backend) -> None:
        self.events: list[api.InventoryEvent] = []
        self.held: set[api.OffloadKey] = set()
        """Keys reported as added and not as removed since. The test adds its own stores and deletes."""
        self.scanned = self.complete = False
        self._heard = asyncio.Event()
        self.task = asyncio.create_task(self._follow(_watch(backend)))

    async def _follow(self, events: AsyncIterator[api.InventoryEvent]) -> None:
        async for event in events:
            self.events.append(event)
            match event:
                case api.Added(keys):
                    self.held.update(keys)
                case api.Removed(keys):
                    self.held.difference_update(keys)
                case api.ScanDone(complete):
                    self.scanned, self.complete = True, complete
            self._heard.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until events make a condition true; fail if they stop before."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not true():
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            raise AssertionError(f"the report fell silent after {self.events}, with more to come") from None


def _watch(backend: api.Backend) -> AsyncIterator[api.InventoryEvent]:
    assert isinstance(backend, api.Inventory), f"{type(backend).__name__} has no watch()"
    return backend.watch()


async def _scan(events: AsyncIterator[api.InventoryEvent]) -> list[api.InventoryEvent]:
    """Collect events up to `ScanDone`."""
    seen: list[api.InventoryEvent] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            async for event in events:
                seen.append(event)
                if isinstance(event, api.ScanDone):
                    return seen
    raise AssertionError(f"no ScanDone after {seen}")


def _added(events: list[api.InventoryEvent]) -> set[api.OffloadKey]:
    """Return all keys reported before `ScanDone`, without any `Removed`."""
    assert not any(isinstance(event, api.Removed) for event in events)
    return {key for event in events if isinstance(event, api.Added) for key in event.keys}


class MeasuredConformance(Promises):
    async def test_every_chunk_is_counted_once(self, backend: api.Backend, lender: Lender) -> None:
        """An empty tier has no chunks and uses no bytes. Storing again, loading and probing take no second place."""
        keys = keys_of(10)
        assert occupancy(backend)[:2] == (0, 0)
        await lender.keep(backend, keys)
        once = occupancy(backend)
        await lender.keep(backend, keys[:5], version=1)
        assert once.chunks == occupancy(backend).chunks == 10
        assert once.used_bytes > 0
        assert occupancy(backend).used_bytes <= once.used_bytes * 2
        before = occupancy(backend)
        await lender.recall(backend, keys_of(20))
        await backend.probe(keys_of(20))
        assert occupancy(backend) == before

    async def test_what_was_deleted_uses_nothing(self, backend: api.Backend, lender: Lender) -> None:
        """A deleted chunk frees its bytes; an unknown key frees none."""
        keys = keys_of(10)
        await lender.keep(backend, keys)
        full = occupancy(backend)
        await backend.delete([*keys[5:], *keys_of(5, start=100)])
        half = occupancy(backend)
        assert half.chunks == 5
        assert 0 < half.used_bytes < full.used_bytes
        await backend.delete(keys)
        assert occupancy(backend)[:2] == (0, 0)


def occupancy(backend: api.Backend) -> api.Occupancy:
    """Return a tier's occupancy, which must be consistent."""
    assert isinstance(backend, api.Measured), f"{type(backend).__name__} has no occupancy()"
    answer = backend.occupancy()
    assert answer.chunks >= 0
    assert 0 <= answer.used_bytes <= (answer.capacity_bytes or answer.used_bytes)
    return answer


class AdvisedConformance(Promises):
    """Needs the fixture `small`: an empty tier that evicts by recency and has room for about `room_chunks` chunks."""

    room_chunks: ClassVar[int] = 16

    async def test_a_request_that_is_over_leaves_its_head_newest(self, small: api.Backend, lender: Lender) -> None:
        """Its chunks came one by one, the tail last. When others need room, the tail is evicted first."""
        prefix = keys_of(self.room_chunks // 2)
        for key in prefix:
            await lender.keep(small, [key])
        advise(small, "rank", prefix)
        await until_some_go(small, lender, prefix)
        run = list(await small.probe(prefix)).count(True)
        assert list(await small.probe(prefix)) == [True] * run + [False] * (len(prefix) - run)

    async def test_what_was_ranked_goes_after_what_was_not(self, small: api.Backend, lender: Lender) -> None:
        """A prefix that the primary served counts as used in the tier."""
        prefix, others = keys_of(4), keys_of(self.room_chunks // 4, start=100)
        await lender.keep(small, prefix)
        await lender.keep(small, others)
        advise(small, "rank", prefix)
        await until_some_go(small, lender, others)
        assert all(await small.probe(prefix))

    async def test_what_was_demoted_goes_first(self, small: api.Backend, lender: Lender) -> None:
        """Even before older chunks."""
        older, newer = await self.newer_demoted(small, lender)
        await until_some_go(small, lender, newer)
        assert all(await small.probe(older))

    async def test_what_was_demoted_and_is_used_again_is_as_any_other(self, small: api.Backend, lender: Lender) -> None:
        """A later use takes back the demotion."""
        older, newer = await self.newer_demoted(small, lender)
        advise(small, "rank", newer)
        await until_some_go(small, lender, older)
        assert all(await small.probe(newer))

    async def test_of_a_session_that_is_over_goes_what_no_other_has_used(
        self, small: api.Backend, lender: Lender
    ) -> None:
        """The head that two sessions share stays for the one that continues."""
        # A tier tracks sessions from the first hint on.
        advise(small, "rank", keys_of(1, start=900), hint=api.Hint(class_="first"))
        head, ended, other, older = keys_of(2), keys_of(2, start=100), keys_of(2, start=200), keys_of(2, start=300)
        await lender.keep(small, older)
        for own in (ended, other):
            await lender.keep(small, [*head, *own])
            advise(small, "rank", [*head, *own], hint=api.Hint())
            advise(small, "rank", [*ended, *own])  # Renewed together, these are no session.
        advise(small, "rank", [*head, *ended], hint=api.Hint(over=True))
        await until_some_go(small, lender, older)
        assert not any(await small.probe(ended))
        assert all(await small.probe([*head, *other]))

    async def test_what_is_retained_stays_while_others_come(self, small: api.Backend, lender: Lender) -> None:
        """Eviction passes over it."""
        keys = keys_of(3)
        await lender.keep(small, keys)
        advise(small, "retain", keys, seconds=3_600.0, priority=0)
        await self.fill(small, lender)
        assert await lender.recall(small, keys) == [*map(label, keys)]

    async def test_what_was_retained_goes_when_its_time_is_over(self, small: api.Backend, lender: Lender) -> None:
        """Retention has a limit."""
        keys = keys_of(3)
        await lender.keep(small, keys)
        advise(small, "retain", keys, seconds=0.001, priority=99)
        await until_some_go(small, lender, keys)

    async def test_a_store_finds_as_much_room_whatever_is_retained(self, small: api.Backend, lender: Lender) -> None:
        """Chunks above the share are not retained, and the newest chunks are present."""
        keys = keys_of(self.room_chunks)
        await small.store(lender.writes(keys))
        advise(small, "retain", keys, seconds=3_600.0, priority=99)
        batch = self.room_chunks // 2
        for start in range(1_000, 1_000 + 4 * batch, batch):
            newer = keys_of(batch, start=start)
            await lender.keep(small, newer)
            assert await lender.recall(small, newer) == [*map(label, newer)]
        assert list(await small.probe(keys)).count(True) <= self.room_chunks

    async def test_a_higher_priority_takes_the_place_of_a_lower_one(self, small: api.Backend, lender: Lender) -> None:
        """Independent of their order."""
        low, high = keys_of(self.room_chunks // 2), keys_of(3, start=100)
        await lender.keep(small, low)
        await lender.keep(small, high)
        advise(small, "retain", low, seconds=3_600.0, priority=1)
        advise(small, "retain", high, seconds=3_600.0, priority=2)
        await self.fill(small, lender)
        assert all(await small.probe(high))
        assert not all(await small.probe(low))

    async def test_advice_changes_nothing_that_is_there(self, small: api.Backend, lender: Lender) -> None:
        """Unknown keys, repeated keys and no keys are harmless."""
        keys = keys_of(4)
        await lender.keep(small, keys)
        before = occupancy(small)
        strangers = keys_of(4, start=100)
        for some in ([*keys, *strangers, keys[0]], strangers, []):
            advise(small, "rank", some)
            advise(small, "demote", some)
            advise(small, "retain", some, seconds=60.0, priority=5)
            advise(small, "rank", some, hint=api.Hint(over=True, returns_in_s=3.0))
        assert occupancy(small) == before
        assert await lender.recall(small, [*keys, key_of(100)]) == [*map(label, keys), "ChunkMissing"]

    async def newer_demoted(
        self, small: api.Backend, lender: Lender
    ) -> tuple[list[api.OffloadKey], list[api.OffloadKey]]:
        """Store keys and then others, which are demoted; return both."""
        older, newer = keys_of(4), keys_of(4, start=100)
        await lender.keep(small, older)
        await lender.keep(small, newer)
        advise(small, "demote", newer)
        return older, newer

    async def fill(self, small: api.Backend, lender: Lender) -> None:
        for key in keys_of(4 * self.room_chunks, start=1_000):
            await lender.keep(small, [key])


def advise(
    tier: api.Backend, kind: Literal["rank", "demote", "retain"], keys: list[api.OffloadKey], **about: Any
) -> None:
    """Advise a tier about keys; `about`: the other fields of `Advice`."""
    assert isinstance(tier, api.Advised), f"{type(tier).__name__} has no advise()"
    tier.advise(api.Advice(kind, keys, **about))


async def until_some_go(tier: api.Backend, lender: Lender, keys: list[api.OffloadKey]) -> None:
    """Store newer chunks until not all of these are there."""
    newer = 1_000
    async with asyncio.timeout(PATIENCE_S):
        while all(await tier.probe(keys)):
            await lender.keep(tier, [key_of(newer)])
            newer += 1


class CountedConformance(Promises):
    """Needs the fixture `provoke`: an async function without arguments that makes `backend` count something."""

    async def test_what_happens_is_counted_in_whole_numbers(self, backend: api.Backend, provoke: Provoke) -> None:
        """Each event raises a total, whose name is an identifier. A mapping that was returned never changes."""
        returned: Mapping[str, int] = {}
        total = sum(counts(backend).values())
        for _ in range(2):
            await provoke()
            returned = counts(backend)
            assert sum(returned.values()) > total
            total = sum(returned.values())
        await provoke()
        assert sum(returned.values()) == total
        for name, count in returned.items():
            assert name.isidentifier(), name
            assert type(count) is int, (name, count)
            assert count >= 0, (name, count)

    async def test_a_total_never_falls(self, backend: api.Backend, lender: Lender, provoke: Provoke) -> None:
        """A consumer that adds up differences would count backwards."""
        keys = keys_of(4)
        for _ in range(3):
            before = dict(counts(backend))
            await lender.keep(backend, keys)
            await provoke()
            await lender.recall(backend, keys_of(8))
            await backend.delete(keys)
            after = counts(backend)
            assert {name: after.get(name, 0) for name in before if after.get(name, 0) < before[name]} == {}


def counts(backend: api.Backend) -> Mapping[str, int]:
    assert isinstance(backend, api.Counted), f"{type(backend).__name__} has no counts()"
    return backend.counts()


class DescribedConformance(Promises):
    async def test_a_description_is_one_line_and_stays_the_same(self, backend: api.Backend, lender: Lender) -> None:
        """It is part of a log line. It says where and how chunks are kept, not which."""
        words = description(backend)
        assert words
        assert all(isinstance(word, str) and word and word.isprintable() for word in (*words, *words.values())), words
        await lender.keep(backend, keys_of(4))
        assert list(description(backend).items()) == list(words.items())
        await backend.delete(keys_of(4))
        assert list(description(backend).items()) == list(words.items())


def description(backend: api.Backend) -> dict[str, str]:
    assert isinstance(backend, api.Described), f"{type(backend).__name__} has no description()"
    return dict(backend.description())


Wrap = Callable[[api.Backend], api.Backend]


class WrapperConformance(Promises):
    """Needs the fixture `wrap`: a function that puts the wrapper around an open tier."""

    @pytest.mark.parametrize("protocol", api.OPTIONAL, ids=lambda protocol: protocol.__name__)
    async def test_a_wrapper_offers_exactly_what_it_wraps(self, wrap: Wrap, protocol: type[Any]) -> None:
        """An engine sees only the wrapper's protocols. It claims none that its inner tier lacks."""
        wrapper = wrap(inner_tier(protocol))
        assert isinstance(wrapper, protocol), f"{type(wrapper).__name__} forgets {protocol.__name__}"
        wrapper = wrap(inner_tier(*(other for other in api.OPTIONAL if other is not protocol)))
        assert not isinstance(wrapper, protocol), f"{type(wrapper).__name__} claims {protocol.__name__}"

    async def test_a_wrapper_passes_on_reports_and_advice(self, wrap: Wrap) -> None:
        """Occupancy, description, events and advice pass unchanged. The wrapper may add counters."""
        inner = inner_tier(*api.OPTIONAL)
        wrapper: Any = wrap(inner)
        assert wrapper.occupancy() == OCCUPANCY
        assert COUNTS.items() <= wrapper.counts().items()
        assert DESCRIPTION.items() <= wrapper.description().items()
        assert [event async for event in wrapper.watch()] == [api.ScanDone(complete=True)]
        given = [
            api.Advice("rank", keys_of(1)),
            api.Advice("rank", keys_of(1), api.Hint(over=True)),
            api.Advice("demote", keys_of(2)),
            api.Advice("retain", keys_of(3), seconds=60.0, priority=7),
        ]
        for advice in given:
            wrapper.advise(advice)
        assert inner.advice == given

    @pytest.mark.parametrize("durability", api.Durability, ids=lambda durability: durability.name)
    async def test_a_wrapper_promises_no_more_than_what_it_wraps(self, wrap: Wrap, durability: api.Durability) -> None:
        """A chunk is as durable as in the inner tier."""
        inner = inner_tier()
        inner.durability = durability
        levels = list(api.Durability)
        assert levels.index(wrap(inner).durability) <= levels.index(durability)


OCCUPANCY = api.Occupancy(chunks=7, used_bytes=7 << 14, capacity_bytes=1 << 20, reserved_bytes=1 << 14)
COUNTS: Mapping[str, int] = {"corrupt_checksum": 3, "evicted": 5}
DESCRIPTION: Mapping[str, str] = {"root": "/nowhere", "layout": "nothing"}


class Nothing(api.Backend):
    """A tier that is always empty, to test the wrapper around it."""

    durability = api.Durability.PROCESS
    options_type = msgspec.Struct

    def __init__(self) -> None:
        self.advice: list[api.Advice[api.OffloadKey]] = []
        self._calls = api.Calls("nothing")

    @classmethod
    async def open(cls, options: msgspec.Struct, context: api.TierContext) -> Self:
        raise NotImplementedError  # `inner_tier` makes it.

    async def probe(self, keys: Sequence[api.OffloadKey]) -> Sequence[bool]:
        return [False] * len(keys)

    async def load(self, reads: Sequence[api.Read]) -> Sequence[api.Outcome]:
        return [ChunkMissing(key.hex()) for key, _ in reads]

    async def store(self, writes: Sequence[api.Write]) -> Sequence[api.Outcome]:
        return [NoSpace(key.hex()) for key, _ in writes]

    async def delete(self, keys: Sequence[api.OffloadKey]) -> None:
        pass

    async def aclose(self, deadline_s: float) -> api.Abandoned:
        return await self._calls.close(deadline_s)


async def _one_scan(_: Nothing) -> AsyncIterator[api.InventoryEvent]:
    yield api.ScanDone(complete=True)


def _heed(tier: Nothing, advice: api.Advice[api.OffloadKey]) -> None:
    tier.advice.append(advice)


def _returning(value: Any) -> Callable[[Nothing], Any]:
    return lambda _: value


OFFERING: Mapping[type[Any], Mapping[str, Any]] = {
    api.Inventory: {"watch": _one_scan},
    api.Measured: {"occupancy": _returning(OCCUPANCY)},
    api.Advised: {"advise": _heed},
    api.Counted: {"counts": _returning(COUNTS)},
    api.Described: {"description": _returning(DESCRIPTION)},
}


def inner_tier(*protocols: type[Any]) -> Nothing:
    """Return a tier with exactly these optional protocols."""
    methods = {name: method for protocol in protocols for name, method in OFFERING[protocol].items()}
    tier: Nothing = type("Inner", (Nothing,), methods)()
    return tier
