import platform

import pytest
from prometheus_client import generate_latest

from kvtier import __version__
from kvtier.engine.answers import EventKind, EventLog
from kvtier.engine.metrics import Metrics, described
from kvtier.runner.messages import Code, RunnerLost, TierUsage
from tests.engine.ledger.bench import Bench

ROW_BYTES = 4_096


@pytest.fixture
def engine() -> Bench:
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
    (load,) = engine.step()
    engine.finish(load)
    engine.load("ax", reader)
    engine.store("nope")
    return engine


def samples(engine: Bench) -> dict[tuple[str, ...], float]:
    """Return every sample by name and labels' values."""
    metrics = Metrics(engine.ledger)
    metrics.observe("disk", "load", 0.2)
    return {
        (sample.name.removeprefix("kvtier_"), *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def test_the_primarys_metrics_show_its_work_and_its_rows(engine: Bench) -> None:
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
    rows = {name[1]: value for name, value in seen.items() if name[0] == "primary_rows"}
    assert rows == {"ready": 4, "filling": 0, "free": 0, "quarantined": 0}
    held = {name[1]: value for name, value in seen.items() if name[0] == "primary_rows_held"}
    assert held == {"leased": 0, "cascading": 3, "kept": 0, "retained": 0}


def test_an_engines_metrics_show_its_version_and_its_runner(engine: Bench) -> None:
    seen = samples(engine)
    assert seen["build_info", __version__, platform.python_version(), ""] == 1
    assert (seen["runner_up",], seen["runners_lost_total",], seen["events_dropped_total",]) == (1, 0, 0)
    engine.ledger.apply(RunnerLost(0, "killed by the machine"))
    assert samples(engine)["runner_up",] == 0


def test_a_row_that_a_hung_store_keeps_after_its_key_was_forgotten_is_quarantined() -> None:
    engine = Bench(rows=4, tiers=[Bench.spec("disk")], row_bytes=ROW_BYTES)
    engine.store("ab")
    (late,) = engine.step()
    engine.fail(late, Code.DEADLINE, lent=True)
    assert engine.ledger.delete(engine.keys("a")) == []
    seen = samples(engine)
    rows = {name[1]: value for name, value in seen.items() if name[0] == "primary_rows"}
    assert rows == {"ready": 1, "filling": 0, "free": 2, "quarantined": 1}
    assert (seen["primary_used_bytes",], seen["primary_rows_evictable",]) == (2 * ROW_BYTES, 0)
    engine.give_back(late)
    assert samples(engine)["primary_rows", "quarantined"] == 0


def test_the_saved_time_is_shown_if_the_prefill_speed_is_known() -> None:
    engine = Bench(rows=4, tiers=[Bench.spec("disk")], computing_s=0.5)  # A chunk, of one token.
    engine.stored_alone("abc")
    engine.lookup("abc")
    engine.load("abc")
    seen = samples(engine)
    assert (seen["computing_saved_seconds_total",], seen["prefill_tokens_per_second",]) == (1.5, 2)
    unknown = samples(Bench(rows=4, tiers=[Bench.spec("disk")]))
    assert unknown["computing_saved_seconds_total",] == 0
    assert ("prefill_tokens_per_second",) not in unknown


def test_chunks_of_several_groups_save_the_time_of_their_tokens_once() -> None:
    engine = Bench(rows=8, tiers=[Bench.spec("disk")], computing_s=0.5)
    ends = dict(zip(engine.keys("abcdxy"), (1, 2, 3, 4, 3, 4), strict=True))  # All of one group; of another, the last.
    request = engine.request(position=ends.get)
    engine.stored_alone("abcdxy")
    engine.lookup("abcdxy", request)
    engine.load("abcdxy", request)
    assert samples(engine)["computing_saved_seconds_total",] == 4 * 0.5


@pytest.mark.parametrize(
    ("name", "disk", "peer"),
    [
        ("hits_total", 1, 0),
        ("misses_total", 1, 0),
        ("promoted_total", 1, 0),
        ("loaded_total", 1, 0),
        ("stored_total", 1, 0),
        ("transfers_failed_total", 0, 1),
        ("probes_failed_total", 0, 0),
        ("breaker_opened_total", 0, 1),
        ("loading", 0, 0),
        ("storing", 0, 0),
    ],
)
def test_each_tiers_metrics_show_its_work(engine: Bench, name: str, disk: int, peer: int) -> None:
    seen = samples(engine)
    assert (seen[f"tier_{name}", "disk"], seen[f"tier_{name}", "peer"]) == (disk, peer)


def test_bytes_are_counted_by_direction(engine: Bench) -> None:
    seen = samples(engine)
    moved = {name[1:]: value for name, value in seen.items() if name[0] == "tier_bytes_total"}
    assert moved == {
        ("disk", "load"): ROW_BYTES,
        ("disk", "store"): ROW_BYTES,
        ("peer", "load"): 0,
        ("peer", "store"): 0,
    }


def test_chunks_that_did_not_move_are_counted_by_reason(engine: Bench) -> None:
    seen = samples(engine)
    failed = {name[1:]: value for name, value in seen.items() if name[0] == "tier_failed_total"}
    dropped = {name[1:]: value for name, value in seen.items() if name[0] == "tier_dropped_total"}
    assert failed == {("disk", "no_space"): 1, ("peer", "deadline"): 3}
    assert dropped == {("disk", "budget"): 1}


def test_exactly_one_state_of_each_breaker_is_shown(engine: Bench) -> None:
    seen = samples(engine)
    shown = {name[1:] for name, value in seen.items() if name[0] == "tier_breaker" and value == 1}
    assert shown == {("disk", "closed"), ("peer", "open")}


def test_latencies_are_observed_once_a_transfer(engine: Bench) -> None:
    seen = samples(engine)
    assert seen["transfer_seconds_count", "disk", "load"] == 1
    assert seen["transfer_seconds_sum", "disk", "load"] == 0.2
    assert seen["transfer_seconds_bucket", "disk", "load", "0.1"] == 0
    assert seen["transfer_seconds_bucket", "disk", "load", "0.25"] == 1


def test_a_registry_is_an_engines_own_and_can_be_scraped(engine: Bench) -> None:
    for registry in (Metrics(engine.ledger).registry, Metrics(engine.ledger).registry):
        assert b'kvtier_tier_hits_total{tier="disk"} 1.0' in generate_latest(registry)


def test_every_sample_has_the_labels_that_its_metric_declares(engine: Bench) -> None:
    declared = {name: set(labels) for name, _, labels in described()}
    for family in Metrics(engine.ledger).registry.collect():
        if family.type != "histogram":
            assert all(sample.labels.keys() == declared[family.name] for sample in family.samples), family.name


def test_events_that_were_not_taken_are_counted(engine: Bench) -> None:
    events = EventLog(2)
    for _ in range(5):
        events.add(EventKind.STORED, "cpu", engine.keys("a"))
    registry = Metrics(engine.ledger, events).registry
    assert registry.get_sample_value("kvtier_events_dropped_total") == 3


def test_a_tiers_reserved_bytes_are_a_metric(engine: Bench) -> None:
    engine.ledger.apply(TierUsage(0, 10, 40_960, 1 << 20, 8_192))
    registry = Metrics(engine.ledger).registry
    assert registry.get_sample_value("kvtier_tier_reserved_bytes", {"tier": "disk"}) == 8_192
