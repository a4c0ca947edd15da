"""For how long a request waited for loads: it is said once, when the request does not wait any more."""

import pytest

from kvtier.engine.prefetches import WAITING_MAX
from kvtier.runner.messages import Code
from tests.engine.ledger.bench import HIT, MISS, PENDING, RETRY, Bench


def holding(names="abc", **options):
    engine = Bench(8, 1, **options)
    engine.knows_all()
    engine.holds(names)
    return engine


@pytest.mark.parametrize("full", [False, True])
def test_a_wait_lasts_from_the_step_that_sent_for_chunks_to_the_one_in_which_all_are_there(full):
    """Where room is made between a step's look-ups, too: the request is noted before it and after it."""
    engine = holding()
    engine.stored_alone("stuvwxyz" if full else "")
    request, other = engine.request(), engine.request("other")
    assert engine.lookup("ab", request) == [PENDING] * 2
    (load,) = engine.step(seconds=2.0)
    assert engine.lookup("ab", request) == engine.lookup("ab", other) == [PENDING] * 2
    engine.step(seconds=3.0)
    engine.finish(load)
    assert engine.lookup("ab", request) == engine.lookup("ab", other) == [HIT] * 2
    engine.load("ab", request)
    assert engine.waited == []
    engine.step()
    assert sorted(engine.waited) == [3.0, 5.0]
    engine.ledger.finish(request)
    assert len(engine.waited) == 2


def test_neither_hits_nor_misses_nor_a_prefetch_are_waits():
    engine = holding()
    engine.stored_alone("x")
    request = engine.request()
    assert engine.lookup("xz", request) == [HIT, MISS]
    engine.ledger.prefetches.begin(engine.keys("abc"))
    (load,) = engine.step(seconds=1.0)
    engine.finish(load)
    engine.step(seconds=1.0)
    engine.ledger.finish(request)
    assert not engine.ledger.prefetches.waiting
    assert engine.waited == []


@pytest.mark.parametrize("why", ["failed", "was late", "reset", "finished"])
def test_a_wait_that_is_in_vain_ends_with_the_next_look_up_or_the_requests_end(why):
    engine = holding(computing_s=1.0 if why == "was late" else None, late_margin=1.5)
    engine.takes(0.1, 0.01)
    request = engine.request()
    assert engine.lookup("az", request) == [PENDING, MISS]
    (load,) = engine.step(seconds=1.0)
    assert engine.lookup("az", request) == [PENDING, MISS]  # A miss behind a load in flight ends no wait.
    engine.step(seconds=1.0)
    match why:
        case "failed":
            engine.fail(load, Code.FAILED)
        case "reset":
            engine.ledger.reset()
        case "finished":
            engine.ledger.finish(request)
    if why != "finished":
        assert engine.lookup("a", request) == [MISS]
        engine.step(seconds=9.0)
    assert engine.waited == [2.0]
    engine.ledger.finish(request)
    assert engine.waited == [2.0]


def test_a_request_looks_up_again_at_once_for_a_late_word_only_once():
    """Found by a storm: the tier's breaker opened meanwhile, so no look-up waited for its answer any more."""
    engine = Bench(8, [Bench.spec("has"), Bench.spec("silent", breaker_failures=1)], computing_s=0.1)
    engine.knows_all(0)
    engine.holds("a")
    engine.takes(0.0, 0.01)
    assert engine.lookup("z") == [RETRY]
    engine.answer(*engine.step(), False)  # It takes longer than computing.
    assert engine.lookup("y") == [RETRY]
    (probe,) = engine.step()
    request = engine.request()
    assert engine.lookup("ab", request) == [PENDING, RETRY]
    engine.step()
    engine.answer(probe, None)
    assert engine.lookup("ab", request) == [PENDING, MISS]
    engine.step(1e-3)
    assert request.late_after(engine.now) == engine.now
    assert engine.lookup("ab", request) == [PENDING, MISS]
    assert request.late_after(engine.now) > engine.now


def test_a_prefetch_above_the_limit_is_over_at_once(engine):
    begun = [engine.ledger.prefetches.begin(engine.keys("a")) for _ in range(WAITING_MAX + 1)]
    assert [prefetch.over for prefetch in begun] == [False] * WAITING_MAX + [True]
