"""For how long a request waited for loads: it is said once, when the request does not wait any more."""

from kvtier.engine.answers import HIT, HIT_PENDING, MISS, RETRY
from kvtier.runner.messages import Code
from tests.engine.ledger.bench import Bench


def holding(names: str = "abc", **options: object) -> Bench:
    """Make a ledger of which a tier holds these keys."""
    engine = Bench(8, 1, **options)
    engine.knows_all()
    engine.holds(names)
    return engine


def test_a_wait_lasts_from_the_step_that_sent_for_chunks_to_the_one_in_which_all_are_there() -> None:
    engine = holding()
    request = engine.request()
    assert engine.lookup("ab", request) == [HIT_PENDING] * 2
    (load,) = engine.step(seconds=2.0)
    assert engine.lookup("ab", request) == [HIT_PENDING] * 2
    engine.step(seconds=3.0)
    engine.finish(load)
    assert engine.lookup("ab", request) == [HIT] * 2
    engine.load("ab", request)
    assert engine.waited == []
    engine.step()
    assert engine.waited == [5.0]
    engine.ledger.finish(request)
    assert engine.waited == [5.0]


def test_two_requests_that_wait_for_one_load_wait_both() -> None:
    engine = holding()
    one, other = engine.request("one"), engine.request("other")
    engine.lookup("a", one)
    (load,) = engine.step(seconds=2.0)
    engine.lookup("a", one)
    engine.lookup("a", other)
    engine.step(seconds=1.0)
    engine.finish(load)
    engine.lookup("a", one)
    engine.lookup("a", other)
    engine.step()
    assert sorted(engine.waited) == [1.0, 3.0]


def test_a_request_that_finds_everything_waits_for_nothing() -> None:
    engine = holding()
    engine.stored_alone("x")
    request = engine.request()
    assert engine.lookup("xz", request) == [HIT, MISS]
    engine.step(seconds=1.0)
    engine.ledger.finish(request)
    assert engine.waited == []


def test_a_wait_for_a_failed_load_ends_with_the_next_look_up() -> None:
    engine = holding()
    request = engine.request()
    engine.lookup("a", request)
    (load,) = engine.step(seconds=2.0)
    engine.fail(load, Code.FAILED)
    assert engine.lookup("a", request) == [MISS]
    engine.step(seconds=9.0)
    assert engine.waited == [2.0]
    engine.ledger.finish(request)
    assert engine.waited == [2.0]


def test_a_miss_behind_a_load_in_flight_ends_no_wait() -> None:
    engine = holding()
    request = engine.request()
    for _ in range(2):
        assert engine.lookup("az", request) == [HIT_PENDING, MISS]
        engine.step(seconds=1.0)
    assert engine.waited == []


def test_a_request_that_is_given_up_while_it_waits_has_waited() -> None:
    engine = holding()
    request = engine.request()
    engine.lookup("a", request)
    engine.step(seconds=4.0)
    engine.ledger.finish(request)
    assert engine.waited == [4.0]


def test_a_wait_ends_when_the_load_is_late_and_its_chunks_are_computed() -> None:
    engine = holding(computing_s=1.0, late_margin=1.5)
    engine.takes(0.1, 0.01)
    request = engine.request()
    assert engine.lookup("a", request) == [HIT_PENDING]
    engine.step(seconds=1.6)
    assert engine.lookup("a", request) == [MISS]
    engine.step(seconds=9.0)
    assert engine.waited == [1.6]


def test_a_wait_that_a_reset_cut_short_ends_with_the_next_look_up() -> None:
    engine = holding()
    request = engine.request()
    engine.lookup("a", request)
    engine.step(seconds=1.0)
    engine.ledger.reset()
    assert engine.lookup("a", request) == [MISS]
    engine.step(seconds=9.0)
    assert engine.waited == [1.0]


def test_a_prefetch_counts_as_no_wait() -> None:
    engine = holding()
    engine.ledger.prefetches.begin(engine.keys("abc"))
    (load,) = engine.step(seconds=1.0)
    engine.finish(load)
    engine.step(seconds=1.0)
    assert not engine.ledger.prefetches
    assert engine.waited == []


def test_a_wait_for_rows_that_others_had_is_one_wait() -> None:
    """Room was made between the look-ups of one step, so that the request is noted before it and after it."""
    engine = holding()
    engine.stored_alone("stuvwxyz")
    request = engine.request()
    assert engine.lookup("abc", request) == [HIT_PENDING] * 3
    (load,) = engine.step(seconds=2.0)
    engine.finish(load)
    engine.lookup("abc", request)
    engine.step()
    assert engine.waited == [2.0]


def test_a_request_looks_up_again_at_once_for_a_late_word_only_once() -> None:
    """Found by a storm: the tier's breaker opened meanwhile, so no look-up waited for its answer any more."""
    engine = Bench(8, [Bench.spec("has"), Bench.spec("silent", breaker_failures=1)], computing_s=0.1)
    engine.knows_all(0)
    engine.holds("a")
    engine.takes(0.0, 0.01)
    assert engine.lookup("z") == [RETRY]
    (probe,) = engine.step()
    engine.answer(probe, False)  # It takes longer than computing.
    assert engine.lookup("y") == [RETRY]
    (probe,) = engine.step()
    request = engine.request()
    assert engine.lookup("ab", request) == [HIT_PENDING, RETRY]
    engine.step()
    engine.answer(probe, None)
    assert engine.lookup("ab", request) == [HIT_PENDING, MISS]
    engine.step(1e-3)
    assert request.late_after(engine.now) == engine.now
    assert engine.lookup("ab", request) == [HIT_PENDING, MISS]
    assert request.late_after(engine.now) > engine.now
