"""Which of a request's chunks leave first: its tail, while it runs and when it is over, whatever order they came in."""

import pytest

from kvtier.backend.namespace import make_offload_key


def positions(*groups):
    """Return where each letter's chunk ends: by its place among its group's."""
    return {
        make_offload_key(name.encode(), group): 16 * place
        for group, names in enumerate(groups)
        for place, name in enumerate(names, 1)
    }.get


def leave(engine, count):
    return engine.store("XYZ"[:count]).evicted


def test_a_running_request_stored_in_pieces_loses_its_tail_first(bench):
    engine = bench(rows=6, tiers=0)
    request = engine.request()
    for piece in ("ab", "cd", "ef"):
        engine.store(piece, request)
    assert leave(engine, 3) == engine.keys("fed")
    assert engine.ready() == "abcXYZ"


# Who stores (S), fails to store (F) or loads (L) which piece, in order: r is the request, o others; and what leaves.
STORIES = {
    "a loaded prefix outlives what is computed after it": (4, ["oSab", "rLab", "rScd"], "dcb"),
    "a prefix that is offered again does, too": (4, ["oSab", "rSab", "rScd"], "dcb"),
    "a chunk that comes late takes its place": (3, ["rSa", "rSc", "rSb"], "cb"),
    "a store that is tried again keeps its place": (4, ["rSab", "rFc", "rSc", "rSd"], "dc"),
    "a missing chunk comes back to its place": (3, ["oSbc", "rSabc"], "cb"),
    "two requests with one prompt keep its order": (4, ["rSab", "qSab", "rScd", "qScd"], "dcb"),
    "a request that began early demotes nothing that it uses": (3, ["rSa", "oSx", "qSb", "rLb"], "x"),
}


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("finished", [False, True])
def test_the_end_of_a_prefix_leaves_first(bench, story, finished):
    rows, deeds, left = STORIES[story]
    engine = bench(rows, tiers=0)
    position = positions("abcd")
    requests = {name: engine.request(name, position=position if name != "o" else None) for name in "rqo"}
    for who, does, *names in deeds:
        request, piece = requests[who], "".join(names)
        if does == "L":
            engine.lookup(piece, request)
            engine.load(piece, request)
        elif does == "F":
            plan = engine.ledger.prepare_store(engine.keys(piece), request)
            engine.ledger.complete_store(plan.keys, request, success=False)
        else:
            engine.store(piece, request)
    engine.step()
    if finished:
        for name in "qr":
            engine.ledger.finish(requests[name])
    assert leave(engine, len(left)) == engine.keys(left)


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


def test_a_requests_earlier_keys_are_not_ranked_again_with_each_piece(bench):
    """A long prompt comes in many pieces: to rank all of them each time would cost its length squared."""
    engine, asked = bench(64, 0), []
    place = {key: index for index, key in enumerate(bench.keys("abcdefghijklmnop"))}
    request = engine.request(position=lambda key: asked.append(key) or place[key])
    for name in "abcdefghijklmnop":
        engine.store(name, request)
    assert len(asked) <= 3 * len(place)
