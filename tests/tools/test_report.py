"""Pages of reports: one file that needs nothing else, whatever names are in it; of up to five runs of one command."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvtier.tools.bench.figures import Figures, print_by_chunk
from kvtier.tools.cli import main
from kvtier.tools.outputs import as_json
from kvtier.tools.pictures import write_figures_picture, write_replay_picture
from kvtier.tools.replay.replay import Tally
from kvtier.tools.replay.report import Report, make_report
from kvtier.tools.replay.study import Extent
from kvtier.tools.replay.traces import Request, write_trace
from kvtier.tools.report.benches import bench_page
from kvtier.tools.report.command import run_names
from kvtier.tools.report.page import write_page
from kvtier.tools.report.replays import replay_page
from tests.tools.reports import bench_report, config_of, replay_report

PAGE_BYTES_MAX = 2 << 20
HOSTILE = "<script>alert(1)</script>\"'&amp;]]>${x}{{ 7 * 7 }}‮"
Run = Any


class Elements(HTMLParser):
    """What is in a page: its elements, where they lead, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.targets: list[str] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.targets += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(tmp_path: Path, page: Any) -> Elements:
    path = tmp_path / "page.html"
    write_page(str(path), page)
    text = path.read_text()
    assert text.startswith("<!doctype html>")
    assert len(text) < PAGE_BYTES_MAX
    return Elements(text)


def written(tmp_path: Path, **reports: Report | Figures) -> list[str]:
    for name, report in reports.items():
        (tmp_path / f"{name}.json").write_bytes(as_json(report))
    return [str(tmp_path / f"{name}.json") for name in reports]


def test_a_page_says_what_was_found_against_what_and_with_which_assumptions(tmp_path: Path) -> None:
    told = page_of(tmp_path, replay_page({"": replay_report()})).text
    for words in (
        "kvtier replay: trace.jsonl",
        "0.5000",
        "0.7500",
        "7.0 GB/s",
        "assumed",
        "no limit",
        "prefill: slots",
    ):
        assert words in told
    assert "disk dropped budget 7" in told
    assert "disk failed failed 20" in told
    assert "disk skipped late 2" in told
    assert "tier disk: 7 chunks were never stored in it" in told


@pytest.mark.parametrize("runs", [1, 5])
def test_no_name_becomes_part_of_a_page(tmp_path: Path, runs: int) -> None:
    """Traces and tiers are named by others."""
    report = replay_report(tiers=(HOSTILE, "$\\frac{"), trace=HOSTILE)
    found = page_of(tmp_path, replay_page({f"{HOSTILE}{number}" if runs > 1 else "": report for number in range(runs)}))
    assert "script" not in found.tags
    assert found.handlers == []
    assert HOSTILE in "".join(found.words)


def test_a_name_in_letters_that_the_pictures_font_lacks_is_no_warning(tmp_path: Path) -> None:
    report = replay_report(tiers=("磁盘",), trace="跟踪.jsonl")
    assert "磁盘" in page_of(tmp_path, replay_page({"": report})).text
    write_replay_picture(str(tmp_path / "replay.png"), report)


def test_a_page_leads_nowhere_else(tmp_path: Path) -> None:
    for page in (replay_page({"": replay_report()}), bench_page({"": bench_report()})):
        found = page_of(tmp_path, page)
        assert [target for target in found.targets if not target.startswith(("#", "data:"))] == []
        assert found.tags.isdisjoint({"script", "iframe", "object", "embed", "form"})
        assert "img" in found.tags


def test_links_within_a_page_lead_to_its_parts(tmp_path: Path) -> None:
    write_page(str(tmp_path / "page.html"), bench_page({"": bench_report()}))
    text = (tmp_path / "page.html").read_text()
    assert set(re.findall(r'href="#([^"]*)"', text)) == set(re.findall(r'<section id="([^"]*)"', text))


def test_five_large_reports_make_a_page_of_less_than_two_mebibytes(tmp_path: Path) -> None:
    tiers = tuple(f"tier {number}" for number in range(6))
    page_of(tmp_path, replay_page({str(run): replay_report(tiers=tiers, samples=400) for run in range(5)}))
    page_of(tmp_path, bench_page({str(run): bench_report(sizes=8, lines=20) for run in range(5)}))


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_replay_of_nothing_has_a_page(tmp_path: Path, interrupted: bool) -> None:
    empty = make_report(
        Tally(1),
        trace="empty",
        seed=0,
        extent=Extent(0, 0, 0, 0, {}),
        config=config_of("disk"),
        engine={},
        interrupted=interrupted,
        ttft_s=None,
    )
    told = page_of(tmp_path, replay_page({"": empty})).text
    assert ("was interrupted" if interrupted else "had not reached its tiers") in told
    assert "No chunk was dropped" in told
    page_of(tmp_path, replay_page({"empty": empty, "full": replay_report()}))


def test_runs_of_different_requests_are_said_to_be_so(tmp_path: Path) -> None:
    runs = {"long": replay_report(samples=40), "short": replay_report(samples=20)}
    assert "did not replay the same requests" in page_of(tmp_path, replay_page(runs)).text
    assert "did not replay" not in page_of(tmp_path, replay_page({"a": runs["long"], "b": runs["long"]})).text


def test_a_comparison_says_how_each_run_differs_from_the_first(tmp_path: Path) -> None:
    runs = {"before": bench_report(), "after": bench_report(factor=2.0)}
    told = page_of(tmp_path, bench_page(runs)).text
    assert "100 MB/s ratio 0.40 (0.30 to 0.50) 200 MB/s (+100.0 %) ratio 0.80 (0.60 to 1.00)" in told


@pytest.mark.parametrize("runs", [1, 2])
def test_a_benchmarks_times_are_drawn_as_distributions(tmp_path: Path, runs: int) -> None:
    figures = {str(run) if runs > 1 else "": bench_report(sizes=1, lines=2) for run in range(runs)}
    told = page_of(tmp_path, bench_page(figures)).text
    assert told.count("store 0, segments, 128 KiB, beside") == 2  # Of each limit.
    assert "store 1, files, 128 KiB, beside" not in told


def test_the_page_of_a_run_is_the_page_of_its_json(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace("trace.jsonl", [Request(1_000 * turn, 512 * turn, 1, tuple(range(turn))) for turn in range(1, 9)])
    replayed = ("replay", "trace.jsonl", "--virtual-time", "--json", "run.json", "--report", "run.html")
    assert run(*replayed)[0] == 0
    assert run("report", "run.json") == (0, "")
    assert Path("report.html").read_text() == Path("run.html").read_text()
    measured = ("bench", "cpu", "--no-pages", "--chunk-sizes", "64KiB", "--rounds", "1")
    assert run(*measured, "--json", "cpu.json", "--report", "cpu.html")[0] == 0
    assert run("report", "cpu.json", "-o", "again.html")[0] == 0
    assert Path("again.html").read_text() == Path("cpu.html").read_text()


def test_up_to_five_reports_stand_beside_each_other_by_the_names_of_their_files(run: Run, tmp_path: Path) -> None:
    paths = written(tmp_path, **{f"run{number}": replay_report() for number in range(5)})
    assert run("report", *paths, "--output", tmp_path / "out.html") == (0, "")
    told = Elements((tmp_path / "out.html").read_text()).text
    assert "kvtier replay: 5 runs" in told
    assert "run0 run1 run2 run3 run4" in told


def test_runs_whose_files_have_one_name_stay_apart(run: Run, tmp_path: Path) -> None:
    long, also = written(tmp_path, **{"same" * 30: replay_report(), "same" * 30 + "s": replay_report()})
    assert run("report", long, long, also, "--output", tmp_path / "out.html")[0] == 0
    assert "kvtier replay: 3 runs" in (tmp_path / "out.html").read_text()
    assert run_names(["x", "x", "x (2)"]) == ["x (1)", "x (2)", "x (2) (3)"]
    assert run_names(["a/run.json", "b/run.json"]) == ["a/run.json", "b/run.json"]


OLD = {"command": "kvtier bench fs", "machine": {}, "seconds": 1.0, "rows": []}


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            {"other": b'{"checked": 3}'},
            "JSON that does not say which command wrote it given, a report of kvtier replay",
        ),
        (
            {"other": b'{"command": "kvtier top"}'},
            "a report of 'kvtier top' given, a report of kvtier replay --json or",
        ),
        ({"old": json.dumps(OLD).encode()}, "format 0 of another version of kvtier given, format 1 accepted; write it"),
        (
            {"new": b'{"command": "kvtier replay", "format": 2}'},
            "format 2 of another version of kvtier given, format 1",
        ),
        ({"cut": b'{"command": "kvtier replay", "format": 1}'}, "Object missing required field `trace`"),
        ({"broken": b'{"command": "kvtier replay"'}, "Input data was truncated"),
        ({"binary": b"\xff\xfe"}, "JSON is malformed"),
        ({"array": b"[]"}, "Expected `object`, got `array`"),
        ({"deep": b"[" * 100_000}, "a report of kvtier replay --json or kvtier bench --json accepted"),
        (
            {"a": as_json(replay_report()), "b": as_json(bench_report())},
            "REPORT...: reports of kvtier replay and kvtier",
        ),
        (
            {"a": as_json(bench_report("kvtier bench cpu")), "b": as_json(bench_report())},
            "those of one command accepted",
        ),
        ({str(number): as_json(replay_report()) for number in range(6)}, "REPORT...: 6 given, at most 5 accepted"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line_and_writes_no_page(
    files: dict[str, bytes], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_bytes(content)
    with pytest.raises(SystemExit) as end:
        main(["report", *(str(tmp_path / f"{name}.json") for name in files), "--output", str(tmp_path / "out.html")])
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (2, "", 1)
    assert complaint in err
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_what_draws_pages_they_are_refused_with_the_remedy(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for call in (["replay", "--report", f"{tmp_path}/out.html"], ["report", "absent", "-o", f"{tmp_path}/out.html"]):
        with pytest.raises(SystemExit) as end:
            main(call)
        assert end.value.code == 2
        assert f"out.html: {missing} is not installed; pip install 'kvtier[report]'" in capsys.readouterr().err


# Benchmarks on the screen and as a picture.


def test_the_screen_has_a_column_for_each_chunk_size_and_marks_what_is_unsure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_by_chunk(bench_report(), Console(width=200))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["operation", "128", "KiB", "256", "KiB"]
    assert lines[1] == ["pwritev", "of", "one", "file", "250", "250"]
    assert lines[2] == ["store", "0,", "segments", "100", "0.40", "100", "0.40"]
    assert lines[3] == ["store", "1,", "files", "200", "0.80~", "200", "0.80~"]
    assert [*filter(None, lines)][9][:6] == ["MB/s", "and", "ratio", "by", "chunk", "size;"]
    assert "All: depth 4." in " ".join(" ".join(line) for line in lines)


@pytest.mark.parametrize("figures", [bench_report(), bench_report(lines=0), bench_report(sizes=8, lines=40)])
def test_any_benchmark_is_drawn(tmp_path: Path, figures: Figures) -> None:
    write_figures_picture(str(tmp_path / "bench.svg"), figures)
    assert (tmp_path / "bench.svg").read_bytes().startswith(b"<?xml")
