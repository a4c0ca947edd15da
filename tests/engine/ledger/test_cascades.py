"""From the primary into the tiers: each chunk once, each drop counted with its reason."""

import pytest

from kvtier.engine.answers import Event, EventKind
from kvtier.runner.messages import Cascade, Code, Delete, Probe, Promote, unpack_rows
from tests.engine.ledger.bench import MISS, PENDING, RETRY, cascades


def test_a_store_that_is_complete_cascades_to_every_tier_in_batches_that_an_action_may_move(bench):
    engine = bench(tiers=2, action_chunks=2)
    request = engine.request()
    engine.ledger.prepare_store(engine.keys("abc"), request)
    assert engine.step() == []
    engine.ledger.complete_store(engine.keys("abc"), request)
    sent = engine.step()
    assert cascades(sent) == [(0, "ab"), (0, "c"), (1, "ab"), (1, "c")]
    assert [row for action in sent[:2] for row in unpack_rows(action.rows)] == [engine.row(name) for name in "abc"]


def test_a_chunk_is_not_sent_twice_to_a_tier(bench):
    engine = bench(rows=2)
    engine.holds("b")
    engine.store("a", engine.request("first"))
    engine.store("aab", engine.request("second"))
    sent = engine.step()
    assert cascades(sent) == [(0, "a")]
    engine.store("a", engine.request("third"))
    assert engine.step() == []
    engine.finish_all(sent)
    engine.store("a", engine.request("fourth"))
    assert engine.step() == []


def test_loads_leave_before_stores_and_probes_before_both(bench):
    engine = bench(tiers=2)
    engine.holds("b")
    engine.store("a")
    engine.lookup("bc")
    engine.ledger.delete(engine.keys("d"))
    kinds = [type(action) for action in engine.step()]
    assert kinds == [Probe, Probe, Promote, Cascade, Cascade, Delete, Delete]


@pytest.mark.promise("It stores more slowly than chunks come")
def test_beyond_a_tiers_budget_cascades_are_dropped_and_counted(bench):
    engine = bench(tiers=[bench.spec("slow", store_chunks_max=2), bench.spec("fast")], cascade_rows_max=4)
    traffic = engine.ledger.traffic
    assert (traffic.slice_chunks, traffic.room(2), traffic.room(3)) == (2, True, False)
    engine.store("abc")
    sent = engine.step()
    assert cascades(sent) == [(0, "ab"), (1, "abc")]
    assert (engine.counters(0).dropped, engine.counters(1).dropped) == ({"budget": 1}, {})
    assert not traffic.room(1)
    engine.finish_all(sent)
    assert engine.settled()
    engine.store("d")
    assert cascades(engine.step()) == [(0, "d"), (1, "d")]
    assert (traffic.room(1), traffic.room(2)) == (True, False)


def test_beyond_the_cascades_share_of_the_primary_they_are_dropped_so_that_stores_go_on(bench):
    engine = bench(rows=4, tiers=2, cascade_rows_max=2)
    engine.store("abc")
    sent = engine.step()
    assert cascades(sent) == [(0, "ab"), (1, "ab")]
    assert [tier.counters.dropped for tier in engine.ledger.tiers] == [{"pinned": 1}] * 2
    assert engine.store("xy").evicted == engine.keys("c")
    engine.finish_all(sent)
    assert engine.settled()


@pytest.mark.promise("It fails again and again")
def test_a_tier_behind_an_open_breaker_is_sent_nothing_and_then_a_few_to_try_it(bench):
    engine = bench(rows=20, tiers=[bench.spec(breaker_failures=1, breaker_cooldown_s=5.0, trial_chunks=2)])
    engine.store("a")
    engine.fail(*engine.step(), Code.UNAVAILABLE)
    engine.store("b")
    assert engine.step(seconds=5.0) == []
    assert engine.counters().dropped == {"breaker": 1}
    engine.store("cde")
    (trial,) = engine.step()
    assert cascades([trial]) == [(0, "cd")]
    assert engine.counters().dropped == {"breaker": 2}
    engine.finish(trial)
    engine.store("fgh")
    assert cascades(engine.step()) == [(0, "fgh")]


def test_actions_that_the_bridge_refuses_are_dropped_and_counted(bench):
    engine = bench(rows=4)
    engine.holds("x")
    engine.store("ab")
    engine.lookup("x", request := engine.request())
    engine.lookup("y")
    engine.ledger.refuse(engine.step())
    counters = engine.counters()
    assert counters.dropped == {"bridge": 2}
    assert counters.failed == {"refused": 2}  # The load and the probe.
    assert counters.transfers_failed == 0
    assert engine.lookup("x", request) == [MISS]
    assert engine.settled()


@pytest.mark.promise("A tier fails to store it")
def test_a_chunk_that_did_not_reach_a_tier_is_not_looked_for_there(bench):
    engine = bench(rows=2)
    engine.knows_all()
    engine.store("ab")
    engine.finish(*engine.step(), {0: Code.NO_SPACE})
    assert (engine.counters().stored, engine.counters().failed) == (1, {"no_space": 1})
    assert engine.events.take()[1:] == [
        Event(EventKind.FAILED, "tier0", engine.keys("a"), "no_space"),
        Event(EventKind.STORED, "tier0", engine.keys("b")),
    ]
    assert engine.observed == [("tier0", "store", 0.25)]
    engine.stored_alone("xy")
    assert engine.lookup("ab") == [MISS, PENDING]


@pytest.mark.parametrize("code", list(Code))
def test_each_reason_why_a_chunk_did_not_move_is_counted_by_its_name(engine, code):
    engine.store("a")
    engine.fail(*engine.step(), code)
    counters = engine.counters()
    assert counters.failed | counters.dropped == {"bridge" if code is Code.REFUSED else code.name.lower(): 1}
    assert counters.transfers_failed == (code in (Code.FAILED, Code.UNAVAILABLE, Code.DEADLINE))


@pytest.mark.promise("A store hangs")
def test_a_tier_whose_hung_transfers_hold_too_many_rows_is_not_used_until_some_come_back(bench):
    """Or one hung tier takes the whole share of cascades, a few rows with every trial, and starves the healthy ones."""
    engine = bench(rows=8, tiers=[bench.spec("hung", overdue_rows_max=2), bench.spec("well")], cascade_rows_max=4)
    engine.holds("x")
    engine.store("ab")
    hung, well = engine.step()
    engine.finish(well)
    engine.fail(hung, Code.DEADLINE, lent=True)
    engine.knows_all(1)
    assert engine.lookup("x") == [MISS]
    engine.store("cdef")
    assert cascades(engine.step()) == [(1, "cd")]
    assert (engine.counters(0).dropped, engine.counters(1).dropped) == ({"overdue": 4}, {"pinned": 2})
    engine.give_back(hung)
    assert engine.lookup("x") == [PENDING]
    engine.store("gh")
    assert (0, "gh") in cascades(engine.step())


@pytest.mark.parametrize("given_up_by", ["its deadline", "a reset"])
def test_a_chunk_stored_after_the_deadline_is_probed(bench, given_up_by):
    engine = bench(rows=2)
    engine.knows_all()
    engine.store("ab")
    (late,) = engine.step()
    if given_up_by == "its deadline":
        engine.fail(late, Code.DEADLINE, lent=True)
        engine.give_back(late, moved=[0])
        engine.stored_alone("cd")
    else:
        engine.reset()
        engine.step(seconds=60.0)  # The breaker admits a trial.
        engine.finish(late, {1: Code.FAILED})
    assert engine.lookup("ab") == [RETRY, MISS]
    engine.answer(*engine.step(), present=True)
    assert engine.lookup("a") == [PENDING]
