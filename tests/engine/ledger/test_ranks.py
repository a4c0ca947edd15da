"""Advice to tiers at a request's end: the keys that they hold, in prefix order, or nothing above the limit."""

import pytest

from kvtier import Hint, TierMatcher
from kvtier.engine import traffic
from kvtier.runner.messages import Advise, RunnerLost


def end(engine, names, matchers=None):
    engine.store(names, request := engine.request("r", matchers))
    engine.lookup(names, request)
    engine.ledger.finish(request)


@pytest.mark.parametrize("position", [False, True])
def test_a_tier_hears_of_a_request_that_is_over_in_prefix_order(engine, position):
    place = {key: place for place, key in enumerate(engine.keys("abcd"))}.get if position else None
    request = engine.request(position=place)
    for piece in ("d", "ab", "c") if position else ("ab", "cd"):
        engine.store(piece, request)
    engine.finish_all(engine.step())
    engine.ledger.finish(request)
    assert engine.step() == []
    engine.lookup("abc", again := engine.request())
    engine.load("abc", again)
    engine.ledger.finish(again)
    engine.step()
    assert engine.ranked == [(0, "abcd"), (0, "abc")]
    assert engine.settled()


def test_from_the_first_hint_on_every_end_is_told_as_one(engine):
    """A tier learns from them which session goes on; a session without hints counts, too."""
    engine.holds("a")
    engine.store("a")
    said = []
    for hint in (None, Hint(over=True), None):
        request = engine.request()
        engine.ledger.hint(request, hint)
        engine.lookup("a", request)
        engine.load("a", request)
        engine.ledger.finish(request)
        said += [action.hint for action in engine.ledger.end_step() if isinstance(action, Advise)]
    first_of_all = Hint()
    assert said == [None, first_of_all, Hint(over=True), Hint()]


def test_a_tier_hears_only_of_what_it_is_known_to_hold_and_of_requests_that_may_use_it(bench):
    engine = bench(tiers=3)
    for tier in range(3):
        engine.knows_all(tier, complete=tier < 2)
    engine.holds("a", tier=1)
    engine.store("ab", request := engine.request())
    for action in engine.step():
        engine.finish(action, {1: 4} if action.tier == 0 else None)
    engine.ledger.finish(request)
    end(engine, "ab", [TierMatcher(medium="CPU")])
    engine.step()
    assert engine.ranked == [(0, "a"), (1, "ab"), (2, "ab")]  # The last one shares its storage: it said so itself.


def test_a_long_request_is_told_of_in_parts_the_tail_first_and_of_too_many_the_newest(bench, monkeypatch):
    monkeypatch.setattr(traffic, "ADVICE_KEYS_MAX", 3)
    engine = bench()
    engine.holds("abcdefgh")
    for _ in range(traffic.ADVICE_MAX):
        end(engine, "abcdefgh")
    assert not engine.ledger.pending  # No call waits for it.
    engine.step()
    assert len(engine.ranked) == traffic.ADVICE_MAX
    assert engine.ranked[-3:] == [(0, "gh"), (0, "def"), (0, "abc")]


@pytest.mark.parametrize("why", ["the bridge refuses it", "the runner is lost"])
def test_advice_that_cannot_be_given_is_dropped(engine, why):
    engine.holds("a")
    if why == "the runner is lost":
        engine.ledger.apply(RunnerLost(0, "killed"))
    end(engine, "a")
    engine.ledger.refuse(engine.ledger.end_step())
    engine.step()
    assert engine.ranked == []
    assert engine.settled()
