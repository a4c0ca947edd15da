import json
from array import array

import pytest
from rich.console import Console

from kvtier import EngineConfig, OffloadKey
from kvtier.tools.outputs import encoded
from kvtier.tools.replay.replay import WRONG_KEYS_MAX, ReplayTally, Sample, tier_report
from kvtier.tools.replay.report import make_report, print_report
from kvtier.tools.replay.study import Extent

ROW_BYTES = 4_096
REASONS = {"dropped": {"budget": 7}, "failed": {"failed": 1, "lost": 2}}
DISK = {"type": "dummy", "name": "disk [1]", "limits": {"store_bytes_in_flight": "64KiB"}}
SIZES = {"cpu_bytes_to_use": "1MiB", "chunk_bytes": ROW_BYTES}
CONFIG = EngineConfig.from_dict({**SIZES, "secondary_tiers": [DISK]})


def tally_of(samples):
    tally = ReplayTally(samples, ROW_BYTES)
    for number in range(1, samples + 1):
        tally.requests = number
        tally.looked_up(10, 5, ())
        tally.time("fetch", number / 1_000)
        tally.samples.append(
            Sample(
                float(number),
                number,
                10 * number,
                {
                    "cpu": tier_report(2 * number, 5 * number, 5 * number, ROW_BYTES),
                    "disk [1]": tier_report(3 * number, 4 * number, 5 * number, ROW_BYTES, **REASONS),
                },
            )
        )
    tally.seconds = float(samples)
    return tally


def report_of(tally, **given):
    fixed = {"command": "kvtier replay", "trace": "a $trace$ [bold]", "seed": 3, "config": CONFIG}
    return make_report(tally, **{"extent": Extent(100, 4, 100, 3, {}), **fixed, **given})


def test_the_json_has_every_figure_under_its_name():
    told = json.loads(encoded(report_of(tally_of(100))))
    ran = {"wrong_chunks": 0, "seconds": 100.0, "requests_per_s": 1.0, "interrupted": False}
    expected = ran | {
        "requests": 100,
        "chunk_references": 1_000,
        "hit_ratio": 0.5,
        "best_hit_ratio": 0.75,
        "hits": {"cpu": 200, "disk [1]": 300},
        "engine": {"rows": 256, "chunk_bytes": ROW_BYTES, "eviction_policy": "lru", "runner": "inline"},
    }
    assert told | expected == told
    assert told["latency_s"]["fetch"] == pytest.approx({"p50": 0.0505, "p99": 0.09901, "mean": 0.0505, "samples": 100})
    disk = told["tiers"]["disk [1]"]
    assert (disk["chunks_loaded"], disk["chunks_stored"]) == (400, 500)
    assert (disk["bytes_loaded"], disk["bytes_stored"]) == (400 * ROW_BYTES, 500 * ROW_BYTES)
    assert (disk["dropped"], disk["failed"]) == ({"budget": 7}, {"failed": 1, "lost": 2})


def test_what_the_primary_refused_is_in_the_json_and_the_table(capsys):
    tally, refused = tally_of(1), {"stores": 3, "promotions": 4}
    tally.samples[-1] = tally.samples[-1]._replace(tiers={"cpu": tier_report(1, 1, 1, ROW_BYTES, refused=refused)})
    report = report_of(tally)
    assert json.loads(encoded(report))["tiers"]["cpu"]["refused"] == refused
    print_report(report, Console(width=200))
    shown = capsys.readouterr().out
    assert "stores 3" in shown
    assert "promotions 4" in shown


def test_nothing_replayed_is_a_report_all_the_same(capsys):
    report = report_of(ReplayTally(100, ROW_BYTES), interrupted=True)
    told = json.loads(encoded(report))
    assert (told["requests"], told["hit_ratio"], told["requests_per_s"], told["hits"]) == (0, 0.0, 0.0, {"cpu": 0})
    assert told["interrupted"] is True
    print_report(report, Console())
    assert "interrupted after 0 requests" in capsys.readouterr().out


def test_some_of_the_wrong_keys_are_named_and_all_are_counted():
    tally = ReplayTally(1, ROW_BYTES)
    keys = [OffloadKey(bytes([number])) for number in range(2 * WRONG_KEYS_MAX)]
    tally.looked_up(100, 50, keys[:3])
    tally.looked_up(100, 50, keys[3:])
    report = report_of(tally)
    assert report.wrong_chunks == 2 * WRONG_KEYS_MAX
    assert report.wrong_keys == [key.hex() for key in keys[:WRONG_KEYS_MAX]]


def test_the_tables_have_the_figures_and_warn_of_a_limit_that_kept_chunks_from_a_tier(capsys):
    times = {"with_tiering": array("d", [1.0, 2.0]), "without_tiering": array("d", [3.0, 4.0])}
    report = report_of(tally_of(100), ttft_s=times)
    assert report.warnings == [
        "tier disk [1]: 7 chunks were never stored in it; secondary_tiers[0].limits.store_bytes_in_flight was "
        "64.0 KiB: raise it"
    ]
    print_report(report, Console(width=200))
    shown = capsys.readouterr().out
    for part in (
        "a $trace$ [bold]: replayed 100 requests",
        "hit ratio 0.5000 (best possible 0.7500)",
        "0 wrong chunks",
        "virtual time",
        "had not reached",  # This tally was not drained.
        report.warnings[0],
    ):
        assert part in shown
    for part in ("disk [1]", "0.3000", "budget 7", "lost 2", "fetch", "50.50", "with_tiering", "1.50"):
        assert part in shown


@pytest.mark.parametrize(
    ("samples", "suffix", "begin"), [(0, "svg", b"<?xml"), (1, "png", b"\x89PNG"), (400, "pdf", b"%PDF")]
)
def test_any_replay_is_drawn_in_the_format_of_the_name(thorough, tmp_path, samples, suffix, begin):
    """The trace's name has letters that the font lacks, and dollar signs."""
    from kvtier.tools.pictures import write_replay_picture  # Here, because matplotlib takes half a second.

    tally, path = tally_of(samples), tmp_path / f"course.{suffix}"
    write_replay_picture(str(path), report_of(tally, trace="跟踪 $trace$.jsonl"), tally)
    assert path.read_bytes().startswith(begin)
