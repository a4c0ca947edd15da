"""Faults that the simulation found, each as its shortest sequence of calls, with the first seed that met it."""

import pytest

from kvtier.runner.messages import Code, Delete, Probe
from tests.engine.ledger.bench import MISS, PENDING, RETRY, loads


@pytest.mark.parametrize(("answer", "found"), [([True, False], [PENDING, MISS]), (None, [MISS, MISS])])
def test_seed_7_a_request_asks_a_tier_once_however_short_answers_are_believed(bench, answer, found):
    engine = bench(tiers=[bench.spec(answer_ttl_s=0.0)])
    request = engine.request()
    assert engine.lookup("ab", request) == [RETRY, RETRY]
    (probe,) = engine.step(seconds=1.0)
    assert engine.lookup("ab", request) == [RETRY, RETRY]  # It has not answered yet.
    assert engine.step() == []
    engine.answer(probe, answer)
    engine.step(seconds=1.0)
    assert engine.lookup("ab", request) == found
    assert engine.lookup("b", engine.request("next")) == [RETRY]


@pytest.mark.promise("It is deleted while its store hangs")
def test_seed_51_a_delete_forgets_what_only_a_hung_store_holds_and_leaves_what_a_load_holds_beside_it(bench):
    engine = bench(rows=1)
    engine.store("a")
    (store,) = engine.step()
    assert engine.ledger.delete(engine.keys("a")) == engine.keys("a")  # Under way: it will end.
    engine.fail(store, Code.DEADLINE, lent=True)
    engine.ledger.prepare_load(engine.keys("a"), engine.request())
    assert engine.ledger.delete(engine.keys("a")) == engine.keys("a")
    engine.ledger.complete_load(engine.keys("a"))
    assert engine.ledger.delete(engine.keys("a")) == []
    assert isinstance(engine.step()[0], Delete)
    assert engine.store("b") is None  # The row is lent still.
    engine.give_back(store)
    assert engine.store("b").keys == engine.keys("b")


def test_seed_249_a_chunk_evicted_before_its_stores_report_is_probed(bench):
    for present, answer in ((False, MISS), (True, PENDING)):
        engine = bench(rows=2)
        engine.knows_all()
        engine.store("ab")
        (store,) = engine.step()
        engine.loses("a")  # Said before the store's own end.
        engine.finish(store)
        engine.stored_in_tiers("cd")
        engine.step(seconds=100.0)
        assert engine.lookup("a", engine.request("asks")) == [RETRY]
        (probe,) = [action for action in engine.step() if isinstance(action, Probe)]
        engine.answer(probe, present)
        assert engine.lookup("a", engine.request()) == [answer]
        assert loads(engine.step()) == ({0: "a"} if present else {})


def test_seed_249_a_second_store_settles_the_doubt(bench):
    engine = bench(rows=1)
    engine.knows_all()
    engine.store("a")
    (store,) = engine.step()
    engine.loses("a")
    engine.finish(store)
    for name in "bac":
        engine.store(name)
        engine.finish_all(engine.step(seconds=100.0))
    assert engine.lookup("a", engine.request()) == [PENDING]
