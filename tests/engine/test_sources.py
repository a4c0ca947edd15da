"""Which tiers can serve a key: sorted by what is known of it."""

import pytest

from kvtier.engine.answers import sources_of
from kvtier.engine.requests import Request
from kvtier.engine.tier import Tier, TierMatcher, TierSpec
from tests.engine.kit import key

KEY = key(1)
NOW = 10.0


def sources(request, *args):
    return sources_of(KEY, request, request.search, *args)


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
    assert sources(request, tiers, 0b111, NOW).admitted == [second]


def test_an_answer_of_the_requests_own_probe_counts_though_it_has_expired(tiers):
    tier, request = tiers[0], Request("r")
    tier.believe(KEY, present=True, now=0.0)
    expired = 1_000.0
    assert sources(request, [tier], 0, expired).silent == (tier,)
    request.search.asked.add((tier.index, KEY))
    assert sources(request, [tier], 0, expired).having == (tier,)


@pytest.mark.parametrize(("latency_s", "until"), [(1.0, 12.0), (5.0, NOW)], ids=["in time", "expected too late"])
def test_a_probe_is_waited_for_until_its_deadline(tiers, latency_s, until):
    tier, request = tiers[0], Request("r")
    tier.ask(KEY)
    request.search.asked.add((tier.index, KEY))
    request.search.await_probe(NOW, latency_s, 2.0)
    for now in (NOW, 11.0, 12.0, 13.0):
        found = sources(request, [tier], 0, now)
        assert (found.silent, found.late) == (((tier,), ()) if now < until else ((), (tier,)))
