"""Which of a request's chunks leave first: its tail, while it runs and when it is over, whatever order they came in."""

import pytest

from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.engine.ledger import Ledger, LedgerLimits
from kvtier.engine.requests import Position, Request
from kvtier.policies import LRU


def positions(*groups: str) -> Position:
    """Return where each letter's chunk ends: by its place among its group's."""
    return {
        make_offload_key(name.encode(), group): 16 * place
        for group, names in enumerate(groups)
        for place, name in enumerate(names, 1)
    }.get


def leave(engine, count: int) -> list[OffloadKey]:
    """Let another request take rows; return the evicted names."""
    return engine.store("XYZ"[:count]).evicted


def test_a_running_request_stored_in_pieces_loses_its_tail_first(bench):
    engine = bench(rows=6, tiers=0)
    request = engine.request()
    for piece in ("ab", "cd", "ef"):
        engine.store(piece, request)
    assert leave(engine, 3) == engine.keys("fed")
    assert engine.ready() == "abcXYZ"


@pytest.mark.parametrize("again", ["loaded", "offered"])
def test_a_prefix_that_is_used_again_outlives_chunks_computed_after_it(bench, again):
    engine = bench(rows=4, tiers=0)
    engine.stored_alone("ab")
    request = engine.request()
    if again == "loaded":
        engine.lookup("ab", request)
        engine.load("ab", request)
    else:
        engine.store("ab", request)
    engine.store("cd", request)
    engine.step()
    assert leave(engine, 3) == engine.keys("dcb")


@pytest.mark.parametrize("finished", [False, True])
def test_the_groups_of_a_model_lose_their_tails_together(bench, finished):
    engine = bench(rows=6, tiers=0)
    a, b, c = engine.keys("abc")
    d, e, f = (make_offload_key(name, 1) for name in (b"d", b"e", b"f"))
    request = engine.request(position=positions("abc", "def"))
    for piece in ([a, b, d, e], [c, f]):
        plan = engine.ledger.prepare_store(piece, request)
        assert plan.keys == piece, "in the order in which they were offered"
        assert plan.rows == [engine.ledger.primary.row(key) for key in piece]
        engine.ledger.complete_store(piece, request)
    if finished:
        engine.ledger.finish(request)
    assert set(leave(engine, 2)) == {c, f}


@pytest.mark.parametrize("finished", [False, True])
def test_a_chunk_that_comes_late_takes_its_place_in_the_prefix(bench, finished):
    engine = bench(rows=3, tiers=0)
    request = engine.request(position=positions("abc"))
    for piece in ("a", "c", "b"):
        engine.store(piece, request)
    if finished:
        engine.ledger.finish(request)
    assert leave(engine, 2) == engine.keys("cb")


def test_a_store_that_is_tried_again_keeps_its_place(bench):
    engine = bench(rows=4, tiers=0)
    request = engine.request(position=positions("abcd"))
    engine.store("ab", request)
    engine.ledger.complete_store(engine.ledger.prepare_store(engine.keys("c"), request).keys, request, success=False)
    engine.store("c", request)
    engine.store("d", request)
    assert leave(engine, 2) == engine.keys("dc")


def test_a_request_that_began_early_demotes_nothing_that_it_uses(bench):
    engine = bench(rows=3, tiers=0)
    old = engine.request(position=positions("ps"))
    engine.store("p", old)
    engine.store("c", engine.request("cold"))
    engine.store("s", engine.request("newer"))
    engine.lookup("s", old)
    engine.load("s", old)
    engine.step()
    assert leave(engine, 1) == engine.keys("c")


def test_two_running_requests_with_one_prompt_keep_its_order(bench):
    engine = bench(rows=4, tiers=0)
    first, second = (engine.request(name, position=positions("abcd")) for name in ("first", "second"))
    for piece in ("ab", "cd"):
        engine.store(piece, first)
        engine.store(piece, second)
    assert leave(engine, 3) == engine.keys("dcb")


def test_a_missing_chunk_of_a_prefix_comes_back_to_its_place(bench):
    engine = bench(rows=3, tiers=0)
    engine.stored_alone("bc")
    engine.store("abc", engine.request())
    assert leave(engine, 2) == engine.keys("cb")


def test_a_request_whose_tail_has_left_goes_on_behind_what_is_left_of_it(bench):
    engine = bench(rows=3, tiers=0)
    request = engine.request()
    engine.store("ab", request)
    engine.store("c", request)
    assert leave(engine, 1) == engine.keys("c")
    engine.store("d", request)
    assert engine.ready() == "adX"
    assert engine.store("YZ").evicted == engine.keys("Xd")


def test_a_requests_earlier_keys_are_not_ranked_again_with_each_piece(bench):
    """A long prompt comes in many pieces: to rank all of them each time would cost its length squared."""

    class Counted(LRU):
        ranks = 0

        def rank(self, keys, hint=None):
            self.ranks += 1
            super().rank(keys)

    policy = Counted(64)
    ledger = Ledger(64, policy, (), LedgerLimits(64, 64, 10.0, 64))
    asked = []
    place = {key: index for index, key in enumerate(bench.keys("abcdefghijklmnop"))}
    request = Request("long", position=lambda key: asked.append(key) or place[key])
    for key in place:
        ledger.complete_store(ledger.prepare_store([key], request).keys, request)
    assert policy.ranks == 0
    assert len(asked) <= 3 * len(place)
