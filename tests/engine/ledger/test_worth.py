"""Loads that are weighed against computing: what is declined, what is given up, and what is tried again."""

import pytest

from kvtier.backend.namespace import make_offload_key
from kvtier.engine.loads import TRIAL_CHUNKS, TRIAL_EVERY_S
from kvtier.runner.messages import Code, Found, Probe, Promote, pack_keys, unpack_keys
from tests.engine.ledger.bench import HIT, MISS, PENDING, RETRY, SECONDS, Bench, ending_at, loads, names_of


def tier(*, rows=16, tiers=1, holds="abcdef", takes=None, **options):
    made = Bench(rows, tiers, **{"computing_s": 1.0, **options})
    for index in range(tiers):
        made.knows_all(index)
    made.holds(holds)
    if takes is not None:
        made.takes(*takes)
    return made


def both(*speeds, **options):
    """Make a ledger whose two tiers both hold a to f; speeds are of the first, and of the second."""
    made = tier(tiers=2, **options)
    made.holds("abcdef", tier=1)
    for index, takes in enumerate(speeds):
        made.takes(*takes, tier=index)
    return made


def wanted(bench, names, request=None, *, seconds=0.0):
    bench.lookup(names, request or bench.request())
    return loads(bench.step(seconds))


FAST, SLOW_CALLS, SLOW_BYTES = (0.1, 0.1), (100.0, 0.0), (0.0, 2.0)


@pytest.mark.parametrize(
    ("takes", "here", "names", "loaded"),
    [
        ((0.1, 0.01), "", "abcdef", "abcdef"),
        ((2.0, 0.5), "", "abc", ""),
        ((2.0, 0.5), "", "abcdef", "abcdef"),  # A longer prompt may be worth it.
        ((2.0, 0.5), "bcd", "abcd", "a"),  # Chunks in the primary behind a load count for it.
    ],
)
def test_loads_that_save_time_are_sent(takes, here, names, loaded):
    bench = tier(takes=takes)
    bench.stored_alone(here)
    assert wanted(bench, names) == ({0: loaded} if loaded else {})


@pytest.mark.promise("Loading takes longer than computing")
@pytest.mark.parametrize(("takes", "names", "at_first"), [((0.0, 1.0), "a", MISS), ((3.0, 0.5), "abcdef", PENDING)])
def test_a_load_that_is_slower_than_computing_is_a_miss_at_once_or_from_the_steps_end_on(takes, names, at_first):
    bench = tier(takes=takes)
    request = bench.request()
    assert bench.lookup(names, request) == [at_first] * len(names)
    assert loads(bench.step()) == {}
    assert bench.lookup(names, request) == [MISS] * len(names)
    bench.step()
    assert bench.settled()
    counters = bench.counters()
    assert (counters.declined, counters.declined_requests, counters.promoted) == (len(names), 1, 0)
    assert counters.declined_seconds == pytest.approx(len(names))
    assert bench.ledger.counters.misses == len(names)


@pytest.mark.parametrize("same_step", [False, True])
def test_loads_in_flight_and_of_the_same_step_delay_new_ones(same_step):
    bench = tier(takes=(0.0, 0.6))
    bench.lookup("abcd", bench.request("first"))
    sent = loads([] if same_step else bench.step())
    second = bench.request("second")
    assert sent | wanted(bench, "ef", second) == {0: "abcd"}
    assert bench.lookup("ef", second) == [MISS, MISS]


def test_of_two_tiers_the_leading_part_is_loaded_that_saves_most():
    bench = tier(tiers=2, rows=32, takes=(3.0, 0.0))
    bench.holds("ghijkl", tier=1)
    bench.takes(0.0, 1.6, tier=1)
    request = bench.request()
    bench.lookup("abcdefghijkl", request)
    sent = bench.step()
    assert loads(sent) == {0: "abcdef"}
    bench.finish_all(sent)
    assert bench.lookup("abcdefghijkl", request) == [HIT] * 6 + [MISS] * 6


def test_a_tier_that_was_never_heard_of_loads_for_one_request_first():
    """What is declined meanwhile adds no time: it is expected to take for ever."""
    bench = tier()
    bench.lookup("abc", bench.request("first"))
    sent = bench.step()
    assert loads(sent) == {0: "abc"}
    second = bench.request("second")
    assert wanted(bench, "def", second) == {}
    assert bench.lookup("def", second) == [MISS] * 3
    assert (bench.counters().declined, bench.counters().declined_seconds) == (3, 0.0)
    bench.finish_all(sent)
    bench.takes(0.0, 0.1)
    assert wanted(bench, "def") == {0: "def"}


def test_a_request_that_shares_chunks_with_a_declined_one_is_weighed_for_itself():
    bench = tier(takes=(3.5, 0.1))
    short, long = bench.request("short"), bench.request("long")
    assert bench.lookup("abc", short) == [PENDING] * 3
    assert bench.lookup("abcdef", long) == [PENDING] * 6
    assert loads(bench.step()) == {}
    assert bench.lookup("abc", short) == [MISS] * 3
    assert bench.lookup("abcdef", long) == [PENDING] * 6
    sent = bench.step()
    assert loads(sent) == {0: "abcdef"}
    assert bench.lookup("abc", short) == [MISS] * 3, "though the load is in flight"
    bench.finish_all(sent)
    assert bench.lookup("abcdef", long) == [HIT] * 6


def test_a_request_is_not_declined_before_every_tier_has_said_what_it_has():
    bench = Bench(16, computing_s=1.0)
    bench.takes(3.0, 0.1)
    bench.holds("ab")
    request = bench.request()
    assert bench.lookup("abcdef", request) == [PENDING] * 2 + [RETRY] * 4
    bench.answer(*bench.step(), True)
    assert bench.lookup("abcdef", request) == [PENDING] * 6
    assert loads(bench.step()) == {0: "abcdef"}


@pytest.mark.parametrize("fixed_s", [5.0, 5.5, 6.5, 9.0])
def test_a_model_of_several_groups_needs_all_or_nothing(fixed_s):
    """A sliding window is looked up backwards: its last token is what all before it was computed for.

    Full attention over six chunks, and a window of three: loading both saves the computing of six.
    """
    bench = tier(takes=(fixed_s, 0.0))
    request = bench.request(position=ending_at(bench.keys("abcdef"), [3, 4, 5, 6, 7, 8]))
    assert wanted(bench, "fedcba", request) == ({0: "fedcba"} if fixed_s < 8.0 else {})
    bench = tier(takes=(fixed_s, 0.0))
    full, window = ([make_offload_key(name.encode(), group) for name in "abcdef"] for group in (0, 1))
    bench.ledger.apply(Found(0, pack_keys([*full, *window])))
    looked_up = [*full, *window[:2:-1]]  # As vLLM does: a window from its end.
    request = bench.request(position=ending_at([*full, *window], [1, 2, 3, 4, 5, 6] * 2))
    for key in looked_up:
        bench.ledger.lookup(key, request)
    sent = [key for action in bench.step() if isinstance(action, Promote) for key in unpack_keys(action.keys)]
    assert sent == (looked_up if fixed_s < 6.0 else [])


@pytest.mark.promise("Loading takes longer than computing")
@pytest.mark.parametrize("full", [False, True])
def test_a_load_that_is_late_is_given_up_and_a_hit_for_the_next_request(full):
    """In a full primary, too: the request is noted before room is made, and after it. What came in time is a hit."""
    bench = tier(rows=8, takes=FAST, action_chunks=3)
    if full:
        bench.stored_alone("stuvwxyz")
    request = bench.request()
    bench.lookup("abcd", request)
    first, second = bench.step(5.9)
    assert bench.lookup("abcd", request) == [PENDING] * 4
    bench.finish(first)
    bench.step(0.2)
    assert bench.lookup("abcd", request) == [HIT] * 3 + [MISS]
    bench.step()
    assert not bench.settled(), "the rows are the transfer's until it ends"
    assert bench.counters().given_up == 1
    bench.finish(second)
    bench.ledger.finish(request)
    assert bench.settled()
    assert bench.counters().expected_seconds == pytest.approx(0.4 + 0.5)
    assert bench.counters().loaded_seconds == pytest.approx(2 * SECONDS)
    assert bench.lookup("abcd", bench.request("next")) == [HIT] * 4


def test_a_request_that_gave_up_a_load_stores_nothing_over_it():
    bench = tier(takes=FAST)
    request = bench.request()
    bench.lookup("abcd", request)
    (load,) = bench.step(100.0)
    assert bench.lookup("abcd", request)[0] is MISS
    assert names_of(bench.store("abcdgh", request).keys) == "gh"
    bench.fail(load, Code.FAILED)
    assert bench.ready() == "gh"


def test_a_request_that_waits_for_anothers_load_gives_it_up_in_its_own_time():
    bench = tier(takes=FAST)
    first, second = bench.request("first"), bench.request("second")
    bench.lookup("abcdef", first)
    bench.step(1.0)
    assert bench.lookup("ab", second) == [PENDING] * 2
    bench.step(3.1)
    assert bench.lookup("ab", second) == [MISS] * 2
    assert bench.lookup("abcdef", first) == [PENDING] * 6


DECLINED, LATE, FAILED = "was declined", "was late", "failed"


@pytest.mark.parametrize("why", [DECLINED, LATE, FAILED])
@pytest.mark.parametrize("missed_before", [False, True], ids=["", "missed before"])
def test_earlier_waits_do_not_shorten_the_next_one(why, missed_before):
    bench = tier(takes=(3.0, 0.5) if why is DECLINED else FAST)
    request = bench.request()
    if missed_before:
        request.search.missed.update(bench.keys("a"))
    assert bench.lookup("abcd", request) == [PENDING] * 4
    sent = bench.step(6.1 if why is LATE else 1.0)
    if why is FAILED:
        bench.fail(sent[0], Code.FAILED)
    assert bench.lookup("abcd", request) == [MISS] * 4
    bench.step(100.0)
    if why is LATE:
        bench.finish_all(sent)
    bench.takes(*FAST)
    bench.holds("gh")
    assert bench.lookup("gh", bench.request("other")) == [PENDING] * 2
    bench.step()
    for seconds in (2.9, 0.2):
        assert bench.lookup("gh", request) == [PENDING] * 2
        bench.step(seconds)
    assert bench.lookup("gh", request) == [MISS] * 2
    assert len(bench.waited) == 1
    bench.step()
    assert len(bench.waited) == 2


@pytest.mark.parametrize("takes", [SLOW_CALLS, (0.0, 100.0)], ids=["at the end", "at once"])
def test_a_declined_tier_is_tried_with_few_chunks_that_no_request_waits_for(takes):
    bench = tier(takes=takes)
    for failed in (True, False):
        bench.step(TRIAL_EVERY_S)
        request = bench.request()
        bench.lookup("abcdef", request)
        (load,) = bench.step()
        assert loads([load]) == {0: "abcdef"[:TRIAL_CHUNKS]}, "a failed load does not count as a fast one"
        assert bench.lookup("abcdef", request) == [MISS] * 6
        assert wanted(bench, "abcdef") == {}, "not twice at a time"
        if failed:
            bench.fail(load, Code.FAILED)
            assert wanted(bench, "cdef") == {}, "not at once, and not with more"
            bench.holds("ab")
            bench.step(11.0)
    bench.finish(load)
    bench.takes(0.1, 0.0)
    assert (bench.counters().explored, bench.ready()) == (2 * TRIAL_CHUNKS, "ab")
    assert wanted(bench, "cdef") == {0: "cdef"}


def tried(bench, names, expected, *, seconds, pause_s=0.0):
    bench.step(pause_s)
    bench.lookup(names)
    sent = bench.step()
    assert loads(sent) == {0: expected}
    bench.finish_all(sent, seconds=seconds)


def late_for_large_loads():
    """Make a ledger whose tier holds a to z; it was late with twelve chunks and is fast again with two."""
    bench = tier(rows=32, holds="abcdefghijklmnopqrstuvwxyz", takes=FAST)
    bench.lookup("abcdefghijkl")
    bench.finish_all(bench.step(13.0), seconds=13.0)
    assert bench.counters().given_up == 0, "one that took longer than computing is enough"
    tried(bench, "mno", "mn", seconds=0.3, pause_s=TRIAL_EVERY_S)
    return bench


def test_small_loads_that_are_fast_again_are_used_while_large_ones_are_not_known_to_be():
    bench = late_for_large_loads()
    tried(bench, "op", "op", seconds=0.3)  # As many as were tried.
    large = bench.request("large")
    assert wanted(bench, "qrs", large) == {}
    assert bench.lookup("qrs", large) == [MISS] * 3
    for names in ("t", "uv"):
        tried(bench, names, names, seconds=0.3)  # A smaller one changes nothing.
    bench = late_for_large_loads()
    tried(bench, "op", "op", seconds=0.3, pause_s=TRIAL_EVERY_S)
    tried(bench, "qrstuvwxyz", "qrstuvwx", seconds=0.9)  # Nor do they postpone the trial of large ones.
    assert bench.ledger.tiers[0].late is None


def test_a_trial_that_took_longer_than_computing_is_followed_by_a_small_one():
    bench = tier(rows=32, holds="abcdefghijklmnopqrstuvwxyz", takes=SLOW_CALLS)
    for names, expected, seconds in [
        ("abcdefghijkl", "ab", 0.3),
        ("cdefghijklmn", "cdefghij", 12.0),
        ("klmnopqrstuv", "kl", 0.3),
    ]:
        tried(bench, names, expected, seconds=seconds, pause_s=TRIAL_EVERY_S)


def test_a_load_declined_for_a_request_still_serves_a_prefetch():
    bench = tier(takes=(3.0, 0.5))
    prefetch = bench.ledger.prefetches.begin(bench.keys("abc"))
    request = bench.request()
    assert bench.lookup("abc", request) == [PENDING] * 3
    sent = bench.step()
    assert loads(sent) == {0: "abc"}
    assert bench.lookup("abc", request) == [MISS] * 3
    bench.ledger.finish(request)
    bench.finish_all(sent)
    bench.step()
    assert (prefetch.over, prefetch.here, bench.ready()) == (True, 3, "abc")
    assert bench.settled()


def chosen(bench, names, request=None):
    """Return what is sent for a request: at once, or when it has passed over a tier that is too slow."""
    request = request or bench.request()
    bench.lookup(names, request)
    sent = bench.step()
    if not sent:
        bench.lookup(names, request)
        sent = bench.step()
    return sent


# Too slow for each chunk, which a look-up shows at once; or for a call, which the step's end does.
SLOW = pytest.mark.parametrize("slow", [SLOW_BYTES, SLOW_CALLS], ids=["at once", "at the end"])


def test_a_tier_that_was_never_heard_of_is_tried_only_where_no_other_is_worth_its_load():
    bench = both(FAST)
    assert wanted(bench, "abc") == {0: "abc"}
    bench.takes(*SLOW_CALLS)
    assert loads(chosen(bench, "def")) == {1: "def"}


def test_a_tier_that_hangs_sends_the_next_request_to_the_other():
    bench = both(FAST, (0.5, 0.1))
    assert wanted(bench, "abc", seconds=4.0) == {0: "abc"}
    assert loads(chosen(bench, "def")) == {1: "def"}


@SLOW
@pytest.mark.parametrize("has", [6, 4, 0, None])
def test_an_unprobed_tier_is_probed_before_computing(slow, has):
    bench = Bench(16, 2, computing_s=1.0)
    bench.knows_all()
    bench.holds("abcdef")
    for tier, takes in enumerate((slow, FAST)):
        bench.takes(*takes, tier=tier)
    request = bench.request()
    if slow is SLOW_CALLS:
        assert bench.lookup("abcdef", request) == [PENDING] * 6
        assert bench.step() == []
    assert bench.lookup("abcdef", request) == [RETRY] * 6
    (probe,) = bench.step()
    assert isinstance(probe, Probe)
    assert (probe.tier, names_of(unpack_keys(probe.keys))) == (1, "abcdef")
    assert bench.lookup("abcdef", request) == [RETRY] * 6
    assert bench.step() == []
    bench.answer(probe, None if has is None else [True] * has + [False] * (6 - has))
    has = has or 0
    bench.lookup("abcdef", request)
    sent = bench.step()
    assert loads(sent) == ({1: "abcdef"[:has]} if has else {})
    assert bench.lookup("abcdef", request) == [PENDING] * has + [MISS] * (6 - has)
    bench.finish_all(sent)
    assert bench.lookup("abcdef", request) == [HIT] * has + [MISS] * (6 - has)
    bench.ledger.finish(request)
    bench.step()
    assert bench.settled()
    assert (bench.counters().declined, bench.ledger.counters.misses) == (6 - has, 6 - has)


def test_a_tier_that_may_not_be_asked_for_long_is_not_waited_for():
    made = Bench(16, [Bench.spec("first"), Bench.spec("second", asked_keys_max=1)], computing_s=1.0)
    made.knows_all()
    made.holds("abc")
    made.lookup("z")
    made.step()
    made.takes(*SLOW_CALLS)
    made.step(TRIAL_EVERY_S)
    request = made.request()
    assert wanted(made, "abc", request) == {}
    assert made.lookup("abc", request) == [PENDING] * 3
    assert loads(made.step()) == {0: "abc"[:TRIAL_CHUNKS]}
    assert made.lookup("abc", request) == [MISS] * 3


@SLOW
def test_a_tier_that_is_never_chosen_is_tried_now_and_then(slow):
    """With the last chunks of a prompt, which are computed meanwhile: it may have become faster."""
    bench = both(slow, FAST)
    bench.step(TRIAL_EVERY_S)
    assert loads(chosen(bench, "abcdef")) == {1: "abcdef"}, "two computed chunks are a hundredth of a longer time"
    bench = both(slow, FAST)
    bench.step(100 * TRIAL_CHUNKS)
    request = bench.request()
    sent = chosen(bench, "abcdef", request)
    assert loads(sent) == {1: "abcd", 0: "ef"}
    assert bench.ledger.leases.rows == 4, "the trial's rows are leased to no request"
    assert bench.lookup("abcdef", request) == [PENDING] * 4 + [MISS] * 2
    bench.finish_all(sent)
    assert bench.lookup("abcdef", request) == [HIT] * 6, "chunks that have come meanwhile are hits"
    assert (bench.counters().explored, bench.counters().hits) == (TRIAL_CHUNKS, 0)
    bench.ledger.finish(request)
    bench.step()
    assert bench.settled()


@pytest.mark.parametrize(
    ("case", "sent"),
    [
        ("it holds f alone", {1: "abcde", 0: "f"}),  # It is tried with what it has.
        ("others in the primary follow", {1: "abcdef"}),
        ("a probe may find further chunks", {1: "abcdef"}),
        ("its breaker is half open", {1: "abcd", 0: "ef"}),
        ("its breaker opens meanwhile", {1: "abcdef"}),
        ("chunks are in prefix order", {1: "abcd", 0: "ef"}),
        ("only the last tokens are needed", {1: "abcdef"}),
    ],
)
def test_what_a_tier_that_is_never_chosen_is_tried_with(case, sent):
    bench = Bench(16, 3, computing_s=1.0)
    for tier in range(2 if case == "a probe may find further chunks" else 3):
        bench.knows_all(tier)
    bench.holds("f" if case == "it holds f alone" else "abcdef")
    bench.holds("abcdef", tier=1)
    bench.takes(0.0, 100.0)
    bench.takes(*FAST, tier=1)
    bench.step(100 * TRIAL_CHUNKS)
    first = bench.ledger.tiers[0]
    names, request = "abcdef", bench.request()
    match case:
        case "others in the primary follow":
            bench.stored_alone("g")
            names += "g"
        case "a probe may find further chunks":
            names += "g"
        case "its breaker is half open":
            first.breaker.trip(bench.now)
            bench.step(first.spec.breaker_cooldown_s)
        case "chunks are in prefix order":
            request = bench.request(position=ending_at(bench.keys(names), [1, 2, 3, 4, 5, 6]))
        case "only the last tokens are needed":
            request = bench.request(position=ending_at(bench.keys(names), [6, 5, 4, 3, 2, 1]))
    bench.lookup(names, request)
    if case == "its breaker opens meanwhile":
        first.breaker.trip(bench.now)
    assert loads(bench.step()) == sent
    if case == "its breaker is half open":
        assert first.admits(bench.now) == 0, "the trial counts"


@pytest.mark.parametrize(
    ("slow", "tries"), [(SLOW_CALLS, [{0: "ef", 1: "ab"}]), ((0.0, 100.0), [{0: "ab"}, {1: "cd"}])]
)
def test_tiers_that_are_all_too_slow_are_tried_together_or_in_turn(slow, tries):
    bench = both(slow, slow)
    assert loads(chosen(bench, "abcdef")) == {}, "all are computed"
    assert sum(each.counters.declined for each in bench.ledger.tiers) == 6
    for expected in tries:
        bench.step(TRIAL_EVERY_S)
        names = "abcdef" if len(tries) == 1 else expected.get(0) or expected[1]
        request = bench.request()
        bench.lookup(names, request)
        sent = bench.step(TRIAL_EVERY_S * (len(tries) - 1)) or chosen(bench, names, request)
        assert loads(sent) == expected
        assert bench.lookup(names, request) == [MISS] * len(names)
        bench.finish_all(sent)
        bench.step()
        assert bench.settled()
