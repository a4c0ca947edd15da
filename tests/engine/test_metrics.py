import platform

import pytest
from prometheus_client import generate_latest

from kvtier import __version__
from kvtier.engine.answers import EventKind, EventLog
from kvtier.engine.metrics import Metrics, described
from kvtier.runner.messages import Code, RunnerLost, TierUsage
from tests.engine.ledger.bench import Bench, ending_at

ROW_BYTES = 4_096


@pytest.fixture
def engine():
    """An engine of four rows with two tiers: something of everything that is counted has happened."""
    disk, peer = Bench.spec("disk", store_chunks_max=2), Bench.spec("peer", breaker_failures=1)
    engine = Bench(rows=4, tiers=[tier._replace(row_bytes=ROW_BYTES) for tier in (disk, peer)], row_bytes=ROW_BYTES)
    engine.knows_all(0)
    engine.knows_all(1)
    engine.holds("xy", tier=0)
    engine.store("abc")  # One too many for the disk.
    disk, peer = engine.step()
    engine.finish(disk, {1: Code.NO_SPACE})
    engine.fail(peer, Code.DEADLINE, lent=True)
    reader = engine.request()
    engine.lookup("axz", reader)
    engine.finish(*engine.step())
    engine.load("ax", reader)
    engine.store("nope")
    engine.ledger.apply(TierUsage(0, 10, 40_960, 1 << 20, 8_192, {"evicted": 3}))
    return engine


def samples(engine):
    metrics = Metrics(engine.ledger)
    metrics.observe("disk", "load", 0.2)
    return {
        (sample.name.removeprefix("kvtier_"), *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def labelled(seen, name):
    found = {labels: value for (each, *labels), value in seen.items() if each == name for labels in [tuple(labels)]}
    return {labels[0] if len(labels) == 1 else labels: value for labels, value in found.items()}


def test_the_primarys_metrics_show_its_work_and_its_rows(engine):
    seen = samples(engine)
    one = {name[0]: value for name, value in seen.items() if len(name) == 1 and name[0].startswith("primary_")}
    assert {name.removeprefix("primary_"): value for name, value in one.items()} == {
        "hits_total": 1,
        "misses_total": 1,
        "stores_total": 3,
        "stores_refused_total": 4,
        "promotions_refused_total": 0,
        "rows_kept_total": 0,
        "evictions_total": 0,
        "retentions_cut_total": 0,
        "row_bytes": ROW_BYTES,
        "rows_evictable": 1,
        "capacity_bytes": 4 * ROW_BYTES,
        "used_bytes": 4 * ROW_BYTES,
    }
    assert labelled(seen, "primary_rows") == {"ready": 4, "filling": 0, "free": 0, "quarantined": 0}
    assert labelled(seen, "primary_rows_held") == {"leased": 0, "cascading": 3, "kept": 0, "retained": 0}
    assert (seen["transfer_seconds_count", "disk", "load"], seen["transfer_seconds_sum", "disk", "load"]) == (1, 0.2)
    assert [seen["transfer_seconds_bucket", "disk", "load", most] for most in ("0.1", "0.25")] == [0, 1]


def test_an_engines_metrics_show_its_version_its_runner_and_lost_events(engine):
    events = engine.ledger.events = EventLog(2)
    for _ in range(5):
        events.add(EventKind.STORED, "cpu", engine.keys("a"))
    seen = samples(engine)
    assert seen["build_info", __version__, platform.python_version(), ""] == 1
    assert (seen["runner_up",], seen["runners_lost_total",], seen["events_dropped_total",]) == (1, 0, 3)
    engine.ledger.apply(RunnerLost(0, "killed by the machine"))
    assert samples(engine)["runner_up",] == 0


def test_a_row_that_a_hung_store_keeps_after_its_key_was_forgotten_is_quarantined():
    engine = Bench(rows=4, tiers=[Bench.spec("disk")], row_bytes=ROW_BYTES)
    engine.store("ab")
    (late,) = engine.step()
    engine.fail(late, Code.DEADLINE, lent=True)
    assert engine.ledger.delete(engine.keys("a")) == []
    seen = samples(engine)
    assert labelled(seen, "primary_rows") == {"ready": 1, "filling": 0, "free": 2, "quarantined": 1}
    assert (seen["primary_used_bytes",], seen["primary_rows_evictable",]) == (2 * ROW_BYTES, 0)
    engine.give_back(late)
    assert samples(engine)["primary_rows", "quarantined"] == 0


@pytest.mark.parametrize("computing_s", [0.5, None])
def test_the_saved_time_of_the_tokens_is_shown_once_if_the_prefill_speed_is_known(computing_s):
    engine = Bench(rows=8, tiers=[Bench.spec("disk")], computing_s=computing_s)
    request = engine.request(position=ending_at(engine.keys("abcdxy"), [1, 2, 3, 4, 3, 4]))  # x and y: another group's.
    engine.stored_alone("abcdxy")
    engine.lookup("abcdxy", request)
    engine.load("abcdxy", request)
    seen = samples(engine)
    assert seen["computing_saved_seconds_total",] == (4 * 0.5 if computing_s else 0)
    assert seen.get(("prefill_tokens_per_second",)) == (2 if computing_s else None)


def test_each_tiers_metrics_show_its_work(engine):
    seen = samples(engine)
    expected = {"hits_total": (1, 0), "misses_total": (1, 0), "promoted_total": (1, 0), "loaded_total": (1, 0)}
    expected |= {"stored_total": (1, 0), "transfers_failed_total": (0, 1), "probes_failed_total": (0, 0)}
    expected |= {"breaker_opened_total": (0, 1), "loading": (0, 0), "storing": (0, 0)}
    assert {name: (seen[f"tier_{name}", "disk"], seen[f"tier_{name}", "peer"]) for name in expected} == expected
    assert labelled(seen, "tier_bytes_total") == {
        ("disk", "load"): ROW_BYTES,
        ("disk", "store"): ROW_BYTES,
        ("peer", "load"): 0,
        ("peer", "store"): 0,
    }
    assert labelled(seen, "tier_failed_total") == {("disk", "no_space"): 1, ("peer", "deadline"): 3}
    assert labelled(seen, "tier_dropped_total") == {("disk", "budget"): 1}
    breakers = {labels for labels, value in labelled(seen, "tier_breaker").items() if value == 1}
    assert breakers == {("disk", "closed"), ("peer", "open")}
    assert seen["tier_reserved_bytes", "disk"] == 8_192
    assert labelled(seen, "tier_reported_total") == {("disk", "evicted"): 3}


def test_a_registry_is_an_engines_own_and_every_sample_has_the_labels_that_its_metric_declares(engine):
    declared = {name: set(labels) for name, _, labels in described()}
    for registry in (Metrics(engine.ledger).registry, Metrics(engine.ledger).registry):
        assert b'kvtier_tier_hits_total{tier="disk"} 1.0' in generate_latest(registry)
        for family in registry.collect():
            if family.type != "histogram":
                assert all(sample.labels.keys() == declared[family.name] for sample in family.samples), family.name
