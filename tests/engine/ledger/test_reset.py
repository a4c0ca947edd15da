"""A reset forgets the primary, never what is lent, and promotes nothing before the engine's word."""

import pytest

from kvtier.engine.answers import Event, EventKind
from kvtier.engine.tier import BreakerState
from kvtier.runner.messages import Cascade, Code, Delete, Promote, unpack_keys
from tests.engine.ledger.bench import HIT, MISS, PENDING, RETRY


def test_until_the_workers_have_flushed_nothing_is_promoted_and_stores_go_on(engine):
    engine.stored_in_tiers("a")
    engine.ledger.reset()
    assert engine.lookup("ab") == [MISS, MISS]
    assert engine.step() == []
    engine.store("c")
    assert [type(action) for action in engine.step()] == [Cascade]
    engine.ledger.promoting = True
    assert engine.lookup("abc") == [PENDING, RETRY, HIT]


def test_a_reset_drops_all_but_queued_deletions_with_an_event_for_each_key(engine):
    engine.holds("b")
    engine.store("ad")
    engine.ledger.prepare_store(engine.keys("e"), engine.request())
    engine.lookup("b")
    engine.ledger.delete(engine.keys("c"))
    engine.events.take()
    engine.ledger.reset()
    assert engine.events.take() == [Event(EventKind.REMOVED, "cpu", engine.keys("ad"))]
    assert engine.lookup("ade") == [MISS, MISS, MISS]
    (delete,) = engine.step()
    assert isinstance(delete, Delete)
    engine.finish(delete)
    assert engine.settled()
    engine.store("a")
    assert len(engine.step()) == 1  # The tier is not thought to be getting it.


@pytest.mark.parametrize("kind", [Promote, Cascade])
@pytest.mark.parametrize("reader", ["none", "first", "last"])
def test_a_transfer_that_outlives_a_reset_keeps_its_rows(bench, kind, reader):
    engine = bench(rows=2)
    if kind is Promote:
        engine.holds("a")
        engine.lookup("a")
    else:
        engine.store("a")
    (transfer,) = engine.step()
    row = engine.row("a")
    through = [lambda: engine.give_back(transfer)]
    if kind is Cascade and reader != "none":
        engine.fail(transfer, Code.DEADLINE, lent=True)
        engine.ledger.keep([row])
        through.insert(0 if reader == "first" else 1, lambda: engine.ledger.let_go(row))
    engine.ledger.reset()
    assert not engine.ledger.pending
    assert engine.store("x").rows != [row]
    for end in through:
        assert engine.ledger.primary.rows_free == 0
        end()
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


def deleted(actions):
    return [unpack_keys(action.keys) for action in actions if isinstance(action, Delete)]


def test_keys_held_until_a_reset_are_deleted_in_tiers_a_second_time(engine):
    engine.store("a")
    engine.step()
    assert engine.ledger.forget(engine.keys("a")) == 0
    assert deleted(engine.step()) == [engine.keys("a")]
    engine.reset()
    assert deleted(engine.step()) == [engine.keys("a")]
    engine.stored_alone("a")
    engine.step()
    assert engine.ready() == "a"


def test_a_chunk_stored_again_in_the_step_of_its_release_is_not_forgotten(bench):
    engine = bench(rows=1)
    request = engine.request()
    engine.stored_alone("a")
    assert engine.lookup("a", request) == [HIT]
    engine.ledger.prepare_load(engine.keys("a"), request)
    engine.step()
    assert engine.ledger.forget(engine.keys("a")) == 0
    engine.step()
    engine.ledger.complete_load(engine.keys("a"))
    engine.stored_alone("b")
    engine.stored_alone("a")
    assert deleted(engine.step()) == [engine.keys("a")]
    assert engine.ready() == "a"
