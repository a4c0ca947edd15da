"""Look-ups: their answers, the tiers that are probed, and how long a probe's answer is believed."""

import pytest

from kvtier.engine.ledger import LookupResult
from kvtier.engine.tier import BreakerState, TierMatcher
from kvtier.runner.messages import Code, Probe, Promote, unpack_keys
from tests.engine.ledger.bench import Bench

HIT, PENDING, MISS, RETRY = (LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS, LookupResult.RETRY)


def test_without_tiers_a_key_is_there_or_it_is_not(bench):
    engine = bench(tiers=0)
    engine.store("a")
    assert engine.lookup("ab") == [HIT, MISS]
    assert engine.step() == []


def test_a_hit_is_not_evicted_before_the_step_ends(bench):
    engine = bench(rows=1)
    engine.stored_alone("a")
    assert engine.lookup("a") == [HIT]
    assert engine.store("b") is None
    engine.step()
    assert engine.store("b").evicted == engine.keys("a")


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


def test_a_key_that_is_being_stored_is_pending(bench):
    engine = bench()
    request = engine.request()
    engine.ledger.prepare_store(engine.keys("a"), request)
    assert engine.lookup("a") == [PENDING]
    engine.ledger.complete_store(engine.keys("a"), request)
    assert engine.lookup("a") == [HIT]


def test_a_tier_that_does_not_know_is_asked_once_whoever_looks(bench):
    engine = bench()
    assert engine.lookup("ab") == engine.lookup("ab") == [RETRY, RETRY]
    (probe,) = engine.step()
    assert isinstance(probe, Probe)
    assert unpack_keys(probe.keys) == engine.keys("ab")
    assert engine.lookup("ab") == [RETRY, RETRY]
    assert engine.step() == []


def test_a_probe_answers_key_by_key(bench):
    engine = bench()
    engine.lookup("ab")
    (probe,) = engine.step()
    engine.answer(probe, [False, True])
    assert engine.lookup("ab") == [MISS, PENDING]


@pytest.mark.parametrize(
    ("present", "seconds", "answered"),
    [
        *((True, 9.9, PENDING), (True, 10.0, RETRY)),
        *((False, 9.9, MISS), (False, 10.0, RETRY)),
        *((None, 9.9, MISS), (None, 10.0, RETRY)),
    ],
)
def test_an_answer_is_believed_for_its_time_and_not_longer(bench, present, seconds, answered):
    engine = bench()
    engine.lookup("a")
    engine.answer(*engine.step(), present)
    engine.step(seconds)
    assert engine.lookup("a") == [answered]


def test_a_probe_without_an_answer_is_counted_and_no_transfer(bench):
    engine = bench()
    for name, answer in (("a", None), ("b", True), ("c", False)):
        engine.lookup(name)
        (*_, probe) = engine.step()
        engine.answer(probe, answer)
    counters = engine.ledger.tiers[0].counters
    assert (counters.probes_failed, counters.transfers_failed, counters.failed) == (1, 0, {})


@pytest.mark.parametrize(("code", "counted"), [(Code.DEADLINE, 1), (Code.LOST, 0), (Code.REFUSED, 0)])
def test_a_probe_that_is_given_up_is_counted_if_the_tier_is_at_fault(bench, code, counted):
    engine = bench()
    engine.lookup("a")
    (probe,) = engine.step()
    engine.fail(probe, code)
    counters = engine.ledger.tiers[0].counters
    assert (counters.probes_failed, counters.transfers_failed) == (counted, 0)


def test_an_authoritative_tier_answers_at_once(bench):
    engine = bench()
    engine.holds("a")
    engine.knows_all()
    assert engine.lookup("ab") == [PENDING, MISS]
    (load,) = engine.step()
    assert isinstance(load, Promote)


def test_a_tier_that_is_being_scanned_is_probed_for_keys_not_found_yet(bench):
    engine = bench()
    engine.holds("a")
    assert engine.lookup("ab") == [PENDING, RETRY]


def test_a_tier_that_others_write_to_is_asked_after_its_scan_too(bench):
    engine = bench()
    engine.knows_all(complete=False)
    assert engine.lookup("a") == [RETRY]


def test_each_inventory_batch_is_acknowledged_with_the_next_step(bench):
    engine = bench(tiers=2)
    engine.holds("a", tier=1)
    assert engine.acknowledged == []
    engine.step()
    assert engine.acknowledged == [1]


def test_tiers_are_asked_in_order_and_the_first_that_has_the_key_gives_it(bench):
    engine = bench(tiers=3)
    for tier in (1, 2):
        engine.holds("a", tier=tier)
    engine.knows_all(tier=0)
    assert engine.lookup("a") == [PENDING]
    (load,) = engine.step()
    assert load.tier == 1


def test_a_tier_that_has_the_key_does_not_wait_for_a_silent_one(bench):
    engine = bench(tiers=2)
    engine.holds("a", tier=1)
    assert engine.lookup("a") == [PENDING]
    (load,) = engine.step()
    assert load.tier == 1


def test_all_tiers_that_do_not_know_are_asked_at_once(bench):
    engine = bench(tiers=2)
    assert engine.lookup("a") == [RETRY]
    assert [action.tier for action in engine.step()] == [0, 1]


def test_a_request_is_served_by_the_tiers_that_it_allows(bench):
    disk = bench.spec("disk", medium="STORAGE", locality="LOCAL")
    peer = bench.spec("peer", medium="CPU", locality="REMOTE")
    engine = bench(tiers=[disk, peer])
    for tier in (0, 1):
        engine.knows_all(tier)
    engine.holds("a", tier=0)
    assert engine.lookup("a", engine.request("remote", [TierMatcher(locality="REMOTE")])) == [MISS]
    assert engine.lookup("a", engine.request("memory", [TierMatcher(medium="CPU")])) == [MISS]
    assert engine.lookup("a", engine.request("none", [])) == [MISS]
    assert engine.lookup("a", engine.request("disk", [TierMatcher(medium="STORAGE", locality="LOCAL")])) == [PENDING]


def test_a_tier_without_a_medium_serves_every_request(bench):
    engine = bench(tiers=[bench.spec(medium=None)])
    engine.holds("a")
    assert engine.lookup("a", engine.request("r", [TierMatcher(medium="CPU", locality="REMOTE")])) == [PENDING]


def test_a_filter_does_not_hide_the_primary(bench):
    engine = bench()
    engine.store("a")
    assert engine.lookup("a", engine.request("none", [])) == [HIT]


def test_the_primary_full_is_a_miss_and_never_a_wait(bench):
    engine = bench(rows=1)
    engine.holds("b")
    request = engine.request()
    engine.ledger.prepare_store(engine.keys("a"), request)
    assert engine.lookup("b") == [MISS]
    assert engine.ledger.counters.promotions_refused == 1


def test_a_miss_is_counted_once_a_request_and_key_for_each_tier_that_was_asked(bench):
    engine = bench(tiers=2)
    for tier in (0, 1):
        engine.knows_all(tier)
    request = engine.request("first")
    engine.lookup("aab", request)
    engine.lookup("a", engine.request("second"))
    assert engine.ledger.counters.misses == 3
    assert [tier.counters.misses for tier in engine.ledger.tiers] == [3, 3]


def test_a_probe_is_pending_work(bench):
    engine = bench()
    engine.lookup("a")
    assert engine.ledger.pending
    (probe,) = engine.step()
    assert engine.ledger.pending
    engine.answer(probe, False)
    assert not engine.ledger.pending


def test_a_tier_behind_an_open_breaker_is_not_asked(bench):
    engine = bench(tiers=[bench.spec(breaker_failures=1, breaker_cooldown_s=5.0)])
    engine.lookup("a")
    engine.answer(*engine.step(), None)
    assert engine.lookup("b") == [MISS]
    engine.step(seconds=5.0)
    assert engine.lookup("b") == [RETRY]


def test_a_late_outcome_of_a_probe_that_is_not_known_any_more_changes_nothing(bench):
    engine = bench()
    engine.lookup("a")
    (probe,) = engine.step()
    engine.ledger.reset()
    engine.ledger.promoting = True
    engine.answer(probe, True)
    assert engine.lookup("a") == [MISS]
    engine.fail(probe, Code.FAILED)
    assert engine.settled()


@pytest.mark.parametrize("complete", [True, False])
def test_an_answer_that_is_older_than_a_store_of_ours_is_not_believed(bench, complete):
    engine = bench()
    engine.lookup("a")
    (probe,) = engine.step()
    engine.knows_all(complete=complete)
    engine.store("a")
    engine.finish_all(engine.step())
    engine.answer(probe, False)
    engine.ledger.primary.discard(*engine.keys("a"))
    assert engine.lookup("a") == [PENDING]


def test_a_tiers_report_outlives_an_older_answer(bench):
    engine = bench()
    engine.lookup("a")
    engine.answer(*engine.step(), False)
    engine.holds("a")
    assert engine.lookup("a") == [PENDING]


def test_a_tier_is_asked_for_so_many_keys_at_once_and_no_more(bench):
    engine = bench(tiers=[Bench.spec(asked_keys_max=2)])
    assert engine.lookup("abc") == [RETRY, RETRY, MISS]
    assert engine.lookup("ab") == [RETRY, RETRY]  # They are being asked for.
    assert engine.ledger.tiers[0].counters.dropped == {"asking": 1}
    (probe,) = engine.step()
    engine.answer(probe, present=False)
    assert engine.lookup("c") == [RETRY]


def test_a_tier_on_trial_is_asked_for_no_more_keys_than_it_is_sent_chunks(bench):
    """And that it answers does not end the trial: what is listed may be unreadable."""
    engine = bench()
    for name in "abc":
        engine.lookup(name)
        (probe,) = engine.step()
        engine.answer(probe, None)
    assert engine.ledger.tiers[0].breaker.state is BreakerState.OPEN
    engine.step(seconds=20.0)
    assert engine.lookup("defg") == [RETRY, RETRY, MISS, MISS]
    (probe,) = engine.step()
    engine.answer(probe, present=True)
    assert engine.ledger.tiers[0].breaker.state is BreakerState.HALF_OPEN
    assert engine.lookup("d") == [PENDING]
    (promote,) = engine.step()
    engine.finish(promote)
    assert engine.ledger.tiers[0].breaker.state is BreakerState.CLOSED
    assert engine.lookup("fg") == [RETRY, RETRY]
