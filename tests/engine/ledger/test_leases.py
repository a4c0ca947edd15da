"""A waiting request's rows stay: for how long, for whom, and how many."""

import weakref

import pytest

from kvtier.engine.requests import Request
from tests.engine.ledger.bench import HIT, MISS, PENDING


def test_a_request_that_waits_leases_its_hits_and_one_that_need_not_leases_nothing(bench):
    engine = bench(rows=4)
    engine.stored_alone("ab")
    assert engine.lookup("ab", engine.request()) == [HIT, HIT]
    engine.step()
    assert engine.ledger.leases.rows == 0
    engine.holds("c")
    assert engine.lookup("abc", engine.request("waiting")) == [HIT, HIT, PENDING]
    engine.step()
    assert engine.ledger.leases.rows == 3
    assert engine.store("xyz") is None  # Only one row is free, and none can be evicted.


def test_a_lease_ends_when_its_request_loads_the_row(engine):
    engine.holds("b")
    engine.stored_alone("a")
    waiting = engine.request()
    engine.lookup("ab", waiting)
    engine.finish(*engine.step())
    assert engine.lookup("ab", waiting) == [HIT, HIT]
    engine.load("ab", waiting)
    assert engine.ledger.leases.rows == 0
    engine.step()
    assert engine.settled()


@pytest.mark.parametrize("end", ["its time", "its requests"])
def test_a_lease_ends_after_its_time_or_with_the_last_of_its_requests(bench, end):
    engine = bench(lease_s=10.0)
    engine.holds("a")
    first, second = engine.request("first"), engine.request("second")
    assert engine.lookup("a", first) == engine.lookup("a", second) == [PENDING]
    engine.finish_all(engine.step(seconds=9.0))
    engine.ledger.finish(first)
    assert engine.ledger.leases.rows == 1
    if end == "its time":
        engine.step(seconds=1.0)
    else:
        engine.ledger.finish(second)
    assert engine.settled()


@pytest.mark.promise("The primary is full of waiting requests")
def test_leases_of_all_requests_together_take_no_more_than_their_share(bench):
    engine = bench(rows=8, lease_rows_max=3)
    engine.holds("abcdef")
    assert engine.lookup("ab", engine.request("first")) == [PENDING, PENDING]
    assert engine.lookup("cdef", engine.request("second")) == [PENDING, MISS, MISS, MISS]
    assert engine.ledger.counters.promotions_refused == 3
    engine.step()
    assert engine.ledger.leases.rows == 3


class Watched(Request):
    """A request that can be weakly referenced."""

    __slots__ = ("__weakref__",)


@pytest.mark.parametrize("over", ["step", "reset"])
@pytest.mark.parametrize("room_was_made", [False, True])
def test_a_finished_step_releases_its_requests(bench, room_was_made, over):
    engine, request = bench(rows=2, tiers=0), Watched("r")
    known = weakref.ref(request)
    engine.store("a")
    engine.lookup("a", request)
    if room_was_made:
        assert engine.store("bc") is None
        engine.lookup("a", request)
    getattr(engine, over)()
    del request
    assert known() is None
