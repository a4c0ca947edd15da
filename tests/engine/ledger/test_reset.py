"""A reset forgets the primary, never what is lent, and promotes nothing before the engine's word."""

import pytest

from kvtier.engine.answers import Event, EventKind
from kvtier.engine.tier import BreakerState
from kvtier.runner.messages import Cascade, Code, Delete, Promote
from tests.engine.ledger.bench import HIT, MISS, PENDING, RETRY


def test_a_reset_forgets_every_key_of_the_primary_with_events(bench):
    engine = bench(rows=4, tiers=0)
    engine.store("ab")
    engine.ledger.prepare_store(engine.keys("c"), engine.request())
    engine.events.take()
    engine.ledger.reset()
    assert engine.lookup("abc") == [MISS, MISS, MISS]
    assert engine.events.take() == [Event(EventKind.REMOVED, "cpu", engine.keys("ab"))]
    assert engine.settled()
    assert engine.store("wxyz").evicted == []


def test_until_the_workers_have_flushed_nothing_is_promoted_and_stores_go_on(bench):
    engine = bench()
    engine.stored_in_tiers("a")
    engine.ledger.reset()
    assert engine.lookup("ab") == [MISS, MISS]
    assert engine.step() == []
    engine.store("c")
    assert [type(action) for action in engine.step()] == [Cascade]
    engine.ledger.promoting = True
    assert engine.lookup("abc") == [PENDING, RETRY, HIT]


def test_a_reset_drops_the_queue_except_deletions(bench):
    engine = bench()
    engine.holds("b")
    engine.store("a")
    engine.lookup("b")
    engine.ledger.delete(engine.keys("c"))
    engine.ledger.reset()
    (delete,) = engine.step()
    assert isinstance(delete, Delete)
    engine.finish(delete)
    assert engine.settled()
    engine.store("a")
    assert len(engine.step()) == 1  # The tier is not thought to be getting it.


@pytest.mark.parametrize("kind", [Promote, Cascade])
def test_a_transfer_that_outlives_a_reset_keeps_its_rows(bench, kind):
    engine = bench(rows=2)
    if kind is Promote:
        engine.holds("a")
        engine.lookup("a")
    else:
        engine.store("a")
    (transfer,) = engine.step()
    row = engine.row("a")
    engine.ledger.reset()
    assert not engine.ledger.pending
    assert engine.store("xy") is None
    assert engine.store("x").rows != [row]
    engine.give_back(transfer)
    assert engine.store("y").rows == [row]


def test_a_tier_that_did_not_end_in_time_is_out_of_use_until_it_has_proved_itself(bench):
    engine = bench(tiers=[bench.spec("hung", breaker_cooldown_s=5.0), bench.spec("well")], action_chunks=1)
    engine.store("abc")
    engine.finish_all(action for action in engine.step() if action.tier == 1)
    engine.reset()
    hung, well = (tier.breaker for tier in engine.ledger.tiers)
    assert (hung.state, hung.opened, well.state) == (BreakerState.OPEN, 1, BreakerState.CLOSED)
    engine.store("d")
    assert [action.tier for action in engine.step(seconds=5.0)] == [1]
    engine.store("e")
    assert sorted(action.tier for action in engine.step()) == [0, 1]


@pytest.mark.parametrize("first", ["reader", "store"])
def test_a_row_that_a_reader_and_a_hung_store_keep_is_free_when_both_are_through(bench, first):
    engine = bench(rows=1)
    engine.store("a")
    (store,) = engine.step()
    engine.fail(store, Code.DEADLINE, lent=True)
    engine.lookup("a")
    (row,) = engine.load("a")
    engine.ledger.keep([row])
    engine.ledger.reset()
    through = [lambda: engine.ledger.let_go(row), lambda: engine.give_back(store)]
    for end in through if first == "reader" else reversed(through):
        assert engine.store("x") is None
        end()
    assert engine.settled()
    assert engine.store("x") is not None
