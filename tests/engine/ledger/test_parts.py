"""Parts of a ledger: the log of events, the primary's rows, and the tiers that can serve a key."""

import pytest

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.engine.answers import Event, EventKind, EventLog, sources_of
from kvtier.engine.primary import Primary
from kvtier.engine.requests import Request
from kvtier.engine.tier import Tier, TierMatcher, TierSpec
from kvtier.policies import LRU

A, B, C, D, E, F = (make_offload_key(bytes([number])) for number in range(6))
NOW = 10.0
STORED, REMOVED, FAILED = (
    Event(EventKind.STORED, "cpu", [A]),
    Event(EventKind.REMOVED, "cpu", [A]),
    Event(EventKind.FAILED, "0:fs", [A], "corrupt"),
)


@pytest.mark.parametrize(("events_max", "kept", "dropped"), [(2, [REMOVED, FAILED], 1), (0, [], 0)])
def test_events_are_taken_once_and_in_order_and_beyond_a_limit_the_oldest_go_and_are_counted(events_max, kept, dropped):
    log = EventLog(events_max)
    log.add(EventKind.STORED, "cpu", [])  # No keys are no event.
    for event in (STORED, REMOVED, FAILED):
        log.add(*event)
    assert (log.take(), log.dropped) == (kept, dropped)
    assert log.take() == []


@pytest.fixture
def primary():
    primary = Primary(3, LRU(3))
    assert primary.reserve([A]) is not None
    primary.publish([A])
    return primary


@pytest.mark.parametrize("ends", [("release", "unpin", "unpin"), ("unpin", "release", "unpin"), ("unpin", "unpin")])
def test_an_abandoned_row_is_free_when_it_is_neither_pinned_nor_lent(primary, ends):
    primary.reserve([B])
    row = primary.row(B)
    primary.pin([row, row])
    primary.abandon(B, lent="release" in ends)
    for end in ends:
        assert primary.rows_free == 1
        primary.release(row) if end == "release" else primary.unpin([row])
    assert (primary.rows_free, primary.pinned(row)) == (2, False)


@pytest.mark.parametrize("end", [Primary.end_step, lambda primary: primary.clear({})], ids=["step", "reset"])
def test_hits_stay_until_the_step_ends_or_a_reset(primary, end):
    primary.hold([A])
    assert primary.reserve([B, C, D]) is None
    end(primary)
    for keys in ([B, C, D], [A, E, F]):
        assert primary.reserve(keys) is not None
        primary.publish(keys)


def test_rows_chosen_ahead_and_pinned_since_are_replaced_by_others():
    primary = Primary(4, LRU(4), ahead_rows=2)
    primary.reserve([A, B, C, D])
    primary.publish([A, B, C, D])
    primary.choose_ahead(2)
    primary.pin(list(primary.ahead))
    primary.choose_ahead(2)
    assert set(primary.ahead) == set(range(4))


def test_a_promotion_that_was_taken_back_is_no_source_of_a_hit():
    search = Request("r").search
    search.promotions[A], search.sources[A] = 1, 0
    search.undo(A)
    assert (search.promotions, search.sources) == ({A: 0}, {})


def test_keys_that_come_from_elsewhere_are_known_by_the_objects_that_are_kept(primary):
    copies = [OffloadKey(bytes(bytearray(key))) for key in (A, B)]
    assert copies[0] is not A
    own = primary.own(copies)
    assert own == [A, B]
    assert (own[0] is A, own[1] is copies[1]) == (True, True)


def sources(request, *args):
    return sources_of(A, request, request.search, *args)


@pytest.fixture
def tiers():
    return [Tier(index, TierSpec(f"tier{index}", 100, 60.0, 3, 5.0, 2, locality="LOCAL")) for index in range(3)]


def test_tiers_are_sorted_by_what_they_have_said(tiers):
    first, second, third = tiers
    third.authoritative = True
    found = sources(Request("r"), tiers, first.bit, NOW)
    assert found == ((first,), (), (second,), (), tiers)


def test_a_tier_that_a_location_map_names_may_be_too_slow(tiers):
    first, second, third = tiers
    found = sources(Request("r"), tiers, first.bit | second.bit, NOW, lambda tier: tier is first)
    assert found == ((second,), (first,), (third,), (), tiers)


def test_a_tier_that_may_not_be_loaded_from_is_no_source(tiers):
    first, second, third = tiers
    first.breaker.trip(NOW)
    third.spec = third.spec._replace(locality="REMOTE")
    request = Request("r", load_matchers=[TierMatcher(locality="LOCAL")])
    *_, admitted = sources(request, tiers, 0b111, NOW)
    assert admitted == [second]


def test_an_answer_of_the_requests_own_probe_counts_though_it_has_expired(tiers):
    tier, request = tiers[0], Request("r")
    tier.believe(A, present=True, now=0.0)
    expired = 1_000.0
    assert sources(request, [tier], 0, expired) == ((), (), (tier,), (), [tier])
    request.search.asked.add((tier.index, A))
    assert sources(request, [tier], 0, expired) == ((tier,), (), (), (), [tier])


@pytest.mark.parametrize(("latency_s", "until"), [(1.0, 12.0), (5.0, NOW)], ids=["in time", "expected too late"])
def test_a_probe_is_waited_for_until_its_deadline(tiers, latency_s, until):
    tier, request = tiers[0], Request("r")
    tier.ask(A)
    request.search.asked.add((tier.index, A))
    request.search.await_probe(NOW, latency_s, 2.0)
    for now in (NOW, 11.0, 12.0, 13.0):
        _, _, silent, late, _ = sources(request, [tier], 0, now)
        assert (silent, late) == (((tier,), ()) if now < until else ((), (tier,)))
