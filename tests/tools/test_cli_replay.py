import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from kvtier.settings.hints import Hint
from kvtier.tools.replay.study import measure, simulation
from kvtier.tools.replay.traces import Trace, TraceRequest
from kvtier_backends.dummy import DummyBackend
from tests.tools.command import KVTIER, check_refusal, reported, run
from tests.tools.replay.written import write_prompts, write_trace

SMALL = 'cpu_bytes_to_use = "{rows}"\nchunk_bytes = "4KiB"\nrunner = "inline"\n'


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def trace(tmp_path):
    prompts = [tuple(range(user * 100, user * 100 + turn)) for turn in range(1, 11) for user in range(6)]
    path = str(tmp_path / "trace.jsonl.gz")
    write_trace(path, [TraceRequest(number // 4 * 3_000, 512 * len(ids), 9, ids) for number, ids in enumerate(prompts)])
    return path


def config_file(folder, *lines, rows=64):
    path = folder / "engine.toml"
    path.write_text(SMALL.format(rows=f"{4 * rows}KiB") + "\n".join(lines))
    return str(path)


def test_by_default_a_trace_goes_through_memory_and_files_and_leaves_none(outside, trace, tmp_path, temporary, capsys):
    picture = tmp_path / "out.png"
    told, shown = reported(tmp_path, "replay", trace, "--plot", picture), capsys.readouterr()
    assert "trace.jsonl.gz: replayed 60 requests, 330 chunk references" in shown.out
    assert "0 wrong chunks" in shown.out
    assert "\n0:fs " in shown.out
    assert shown.err == ""
    extent = measure(Trace(trace))
    assert (told["command"], told["requests"], told["chunk_references"]) == ("kvtier replay", 60, 330)
    assert told["hit_ratio"] == told["best_hit_ratio"] == extent.hit_ratio(extent.best_hits)
    assert sum(told["hits"].values()) == extent.best_hits
    assert told["tiers"]["0:fs"]["chunks_stored"] == extent.unique_blocks
    assert told["tiers"]["0:fs"]["dropped"] == told["tiers"]["0:fs"]["failed"] == {}
    assert (told["wrong_chunks"], told["drained"], told["interrupted"]) == (0, True, False)
    assert {"put", "fetch", "0:fs store"} <= told["latency_s"].keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert os.listdir(temporary) == []


def test_in_the_users_directory_chunks_stay_and_only_the_same_trace_finds_them(outside, trace, tmp_path):
    tier, other = tmp_path / "tier", tmp_path / "other.jsonl"
    write_trace(other, [TraceRequest(5, 1_024, 1, (0, 1)), TraceRequest(6, 1_024, 1, (2, 3))])
    first, again = (reported(tmp_path, "replay", trace, "--fs", tier, "--limit", "30") for _ in range(2))
    assert first["hit_ratio"] < 0.8
    assert again["hit_ratio"] == 1.0
    assert again["hits"]["0:fs"] > 0
    assert reported(tmp_path, "replay", other, "--fs", tier)["hit_ratio"] == 0.0


def test_a_workload_is_generated_from_a_seed_without_a_trace(tmp_path):
    options = ("--config", config_file(tmp_path, rows=512), "--limit", "50", "--concurrency", "1", "--seed")
    told = [reported(tmp_path, "replay", *options, seed) for seed in (1, 1, 2)]
    figures = [(each["chunk_references"], each["hits"]) for each in told]
    assert figures[0] == figures[1] != figures[2]


BOTH = pytest.mark.parametrize("way", [("replay",), ("simulate", "--gpu-cache-tokens", "0")], ids=lambda way: way[0])


@BOTH
def test_the_default_primary_holds_long_requests_so_that_nothing_is_lost(outside, tmp_path, way):
    """Agents' prompts have thousands of blocks, most of them in every prompt: a share of these is less than one."""
    sessions = [(*range(600), *range(1_000 * each, 1_000 * each + 100)) for each in (1, 2, 3, 4)]
    told = reported(tmp_path, *way, write_prompts(tmp_path / "agents.jsonl", sessions * 3, every_ms=60_000))
    assert told["hit_ratio"] == told["best_hit_ratio"]
    assert (told["warnings"], told["tiers"]["cpu"]["refused"]) == ([], {})


@BOTH
def test_requests_longer_than_the_primary_are_a_warning(tmp_path, way, capsys):
    trace = write_prompts(tmp_path / "trace.jsonl", [*[range(6), range(8, 14)] * 3, range(20, 27)], every_ms=60_000)
    config = config_file(tmp_path, '[[secondary_tiers]]\ntype = "dummy"', rows=4)
    told = reported(tmp_path, *way, trace, "--config", config)
    line = "the primary of 4 chunks is shorter than 7 requests of 7, the longest of 7 chunks"
    assert line in told["warnings"][0]
    assert line in capsys.readouterr().out


class Forgetful(DummyBackend):
    async def load(self, reads):
        outcomes = await super().load(reads)
        reads[0].into[:8] = bytes(8)
        return outcomes


def test_wrong_bytes_end_the_command_with_1(trace, tmp_path, capsys):
    config = config_file(tmp_path, f'[[secondary_tiers]]\ntype = "{__name__}:Forgetful"', rows=24)
    told = reported(tmp_path, "replay", trace, "--config", config, status=1)
    assert told["wrong_chunks"] >= len(told["wrong_keys"]) > 0
    assert f"{told['wrong_chunks']} wrong chunks" in capsys.readouterr().out


@BOTH
def test_the_hints_of_a_trace_reach_the_engine(tmp_path, way):
    """Finished sessions make room for one that returns: as many hits as the study has with the same hints."""
    blocks = [(0, 1, 2), *((10 * end, 10 * end + 1) for end in range(1, 5)), (0, 1, 2, 3)]
    requests = [
        TraceRequest(60_000 * number, 512 * len(ids), 9, ids, hint=Hint(over=True) if number in (1, 2, 3, 4) else None)
        for number, ids in enumerate(blocks)
    ]
    trace = str(tmp_path / "hinted.jsonl")
    write_trace(trace, requests)
    assert reported(tmp_path, *way, trace, "--config", config_file(tmp_path, rows=6))["hit_ratio"] == 3 / 15
    assert list(simulation("lru")(requests, 6)) == [0, 0, 0, 0, 0, 3]
    assert sum(simulation("lru")([structs.replace(each, hint=None) for each in requests], 6)) == 0


def test_a_simulation_reports_first_tokens_and_the_same_seed_gives_the_same_bytes(outside, trace, tmp_path, temporary):
    out = [tmp_path / "0.json", tmp_path / "1.json"]
    for hash_seed, path in enumerate(out):
        command = [*KVTIER, "simulate", trace, "--gpu-cache-tokens", "2048", "--json", str(path)]
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
        assert "of virtual time" in ended.stdout
        assert "without_tiering" in ended.stdout
    assert out[0].read_bytes() == out[1].read_bytes()
    told = json.loads(out[0].read_bytes())
    assert told["hit_ratio"] == told["best_hit_ratio"]
    assert told["ttft_s"]["with_tiering"]["samples"] == told["ttft_s"]["without_tiering"]["samples"] == 60
    assert told["ttft_s"]["with_tiering"]["mean"] < told["ttft_s"]["without_tiering"]["mean"]
    assert 42 <= told["seconds"] <= 46  # The trace's own time: fourteen batches of three seconds, and the last one's.
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("written", ["", "prefill_tokens_per_s = 20000.0\n"])
def test_chunks_have_the_length_of_the_traces_blocks_when_loads_are_weighed(tmp_path, written):
    """A chunk of 512 tokens takes 26 ms to compute, and one load 10 ms: worth it, and not at fewer tokens a chunk."""
    prompts = [range(10 * session, 10 * session + 3) for session in range(4)] * 3
    trace = write_prompts(tmp_path / "returning.jsonl", prompts, every_ms=60_000)
    tier = '[[secondary_tiers]]\ntype = "dummy"\nname = "slow"\nlatency_s = "10ms"\n'
    config = Path(config_file(tmp_path, tier, rows=6))
    config.write_text(written + config.read_text())
    told = reported(tmp_path, "simulate", trace, "--config", config, "--gpu-cache-tokens", "0")
    assert told["hits"] == {"cpu": 0, "slow": 24}


def test_without_matplotlib_a_picture_is_rejected_with_the_remedy(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run("replay", trace, "--plot", tmp_path / "out.png") == 2
    assert "pip install 'kvtier[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda lines: [*lines[:20], b'{"timestamp": -1}', *lines[21:]], "line 21: "),
        (lambda lines: [*lines[:59], lines[59][:30]], "line 60: Input data was truncated"),
        (lambda _: [], "no requests in it"),
    ],
)
@pytest.mark.parametrize("command", ["replay", "policies"])
def test_a_bad_trace_is_rejected_by_its_line_and_makes_nothing(
    outside, trace, tmp_path, temporary, capsys, damage, complaint, command
):
    """Outside, because matplotlib lists a fresh machine's fonts by a process."""
    good = tmp_path / "trace.jsonl"
    write_trace(good, Trace(trace))
    good.write_bytes(b"\n".join(damage(good.read_bytes().splitlines())))
    os.unlink(trace)
    plot = ("--plot", f"{tmp_path}/out.png") if command == "replay" else ()
    assert run(command, good, "--json", f"{tmp_path}/out.json", *plot) == 2
    check_refusal(capsys, complaint)
    assert (os.listdir(tmp_path), os.listdir(temporary)) == (["trace.jsonl"], [])


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("command", "told_to_end"),
    [("replay", signal.SIGINT), ("replay", signal.SIGTERM), ("replay", signal.SIGHUP), ("simulate", signal.SIGINT)],
)
def test_an_interrupt_ends_a_replay_with_130_and_a_report_of_what_finished(tmp_path, temporary, command, told_to_end):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    prompts = [range(user * 1_000, user * 1_000 + 100 + turn) for turn in range(80) for user in range(50)]
    long = write_prompts(tmp_path / "long.jsonl", prompts)
    line = [*KVTIER, command, long, "--json", str(out), *(["--plot", str(picture)] if command == "replay" else [])]
    terminal, theirs = os.openpty()
    with (
        open(terminal, "rb", buffering=0) as screen,
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=theirs, text=True, start_new_session=True) as process,
    ):
        os.close(theirs)
        seen = see(screen, rb"[1-9]\d*/4000")
        process.send_signal(told_to_end)
        seen += see(screen, None)
        shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in seen
    assert b"WARNING" not in seen
    told = json.loads(out.read_bytes())
    assert told["interrupted"] is True
    assert 0 < told["requests"] < 4_000
    assert told["wrong_chunks"] == 0
    assert told["chunk_references"] >= 100 * told["requests"]
    assert f"interrupted after {told['requests']:,} requests" in shown
    assert (sorted(os.listdir(tmp_path)), os.listdir(temporary)) == (["long.jsonl", "out.json"], [])


def see(screen, pattern):
    seen = b""
    while pattern is None or not re.search(pattern, seen):
        try:
            seen += screen.read(4_096)
        except OSError:  # EIO: the other end is closed.
            assert pattern is None, seen
            return seen
    return seen
