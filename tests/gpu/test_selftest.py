"""`kvtier selftest` as people run it: what it writes, how it ends, and what it refuses."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kvtier.tools.selftest.model import TINY, PagedCache, Transformer
from kvtier.tools.selftest.report import FirstToken, Report, goals_of, winners

from kvtier.tools.bench.figures import Row
from kvtier.tools.commands import run
from kvtier.tools.selftest import checks, children, command, model, speed
from kvtier.tools.selftest.checks import Check
from kvtier.tools.selftest.device import Device, NotHere, Way, Wrong
from tests.gpu.modelled import Modelled

pytestmark = pytest.mark.usefixtures("outside")

Tested = Callable[..., tuple[int, Report, str]]


@pytest.fixture
def tested(tmp_path: Path) -> Tested:
    """Run a dry self-test; return its exit status, its report, and that for people."""

    def tested(*parts: str) -> tuple[int, Report, str]:
        out, text = tmp_path / "report.json", tmp_path / "report.md"
        chosen = [] if not parts else ["--parts", ",".join(parts)]
        args = [
            "selftest",
            "--device",
            "cpu",
            "--dir",
            str(tmp_path),
            "--json",
            str(out),
            "--markdown",
            str(text),
            *chosen,
        ]
        status = run(args)
        assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.md"}  # Scratch files are gone.
        return status, msgspec.json.decode(out.read_bytes(), type=Report), text.read_text()

    return tested


def only(monkeypatch: pytest.MonkeyPatch, *given: Check) -> None:
    monkeypatch.setattr(checks, "checks", lambda: list(given))
    monkeypatch.setattr(children, "checks", list)


def test_a_dry_run_says_that_it_is_one_and_which_checks_it_could_not_make(tested: Tested) -> None:
    status, report, text = tested("order")
    assert (status, report.dry_run, report.broken) == (0, True, [])
    skipped = [check for check in report.checks if check.outcome == "skipped"]
    assert {check.detail for check in skipped} == {"cpu has no streams: what is launched there is done at once"}
    assert "its figures say nothing of a device" in text
    assert report.machine.python in text
    assert report.device["torch"] == torch.__version__


def test_a_broken_promise_and_a_check_that_raises_are_told_and_the_status_says_so(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(device: Device, way: Way) -> str:
        raise Wrong("a byte | is wrong")

    def broken(device: Device, way: Way) -> str:
        raise RuntimeError("CUDA error: an illegal address")

    def not_here(device: Device, way: Way) -> str:
        raise NotHere("no streams")

    only(monkeypatch, *(Check("bytes", each.__name__, each) for each in (wrong, broken, not_here)))
    status, report, text = tested("bytes")
    assert status == 1
    assert [(check.promise, check.outcome, check.detail) for check in report.checks] == [
        ("wrong", "broken", "Wrong: a byte | is wrong"),
        ("broken", "broken", "RuntimeError: CUDA error: an illegal address"),
        ("not_here", "skipped", "no streams"),
    ]
    assert "0 kept, 2 broken, 1 skipped" in text
    assert "a byte / is wrong" in text  # A cell of a table stays one.


def test_each_way_is_measured_both_ways_beside_plain_copies_and_beside_a_matmul(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(speed.SCALES, "cpu", speed.Scale((16 << 10, 64 << 10), 1 << 20, 1, 16, 0.001))
    status, report, text = tested("speed")
    assert status == 0
    assert [(row.operation, row.settings["page_bytes"]) for row in report.figures] == [
        ("store", 16 << 10),
        ("load", 16 << 10),
        ("store", 64 << 10),
        ("load", 64 << 10),
        ("store and load at once", 64 << 10),
        ("matmul beside copies both ways", 64 << 10),
    ]
    assert all(row.figure > 0 and row.limit > 0 for row in report.figures)
    assert "## Rates: medians of 1 rounds in turn" in text
    assert "## Goals" not in text  # They are a device's.


def test_a_prompt_is_answered_alike_whether_its_kv_was_computed_loaded_from_cpu_or_promoted_from_fs(
    tested: Tested,
) -> None:
    status, report, text = tested("model")
    assert status == 0
    assert [(each.tokens, each.source, each.same_tokens) for each in report.first_tokens] == [
        (tokens, source, True) for tokens in TINY.prompts for source in ("computed", "cpu", "fs")
    ]
    for each in report.first_tokens:
        blocks = 0 if each.source == "computed" else (each.tokens - 1) // model.BLOCK_TOKENS
        assert each.loaded_bytes == blocks * model.BLOCK_TOKENS * TINY.token_bytes
    assert TINY.name in text


def test_a_promotion_that_brings_a_wrong_byte_changes_the_answer_and_the_status_says_so(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = model.Tiered.load

    def loaded(self: model.Tiered, keys: list[Any], blocks: list[int]) -> None:
        load(self, keys, blocks)
        self._worker._sides.pieces[0][0].memory[blocks[0], 3] ^= 1

    monkeypatch.setattr(model.Tiered, "load", loaded)
    status, report, text = tested("model")
    assert status == 1
    assert {each.source for each in report.first_tokens if not each.same_tokens} == {"cpu", "fs"}
    assert "DIFFERENT" in text


def test_the_transformer_computes_a_prompt_in_two_steps_as_in_one() -> None:
    transformer = Transformer(TINY, torch.device("cpu"))
    tokens, blocks = list(range(40)), torch.tensor([5, 0, 3])
    cache = PagedCache(TINY, 8, torch.device("cpu"))
    at_once = transformer.run(tokens, 0, cache, blocks)
    transformer.run(tokens[:32], 0, cache, blocks)
    in_two = transformer.run(tokens[32:], 32, cache, blocks)
    torch.testing.assert_close(in_two, at_once, rtol=0.1, atol=0.1)  # Rounded differently, in bf16.


def test_what_was_found_before_a_measurement_failed_is_in_the_report(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(device: Device) -> Iterator[Row]:
        yield row("store", "by index", 4_096, 1.0, 0.5)
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(speed, "measure", measure)
    status, report, _ = tested("speed")
    assert status == 1
    assert [each.operation for each in report.figures] == ["store"]
    assert [check.detail for check in report.broken] == ["RuntimeError: CUDA error: unspecified launch failure"]


def test_when_time_has_run_out_nothing_new_is_begun_and_the_report_is_written(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LIMIT_S", -1.0)
    status, report, _ = tested()
    assert (status, {check.outcome for check in report.checks}) == (0, {"skipped"})
    assert (report.figures, report.first_tokens) == ([], [])


def test_what_hangs_is_reported_with_all_that_was_found_before(tmp_path: Path) -> None:
    """In a process of its own: the self-test ends it."""
    out = tmp_path / "report.json"
    program = f"""
import threading
from kvtier.tools.commands import run
from kvtier.tools.selftest import checks, children, command
from kvtier.tools.selftest.checks import Check
command.LIMIT_S, command.GRACE_S = 0.5, 0.5
checks.checks = lambda: [
    Check("bytes", "it is kept", lambda device, way: ""),
    Check("bytes", "it hangs", lambda device, way: str(threading.Event().wait())),
]
children.checks = list
run(["selftest", "--device", "cpu", "--dir", {str(tmp_path)!r}, "--json", {str(out)!r}])
"""
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    report = msgspec.json.decode(out.read_bytes(), type=Report)
    assert [(check.promise, check.outcome) for check in report.checks] == [
        ("it is kept", "kept"),
        ("it hangs", "broken"),
    ]
    assert "still under way after" in ended.stdout


def test_a_measurement_that_finds_no_room_on_the_device_is_left_out(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(device: Device) -> Iterator[Row]:
        yield row("store", "by index", 4_096, 1.0, 0.5)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed, "measure", measure)
    status, report, _ = tested("speed")
    assert (status, len(report.figures)) == (0, 1)
    assert [(check.outcome, check.detail) for check in report.checks] == [
        ("skipped", "the device has no room: CUDA out of memory")
    ]


def test_a_copy_that_fails_beside_another_is_no_figure() -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal address")

    with pytest.raises(RuntimeError, match="an illegal address"):
        speed._at_once(lambda: None, fail)
    with ThreadPoolExecutor(1) as threads:
        copying = speed._Copying(threads, fail)
        copying.start()
        with pytest.raises(RuntimeError, match="an illegal address"):
            copying.stop()


def test_a_disk_without_room_for_the_prompts_is_said_before_anything_is_computed(
    tested: Tested, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "ROOM", 1e12)
    status, report, _ = tested("model")
    assert (status, report.checks[0].outcome) == (0, "skipped")
    assert "--dir names another" in report.checks[0].detail


def test_a_way_whose_first_transfers_fail_is_tried_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    def first(device: Device, way: Way) -> str:
        if way.name == "gather kernel":
            raise Wrong("the process for 'first' said nothing; exit status -6")
        return ""

    def check(device: Device, way: Way) -> str:
        made.append(way.name)
        return ""

    only(monkeypatch, Check("bytes", "a promise", check))
    monkeypatch.setattr(children, "first_transfers", lambda: Check("first", "first transfers work", first))
    device = Modelled([Way("batched", None), Way("gather kernel", None)])
    testing = command.Testing(device, ["bytes"], time.perf_counter() + 60, lambda what: None)
    testing.choose_ways()
    testing.check_all(["bytes"])
    assert made == ["batched"]
    assert [(row.way, row.outcome) for row in testing.found] == [
        ("batched", "kept"),
        ("gather kernel", "broken"),
        ("batched", "kept"),
    ]


# The report.


def row(operation: str, way: str, page_bytes: int, figure: float, ratio: float) -> Row:
    return Row(
        operation=operation,
        chunk_bytes=None,
        settings={"way": way, "page_bytes": page_bytes},
        unit="MB/s",
        figure=figure,
        limit=figure / ratio,
        limit_is="",
        ratio=ratio,
        spread=(ratio, ratio),
        figure_spread=(figure, figure),
        limit_spread=(figure, figure),
        rounds=1,
    )


def test_the_fastest_way_is_named_for_each_page_and_direction() -> None:
    figures = [
        row("load", "batched", 4_096, 5.0, 0.1),
        row("load", "gather kernel", 4_096, 20.0, 0.4),
        row("load", "batched", 65_536, 48.0, 0.96),
        row("load", "gather kernel", 65_536, 24.0, 0.48),
        row("store", "batched", 4_096, 9.0, 0.2),
    ]
    assert winners(figures) == [
        (4_096, "load", "gather kernel", 4.0),
        (4_096, "store", "batched", 1.0),
        (65_536, "load", "batched", 2.0),
    ]


def test_goals_are_met_by_the_worst_figure_of_the_way_that_transfers_use() -> None:
    figures = [
        row("load", "batched", 16_384, 1.0, 0.7),
        row("load", "batched", 65_536, 1.0, 0.89),
        row("store", "batched", 1 << 20, 1.0, 0.99),
        row("load", "gather kernel", 65_536, 1.0, 0.1),
        row("matmul beside copies both ways", "batched", 65_536, 1.0, 0.98),
    ]
    told = [
        FirstToken(
            tokens=tokens,
            source=source,
            ttft_s=1.0,
            spread_s=(1.0, 1.0),
            loaded_bytes=1,
            limit_s=None,
            saved=saved,
            same_tokens=True,
        )
        for tokens, source, saved in ((2_048, "cpu", 0.5), (32_768, "cpu", 0.95), (32_768, "fs", 0.4))
    ]
    found = [(goal.at_least, goal.found, goal.met) for goal in goals_of("batched", figures, told)]
    assert found == [(0.9, 0.89, False), (0.6, 0.7, True), (0.97, 0.98, True), (0.9, 0.95, True)]


# What is refused.


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def refused(*args: str) -> str:
        assert run(["selftest", *args]) == 2
        return capsys.readouterr().err

    return refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused_with_the_dry_run_for_a_remedy(refused: Callable[..., str]) -> None:
    assert "torch 2" in (told := refused())
    assert "finds no such device; cpu accepted, for a dry run" in told


def test_wrong_options_are_refused_by_name(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "--device 'tpu': expected one of cpu, cuda" in refused("--device", "tpu")
    assert "--parts 'bytes,bits': expected one or more of bytes, order" in refused("--parts", "bytes,bits")
    absent = str(tmp_path / "absent")
    assert f"{absent}: No such file or directory" in refused("--device", "cpu", "--dir", absent)
    assert "--markdown" in refused("--device", "cpu", "--markdown", f"{absent}/out.md")


def test_figures_for_standard_output_go_there_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch)
    assert run(["selftest", "--device", "cpu", "--parts", "bytes", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["checks"] == []
    assert shown.err == ""
