"""The figures of a replay as JSON, as tables and as a picture."""

import json
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvtier.backend.keys import OffloadKey
from kvtier.config import EngineConfig
from kvtier.tools.outputs import as_json
from kvtier.tools.pictures import write_replay_picture
from kvtier.tools.replay.replay import WRONG_KEYS_MAX, Sample, Tally, TierTotals
from kvtier.tools.replay.report import (
    BINS_PER_DECADE,
    SLICES_MAX,
    Quantiles,
    Report,
    distribution,
    make_report,
    print_report,
    quantiles,
)
from kvtier.tools.replay.setup import settings_of
from kvtier.tools.replay.study import Extent

ROW_BYTES = 4_096
CONFIG = EngineConfig.from_dict(
    {
        "cpu_bytes_to_use": "1MiB",
        "chunk_bytes": ROW_BYTES,
        "secondary_tiers": [{"type": "dummy", "name": "disk [1]", "limits": {"store_bytes_in_flight": "64KiB"}}],
    }
)


def tally_of(samples: int) -> Tally:
    """Return the tally of a replay that found a half of ten chunks a request, a second each."""
    tally = Tally(samples)
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
                    "cpu": TierTotals(2 * number, 5 * number, 5 * number),
                    "disk [1]": TierTotals(3 * number, 4 * number, 5 * number, {"budget": 7}, {"failed": 1, "lost": 2}),
                },
            )
        )
    tally.seconds = float(samples)
    return tally


def report_of(tally: Tally, **given: object) -> Report:
    fixed = {
        "trace": "a $trace$ [bold]",
        "seed": 3,
        "extent": Extent(100, 4, 100, 3, {}),
        "config": CONFIG,
        "engine": {},
    }
    return make_report(tally, **({**fixed, "interrupted": False, "ttft_s": None, **given}))  # type: ignore[arg-type]


def test_the_json_has_every_figure_under_its_name() -> None:
    told = json.loads(as_json(report_of(tally_of(100))))
    assert told["requests"] == 100
    assert told["chunk_references"] == 1_000
    assert told["hit_ratio"] == 0.5
    assert told["best_hit_ratio"] == 0.75
    assert told["hits"] == {"cpu": 200, "disk [1]": 300}
    assert told["bytes"] == {"cpu": 1_000 * ROW_BYTES, "disk [1]": 900 * ROW_BYTES}
    assert told["wrong_chunks"] == 0
    assert told["cascades"] == 500
    assert told["promotions"] == 400
    assert told["dropped"] == 7
    assert told["failed"] == 3
    assert told["seconds"] == 100.0
    assert told["requests_per_s"] == 1.0
    assert told["interrupted"] is False
    assert told["latency_s"]["fetch"]["p50"] == pytest.approx(0.0505)
    assert told["latency_s"]["fetch"]["p99"] == pytest.approx(0.09901)
    assert told["latency_s"]["fetch"]["samples"] == 100
    assert told["tiers"]["disk [1]"]["dropped"] == {"budget": 7}


def test_a_name_in_letters_that_the_pictures_font_lacks_is_no_warning(tmp_path: Path) -> None:
    write_replay_picture(str(tmp_path / "replay.png"), report_of(tally_of(20), trace="跟踪.jsonl"))


def test_what_the_primary_refused_is_in_the_json_and_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    tally = tally_of(1)
    refused = {"stores": 3, "promotions": 4}
    tally.samples[-1] = tally.samples[-1]._replace(tiers={"cpu": TierTotals(1, 1, 1, refused=refused)})
    report = report_of(tally)
    assert json.loads(as_json(report))["tiers"]["cpu"]["refused"] == refused
    print_report(report, Console(width=200))
    shown = capsys.readouterr().out
    assert "stores 3" in shown
    assert "promotions 4" in shown


def test_nothing_replayed_is_a_report_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(Tally(100), interrupted=True)
    told = json.loads(as_json(report))
    assert (told["requests"], told["hit_ratio"], told["requests_per_s"], told["hits"]) == (0, 0.0, 0.0, {"cpu": 0})
    assert told["interrupted"] is True
    print_report(report, Console())
    assert "interrupted after 0 requests" in capsys.readouterr().out


def test_quantiles_of_nothing_are_zero() -> None:
    assert quantiles(array("d")) == Quantiles(0.0, 0.0, 0.0, 0)


def test_some_of_the_wrong_keys_are_named_and_all_are_counted() -> None:
    tally = Tally(1)
    keys = [OffloadKey(bytes([number])) for number in range(2 * WRONG_KEYS_MAX)]
    tally.looked_up(100, 50, keys[:3])
    tally.looked_up(100, 50, keys[3:])
    report = report_of(tally)
    assert report.wrong_chunks == 2 * WRONG_KEYS_MAX
    assert report.wrong_keys == [key.hex() for key in keys[:WRONG_KEYS_MAX]]


def test_the_tables_say_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"with_tiering": array("d", [1.0, 2.0]), "without_tiering": array("d", [3.0, 4.0])}
    tally = tally_of(100)
    print_report(report_of(tally, ttft_s=times), Console())
    shown = capsys.readouterr().out
    for part in (
        "a $trace$ [bold]: replayed 100 requests",
        "hit ratio 0.5000 (best possible 0.7500)",
        "0 wrong chunks",
    ):
        assert part in shown
    for part in ("disk [1]", "0.3000", "budget 7", "lost 2", "fetch", "50.50", "with_tiering", "1.50", "virtual time"):
        assert part in shown
    assert "had not reached" in shown  # Nobody said that this one was drained.


def test_chunks_that_a_limit_kept_from_a_tier_are_said_with_their_number_and_the_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = report_of(tally_of(10))
    assert report.warnings == [
        "tier disk [1]: 7 chunks were never stored in it; secondary_tiers[0].limits.store_bytes_in_flight was "
        "64.0 KiB: raise it"
    ]
    print_report(report, Console(width=200))
    assert report.warnings[0] in capsys.readouterr().out


def test_the_smaller_of_two_limits_is_the_one_to_raise() -> None:
    limits = {"store_bytes_in_flight": "64KiB", "store_chunks_in_flight": 15}
    tier = {"type": "dummy", "name": "disk [1]", "limits": limits}
    config = EngineConfig.from_dict({"cpu_bytes_to_use": "1MiB", "chunk_bytes": ROW_BYTES, "secondary_tiers": [tier]})
    (warning,) = report_of(tally_of(10), config=config).warnings
    assert "secondary_tiers[0].limits.store_chunks_in_flight was 15: raise it" in warning


def test_nothing_is_said_where_nothing_was_dropped() -> None:
    assert report_of(Tally(1)).warnings == []


@pytest.mark.parametrize(
    ("samples", "suffix", "begin"),
    [(0, ".svg", b"<?xml"), (1, ".png", b"\x89PNG"), (3, ".pdf", b"%PDF"), (400, ".svg", b"<?xml")],
)
def test_the_course_of_any_replay_is_drawn_as_the_name_says(
    tmp_path: Path, samples: int, suffix: str, begin: bytes
) -> None:
    tally = tally_of(samples)
    write_replay_picture(str(tmp_path / f"course{suffix}"), report_of(tally))
    assert (tmp_path / f"course{suffix}").read_bytes().startswith(begin)


@pytest.mark.parametrize("samples", [1, 7, 60, 400])
def test_the_slices_of_time_add_up_to_the_totals_and_are_few(samples: int) -> None:
    report = report_of(tally_of(samples))
    course = report.over_time
    assert 1 <= len(course) <= SLICES_MAX
    assert [each.until_s for each in course] == sorted({each.until_s for each in course})
    assert course[-1].until_s == report.seconds
    assert sum(each.requests for each in course) == report.requests
    assert sum(each.chunk_references for each in course) == report.chunk_references
    for name, tier in report.tiers.items():
        for field in ("hits", "bytes_loaded", "bytes_stored"):
            assert sum(getattr(each.tiers[name], field) for each in course) == getattr(tier, field)
        assert sum(each.tiers[name].dropped for each in course) == sum(tier.dropped.values())
        assert sum(each.tiers[name].failed for each in course) == sum(tier.failed.values())


def test_samples_of_one_moment_are_one_slice() -> None:
    """In virtual time many requests end at once: a slice without a width has no rate."""
    tally = tally_of(40)
    tally.samples = [sample._replace(seconds=float(sample.requests // 10)) for sample in tally.samples]
    tally.seconds = tally.samples[-1].seconds
    assert [each.until_s for each in report_of(tally).over_time] == [1.0, 2.0, 3.0, 4.0]


def test_no_slice_is_so_short_that_its_rates_say_nothing() -> None:
    """Samples come by requests: after a pause many come at once."""
    tally = tally_of(200)
    tally.samples = [
        sample._replace(seconds=number / 1_000 + 50.0 * (number > 100)) for number, sample in enumerate(tally.samples)
    ]
    tally.seconds = tally.samples[-1].seconds
    ends = [0.0, *(each.until_s for each in report_of(tally).over_time)]
    assert min(after - before for before, after in pairwise(ends)) >= tally.seconds / SLICES_MAX


@given(st.lists(st.floats(0.0, 1e9, allow_nan=False), min_size=1, max_size=300))
def test_the_bins_of_a_distribution_hold_every_sample_within_their_bounds(seconds: list[float]) -> None:
    found = distribution(array("d", seconds))
    assert sum(each.samples for each in found.bins) == found.samples == len(seconds)
    bounds = [each.at_most_s for each in found.bins]
    assert bounds == sorted(set(bounds))
    assert len(bounds) <= 13 * BINS_PER_DECADE + 1
    within = sorted(min(max(each, 1e-7), 1e6) for each in seconds)
    for number, bound in enumerate(np.cumsum([each.samples for each in found.bins]).tolist()):
        assert within[bound - 1] <= found.bins[number].at_most_s * 1.001


def test_the_bins_of_two_reports_have_the_same_bounds() -> None:
    bounds = [{each.at_most_s for each in distribution(array("d", [low, 0.25])).bins} for low in (0.001, 0.2)]
    assert len(bounds[0] & bounds[1]) == 1


def test_of_a_tiers_options_no_text_is_told_but_words_of_a_fixed_list() -> None:
    """A text may be a password, or lead to one."""
    tier = {"type": "fs", "root": "/secret/place", "layout": "files", "naming": "flat", "capacity_bytes": "1GiB"}
    config = EngineConfig.from_dict({"cpu_bytes_to_use": "1MiB", "chunk_bytes": ROW_BYTES, "secondary_tiers": [tier]})
    told = settings_of(config)
    expected = {"cascade": "store", "layout": "files", "naming": "flat", "capacity_bytes": 1 << 30}
    assert expected.items() <= told["tier_settings"]["0:fs"].items()
    assert "secret" not in json.dumps(told)
