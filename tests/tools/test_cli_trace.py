"""`kvtier trace info` and `kvtier trace convert`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from kvtier.settings.hints import Hint
from kvtier.tools.replay.traces import Trace, TraceRequest, write_trace
from tests.tools.command import run


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "log.jsonl"
    write_log(path, [1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8, 9], times=(0, 40))
    return str(path)


def write_log(path: str | Path, *prompts: list[int], times: Sequence[int] = ()) -> None:
    """Write a log of prompts, with replies of five, six, … tokens."""
    rows = [{"token_ids": tokens, "output_length": 5 + number} for number, tokens in enumerate(prompts)]
    for row, time in zip(rows, times, strict=False):
        row["timestamp"] = time
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_log_of_token_ids_becomes_a_trace_that_the_other_commands_read(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "trace.jsonl.zst")
    assert run("trace", "convert", log, "--block-tokens", "4", "--output", out) == 0
    assert "2 requests, 3 blocks of 4 tokens" in capsys.readouterr().err
    trace = Trace(out, strict=True)
    assert (trace.block_tokens, dict(trace.meta)) == (4, {"block_size": 4})
    assert list(trace) == [
        TraceRequest(timestamp_ms=0, input_length=5, output_length=5, hash_ids=(0,)),
        TraceRequest(timestamp_ms=40, input_length=8, output_length=6, hash_ids=(0, 1)),
    ]
    assert run("policies", out, "--policies", "lru", "--sizes", "1") == 0


def test_a_rejected_log_leaves_the_existing_file(log: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    out.write_text("kept")
    write_log(log, [1], [-2])
    assert run("trace", "convert", log, "-o", str(out)) == 2
    assert out.read_text() == "kept"


def test_a_log_without_times_says_what_is_assumed(log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(log, [1], [2])
    assert run("trace", "convert", log, "--block-tokens", "1", "-o", str(tmp_path / "out.jsonl")) == 0
    assert "one request a second is assumed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "of 2 requests none fills a block of 16 tokens"),
        (("--block-tokens", "1024"), "of 2 requests none fills a block of 1,024 tokens"),
    ],
)
def test_a_log_without_one_whole_block_is_rejected_and_leaves_no_trace(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], why: str
) -> None:
    write_log(log, [1, 2], [3])
    out = tmp_path / "out.jsonl"
    assert run("trace", "convert", log, *options, "-o", str(out)) == 2
    said = capsys.readouterr().err
    assert f"{log}: {why}" in said
    assert "fewer --block-tokens" in said
    assert not out.exists()


@pytest.mark.parametrize("name", ["out.txt", "out", "-", "out.jsonl.bz2", "out.jsonl.zstd"])
def test_a_trace_is_written_only_under_a_name_that_says_how_it_is_written(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("trace", "convert", log, "--block-tokens", "4", "-o", name) == 2
    assert f"--output {name}: expected a name that ends in .jsonl, .jsonl.gz or .jsonl.zst" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_trace_is_written_into_a_pipe_whatever_its_name(
    log: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run("trace", "convert", log, "--block-tokens", "4", "-o", str(pipe)) == 0, capsys.readouterr().err
        assert os.read(reader, 65_536).count(b"hash_ids") == 2
    finally:
        os.close(reader)


def test_the_info_counts_what_is_in_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [
        TraceRequest(1_000 * at, 512 * (at + 1), at, tuple(range(at + 1)), session_id=at % 2) for at in range(4)
    ]
    hints = [None, Hint(over=True, class_="agent"), Hint(class_="agent"), None]
    write_trace(path, [structs.replace(each, hint=hint) for each, hint in zip(requests, hints, strict=True)])
    assert run("trace", "info", str(path), "--json", "-") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "trace": "trace.jsonl",
        "meta": {},
        "block_tokens": 512,
        "requests": 4,
        "sessions": 2,
        "seconds": 3.0,
        "input_length": {"total": 5120, "mean": 1280.0, "p50": 1024, "p99": 2048, "most": 2048},
        "output_length": {"total": 6, "mean": 1.5, "p50": 1, "p99": 3, "most": 3},
        "block_references": 10,
        "unique_blocks": 4,
        "best_hit_ratio": 0.6,
        "hints": {"over": 1, "class": 2},
    }
    assert shown.err == ""


def test_hints_survive_a_conversion(tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", str(tmp_path / "out.jsonl")
    log.write_text('{"token_ids": [1, 2], "kvtier": {"over": true}}\n{"token_ids": [1, 3], "kvtier": 5}\n')
    assert run("trace", "convert", str(log), "--block-tokens", "2", "-o", out) == 0
    assert [request.hint for request in Trace(out)] == [Hint(over=True), None]


def test_the_info_of_a_generated_trace_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trace", "info", "generated", "--limit", "50") == 0
    assert "generated" in capsys.readouterr().out
