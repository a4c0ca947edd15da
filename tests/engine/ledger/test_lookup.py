"""Look-ups: their answers, the tiers that are probed, and how long a probe's answer is believed."""

import pytest

from kvtier.engine.tier import BreakerState, TierMatcher
from kvtier.runner.messages import Code, Probe, Promote, unpack_keys
from tests.engine.ledger.bench import HIT, MISS, PENDING, RETRY


@pytest.mark.parametrize("forget", ["delete", "reset"])
def test_a_hit_is_forgotten_before_the_step_ends_by_a_deletion_or_a_reset(bench, forget):
    engine = bench(rows=1)
    engine.stored_alone("a")
    assert engine.lookup("a") == [HIT]
    if forget == "delete":
        assert engine.ledger.delete(engine.keys("a")) == []
    else:
        engine.ledger.reset()
    with pytest.raises(LookupError):
        engine.load("a")
    assert engine.store("b")


def test_all_tiers_that_do_not_know_are_asked_once_whoever_looks_and_answer_key_by_key(bench):
    engine = bench(tiers=2)
    assert engine.lookup("ab") == engine.lookup("ab") == [RETRY, RETRY]
    assert engine.ledger.pending
    probes = engine.step()
    assert [(probe.tier, unpack_keys(probe.keys)) for probe in probes] == [(tier, engine.keys("ab")) for tier in (0, 1)]
    assert engine.lookup("ab") == [RETRY, RETRY]
    assert engine.step() == []
    assert engine.ledger.pending
    for probe in probes:
        engine.answer(probe, [False, True])
    assert not engine.ledger.pending
    assert engine.lookup("ab") == [MISS, PENDING]


@pytest.mark.parametrize(
    ("present", "seconds", "answered"),
    [
        *((True, 9.9, PENDING), (True, 10.0, RETRY)),
        *((False, 9.9, MISS), (False, 10.0, RETRY)),
        *((None, 9.9, MISS), (None, 10.0, RETRY)),
    ],
)
def test_an_answer_is_believed_for_its_time_and_not_longer(engine, present, seconds, answered):
    engine.lookup("a")
    engine.answer(*engine.step(), present)
    engine.step(seconds)
    assert engine.lookup("a") == [answered]


@pytest.mark.parametrize(
    ("end", "counted"), [(True, 0), (False, 0), (None, 1), (Code.DEADLINE, 1), (Code.LOST, 0), (Code.REFUSED, 0)]
)
def test_a_probe_without_an_answer_is_counted_and_no_transfer(engine, end, counted):
    engine.lookup("a")
    (probe,) = engine.step()
    if isinstance(end, Code):
        engine.fail(probe, end)
    else:
        engine.answer(probe, end)
    counters = engine.counters()
    assert (counters.probes_failed, counters.transfers_failed) == (counted, 0)


@pytest.mark.parametrize(
    ("complete", "answers"), [(None, [PENDING, RETRY]), (False, [PENDING, RETRY]), (True, [PENDING, MISS])]
)
def test_a_tier_is_asked_for_keys_that_it_has_not_listed_unless_its_list_is_complete(engine, complete, answers):
    engine.holds("a")
    if complete is not None:
        engine.knows_all(complete=complete)
    assert engine.lookup("ab") == answers
    assert [type(action) for action in engine.step()] == [*[Probe] * answers.count(RETRY), Promote]


def test_each_inventory_batch_is_acknowledged_with_the_next_step_also_if_the_bridge_refuses_it_once(bench):
    engine = bench(tiers=2)
    engine.holds("a", tier=1)
    engine.ledger.refuse(engine.ledger.end_step())
    assert engine.acknowledged == []
    engine.step()
    assert engine.acknowledged == [1]


def test_the_first_tier_that_has_the_key_gives_it_and_does_not_wait_for_a_silent_one(bench):
    engine = bench(tiers=4)
    engine.knows_all(tier=0)
    for tier in (2, 3):
        engine.holds("a", tier=tier)
    assert engine.lookup("a") == [PENDING]
    (load,) = engine.step()
    assert load.tier == 2


@pytest.mark.parametrize(
    ("medium", "matcher", "answer"),
    [
        ("STORAGE", TierMatcher(locality="REMOTE"), MISS),
        ("STORAGE", TierMatcher(medium="CPU"), MISS),
        ("STORAGE", TierMatcher(medium="STORAGE", locality="LOCAL"), PENDING),
        (None, TierMatcher(medium="CPU", locality="LOCAL"), PENDING),
        ("STORAGE", None, MISS),
    ],
)
def test_a_request_is_served_by_the_primary_and_the_tiers_that_it_allows(bench, medium, matcher, answer):
    engine = bench(tiers=[bench.spec("disk", medium=medium, locality="LOCAL")])
    engine.holds("a")
    engine.stored_alone("b")
    assert engine.lookup("ab", engine.request("r", [] if matcher is None else [matcher])) == [answer, HIT]


def test_a_miss_is_counted_once_a_request_and_key_for_each_tier_that_was_asked(bench):
    engine = bench(tiers=2)
    for tier in (0, 1):
        engine.knows_all(tier)
    engine.lookup("aab", engine.request("first"))
    engine.lookup("a", engine.request("second"))
    assert engine.ledger.counters.misses == 3
    assert [tier.counters.misses for tier in engine.ledger.tiers] == [3, 3]


def test_a_late_outcome_of_a_probe_that_is_not_known_any_more_changes_nothing(engine):
    engine.lookup("a")
    (probe,) = engine.step()
    engine.reset()
    engine.answer(probe, True)
    assert engine.lookup("a") == [MISS]
    engine.fail(probe, Code.FAILED)
    assert engine.settled()


@pytest.mark.parametrize("complete", [True, False, None])
def test_an_answer_that_is_older_than_a_store_of_ours_is_not_believed(engine, complete):
    engine.lookup("a")
    (probe,) = engine.step()
    if complete is None:
        engine.answer(probe, False)
        engine.holds("a")
    else:
        engine.knows_all(complete=complete)
        engine.stored_in_tiers("a")
        engine.answer(probe, False)
        engine.ledger.primary.discard(*engine.keys("a"))
    assert engine.lookup("a") == [PENDING]


def test_an_answer_that_is_older_than_a_removal_is_not_believed(engine):
    engine.lookup("a")
    (probe,) = engine.step()
    engine.loses("a")
    engine.answer(probe, True)
    engine.step()
    assert engine.lookup("a") == [RETRY]


@pytest.mark.promise("It answers probes too slowly")
def test_a_tier_is_asked_for_so_many_keys_at_once_and_no_more(bench):
    engine = bench(tiers=[bench.spec(asked_keys_max=2)])
    assert engine.lookup("abc") == [RETRY, RETRY, MISS]
    assert engine.lookup("ab") == [RETRY, RETRY]  # They are being asked for.
    assert engine.counters().dropped == {"asking": 1}
    engine.answer(*engine.step(), present=False)
    assert engine.lookup("c") == [RETRY]


def test_a_tier_on_trial_is_asked_for_no_more_keys_than_it_is_sent_chunks(engine):
    breaker = engine.ledger.tiers[0].breaker
    for name in "abc":
        engine.lookup(name)
        engine.answer(*engine.step(), None)
    assert breaker.state is BreakerState.OPEN
    assert engine.lookup("z") == [MISS]
    engine.step(seconds=20.0)
    assert engine.lookup("defg") == [RETRY, RETRY, MISS, MISS]
    engine.answer(*engine.step(), present=True)
    assert breaker.state is BreakerState.HALF_OPEN
    assert engine.lookup("d") == [PENDING]
    engine.finish(*engine.step())
    assert breaker.state is BreakerState.CLOSED
    assert engine.lookup("fg") == [RETRY, RETRY]
