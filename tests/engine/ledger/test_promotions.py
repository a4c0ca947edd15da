"""From a tier into the primary: once at a time, twice at most, and what is good of a batch stays."""

import pytest

from kvtier.engine.answers import Event, EventKind
from kvtier.engine.ledger import LookupResult
from kvtier.runner.messages import Code, Promote, unpack_keys, unpack_rows

HIT, PENDING, MISS, RETRY = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS, LookupResult.RETRY
FAILURES = [Code.MISSING, Code.CORRUPT, Code.FAILED, Code.UNAVAILABLE, Code.DEADLINE]


def held_by_tier(bench, names="ab", **options):
    engine = bench(**options)
    engine.holds(names)
    engine.knows_all()
    return engine


def test_a_promotion_goes_to_the_row_that_was_reserved_at_the_lookup(bench):
    engine = held_by_tier(bench)
    assert engine.lookup("ab") == [PENDING, PENDING]
    rows = [engine.row("a"), engine.row("b")]
    (load,) = engine.step()
    assert isinstance(load, Promote)
    assert unpack_keys(load.keys) == engine.keys("ab")
    assert list(unpack_rows(load.rows)) == rows
    engine.finish(load)
    assert engine.lookup("ab") == [HIT, HIT]


def test_a_key_on_its_way_is_not_sent_for_again_whoever_looks(bench):
    engine = held_by_tier(bench)
    assert engine.lookup("a", engine.request("first")) == [PENDING]
    assert engine.lookup("a", engine.request("second")) == [PENDING]
    assert len(engine.step()) == 1
    assert engine.lookup("a", engine.request("third")) == [PENDING]
    assert engine.step() == []


def test_a_step_sends_one_batch_a_tier_and_request(bench):
    engine = bench(tiers=2)
    engine.holds("ab", tier=0)
    engine.holds("c", tier=1)
    engine.lookup("ac", engine.request("first"))
    engine.lookup("b", engine.request("second"))
    sent = [(action.tier, unpack_keys(action.keys)) for action in engine.step()]
    assert sent == [(0, engine.keys("a")), (1, engine.keys("c")), (0, engine.keys("b"))]


def test_a_batch_has_no_more_chunks_than_an_action_may_move(bench):
    engine = held_by_tier(bench, "abcde", action_chunks=2)
    engine.lookup("abcde")
    assert [unpack_keys(action.keys) for action in engine.step()] == [
        engine.keys("ab"),
        engine.keys("cd"),
        engine.keys("e"),
    ]


def test_a_partial_promotion_keeps_the_good_chunks(bench):
    engine = held_by_tier(bench, "abc")
    request = engine.request()
    engine.lookup("abc", request)
    (load,) = engine.step()
    engine.finish(load, {1: Code.CORRUPT})
    assert engine.ready() == "ac"
    assert engine.lookup("abc", request) == [HIT, MISS, HIT]
    assert engine.ledger.primary.rows_free == 6


@pytest.mark.parametrize("code", FAILURES)
def test_a_failed_promotion_is_a_miss_at_once_for_everybody(bench, code):
    engine = held_by_tier(bench)
    request = engine.request("first")
    engine.lookup("a", request)
    (load,) = engine.step()
    engine.fail(load, code)
    assert engine.lookup("a", request) == [MISS]
    assert engine.lookup("a", engine.request("second")) == [MISS]


@pytest.mark.parametrize("code", [Code.REFUSED, Code.LOST])
def test_a_promotion_that_was_never_tried_says_nothing_of_the_chunk(bench, code):
    engine = held_by_tier(bench)
    request = engine.request("first")
    engine.lookup("a", request)
    (load,) = engine.step()
    engine.fail(load, code)
    assert engine.lookup("a", request) == [MISS]
    assert engine.lookup("a", engine.request("second")) == [PENDING]


@pytest.mark.parametrize(
    ("code", "seconds", "answer"),
    [
        *((code, 10.0, PENDING) for code in (Code.FAILED, Code.UNAVAILABLE, Code.DEADLINE)),
        *((code, 1_000.0, MISS) for code in (Code.MISSING, Code.CORRUPT)),
    ],
)
def test_a_failed_load_is_tried_again_later_unless_the_chunk_is_gone(bench, code, seconds, answer):
    engine = held_by_tier(bench)
    engine.lookup("a")
    (load,) = engine.step()
    engine.fail(load, code)
    engine.step(seconds=seconds)
    assert engine.lookup("a") == [answer]


@pytest.mark.parametrize("code", [Code.MISSING, Code.CORRUPT])
def test_a_later_store_of_a_key_that_failed_to_come_is_seen_again(bench, code):
    engine = held_by_tier(bench, rows=1)
    engine.lookup("a")
    (load,) = engine.step()
    engine.fail(load, code)
    engine.store("a")
    engine.finish_all(engine.step())
    engine.stored_alone("x")
    assert engine.ready() == "x"
    assert engine.lookup("a") == [PENDING]


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.FAILED, Code.DEADLINE])
@pytest.mark.parametrize("how", ["found", "stored"])
def test_a_later_store_in_a_shared_tier_is_found_after_a_failed_load(bench, code, how):
    """Also where the chunk was on record from before the tier's list was over."""
    engine = bench(rows=1)
    if how == "found":
        engine.holds("a")
    else:
        engine.store("a")
        engine.finish_all(engine.step())
    engine.knows_all(complete=False)
    engine.stored_alone("x")
    assert engine.lookup("a") == [PENDING]
    (load,) = engine.step()
    engine.fail(load, code)
    engine.store("a")
    engine.finish_all(engine.step())
    engine.stored_alone("x")
    assert engine.ready() == "x"
    assert engine.lookup("a") == [PENDING]


def test_a_key_is_promoted_at_most_twice_for_one_request(bench):
    engine = held_by_tier(bench, rows=1, lease_s=1.0)
    request = engine.request("first")
    for _ in range(2):
        assert engine.lookup("a", request) == [PENDING]
        engine.finish_all(engine.step())
        engine.step(seconds=1.0)
        engine.stored_alone("x")
        assert engine.ready() == "x"
    assert engine.lookup("a", request) == [MISS]
    assert engine.lookup("a", engine.request("second")) == [PENDING]


def test_one_of_many_promotions_does_not_evict_another_or_a_hit_of_its_request(bench):
    engine = held_by_tier(bench, "bcd", rows=3)
    engine.stored_alone("a")
    assert engine.lookup("abcd") == [HIT, PENDING, PENDING, MISS]
    engine.finish_all(engine.step())
    assert engine.ready() == "abc"


def test_a_hit_counts_for_the_tier_that_it_was_promoted_from_and_later_for_the_primary(bench):
    engine = held_by_tier(bench, "b")
    engine.stored_alone("a")
    first, second = engine.request("first"), engine.request("second")
    engine.lookup("ab", first)
    engine.finish_all(engine.step())
    engine.lookup("ab", first)
    engine.load("ab", first)
    (tier,) = engine.ledger.tiers
    assert (engine.ledger.counters.hits, tier.counters.hits) == (1, 1)
    engine.lookup("ab", second)
    engine.load("ab", second)
    assert (engine.ledger.counters.hits, tier.counters.hits) == (3, 1)


def test_a_chunk_that_its_request_computed_after_all_is_no_hit_of_the_tier(bench):
    engine = held_by_tier(bench, "a")
    request = engine.request()
    engine.lookup("a", request)
    (load,) = engine.step()
    engine.fail(load, Code.MISSING)
    engine.store("a", request)
    engine.lookup("a", request)
    engine.load("a", request)
    assert (engine.ledger.counters.hits, engine.ledger.tiers[0].counters.hits) == (1, 0)


def test_promotions_are_counted_when_they_are_sent_for_and_when_they_come(bench):
    engine = held_by_tier(bench, "abc")
    engine.lookup("abc")
    (load,) = engine.step()
    (tier,) = engine.ledger.tiers
    assert (tier.counters.promoted, tier.counters.loaded, tier.loading) == (3, 0, 3)
    engine.finish(load, {0: Code.FAILED})
    assert (tier.counters.promoted, tier.counters.loaded, tier.loading) == (3, 2, 0)
    assert tier.counters.failed == {"failed": 1}
    assert engine.events.take()[-2:] == [
        Event(EventKind.FAILED, "tier0", engine.keys("a"), "failed"),
        Event(EventKind.STORED, "cpu", engine.keys("bc")),
    ]
    assert engine.observed == [("tier0", "load", 0.25)]
