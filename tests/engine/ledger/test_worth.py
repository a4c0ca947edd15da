"""Loads that are weighed against computing: what is declined, what is given up, and what is tried again."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from kvtier.backend.namespace import make_offload_key
from kvtier.engine.answers import HIT, HIT_PENDING, MISS, RETRY
from kvtier.engine.requests import Request
from kvtier.engine.tier import TierMatcher
from kvtier.engine.worth import TRIAL_CHUNKS, TRIAL_EVERY_S
from kvtier.runner.messages import Action, Code, Found, Probe, Promote, pack_keys, unpack_keys
from tests.engine.ledger.bench import SECONDS, Bench, names_of


@pytest.fixture
def tier(bench: type[Bench]) -> Callable[..., Bench]:
    """Make a ledger whose tiers hold a to f; computing a chunk takes a second."""

    def make(*, rows: int = 16, tiers: int = 1, specs: Mapping[str, object] | None = None, **options: object) -> Bench:
        described = [bench.spec(f"tier{index}", **(specs or {})) for index in range(tiers)]
        made = bench(rows, described, **{"computing_s": 1.0, **options})
        for index in range(tiers):
            made.knows_all(index)
        made.holds("abcdef")
        return made

    return make


def loads(actions: list[Action]) -> dict[int, str]:
    """Return the names of loaded keys by tier."""
    named: dict[int, str] = {}
    for action in actions:
        if isinstance(action, Promote):
            named[action.tier] = named.get(action.tier, "") + names_of(unpack_keys(action.keys))
    return named


# What is declined.


def answer(bench: Bench, names: str, *, tier: int) -> None:
    """Answer a request whose chunks all come from a tier."""
    request = bench.request()
    assert bench.lookup(names, request) == [HIT_PENDING] * len(names)
    sent = bench.step()
    assert loads(sent) == {tier: names}
    bench.finish_all(sent)
    assert bench.lookup(names, request) == [HIT] * len(names)
    bench.load(names, request)
    bench.ledger.finish(request)
    bench.step()
    assert bench.settled()


def test_loads_that_save_time_are_sent_as_if_nothing_was_weighed(tier: Callable[..., Bench]) -> None:
    weighed, plain = tier(), tier(computing_s=None)
    for each in (weighed, plain):
        each.takes(0.1, 0.01)
        answer(each, "abcdef", tier=0)
        assert each.ledger.counters.misses == 0
        assert each.ledger.tiers[0].counters.hits == 6


def test_a_tier_that_is_slower_than_computing_is_a_miss_in_the_same_look_up(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(0.0, 1.0)
    request = bench.request()
    assert bench.lookup("a", request) == [MISS]
    assert loads(bench.step()) == {}
    assert bench.lookup("a", request) == [MISS]
    assert bench.settled()
    counters = bench.ledger.tiers[0].counters
    assert (counters.declined, counters.declined_requests, counters.declined_seconds) == (1, 1, 1.0)
    assert bench.ledger.counters.misses == 1


def test_loads_declined_before_the_first_measurement_add_no_time(tier: Callable[..., Bench]) -> None:
    """It is expected to take for ever, and a sum with that in it would say nothing ever after."""
    bench = tier()
    bench.lookup("abc", bench.request("first"))
    first = bench.step()
    second = bench.request("second")
    bench.lookup("def", second)
    assert loads(bench.step()) == {}
    assert bench.lookup("def", second) == [MISS] * 3
    counters = bench.ledger.tiers[0].counters
    assert (counters.declined, counters.declined_seconds) == (3, 0.0)
    bench.finish_all(first)


def test_a_load_declined_at_the_steps_end_is_a_miss_from_then_on(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(3.0, 0.5)
    request = bench.request()
    assert bench.lookup("abcdef", request) == [HIT_PENDING] * 6
    assert loads(bench.step()) == {}
    assert bench.lookup("abcdef", request) == [MISS] * 6
    bench.step()
    assert bench.settled()
    counters = bench.ledger.tiers[0].counters
    assert (counters.declined, counters.declined_requests, counters.promoted) == (6, 1, 0)
    assert counters.declined_seconds == pytest.approx(6.0)


def test_a_longer_prompt_may_be_worth_a_load_that_a_shorter_one_is_not(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(2.0, 0.5)
    short, long = bench.request("short"), bench.request("long")
    bench.lookup("abc", short)
    assert loads(bench.step()) == {}
    bench.lookup("abcdef", long)
    assert loads(bench.step()) == {0: "abcdef"}


def test_chunks_in_the_primary_behind_a_load_count_for_it(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(2.0, 0.5)
    bench.stored_alone("bcd")
    request = bench.request()
    assert bench.lookup("abcd", request) == [HIT_PENDING, HIT, HIT, HIT]
    assert loads(bench.step()) == {0: "a"}


def test_loads_in_flight_delay_new_ones(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(0.0, 0.6)
    bench.lookup("abcd", bench.request("first"))
    assert loads(bench.step()) == {0: "abcd"}
    second = bench.request("second")
    bench.lookup("ef", second)
    assert loads(bench.step()) == {}
    assert bench.lookup("ef", second) == [MISS, MISS]


def test_loads_of_the_same_step_delay_new_ones_too(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(0.0, 0.6)
    bench.lookup("abcd", bench.request("first"))
    bench.lookup("ef", bench.request("second"))
    assert loads(bench.step()) == {0: "abcd"}


def test_of_two_tiers_the_leading_part_is_loaded_that_saves_most(tier: Callable[..., Bench]) -> None:
    bench = tier(tiers=2, rows=32)
    bench.holds("ghijkl", tier=1)
    bench.takes(3.0, 0.0)
    bench.takes(0.0, 1.6, tier=1)
    request = bench.request()
    bench.lookup("abcdefghijkl", request)
    sent = bench.step()
    assert loads(sent) == {0: "abcdef"}
    bench.finish_all(sent)
    assert bench.lookup("abcdefghijkl", request) == [HIT] * 6 + [MISS] * 6


def test_a_tier_that_was_never_heard_of_loads_for_one_request_first(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.lookup("abc", bench.request("first"))
    sent = bench.step()
    assert loads(sent) == {0: "abc"}
    bench.lookup("def", bench.request("second"))
    assert loads(bench.step()) == {}
    bench.finish_all(sent)
    bench.takes(0.0, 0.1)
    bench.lookup("def", bench.request("third"))
    assert loads(bench.step()) == {0: "def"}


def test_a_request_that_shares_chunks_with_a_declined_one_is_weighed_for_itself(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(3.5, 0.1)
    short, long = bench.request("short"), bench.request("long")
    assert bench.lookup("abc", short) == [HIT_PENDING] * 3
    assert bench.lookup("abcdef", long) == [HIT_PENDING] * 6
    assert loads(bench.step()) == {}
    assert bench.lookup("abc", short) == [MISS] * 3
    assert bench.lookup("abcdef", long) == [HIT_PENDING] * 6
    sent = bench.step()
    assert loads(sent) == {0: "abcdef"}
    assert bench.lookup("abc", short) == [MISS] * 3, "though the load is in flight"
    bench.finish_all(sent)
    assert bench.lookup("abcdef", long) == [HIT] * 6


def test_a_request_is_not_declined_before_every_tier_has_said_what_it_has(bench: type[Bench]) -> None:
    ledger = bench(16, computing_s=1.0)
    ledger.takes(3.0, 0.1)
    ledger.holds("ab")
    request = ledger.request()
    assert ledger.lookup("abcdef", request) == [HIT_PENDING] * 2 + [RETRY] * 4
    (probe,) = ledger.step()
    ledger.answer(probe, True)
    assert ledger.lookup("abcdef", request) == [HIT_PENDING] * 6
    assert loads(ledger.step()) == {0: "abcdef"}


@pytest.mark.parametrize("fixed_s", [5.0, 6.5])
def test_a_model_of_several_groups_needs_all_or_nothing(tier: Callable[..., Bench], fixed_s: float) -> None:
    bench = tier()
    bench.takes(fixed_s, 0.0)
    ends = dict(zip(bench.keys("abcdef"), (3, 4, 5, 6, 7, 8), strict=True))
    request = bench.request(position=lambda key: ends[key])
    backwards = "fedcba"  # As a sliding window is looked up: its last token is what all before it was computed for.
    bench.lookup(backwards, request)
    assert loads(bench.step()) == {0: backwards}
    bench.takes(9.0, 0.0)
    bench.lookup(backwards, bench.request("late", position=lambda key: ends[key]))
    assert loads(bench.step()) == {}


def test_a_window_that_is_found_stands_for_all_that_was_computed_before_it(tier: Callable[..., Bench]) -> None:
    """Full attention over six chunks, and a window of three: loading both saves the computing of six."""
    bench = tier()
    full, window = ([make_offload_key(name.encode(), group) for name in "abcdef"] for group in (0, 1))
    bench.ledger.apply(Found(0, pack_keys([*full, *window])))
    ends = dict(zip([*full, *window], [1, 2, 3, 4, 5, 6] * 2, strict=True))
    looked_up = [*full, *window[:2:-1]]  # As vLLM does: a window from its end.
    for fixed_s, loaded in ((5.5, looked_up), (6.5, [])):
        bench.takes(fixed_s, 0.0)
        request = bench.request(str(fixed_s), position=lambda key: ends[key])
        for key in looked_up:
            bench.ledger.lookup(key, request)
        sent = [action for action in bench.step() if isinstance(action, Promote)]
        assert [key for action in sent for key in unpack_keys(action.keys)] == loaded
        for action in sent:
            bench.fail(action, Code.MISSING)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_groups_save_the_time_of_their_tokens_once(tier: Callable[..., Bench], order: Sequence[int]) -> None:
    bench = tier()
    full, window = ([make_offload_key(name.encode(), group) for name in "abcdef"] for group in order)
    ends = dict(zip([*full, *window], [1, 2, 3, 4, 5, 6] * 2, strict=True))
    request = bench.request(position=lambda key: ends[key])
    groups = {order[0]: full, order[1]: window[3:]}
    keys = [*groups[0], *groups[1]]  # As vLLM loads them.
    bench.ledger.prepare_store(keys, request)
    bench.ledger.complete_store(keys, request)
    bench.ledger.prepare_load(keys, request)
    assert bench.ledger.counters.saved_s == 6.0


# What is late.


def test_a_load_that_is_late_is_given_up_and_a_hit_for_the_next_request(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(0.1, 0.1)
    request = bench.request()
    bench.lookup("abcd", request)
    sent = bench.step(5.9)
    assert bench.lookup("abcd", request) == [HIT_PENDING] * 4
    bench.step(0.2)
    assert bench.lookup("abcd", request) == [MISS] * 4
    bench.step()
    assert not bench.settled(), "the rows are the transfer's until it ends"
    assert bench.ledger.tiers[0].counters.given_up == 1
    bench.finish_all(sent)
    assert bench.settled()
    assert bench.lookup("abcd", bench.request("next")) == [HIT] * 4


def test_a_request_that_gave_up_a_load_stores_nothing_over_it(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(0.1, 0.1)
    request = bench.request()
    bench.lookup("abcd", request)
    (load,) = bench.step(100.0)
    assert bench.lookup("abcd", request)[0] is MISS
    plan = bench.store("abcdgh", request)
    assert plan is not None
    assert names_of(plan.keys) == "gh"
    bench.fail(load, Code.FAILED)
    assert bench.ready() == "gh"


def test_chunks_that_came_in_time_are_hits_when_the_rest_is_given_up(tier: Callable[..., Bench]) -> None:
    bench = tier(action_chunks=2)
    bench.takes(0.1, 0.1)
    request = bench.request()
    bench.lookup("abcdef", request)
    first, *_ = bench.step(100.0)
    bench.finish(first)
    assert bench.lookup("abcdef", request)[:3] == [HIT, HIT, MISS]


def test_a_request_that_waits_for_anothers_load_gives_it_up_in_its_own_time(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(0.1, 0.1)
    first, second = bench.request("first"), bench.request("second")
    bench.lookup("abcdef", first)
    bench.step(1.0)
    assert bench.lookup("ab", second) == [HIT_PENDING] * 2
    bench.step(3.1)
    assert bench.lookup("ab", second) == [MISS] * 2
    assert bench.lookup("abcdef", first) == [HIT_PENDING] * 6


DECLINED, LATE, FAILED = "was declined", "was late", "failed"


@pytest.mark.parametrize("why", [DECLINED, LATE, FAILED])
@pytest.mark.parametrize("missed_before", [False, True], ids=["", "missed before"])
def test_earlier_waits_do_not_shorten_the_next_one(tier: Callable[..., Bench], why: str, missed_before: bool) -> None:
    """Earlier waits do not count, however they ended."""
    bench = tier()
    bench.takes(0.1, 0.1)
    request = bench.request()
    if missed_before:
        request.search.missed.update(bench.keys("a"))
    if why is DECLINED:
        bench.takes(3.0, 0.5)
    assert bench.lookup("abcd", request) == [HIT_PENDING] * 4
    sent = bench.step(6.1 if why is LATE else 1.0)
    if why is FAILED:
        bench.fail(sent[0], Code.FAILED)
    assert bench.lookup("abcd", request) == [MISS] * 4
    bench.step(100.0)
    if why is LATE:
        bench.finish_all(sent)
    bench.takes(0.1, 0.1)
    other = bench.request("other")
    bench.holds("gh")
    assert bench.lookup("gh", other) == [HIT_PENDING] * 2
    bench.step()
    assert bench.lookup("gh", request) == [HIT_PENDING] * 2
    bench.step(2.9)
    assert bench.lookup("gh", request) == [HIT_PENDING] * 2
    bench.step(0.2)
    assert bench.lookup("gh", request) == [MISS] * 2
    assert len(bench.waited) == 1
    bench.step()
    assert len(bench.waited) == 2


def test_a_request_that_waits_behind_a_miss_gives_up_in_time(tier: Callable[..., Bench]) -> None:
    """The miss is of another group: it does not restart the wait with every step."""
    bench = tier()
    bench.takes(0.1, 0.1)
    request = bench.request()
    for seconds in (1.0, 1.0, 1.1):
        assert bench.lookup("zab", request) == [MISS] + [HIT_PENDING] * 2
        bench.step(seconds)
    assert bench.lookup("zab", request) == [MISS] * 3
    bench.step()
    assert bench.waited == [pytest.approx(3.1)]


def test_a_load_that_waits_longer_than_it_should_take_makes_its_tier_look_slow(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(0.5, 0.0)
    bench.lookup("abcd", bench.request("first"))
    bench.step(5.0)
    bench.lookup("ef", bench.request("second"))
    assert loads(bench.step()) == {}


def test_how_long_loads_take_is_counted_beside_what_was_expected(tier: Callable[..., Bench]) -> None:
    bench = tier(action_chunks=2)
    bench.takes(0.1, 0.1)
    bench.lookup("abcd")
    bench.finish_all(bench.step())
    counters = bench.ledger.tiers[0].counters
    assert counters.expected_seconds == pytest.approx(0.3 + 0.5)
    assert counters.loaded_seconds == pytest.approx(2 * SECONDS)


# What is tried again.


def test_a_declined_tier_is_tried_with_few_chunks_that_no_request_waits_for(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(100.0, 0.0)
    bench.step(TRIAL_EVERY_S)
    request = bench.request()
    bench.lookup("abcdef", request)
    sent = bench.step()
    assert loads(sent) == {0: "abcdef"[:TRIAL_CHUNKS]}
    assert bench.lookup("abcdef", request) == [MISS] * 6
    bench.lookup("abcdef", bench.request("next"))
    assert loads(bench.step()) == {}, "not twice at a time"
    bench.finish_all(sent)
    bench.takes(0.1, 0.0)
    assert bench.ledger.tiers[0].counters.explored == TRIAL_CHUNKS
    bench.lookup("cdef", bench.request("after"))
    assert loads(bench.step()) == {0: "cdef"}


def test_a_failed_load_does_not_count_as_a_fast_one(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(100.0, 0.0)
    bench.step(TRIAL_EVERY_S)
    bench.lookup("abcdef")
    (failing,) = bench.step()
    bench.fail(failing, Code.FAILED)
    bench.lookup("cdef")
    assert loads(bench.step()) == {}, "not at once, and not with more"
    bench.step(TRIAL_EVERY_S)
    bench.lookup("cdef")
    assert loads(bench.step()) == {0: "cdef"[:TRIAL_CHUNKS]}
    counters = bench.ledger.tiers[0].counters
    assert (counters.expected_seconds, counters.loaded_seconds) == (0.0, 0.0), "it did not come"


def test_one_load_that_took_longer_than_computing_is_enough_though_it_was_not_given_up(
    tier: Callable[..., Bench],
) -> None:
    bench = tier()
    bench.takes(0.1, 0.1)
    bench.lookup("abc")
    bench.finish_all(bench.step(3.5), seconds=3.5)
    assert bench.ledger.tiers[0].counters.given_up == 0
    bench.step(TRIAL_EVERY_S)
    request = bench.request("next")
    bench.lookup("def", request)
    assert loads(bench.step()) == {0: "de"}
    assert bench.lookup("def", request) == [MISS] * 3, "the trial had no request"


def late_for_large_loads(tier: Callable[..., Bench]) -> Bench:
    """Make a ledger whose tier holds a to z; it was late with twelve chunks and is fast again with two."""
    bench = tier(rows=32)
    bench.holds("ghijklmnopqrstuvwxyz")
    bench.takes(0.1, 0.1)
    bench.lookup("abcdefghijkl")
    bench.finish_all(bench.step(13.0), seconds=13.0)
    bench.step(TRIAL_EVERY_S)
    bench.lookup("mno")
    sent = bench.step()
    assert loads(sent) == {0: "mn"}
    bench.finish_all(sent, seconds=0.3)
    return bench


def test_small_loads_that_are_fast_again_are_used_while_large_ones_are_not_known_to_be(
    tier: Callable[..., Bench],
) -> None:
    bench = late_for_large_loads(tier)
    bench.lookup("op", bench.request("small"))
    sent = bench.step()
    assert loads(sent) == {0: "op"}, "as many as were tried"
    bench.finish_all(sent, seconds=0.3)
    large = bench.request("large")
    bench.lookup("qrs", large)
    bench.step()
    assert bench.lookup("qrs", large) == [MISS] * 3
    for names in ("t", "uv"):
        bench.lookup(names)
        sent = bench.step()
        assert loads(sent) == {0: names}, "a smaller one changes nothing"
        bench.finish_all(sent, seconds=0.3)


def test_small_loads_that_are_fast_do_not_postpone_the_trial_of_large_ones(tier: Callable[..., Bench]) -> None:
    bench = late_for_large_loads(tier)
    bench.step(TRIAL_EVERY_S)
    bench.lookup("op", bench.request("small"))
    bench.finish_all(bench.step(), seconds=0.3)
    bench.lookup("qrstuvwxyz", bench.request("large"))
    sent = bench.step()
    assert loads(sent) == {0: "qrstuvwx"}
    bench.finish_all(sent, seconds=0.9)
    assert bench.ledger.tiers[0].late is None


def test_a_trial_that_took_longer_than_computing_is_followed_by_a_small_one(tier: Callable[..., Bench]) -> None:
    bench = tier(rows=32)
    bench.holds("ghijklmnopqrstuvwxyz")
    bench.takes(100.0, 0.0)
    for names, tried, seconds in [
        ("abcdefghijkl", "ab", 0.3),
        ("cdefghijklmn", "cdefghij", 12.0),
        ("klmnopqrstuv", "kl", 0.3),
    ]:
        bench.step(TRIAL_EVERY_S)
        bench.lookup(names)
        sent = bench.step()
        assert loads(sent) == {0: tried}
        bench.finish_all(sent, seconds=seconds)


def test_a_tier_that_loads_the_leading_part_is_not_tried_with_the_declined_rest(tier: Callable[..., Bench]) -> None:
    bench = tier(tiers=2, rows=32)
    bench.holds("gh", tier=1)
    bench.holds("ij")
    bench.takes(0.1, 0.1)
    bench.takes(100.0, 0.0, tier=1)
    bench.step(TRIAL_EVERY_S)
    bench.lookup("abcdefghij")
    assert loads(bench.step()) == {0: "abcdef", 1: "gh"}, "gh is the other tier's trial"


def test_a_load_of_its_kind_that_is_faster_than_computing_makes_up_for_a_late_one(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.holds("ghij")
    bench.takes(0.1, 0.1)
    bench.lookup("abcdef")
    bench.finish_all(bench.step(7.0), seconds=7.0)
    assert bench.ledger.tiers[0].late is not None
    bench.step(TRIAL_EVERY_S)
    bench.lookup("ghij")
    bench.finish_all(bench.step(), seconds=1.9)  # Two chunks, for no request.
    assert bench.ledger.tiers[0].late is None
    assert bench.lookup("ij", bench.request("next")) == [HIT_PENDING] * 2
    assert loads(bench.step()) == {0: "ij"}


def test_a_tier_that_is_declined_at_once_is_tried_too(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(0.0, 100.0)
    bench.step(TRIAL_EVERY_S)
    request = bench.request()
    assert bench.lookup("abc", request) == [HIT_PENDING] * 3
    assert bench.lookup("def", bench.request("other")) == [MISS] * 3, "one request is enough to see it"
    sent = bench.step()
    assert loads(sent) == {0: "abc"[:TRIAL_CHUNKS]}
    assert bench.lookup("abc", request) == [MISS] * 3
    assert bench.lookup("c") == [MISS]
    assert loads(bench.step()) == {}
    bench.finish_all(sent)
    assert bench.settled()
    assert bench.ready() == "ab"


def test_nothing_is_weighed_after_a_reset_that_was_looked_up_before_it(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(3.0, 0.5)
    bench.lookup("abcdef")
    bench.ledger.reset()
    assert loads(bench.step()) == {}
    assert bench.settled()


# With prefetches.


def test_a_load_declined_for_a_request_still_serves_a_prefetch(tier: Callable[..., Bench]) -> None:
    bench = tier()
    bench.takes(3.0, 0.5)
    prefetch = bench.ledger.prefetches.begin(bench.keys("abc"))
    request = bench.request()
    assert bench.lookup("abc", request) == [HIT_PENDING] * 3
    sent = bench.step()
    assert loads(sent) == {0: "abc"}
    assert bench.lookup("abc", request) == [MISS] * 3
    bench.ledger.finish(request)
    bench.finish_all(sent)
    bench.step()
    assert (prefetch.over, prefetch.here, bench.ready()) == (True, 3, "abc")
    assert bench.settled()


# Of several tiers that have the same.


@pytest.fixture
def both(tier: Callable[..., Bench]) -> Callable[..., Bench]:
    """Make a ledger whose two tiers both hold a to f."""

    def make(**options: object) -> Bench:
        made = tier(tiers=2, **options)
        made.holds("abcdef", tier=1)
        return made

    return make


def chosen(bench: Bench, names: str, request: Request | None = None) -> list[Action]:
    """Return what is sent for a request: at once, or when it has passed over a tier that is too slow."""
    request = request or bench.request()
    bench.lookup(names, request)
    sent = bench.step()
    if not sent:
        bench.lookup(names, request)
        sent = bench.step()
    return sent


def test_a_second_tier_loads_chunks_that_the_first_is_too_slow_for(both: Callable[..., Bench]) -> None:
    """Whether a look-up shows it at once, or the step's end does."""
    for fixed_s, chunk_s in ((0.0, 2.0), (100.0, 0.0)):
        bench = both()
        bench.takes(fixed_s, chunk_s)
        bench.takes(0.1, 0.1, tier=1)
        assert loads(chosen(bench, "abcdef")) == {1: "abcdef"}


def test_chunks_that_every_tier_is_too_slow_for_are_computed(both: Callable[..., Bench]) -> None:
    bench = both()
    bench.takes(0.0, 1.0)
    bench.takes(0.0, 2.0, tier=1)
    assert bench.lookup("a") == [MISS]
    bench.takes(100.0, 0.0)
    bench.takes(100.0, 0.0, tier=1)
    request = bench.request()
    assert loads(chosen(bench, "abcdef", request)) == {}
    assert bench.lookup("abcdef", request) == [MISS] * 6
    bench.step()
    assert bench.settled()
    assert sum(each.counters.declined for each in bench.ledger.tiers) == 7


def test_a_tier_that_was_never_heard_of_is_tried_only_where_no_other_is_worth_its_load(
    both: Callable[..., Bench],
) -> None:
    bench = both()
    bench.takes(0.1, 0.1)
    bench.lookup("abc", bench.request("first"))
    assert loads(bench.step()) == {0: "abc"}
    bench.takes(100.0, 0.1)
    assert loads(chosen(bench, "def", bench.request("second"))) == {1: "def"}


def test_a_tier_that_hangs_sends_the_next_request_to_the_other(both: Callable[..., Bench]) -> None:
    bench = both()
    bench.takes(0.1, 0.1)
    bench.takes(0.5, 0.1, tier=1)
    bench.lookup("abc", bench.request("first"))
    assert loads(bench.step(4.0)) == {0: "abc"}
    assert loads(chosen(bench, "def", bench.request("second"))) == {1: "def"}


@pytest.fixture
def unknown(bench: type[Bench]) -> Callable[..., Bench]:
    """Make a ledger whose first tier holds a to f, and whose second must be asked."""

    def make(fixed_s: float, chunk_s: float) -> Bench:
        made = bench(16, 2, computing_s=1.0)
        made.knows_all()
        made.holds("abcdef")
        made.takes(fixed_s, chunk_s)
        made.takes(0.1, 0.1, tier=1)
        return made

    return make


SLOW = pytest.mark.parametrize(("fixed_s", "chunk_s"), [(0.0, 2.0), (100.0, 0.0)], ids=["at once", "at the end"])


def asked(bench: Bench, request: Request, names: str = "abcdef") -> Action:
    """Look up what the first tier is too slow for, and return the probe of the second."""
    answers = bench.lookup(names, request)
    actions = bench.step()
    if answers == [HIT_PENDING] * len(names):
        assert actions == []
        answers = bench.lookup(names, request)
        actions = bench.step()
    assert answers == [RETRY] * len(names)
    (probe,) = actions
    assert isinstance(probe, Probe)
    assert (probe.tier, names_of(unpack_keys(probe.keys))) == (1, names)
    return probe


@SLOW
def test_while_the_first_tier_is_worth_its_load_no_other_is_asked(
    unknown: Callable[..., Bench], fixed_s: float, chunk_s: float
) -> None:
    bench = unknown(fixed_s / 1_000, chunk_s / 1_000)
    bench.lookup("abcdef")
    assert loads(bench.step()) == {0: "abcdef"}


@SLOW
def test_an_unprobed_tier_is_probed_before_computing(
    unknown: Callable[..., Bench], fixed_s: float, chunk_s: float
) -> None:
    bench = unknown(fixed_s, chunk_s)
    request = bench.request()
    probe = asked(bench, request)
    assert bench.lookup("abcdef", request) == [RETRY] * 6
    assert bench.step() == []
    bench.answer(probe, True)
    assert bench.lookup("abcdef", request) == [HIT_PENDING] * 6
    sent = bench.step()
    assert loads(sent) == {1: "abcdef"}
    bench.finish_all(sent)
    assert bench.lookup("abcdef", request) == [HIT] * 6


@SLOW
@pytest.mark.parametrize("word", [False, None], ids=["has not", "does not answer"])
def test_chunks_that_the_probed_tier_lacks_are_computed(
    unknown: Callable[..., Bench], fixed_s: float, chunk_s: float, word: bool | None
) -> None:
    bench = unknown(fixed_s, chunk_s)
    request = bench.request()
    bench.answer(asked(bench, request), word)
    assert bench.lookup("abcdef", request) == [MISS] * 6
    assert bench.step() == []
    assert bench.lookup("abcdef", request) == [MISS] * 6
    bench.ledger.finish(request)
    assert bench.settled()
    assert bench.ledger.tiers[0].counters.declined == 6
    assert bench.ledger.counters.misses == 6


@SLOW
def test_the_leading_part_that_the_probed_tier_has_is_loaded(
    unknown: Callable[..., Bench], fixed_s: float, chunk_s: float
) -> None:
    bench = unknown(fixed_s, chunk_s)
    request = bench.request()
    bench.answer(asked(bench, request), [True] * 4 + [False] * 2)
    bench.lookup("abcdef", request)
    assert loads(bench.step()) == {1: "abcd"}
    assert bench.lookup("abcdef", request) == [HIT_PENDING] * 4 + [MISS] * 2


def test_a_tier_that_may_not_be_asked_for_long_is_not_waited_for(bench: type[Bench]) -> None:
    """The trial of the tier that has it serves no request."""
    made = bench(16, [bench.spec("first"), bench.spec("second", asked_keys_max=1)], computing_s=1.0)
    made.knows_all()
    made.holds("abc")
    made.lookup("z")
    made.step()
    made.takes(100.0, 0.0)
    made.step(TRIAL_EVERY_S)
    request = made.request()
    made.lookup("abc", request)
    assert made.step() == []
    assert made.lookup("abc", request) == [HIT_PENDING] * 3
    assert loads(made.step()) == {0: "abc"[:TRIAL_CHUNKS]}
    assert made.lookup("abc", request) == [MISS] * 3


@SLOW
def test_a_request_that_may_not_load_from_the_other_tier_does_not_ask_it(
    unknown: Callable[..., Bench], fixed_s: float, chunk_s: float
) -> None:
    bench = unknown(fixed_s, chunk_s)
    request = Request("r", load_matchers=[TierMatcher(medium="STORAGE")])
    bench.ledger.tiers[1].spec = bench.ledger.tiers[1].spec._replace(medium="REMOTE")
    bench.lookup("abc", request)
    assert bench.step() == []
    assert bench.lookup("abc", request) == [MISS] * 3


@SLOW
def test_a_tier_that_is_never_chosen_is_tried_now_and_then(
    both: Callable[..., Bench], fixed_s: float, chunk_s: float
) -> None:
    """With the last chunks of a prompt, which are computed meanwhile: it may have become faster."""
    bench = both()
    bench.takes(fixed_s, chunk_s)
    bench.takes(0.1, 0.1, tier=1)
    bench.step(TRIAL_EVERY_S)
    assert loads(chosen(bench, "abcdef")) == {1: "abcdef"}, "two computed chunks are a hundredth of a longer time"
    bench = both()
    bench.takes(fixed_s, chunk_s)
    bench.takes(0.1, 0.1, tier=1)
    bench.step(100 * TRIAL_CHUNKS)
    request = bench.request()
    sent = chosen(bench, "abcdef", request)
    assert loads(sent) == {1: "abcd", 0: "ef"}
    assert bench.ledger.leases.rows == 4, "the trial's rows are leased to no request"
    assert bench.lookup("abcdef", request) == [HIT_PENDING] * 4 + [MISS] * 2
    bench.finish_all(sent)
    assert bench.lookup("abcdef", request) == [HIT] * 6, "chunks that have come meanwhile are hits"
    assert bench.ledger.tiers[0].counters.explored == TRIAL_CHUNKS
    assert bench.ledger.tiers[0].counters.hits == 0
    bench.ledger.finish(request)
    bench.step()
    assert bench.settled()


@pytest.mark.parametrize(
    ("ends", "sent"),
    [((1, 2, 3, 4, 5, 6), {1: "abcd", 0: "ef"}), ((6, 5, 4, 3, 2, 1), {1: "abcdef"})],
    ids=["in prefix order", "of which only the last tokens are needed"],
)
def test_a_tier_is_tried_next_to_another_where_a_leading_part_is_of_use(
    both: Callable[..., Bench], ends: Sequence[int], sent: dict[int, str]
) -> None:
    bench = both()
    bench.takes(100.0, 0.0)
    bench.takes(0.1, 0.1, tier=1)
    bench.step(100 * TRIAL_CHUNKS)
    places = dict(zip(bench.keys("abcdef"), ends, strict=True))
    assert loads(chosen(bench, "abcdef", bench.request(position=places.__getitem__))) == sent


def never_chosen(bench: type[Bench], names: str = "abcdef") -> Bench:
    """Make a ledger whose first tier holds `names` and is due for a trial; its second holds a to f and is fast."""
    made = bench(16, 3, computing_s=1.0)
    made.knows_all(0)
    made.knows_all(1)
    made.holds(names)
    made.holds("abcdef", tier=1)
    made.takes(0.0, 100.0)
    made.takes(0.1, 0.1, tier=1)
    made.step(100 * TRIAL_CHUNKS)
    return made


def test_a_tier_is_tried_with_the_chunks_that_it_holds(bench: type[Bench]) -> None:
    made = never_chosen(bench, "f")
    made.knows_all(2)
    made.lookup("abcdef")
    assert loads(made.step()) == {1: "abcde", 0: "f"}


def test_no_tier_is_tried_with_chunks_that_others_in_the_primary_follow(bench: type[Bench]) -> None:
    made = never_chosen(bench)
    made.knows_all(2)
    made.stored_alone("g")
    made.lookup("abcdefg")
    assert loads(made.step()) == {1: "abcdef"}


def test_no_tier_is_tried_while_a_probe_may_find_further_chunks(bench: type[Bench]) -> None:
    made = never_chosen(bench)
    assert made.lookup("abcdefg") == [HIT_PENDING] * 6 + [RETRY]
    assert loads(made.step()) == {1: "abcdef"}


def test_a_trial_counts_against_a_half_open_breaker(bench: type[Bench]) -> None:
    made = never_chosen(bench)
    made.knows_all(2)
    first = made.ledger.tiers[0]
    first.breaker.trip(made.now)
    made.step(first.spec.breaker_cooldown_s)
    made.lookup("abcdef")
    assert loads(made.step()) == {1: "abcd", 0: "ef"}
    assert first.admits(made.now) == 0


def test_a_tier_that_is_passed_over_is_tried_where_the_others_are_too_slow_too(both: Callable[..., Bench]) -> None:
    bench = both()
    bench.takes(100.0, 0.0)
    bench.takes(100.0, 0.0, tier=1)
    bench.step(TRIAL_EVERY_S)
    request = bench.request()
    sent = chosen(bench, "abcdef", request)
    assert loads(sent) == {0: "ef", 1: "ab"}
    assert bench.lookup("abcdef", request) == [MISS] * 6
    bench.finish_all(sent)
    bench.step()
    assert bench.settled()


def test_tiers_that_are_declined_at_once_are_tried_in_turn(both: Callable[..., Bench]) -> None:
    bench = both()
    bench.takes(0.0, 100.0)
    bench.takes(0.0, 100.0, tier=1)
    bench.step(TRIAL_EVERY_S)
    tried: list[int] = []
    for names in ("ab", "cd"):
        bench.lookup(names)
        sent = bench.step(TRIAL_EVERY_S)
        tried += loads(sent)
        bench.finish_all(sent)
        bench.step(TRIAL_EVERY_S)
    assert tried == [0, 1]


def test_a_prompt_is_loaded_whole_while_the_breaker_of_the_tier_passed_over_is_open(both: Callable[..., Bench]) -> None:
    bench = both()
    bench.takes(100.0, 0.0)
    bench.takes(0.1, 0.1, tier=1)
    bench.step(100 * TRIAL_CHUNKS)
    request = bench.request()
    bench.lookup("abcdef", request)
    assert bench.step() == []
    bench.lookup("abcdef", request)
    bench.ledger.tiers[0].breaker.trip(bench.now)
    assert loads(bench.step()) == {1: "abcdef"}


def test_without_weighing_the_first_tier_that_has_it_loads(both: Callable[..., Bench]) -> None:
    bench = both(computing_s=None)
    bench.takes(100.0, 1.0)
    bench.takes(0.1, 0.1, tier=1)
    bench.lookup("abcdef")
    assert loads(bench.step()) == {0: "abcdef"}


def test_a_load_is_given_up_when_it_is_late_though_room_was_made_for_it(tier: Callable[..., Bench]) -> None:
    """A full primary: the request is noted before room is made, and after it."""
    bench = tier(rows=8)
    bench.stored_alone("stuvwxyz")
    bench.takes(0.1, 0.01)
    request = bench.request()
    assert bench.lookup("abc", request) == [HIT_PENDING] * 3
    bench.step(seconds=4.6)  # One and a half times what computing takes, and more.
    assert bench.lookup("abc", request) == [MISS] * 3
    assert bench.ledger.tiers[0].counters.given_up == 1
