"""Keys that are forgotten while they are held: they go when they are released, unless they are stored again."""

from kvtier.runner.messages import Delete, unpack_keys
from tests.engine.ledger.bench import HIT


def deleted(actions):
    return [unpack_keys(action.keys) for action in actions if isinstance(action, Delete)]


def test_keys_held_until_a_reset_are_deleted_in_tiers_a_second_time(bench):
    engine = bench()
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
