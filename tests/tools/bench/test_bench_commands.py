"""`kvtier bench`: what is measured and written, what is refused, and that nothing is left behind."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.tools.bench.commands import run_bench
from kvtier.tools.bench.figures import Figures, Row, load, print_by_chunk, print_figures, this_machine
from kvtier.tools.bench.files import LAYOUTS
from kvtier.tools.cli import main
from kvtier.tools.commands import COMMANDS

ROOT = Path(__file__).parents[3]
KVTIER = [sys.executable, "-c", "from kvtier.tools.cli import main; main()"]
FAKE_FIO = """#!/bin/sh
echo '{"jobs": [{"read": {"bw_bytes": 2500000}, "write": {"bw_bytes": 1250000}}]}'
"""
COUNTING = """
import asyncio
from kvtier_backends.dummy import DummyBackend
class Counting(DummyBackend):
    deletions = at_once = most_at_once = 0
    async def delete(self, keys):
        Counting.deletions += 1
        Counting.at_once += 1
        Counting.most_at_once = max(Counting.most_at_once, Counting.at_once)
        await asyncio.sleep(0)
        await super().delete(keys)
        Counting.at_once -= 1
"""
FS = ["--chunk-sizes", "8KiB", "--size", "64KiB", "--rounds", "2"]


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", *map(str, args)])
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.fixture
def measured(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run a command with --json - and return what it wrote."""

    def measured(*args: object) -> dict[str, Any]:
        assert run(*args, "--json", "-") == 0
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        for row in told["rows"]:
            assert row["figure"] > 0
            assert row["limit"] > 0
            assert row["spread"][0] <= row["ratio"] <= row["spread"][1]
            assert row["limit_is"]
        return told

    return measured


def operations(told: dict[str, Any]) -> set[str]:
    return {row["operation"] for row in told["rows"]}


@pytest.fixture(autouse=True)
def no_fio(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Have no fio but the one that a test puts here."""
    folder = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", str(folder))
    return folder


# What is measured.


@pytest.mark.usefixtures("outside")
def test_a_directory_is_measured_and_left_as_it_was(tmp_path: Path, measured: Callable[..., dict[str, Any]]) -> None:
    (tmp_path / "mine").write_text("stays")
    told = measured("fs", tmp_path, *FS, "--depths", "1,2", "--fsync", "--namings", "vllm,flat", "--layouts", "files")
    assert operations(told) == {"store", "store, evicting", "load"}
    assert {row["settings"]["fsync"] for row in told["rows"]} == {True, False}
    assert {row["settings"]["depth"] for row in told["rows"]} == {1, 2}
    assert {row["settings"]["naming"] for row in told["rows"]} == {"vllm", "flat"}
    assert {row["settings"].get("checksum") for row in told["rows"]} == {None, True, False}
    assert {row["limit_is"] for row in told["rows"]} == {
        "preadv of one file",
        "pwritev of one file",
        "pwritev of new files",
    }
    assert told["machine"]["file_system"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.usefixtures("outside")
def test_every_layout_is_measured_by_default(tmp_path: Path, measured: Callable[..., dict[str, Any]]) -> None:
    told = measured("fs", tmp_path, *FS)
    assert {row["settings"]["layout"] for row in told["rows"]} == set(LAYOUTS)


@pytest.mark.usefixtures("outside")
def test_the_page_cache_is_measured_if_asked_for(tmp_path: Path, measured: Callable[..., dict[str, Any]]) -> None:
    told = measured("fs", tmp_path, *FS, "--io", "buffered", "--layouts", "files")
    assert {row["settings"]["io"] for row in told["rows"]} == {"buffered"}


@pytest.mark.usefixtures("outside")
def test_fio_stands_beside_the_raw_limit_where_it_is_installed(
    tmp_path: Path, no_fio: Path, measured: Callable[..., dict[str, Any]]
) -> None:
    (no_fio / "fio").write_text(FAKE_FIO)
    (no_fio / "fio").chmod(0o755)
    told = measured("fs", tmp_path, *FS, "--layouts", "files")
    fio = {row["operation"]: row for row in told["rows"] if row["limit_is"] == "fio"}
    assert fio["raw read"]["limit"] == 2.5
    assert fio["raw write"]["limit"] == 1.25


@pytest.mark.usefixtures("outside")
def test_each_tier_of_a_configuration_is_measured_through_an_engine(
    tmp_path: Path, measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.bench.whole.WAITS", 3)
    monkeypatch.setattr("kvtier.tools.bench.whole.STEPS", 3)
    root = tmp_path / "root"
    root.mkdir()
    config = tmp_path / "engine.toml"
    config.write_text(
        'cpu_bytes_to_use = "4MiB"\nchunk_bytes = "8KiB"\n'
        f'[[secondary_tiers]]\ntype = "fs"\nroot = "{root}"\n[[secondary_tiers]]\ntype = "dummy"\n'
    )
    told = measured("tiers", config, "--size", "256KiB", "--rounds", 1)
    expected = {
        "store",
        "load",
        "load, engine busy in Python",
        "p99 of waits for a load beside stores",
        "p99 of steps beside transfers",
    }
    for tier, limit in (("0:fs", "preadv and pwritev of one file"), ("1:dummy", "memcpy")):
        rows = {row["operation"]: row for row in told["rows"] if row["settings"]["tier"] == tier}
        assert rows.keys() == expected
        assert rows["load"]["limit_is"] == limit
        for name, row in rows.items():
            times = [row["figure_times"], row["limit_times"]]
            assert [each and each["samples"] for each in times] == ([3, 3] if row["unit"] == "ms" else [None, None]), (
                name
            )
    assert not list(root.iterdir())


# What is written and shown.


def test_the_table_names_the_operation_the_limit_and_the_machines_load(capsys: pytest.CaptureFixture[str]) -> None:
    print_figures(figures_of_three_operations(), Console(width=160))
    shown = capsys.readouterr().out
    for words in ("store 1", "128 KiB", "pwritev of one file", "Medians of 3 rounds", "load of the machine"):
        assert words in shown


def test_json_is_written_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = figures_of_three_operations().rows
    run_bench("bench", lambda step: iter(rows), 1, json_path=str(tmp_path / "out.json"))
    assert "pwritev of one file" in capsys.readouterr().out
    run_bench("bench", lambda step: iter(rows), 1, json_path="-")
    shown = capsys.readouterr()
    told, written = json.loads(shown.out), json.loads((tmp_path / "out.json").read_text())
    assert told["rows"] == written["rows"] == json.loads(msgspec.json.encode(rows))
    assert len(told["machine"]["load_before"]) == len(told["machine"]["load_after"]) == 3
    assert shown.err == ""


def figures_of_three_operations() -> Figures:
    """Return figures of three operations beside two limits, for two chunk sizes."""
    rows = [
        Row(
            operation=f"store {line}",
            chunk_bytes=(128 << 10) << size,
            settings={"layout": "files" if line % 2 else "segments", "depth": 4},
            unit="MB/s",
            figure=100.0 * (line + 1),
            limit=250.0,
            limit_is=limit,
            ratio=0.4 * (line + 1),
            spread=(0.3 * (line + 1), (0.9 if line == 1 else 0.5) * (line + 1)),
            figure_spread=(90.0, 110.0),
            limit_spread=(240.0, 260.0),
            rounds=3,
        )
        for limit in ("pwritev of one file", "preadv <of> one file")
        for line in range(3)
        for size in range(2)
    ]
    return Figures(command="kvtier bench fs", machine=this_machine(load(), "/"), seconds=1.0, rows=rows)


def test_the_screen_has_a_column_for_each_chunk_size_and_marks_what_is_unsure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_by_chunk(figures_of_three_operations(), Console(width=200))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["operation", "128", "KiB", "256", "KiB"]
    assert lines[1] == ["pwritev", "of", "one", "file", "250", "250"]
    assert lines[2] == ["store", "0,", "segments", "100", "0.40", "100", "0.40"]
    assert lines[3] == ["store", "1,", "files", "200", "0.80~", "200", "0.80~"]
    assert [*filter(None, lines)][9][:6] == ["MB/s", "and", "ratio", "by", "chunk", "size;"]
    assert "All: depth 4." in " ".join(" ".join(line) for line in lines)


# What is refused.


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["fs", "{tmp}", "--depths", "many"], "--depths 'many': expected numbers from 1 to 64"),
        (["fs", "{tmp}", "--json", "{tmp}/absent/out"], "--json {tmp}/absent/out: No such file or directory"),
        (["fs", "{tmp}", "--chunk-sizes", "5000"], "--chunk-sizes '5000': expected multiples of 4,096 bytes"),
        (["fs", "{tmp}/absent"], "DIR '{tmp}/absent': no such directory"),
        (["fs", "{tmp}", "--size", "lots"], "--size 'lots': expected sizes with commas between them"),
        pytest.param(["fs", "{tmp}", "--size", "16GiB"], "TiB are needed", marks=pytest.mark.outside),
        (["fs", "{tmp}", "--layouts", "piles"], "--layouts 'piles': expected one or more of files"),
        (["fs", "{tmp}", "--io", "psychic"], "--io 'psychic': expected one or more of auto, direct, buffered"),
        (["tiers", "{tmp}/absent.toml"], "{tmp}/absent.toml: cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    args: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(arg.format(tmp=tmp_path) for arg in args)) == 2
    shown = capsys.readouterr()
    assert complaint.format(tmp=tmp_path) in shown.err
    assert shown.out == ""
    assert not list(tmp_path.iterdir())


def test_a_tier_whose_answers_have_grown_old_by_its_turn_is_asked_again(
    tmp_path: Path, measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tools.bench.whole.WAITS", 3)
    monkeypatch.setattr("kvtier.tools.bench.whole.STEPS", 3)
    config = tmp_path / "engine.toml"
    config.write_text(
        'cpu_bytes_to_use = "4MiB"\nchunk_bytes = "8KiB"\n'
        '[[secondary_tiers]]\ntype = "dummy"\nshared = true\nlatency_s = "10ms"\nlimits = { answer_ttl_s = "5ms" }\n'
    )
    assert "load" in operations(measured("tiers", config, "--size", "256KiB", "--rounds", 1))


def test_an_engine_without_tiers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "engine.toml"
    config.write_text('cpu_bytes_to_use = "1MiB"\nchunk_bytes = "4KiB"\n')
    assert run("tiers", config) == 2
    assert "secondary_tiers: none given, at least one accepted" in capsys.readouterr().err


def test_an_engine_too_small_to_measure_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "engine.toml"
    config.write_text('cpu_bytes_to_use = "64KiB"\nchunk_bytes = "4KiB"\n[[secondary_tiers]]\ntype = "dummy"\n')
    assert run("tiers", config) == 2
    assert "cpu_bytes_to_use: 64.0 KiB given, at least 256.0 KiB accepted" in capsys.readouterr().err


def test_a_disk_that_fills_up_is_said_so_in_one_line() -> None:
    def work(step: Callable[[], None]) -> Iterator[Row]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match="/somewhere: No space left on device; a smaller --size accepted"):
        run_bench("bench", work, 1, json_path=None, directory="/somewhere")


# How it ends.


@pytest.mark.parametrize("end", [BackendUnavailable("the tier is away"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_what_was_measured_is_written_though_the_run_ends_early(
    end: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, (row, *_) = tmp_path / "out.json", figures_of_three_operations().rows

    def work(step: Callable[[], None]) -> Iterator[Row]:
        yield row
        raise end

    with pytest.raises(type(end)):
        run_bench("bench", work, 1, json_path=str(out))
    told = json.loads(out.read_text())
    assert (len(told["rows"]), told["complete"]) == (1, False)
    shown = capsys.readouterr().out
    assert row.operation in shown
    assert "This run was cut short" in shown


def test_chunks_are_deleted_a_few_calls_at_a_time(
    tmp_path: Path, measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow tier answers few of thousands of deletions within its deadline."""
    monkeypatch.setattr("kvtier.tools.bench.whole.WAITS", 100)
    monkeypatch.setattr("kvtier.tools.bench.whole.STEPS", 3)
    (tmp_path / "counting_tier.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "engine.toml"
    config.write_text(
        'cpu_bytes_to_use = "4MiB"\nchunk_bytes = "8KiB"\n[[secondary_tiers]]\ntype = "counting_tier:Counting"\n'
    )
    assert measured("tiers", config, "--size", "256KiB", "--rounds", 1)["complete"]
    from counting_tier import Counting  # type: ignore[import-not-found]

    assert Counting.deletions > 8
    assert 1 <= Counting.most_at_once <= 4


@pytest.mark.usefixtures("outside")
def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path: Path) -> None:
    command = [*KVTIER, "bench", "fs", str(tmp_path), "--chunk-sizes", "64KiB", "--size", "128KiB", "--rounds", "2000"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as bench:
        while not list(tmp_path.glob("*/*/raw-*")):
            assert bench.poll() is None, bench.communicate()
            time.sleep(0.01)
        bench.send_signal(signal.SIGINT)
        out, _ = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert out == b""
    assert not list(tmp_path.iterdir())


def test_every_bench_command_has_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        if name.startswith("bench "):
            assert name.split()[1] in shown
            assert command.summary in shown
