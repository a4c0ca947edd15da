"""From a tier into the primary: once at a time, twice at most, and what is good of a batch stays."""

import pytest

from kvtier.engine.answers import Event, EventKind
from kvtier.runner.messages import Code, Promote, unpack_keys, unpack_rows
from tests.engine.ledger.bench import HIT, MISS, PENDING


def held_by_tier(bench, names="ab", **options):
    engine = bench(**options)
    engine.holds(names)
    engine.knows_all()
    return engine


def test_a_promotion_goes_to_the_row_that_was_reserved_at_the_lookup_and_is_sent_for_once(bench):
    engine = held_by_tier(bench)
    assert engine.lookup("ab", engine.request("first")) == [PENDING, PENDING]
    assert engine.lookup("a", engine.request("second")) == [PENDING]
    rows = [engine.row("a"), engine.row("b")]
    (load,) = engine.step()
    assert isinstance(load, Promote)
    assert (unpack_keys(load.keys), list(unpack_rows(load.rows))) == (engine.keys("ab"), rows)
    assert engine.lookup("a", engine.request("third")) == [PENDING]
    assert engine.step() == []
    engine.finish(load)
    assert engine.lookup("ab") == [HIT, HIT]


def test_a_step_sends_batches_of_at_most_an_action_for_each_tier_and_request(bench):
    engine = bench(tiers=2, action_chunks=2)
    engine.holds("abde", tier=0)
    engine.holds("c", tier=1)
    engine.lookup("acde", engine.request("first"))
    engine.lookup("b", engine.request("second"))
    sent = [(action.tier, unpack_keys(action.keys)) for action in engine.step()]
    assert sent == [(tier, engine.keys(names)) for tier, names in ((0, "ad"), (0, "e"), (1, "c"), (0, "b"))]


def test_a_partial_promotion_keeps_the_good_chunks_and_counts_both(bench):
    engine = held_by_tier(bench, "abc")
    (tier,) = engine.ledger.tiers
    request = engine.request()
    engine.lookup("abc", request)
    (load,) = engine.step()
    assert (tier.counters.promoted, tier.counters.loaded, tier.loading) == (3, 0, 3)
    engine.finish(load, {1: Code.CORRUPT})
    assert engine.ready() == "ac"
    assert engine.lookup("abc", request) == [HIT, MISS, HIT]
    assert engine.ledger.primary.rows_free == 6
    assert (tier.counters.promoted, tier.counters.loaded, tier.loading) == (3, 2, 0)
    assert tier.counters.failed == {"corrupt": 1}
    assert engine.events.take()[-2:] == [
        Event(EventKind.FAILED, "tier0", engine.keys("b"), "corrupt"),
        Event(EventKind.STORED, "cpu", engine.keys("ac")),
    ]
    assert engine.observed == [("tier0", "load", 0.25)]


@pytest.mark.promise("A tier has lost the chunk")
@pytest.mark.parametrize(
    ("code", "others", "later"),
    [
        *((code, MISS, PENDING) for code in (Code.FAILED, Code.UNAVAILABLE, Code.DEADLINE)),
        *((code, MISS, MISS) for code in (Code.MISSING, Code.CORRUPT)),
        *((code, PENDING, None) for code in (Code.REFUSED, Code.LOST)),  # It was not tried.
    ],
)
def test_a_failed_load_is_a_miss_for_everybody_and_is_tried_again_later_unless_the_chunk_is_gone(
    bench, code, others, later
):
    engine = held_by_tier(bench)
    request = engine.request("first")
    engine.lookup("a", request)
    engine.fail(*engine.step(), code)
    assert engine.lookup("a", request) == [MISS]
    assert engine.lookup("a", engine.request("second")) == [others]
    if later is not None:
        engine.step(seconds=10.0 if later is PENDING else 1_000.0)
        assert engine.lookup("a") == [later]


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.MISSING])
@pytest.mark.parametrize("how", ["found", "stored", "listed"])
def test_a_later_store_is_found_after_a_failed_load(bench, code, how):
    engine = bench(rows=1)
    if how == "stored":
        engine.stored_in_tiers("a")
    else:
        engine.holds("a")
    engine.knows_all(complete=how == "listed")
    engine.stored_alone("x")
    request = engine.request()
    assert engine.lookup("a", request) == [PENDING]
    engine.fail(*engine.step(), code)
    if how == "listed" and code is not Code.MISSING:
        return  # A tier that reports is believed: the chunk is there still.
    engine.store("a", request)
    engine.lookup("a", request)
    engine.load("a", request)
    assert (engine.ledger.counters.hits, engine.ledger.tiers[0].counters.hits) == (1, 0), "it was computed"
    engine.finish_all(engine.step())
    engine.stored_alone("x")
    assert engine.ready() == "x"
    assert engine.lookup("a") == [PENDING]


def test_a_key_is_promoted_at_most_twice_for_one_request(bench):
    engine = held_by_tier(bench, rows=1, lease_s=1.0)
    request = engine.request("first")
    for _ in range(2):
        assert engine.lookup("ab", request) == [PENDING, MISS]  # The second does not evict the first.
        engine.finish_all(engine.step())
        engine.step(seconds=1.0)
        engine.stored_alone("x")
        assert engine.ready() == "x"
    assert engine.lookup("a", request) == [MISS]
    assert engine.lookup("a", engine.request("second")) == [PENDING]


def test_a_hit_counts_for_the_tier_that_it_was_promoted_from_and_later_for_the_primary(bench):
    engine = held_by_tier(bench, "b")
    engine.stored_alone("a")
    first, second = engine.request("first"), engine.request("second")
    engine.lookup("ab", first)
    engine.finish_all(engine.step())
    for request, hits in ((first, (1, 1)), (second, (3, 1))):
        engine.lookup("ab", request)
        engine.load("ab", request)
        assert (engine.ledger.counters.hits, engine.ledger.tiers[0].counters.hits) == hits
