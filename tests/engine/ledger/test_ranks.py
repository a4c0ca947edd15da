"""Advice to tiers at a request's end: the keys that they hold, in prefix order, or nothing above the limit."""

from kvtier.engine import outbox
from kvtier.engine.tier import TierMatcher
from kvtier.runner.messages import Advise, RunnerLost
from kvtier.settings.hints import Hint


def test_a_tier_hears_of_a_request_that_is_over(bench):
    """Also of what came in pieces, or was found in the primary."""
    engine = bench()
    engine.store("ab", request := engine.request())
    engine.store("cd", request)
    engine.finish_all(engine.step())
    engine.ledger.finish(request)
    assert engine.step() == []
    engine.lookup("abc", again := engine.request())
    engine.load("abc", again)
    engine.ledger.finish(again)
    engine.step()
    assert engine.ranked == [(0, "abcd"), (0, "abc")]
    assert engine.settled()


def test_from_the_first_hint_on_every_end_is_told_as_one(bench):
    """A tier learns from them which session goes on; a session without hints counts, too."""
    engine = bench()
    engine.holds("a")
    engine.store("a")
    said: list[Hint | None] = []
    for hint in (None, Hint(over=True), None):
        request = engine.request()
        engine.ledger.hint(request, hint)
        engine.lookup("a", request)
        engine.load("a", request)
        engine.ledger.finish(request)
        said += [action.hint for action in engine.ledger.end_step() if isinstance(action, Advise)]
    first_of_all = Hint()
    assert said == [None, first_of_all, Hint(over=True), Hint()]


def test_a_tier_hears_in_prefix_order_of_what_came_in_any(bench):
    engine = bench()
    position = {key: place for place, key in enumerate(engine.keys("abcd"))}.get
    request = engine.request(position=position)
    for piece in ("d", "ab", "c"):
        engine.store(piece, request)
    engine.finish_all(engine.step())
    engine.ledger.finish(request)
    engine.step()
    assert engine.ranked == [(0, "abcd")]


def test_a_tier_hears_only_of_what_it_is_known_to_hold(bench):
    engine = bench(tiers=3)
    engine.knows_all(0)
    engine.knows_all(1)
    engine.knows_all(2, complete=False)
    engine.holds("a", tier=1)
    engine.store("ab", request := engine.request())
    for action in engine.step():
        engine.finish(action, {1: 4} if action.tier == 0 else None)
    engine.ledger.finish(request)
    engine.step()
    assert engine.ranked == [(0, "a"), (1, "ab"), (2, "ab")]  # The last one shares its storage: it said so itself.


def test_a_tier_that_a_request_may_not_use_does_not_hear_of_it(bench):
    engine = bench()
    engine.holds("a")
    engine.store("a", request := engine.request("r", [TierMatcher(medium="CPU")]))
    engine.ledger.finish(request)
    engine.step()
    assert engine.ranked == []


def test_a_long_request_is_told_of_in_parts_the_tail_first(bench, monkeypatch):
    monkeypatch.setattr(outbox, "ADVICE_KEYS_MAX", 3)
    engine = bench()
    engine.holds("abcdefgh")
    engine.store("abcdefgh", request := engine.request())
    engine.ledger.finish(request)
    engine.step()
    assert engine.ranked == [(0, "gh"), (0, "def"), (0, "abc")]


def test_of_too_many_in_one_step_the_newest_are_told(bench, monkeypatch):
    engine = bench()
    engine.holds("a")
    engine.store("a")
    engine.step()
    for _ in range(outbox.ADVICE_MAX + 10):
        engine.lookup("a", request := engine.request())
        engine.load("a", request)
        engine.ledger.finish(request)
    assert not engine.ledger.pending  # No call waits for it.
    engine.step()
    assert engine.ranked == [(0, "a")] * outbox.ADVICE_MAX


def test_advice_that_the_bridge_refuses_is_dropped(bench):
    engine = bench()
    engine.holds("a")
    engine.store("a", request := engine.request())
    engine.ledger.finish(request)
    engine.ledger.refuse(engine.ledger.end_step())
    engine.step()
    assert engine.ranked == []
    assert engine.settled()


def test_a_lost_runner_gets_no_advice(bench):
    engine = bench()
    engine.holds("a")
    engine.store("a", request := engine.request())
    engine.ledger.apply(RunnerLost(0, "killed"))
    engine.ledger.finish(request)
    engine.step()
    assert engine.ranked == []
