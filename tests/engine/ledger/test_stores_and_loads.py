"""The engine's own reads and writes: rows, pins, recency, and nothing evicted that was offered."""

import pytest

from kvtier.engine.answers import Event, EventKind, StorePlan
from kvtier.engine.ledger import Ledger, LedgerLimits
from kvtier.engine.requests import Request
from kvtier.policies import LRU
from kvtier.runner.messages import Code, Delete
from tests.engine.ledger.bench import HIT, MISS, PENDING


class Recorder(LRU):
    """An LRU that notes what it was told, and holds its owner to the contract: no batch names a key twice."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.told = []

    def insert(self, keys):
        super().insert(self._note("insert", keys))

    def touch(self, keys):
        super().touch(self._note("touch", keys))

    def rank(self, keys, hint=None):
        super().touch(self._note("rank", keys))

    def _note(self, what, keys):
        assert len(set(keys)) == len(keys), keys
        self.told += [(what, list(keys))] if keys else []
        return keys


@pytest.fixture
def recorded():
    """A ledger of eight rows without tiers, and what its policy is told."""
    policy = Recorder(8)
    return Ledger(8, policy, (), LedgerLimits(8, 8, 10.0, 64)), policy.told


def test_a_plan_gives_each_absent_key_one_row_of_its_own(engine):
    engine.stored_alone("b")
    plan = engine.store("abac")
    assert plan.keys == engine.keys("ac")
    assert plan.rows == [engine.row("a"), engine.row("c")]
    assert len({engine.row(name) for name in "abc"}) == 3
    assert engine.store("ab") == engine.store("") == StorePlan([], [], [])
    assert engine.ledger.primary.rows_free == 5


def test_a_store_without_room_for_all_takes_none(bench):
    engine = bench(rows=3)
    engine.ledger.prepare_store(engine.keys("a"), engine.request())
    engine.stored_alone("b")
    assert engine.store("xyz") is None
    assert (engine.ready(), engine.ledger.primary.rows_free) == ("b", 1)
    assert engine.ledger.counters.stores_refused == 3


def test_a_store_never_evicts_what_it_was_offered(bench):
    engine = bench(rows=3)
    engine.stored_alone("abc")
    assert engine.store("abcd") is None
    assert engine.ready() == "abc"
    assert engine.store("cde").evicted == engine.keys("ba")
    assert engine.ready() == "cde"


def test_a_chunk_is_loadable_only_when_its_store_is_complete(engine):
    request = engine.request()
    engine.ledger.prepare_store(engine.keys("ab"), request)
    engine.ledger.complete_store(engine.keys("a"), request)
    assert engine.lookup("ab") == [HIT, PENDING]
    with pytest.raises(LookupError, match=engine.keys("b")[0].hex()):
        engine.ledger.prepare_load(engine.keys("ab"), request)
    assert engine.ledger.counters.hits == 0


def test_a_store_that_failed_is_an_event_leaves_nothing_and_can_be_made_again(bench):
    engine = bench(rows=2)
    request = engine.request()
    plan = engine.ledger.prepare_store(engine.keys("ab"), request)
    engine.lookup("a")
    engine.step()
    for _ in range(2):
        engine.ledger.complete_store(plan.keys, request, success=False)
    assert engine.events.take() == [Event(EventKind.FAILED, "cpu", engine.keys("ab"), "store")]
    assert engine.step() == []
    assert engine.settled()
    assert engine.lookup("a", engine.request("none", [])) == [MISS]
    assert engine.store("ab").keys == engine.keys("ab")


def test_a_key_has_one_access_a_request_however_it_is_used(bench, recorded):
    ledger, told = recorded
    a, b, c = bench.keys("abc")
    writer, reader = Request("writer"), Request("reader")
    ledger.complete_store(ledger.prepare_store([a, a, b], writer).keys, writer)
    ledger.touch([a, b, c], writer)
    assert told == [("insert", [a, b])]
    told.clear()
    for key in (a, b):
        ledger.lookup(key, reader)
    assert len(set(ledger.prepare_load([a, a], reader))) == 1
    ledger.complete_load([a, a])
    ledger.prepare_store([a, b, c, c], reader)
    ledger.touch([a, b, c], reader)
    assert told == [("touch", [a]), ("insert", [c]), ("touch", [b]), ("rank", [a, b, c])]


def test_a_request_that_finishes_has_its_keys_ranked_in_prefix_order_without_those_that_left(bench, recorded):
    ledger, told = recorded
    a, b, c, d, e = bench.keys("abcde")
    other, request = Request("other"), Request("r")
    ledger.complete_store(ledger.prepare_store([b], other).keys, other)
    ledger.complete_store(ledger.prepare_store([a, b, c], request).keys, request)
    ledger.prepare_store([d, e], request)
    ledger.complete_store([d], request, success=False)
    ledger.finish(request)
    assert told[-1] == ("rank", [a, b, c, e])


def test_each_eviction_and_each_store_is_an_event_and_counted(bench):
    engine = bench(rows=1, tiers=0)
    engine.store("a")
    engine.store("b")
    assert engine.events.take() == [
        Event(EventKind.STORED, "cpu", engine.keys("a")),
        Event(EventKind.REMOVED, "cpu", engine.keys("a")),
        Event(EventKind.STORED, "cpu", engine.keys("b")),
    ]
    assert (engine.ledger.counters.stores, engine.ledger.primary.evictions) == (2, 1)


def test_a_deleted_chunk_is_gone_from_the_primary_and_from_every_tier(bench):
    engine = bench(tiers=2)
    engine.stored_in_tiers("a")
    for tier in (0, 1):
        engine.knows_all(tier)
    engine.events.take()
    assert engine.ledger.delete(engine.keys("ax")) == []
    assert engine.events.take() == [Event(EventKind.REMOVED, "cpu", engine.keys("a"))]  # Of the unknown key none.
    assert engine.lookup("a") == [MISS]
    deletes = engine.step()
    assert [type(action) for action in deletes] == [Delete, Delete]
    assert engine.ledger.pending
    for action in deletes:
        engine.finish(action)
    assert engine.settled()


def test_a_held_chunk_is_returned_by_delete_and_stays(engine):
    engine.store("ab")
    (store,) = engine.step()
    assert engine.ledger.delete(engine.keys("abc")) == engine.keys("ab")
    (delete,) = engine.step()
    assert [delete.keys.joined] == engine.keys("c")
    engine.fail(delete, Code.UNAVAILABLE)
    assert engine.counters().failed == {"unavailable": 1}
    engine.finish(store)
    assert engine.ledger.delete(engine.keys("ab")) == []
    assert engine.ready() == ""
