"""`kvtier replay`: what is shown and written, what is refused, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from msgspec import structs

from kvtier.hints import Hint
from kvtier.tools.cli import main
from kvtier.tools.replay.study import measure, simulation
from kvtier.tools.replay.traces import Request, Trace, write_trace

KVTIER = [sys.executable, "-c", "from kvtier.tools.cli import main; main()"]
WITHOUT_PRIVILEGE = """
import ctypes, os, sys
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):  # Or the superuser may write everywhere.
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
UNPRIVILEGED = [sys.executable, "-c", WITHOUT_PRIVILEGE]
SMALL = 'cpu_bytes_to_use = "{rows}"\nchunk_bytes = "4KiB"\nrunner = "inline"\n'


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have temporary directories made in one of the test's own."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Return a trace's path: six users with prompts that grow, in batches of three seconds."""
    prompts = [tuple(range(user * 100, user * 100 + turn)) for turn in range(1, 11) for user in range(6)]
    path = tmp_path / "trace.jsonl.gz"
    write_trace(path, [Request(number // 4 * 3_000, 512 * len(ids), 9, ids) for number, ids in enumerate(prompts)])
    return str(path)


def run(*args: str) -> int:
    """Run a command in this process; return its exit status."""
    with pytest.raises(SystemExit) as end:
        main(args)
    assert isinstance(end.value.code, int)
    return end.value.code


def config_file(folder: Path, *lines: str, rows: int = 64) -> str:
    path = folder / "engine.toml"
    path.write_text(SMALL.format(rows=f"{4 * rows}KiB") + "\n".join(lines))
    return str(path)


def report(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text())
    return told


# What comes of it.


@pytest.mark.usefixtures("outside")
def test_without_a_configuration_a_trace_goes_through_memory_and_files_and_leaves_none(
    trace: str, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    assert run("replay", trace, "--json", str(out), "--plot", str(picture)) == 0
    shown = capsys.readouterr()
    assert "trace.jsonl.gz: replayed 60 requests, 330 chunk references" in shown.out
    assert "0 wrong chunks" in shown.out
    assert "\n0:fs " in shown.out
    assert shown.err == ""
    told, extent = report(out), measure(Trace(trace))
    assert told["requests"] == 60
    assert told["chunk_references"] == 330
    assert told["hit_ratio"] == told["best_hit_ratio"] == extent.hit_ratio(extent.best_hits)
    assert sum(told["hits"].values()) == extent.best_hits
    assert told["cascades"] == extent.unique_blocks
    assert (told["wrong_chunks"], told["dropped"], told["failed"], told["drained"]) == (0, 0, 0, True)
    assert {"put", "fetch", "0:fs store"} <= told["latency_s"].keys()
    assert told["interrupted"] is False
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert os.listdir(temporary) == []


def test_a_report_for_standard_output_goes_there_alone(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_file(tmp_path)
    before = sorted(os.listdir(tmp_path))
    assert run("replay", trace, "--config", config, "--json", "-") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["requests"] == 60
    assert shown.err == ""
    assert sorted(os.listdir(tmp_path)) == before


def test_a_picture_for_standard_output_is_refused_and_no_file_is_named_after_it(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    assert run("replay", trace, "--plot", "-") == 2
    assert "--plot -: expected a name that ends in one of" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.usefixtures("outside")
def test_in_a_directory_of_ones_own_chunks_stay_and_are_found_again(trace: str, tmp_path: Path) -> None:
    tier, out = tmp_path / "tier", tmp_path / "out.json"
    tier.mkdir()
    assert run("replay", trace, "--fs", str(tier), "--limit", "30", "--json", str(out)) == 0
    assert report(out)["hit_ratio"] < 0.8
    assert run("replay", trace, "--fs", str(tier), "--limit", "30", "--json", str(out)) == 0
    assert report(out)["hit_ratio"] == 1.0
    assert report(out)["hits"]["0:fs"] > 0


@pytest.mark.usefixtures("outside")
def test_in_one_directory_another_trace_finds_nothing_of_the_first(trace: str, tmp_path: Path) -> None:
    tier, out = tmp_path / "tier", tmp_path / "out.json"
    tier.mkdir()
    other = tmp_path / "other.jsonl"
    write_trace(other, [Request(5, 1_024, 1, (0, 1)), Request(6, 1_024, 1, (2, 3))])
    assert run("replay", trace, "--fs", str(tier)) == 0
    assert run("replay", str(other), "--fs", str(tier), "--json", str(out)) == 0
    assert report(out)["hit_ratio"] == 0.0


@pytest.mark.usefixtures("outside")
def test_a_configurations_fs_tier_without_a_root_gets_a_temporary_one(
    trace: str, tmp_path: Path, temporary: Path
) -> None:
    out = tmp_path / "out.json"
    config = config_file(tmp_path, '[[secondary_tiers]]\ntype = "fs"', '[[secondary_tiers]]\ntype = "dummy"')
    assert run("replay", trace, "--config", config, "--json", str(out)) == 0
    told = report(out)
    assert told["engine"]["tiers"] == {"0:fs": "fs", "1:dummy": "dummy"}
    assert told["hits"].keys() == {"cpu", "0:fs", "1:dummy"}
    assert os.listdir(temporary) == []


def test_a_workload_is_generated_where_there_is_no_trace(tmp_path: Path) -> None:
    config = config_file(tmp_path, rows=512)
    told = []
    for seed in ("1", "1", "2"):
        out = tmp_path / "out.json"
        args = ("--config", config, "--limit", "50", "--seed", seed, "--concurrency", "1", "--json", str(out))
        assert run("replay", *args) == 0
        told.append((report(out)["chunk_references"], report(out)["hits"]))
    assert told[0] == told[1] != told[2]


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize(
    "tiers",
    [
        [],
        ['[[secondary_tiers]]\ntype = "dummy"\nlatency_s = "1ms"'],
        [
            '[[secondary_tiers]]\ntype = "dummy"\nlatency_s = "10us"',
            '[[secondary_tiers]]\ntype = "dummy"\nlatency_s = "2ms"\nconcurrency = 2',
            '[[secondary_tiers]]\ntype = "fs"',
        ],
        [
            '[[secondary_tiers]]\ntype = "kvtier.testing.faults:FaultyBackend"\ninner = {type = "dummy"}\n'
            "faults = {unavailable = 1.0}"
        ],
    ],
    ids=["none", "one", "three", "failing"],
)
def test_any_engine_ends_with_right_bytes_and_a_true_report(
    trace: str, tmp_path: Path, tiers: Sequence[str], rows: int
) -> None:
    out = tmp_path / "out.json"
    assert run("replay", trace, "--config", config_file(tmp_path, *tiers, rows=rows), "--json", str(out)) == 0
    told = report(out)
    assert told["requests"] == 60
    assert told["chunk_references"] == 330
    assert told["wrong_chunks"] == 0
    assert told["hit_ratio"] == sum(told["hits"].values()) / 330
    assert told["hit_ratio"] <= told["best_hit_ratio"]
    if rows == 64 and tiers and "Faulty" not in tiers[0]:
        assert told["hit_ratio"] == told["best_hit_ratio"]


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("way", [(), ("--virtual-time", "--gpu-cache-blocks", "0")], ids=["real", "virtual"])
def test_the_default_primary_holds_long_requests_so_that_nothing_is_lost(tmp_path: Path, way: tuple[str, ...]) -> None:
    """Agents' prompts have thousands of blocks, of which most are in every one: a share of these is less than one."""
    sessions = [(*range(600), *range(1_000 * each, 1_000 * each + 100)) for each in (1, 2, 3, 4)]
    trace, out = str(tmp_path / "agents.jsonl"), tmp_path / "out.json"
    write_trace(trace, [Request(60_000 * at, 512 * 700, 9, sessions[at % 4]) for at in range(12)])
    assert run("replay", trace, *way, "--json", str(out)) == 0
    told = report(out)
    assert told["hit_ratio"] == told["best_hit_ratio"]
    assert (told["warnings"], told["tiers"]["cpu"]["refused"]) == ([], {})


@pytest.mark.parametrize("way", [(), ("--virtual-time", "--gpu-cache-blocks", "0")], ids=["real", "virtual"])
def test_requests_longer_than_the_primary_are_counted(
    tmp_path: Path, way: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = str(tmp_path / "trace.jsonl"), tmp_path / "out.json"
    prompts = [tuple(range(8 * (at % 2), 8 * (at % 2) + 6)) for at in range(6)] + [tuple(range(20, 27))]
    write_trace(trace, [Request(60_000 * at, 512 * len(ids), 9, ids) for at, ids in enumerate(prompts)])
    config = config_file(tmp_path, '[[secondary_tiers]]\ntype = "dummy"', rows=4)
    assert run("replay", trace, "--config", config, *way, "--json", str(out)) == 0
    told, shown = report(out), capsys.readouterr().out
    line = "the primary of 4 chunks is shorter than 7 requests of 7, the longest of 7 chunks"
    assert line in told["warnings"][0]
    assert line in shown


def test_wrong_bytes_end_the_command_with_1(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "forgetful_tier.py").write_text(
        "from kvtier_backends.dummy import DummyBackend\n"
        "class Forgetful(DummyBackend):\n"
        "    async def load(self, reads):\n"
        "        outcomes = await super().load(reads)\n"
        "        reads[0].into[:8] = bytes(8)\n"
        "        return outcomes\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out.json"
    config = config_file(tmp_path, '[[secondary_tiers]]\ntype = "forgetful_tier:Forgetful"', rows=24)
    assert run("replay", trace, "--config", config, "--json", str(out)) == 1
    told = report(out)
    assert told["wrong_chunks"] >= len(told["wrong_keys"]) > 0
    assert f"{told['wrong_chunks']} wrong chunks" in capsys.readouterr().out


# In virtual time.


@pytest.mark.usefixtures("outside")
def test_in_virtual_time_first_tokens_are_reported_and_the_same_seed_tells_the_same_story(
    trace: str, tmp_path: Path, temporary: Path
) -> None:
    out = [tmp_path / "0.json", tmp_path / "1.json"]
    for hash_seed, path in enumerate(out):
        command = [*KVTIER, "replay", trace, "--virtual-time", "--gpu-cache-blocks", "16", "--json", str(path)]
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
        assert "of virtual time" in ended.stdout
        assert "without_tiering" in ended.stdout
    assert out[0].read_bytes() == out[1].read_bytes()
    told = report(out[0])
    assert told["hit_ratio"] == told["best_hit_ratio"]
    assert told["ttft_s"]["with_tiering"]["samples"] == told["ttft_s"]["without_tiering"]["samples"] == 60
    assert told["ttft_s"]["with_tiering"]["mean"] < told["ttft_s"]["without_tiering"]["mean"]
    assert 42 <= told["seconds"] <= 46  # The trace's own time: fourteen batches of three seconds, and the last one's.
    assert told["engine"]["prefill"] == {"tokens_per_s": 20_000.0, "slots": 4}
    assert os.listdir(temporary) == []


def test_slower_servers_make_later_first_tokens(trace: str, tmp_path: Path) -> None:
    means = []
    for speed, slots in (("10000", "8"), ("500", "8"), ("500", "1")):
        out = tmp_path / "out.json"
        args = ("--prefill-tokens-per-s", speed, "--slots", slots, "--json", str(out))
        assert run("replay", trace, "--virtual-time", *args) == 0
        means.append(report(out)["ttft_s"]["with_tiering"]["mean"])
    assert means == sorted(means)
    assert len(set(means)) == 3


def test_a_study_says_how_many_chunks_a_limit_kept_from_a_tier_and_which_limit_to_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "engine.toml", tmp_path / "out.json"
    path.write_text('cpu_bytes_to_use = "32GiB"\nchunk_bytes = "64MiB"\n[[secondary_tiers]]\ntype = "fs"\n')
    assert run("replay", "--virtual-time", "--config", str(path), "--limit", "20", "--json", str(out)) == 0
    told = report(out)
    dropped = told["tiers"]["0:fs"]["dropped"]["budget"]
    assert told["warnings"] == [
        f"tier 0:fs: {dropped:,} chunks were never stored in it; secondary_tiers[0].limits.store_bytes_in_flight was "
        "256.0 MiB: raise it"
    ]
    assert f"{dropped:,} chunks were never stored in it" in capsys.readouterr().out


@pytest.mark.parametrize("way", [("--virtual-time", "--gpu-cache-blocks", "0"), ("--concurrency", "1")])
def test_the_hints_of_a_trace_reach_the_engine(tmp_path: Path, way: tuple[str, ...]) -> None:
    """Sessions that are over make room for one that returns: with as many hits as the study has with the same hints."""
    blocks = [(0, 1, 2), *((10 * end, 10 * end + 1) for end in range(1, 5)), (0, 1, 2, 3)]
    requests = [
        Request(60_000 * number, 512 * len(ids), 9, ids, hint=Hint(over=True) if number in (1, 2, 3, 4) else None)
        for number, ids in enumerate(blocks)
    ]
    trace, out = str(tmp_path / "hinted.jsonl"), tmp_path / "report.json"
    write_trace(trace, requests)
    assert run("replay", trace, "--config", config_file(tmp_path, rows=6), *way, "--json", str(out)) == 0
    assert report(out)["hit_ratio"] == 3 / 15
    assert list(simulation("lru")(requests, 6)) == [0, 0, 0, 0, 0, 3]
    assert sum(simulation("lru")([structs.replace(each, hint=None) for each in requests], 6)) == 0


@pytest.mark.parametrize("way", [("--virtual-time", "--gpu-cache-blocks", "0"), ("--concurrency", "1")])
def test_tokens_of_a_hint_are_counted_by_the_traces_blocks(tmp_path: Path, way: tuple[str, ...]) -> None:
    blocks = [(0, 1, 2), *((10 * end, 10 * end + 1) for end in range(1, 7)), (0, 1, 2, 3)]
    requests = [Request(60_000 * number, 512 * len(ids), 9, ids) for number, ids in enumerate(blocks)]
    requests[0] = structs.replace(requests[0], hint=Hint(retain_s=3_600, tokens=512))
    trace, out = str(tmp_path / "hinted.jsonl"), tmp_path / "report.json"
    write_trace(trace, requests)
    assert sum(simulation("lru")(requests, 12)) == 1
    assert run("replay", trace, "--config", config_file(tmp_path, rows=12), *way, "--json", str(out)) == 0
    assert report(out)["hits"]["cpu"] == 1


def test_a_configuration_that_says_how_fast_prompts_are_computed_has_chunks_of_the_traces_length(
    tmp_path: Path,
) -> None:
    """A chunk of 512 tokens takes 26 ms to compute, and one load 10 ms: worth it, and not at fewer tokens a chunk."""
    blocks = [tuple(range(10 * session, 10 * session + 3)) for session in range(4)] * 3
    requests = [Request(60_000 * number, 512 * len(ids), 9, ids) for number, ids in enumerate(blocks)]
    trace, out = str(tmp_path / "returning.jsonl"), tmp_path / "report.json"
    write_trace(trace, requests)
    tier = '[[secondary_tiers]]\ntype = "dummy"\nname = "slow"\nlatency_s = "10ms"\n'
    config = Path(config_file(tmp_path, tier, rows=6))
    for said in ("", "prefill_tokens_per_s = 20000.0\n"):
        config.write_text(said + config.read_text())
        args = ("--config", str(config), "--virtual-time", "--gpu-cache-blocks", "0", "--json", str(out))
        assert run("replay", trace, *args) == 0
        assert report(out)["hits"] == {"cpu": 0, "slow": 24}


def test_in_virtual_time_an_fs_tier_is_only_modelled(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    config = config_file(tmp_path, '[[secondary_tiers]]\ntype = "fs"\nroot = "/no/such/place"\nname = "disk"')
    assert run("replay", trace, "--virtual-time", "--config", config, "--json", str(out)) == 0
    assert report(out)["engine"]["tiers"] == {"disk": "dummy"}


# What is refused.


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--fs", "{tmp}/absent/tier"], "--fs: cannot create '{tmp}/absent/tier': parent directory does not exist"),
        (["--fs", "{tmp}/trace.jsonl.gz"], "--fs '{tmp}/trace.jsonl.gz': no such directory"),
        (["--fs", "{tmp}", "--virtual-time"], "--fs {tmp}: nothing is written in virtual time"),
        (["--config", "{tmp}/absent.toml"], "{tmp}/absent.toml: cannot be read: No such file or directory"),
        (["--json", "{tmp}/absent/out.json"], "--json {tmp}/absent/out.json: No such file or directory"),
        (["--plot", "{tmp}/absent/out.png"], "--plot {tmp}/absent/out.png: No such file or directory"),
        (["--plot", "{tmp}/out.txt"], "--plot {tmp}/out.txt: expected a name that ends in one of"),
    ],
)
def test_a_bad_call_is_refused_in_one_line_and_leaves_nothing(
    trace: str,
    tmp_path: Path,
    temporary: Path,
    capsys: pytest.CaptureFixture[str],
    args: Sequence[str],
    complaint: str,
) -> None:
    assert run("replay", trace, *(arg.format(tmp=tmp_path) for arg in args)) == 2
    check_refusal(capsys, complaint.format(tmp=tmp_path))
    assert os.listdir(tmp_path) == ["trace.jsonl.gz"]
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("virtual", [[], ["--virtual-time"]], ids=["real", "virtual"])
@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["chunk_byte = 3"], "chunk_byte: "),
        (['eviction_policy = "lrru"'], "'lrru' is no policy; did you mean 'lru'?"),
        (['[[secondary_tiers]]\ntype = "dumy"'], "'dumy' is no tier type; did you mean 'dummy'?"),
        (['[[secondary_tiers]]\ntype = "dummy"\nlatency = 3'], "secondary_tiers[0].latency: "),
        (['[[secondary_tiers]]\ntype = "dummy"\nlatency_s = "fast"'], "secondary_tiers[0].latency_s: "),
        (['[[secondary_tiers]]\ntype = "dummy"\ncapacity_bytes = -1'], "secondary_tiers[0].capacity_bytes: "),
        (['[[secondary_tiers]]\ntype = "dummy"\n[secondary_tiers.limits]\ndeadline_s = -1'], "limits.deadline_s: "),
        (["[limits]\nlease_share = 2"], "limits.lease_share: "),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line_that_names_the_field(
    trace: str,
    tmp_path: Path,
    temporary: Path,
    capsys: pytest.CaptureFixture[str],
    lines: Sequence[str],
    complaint: str,
    virtual: Sequence[str],
) -> None:
    out = tmp_path / "out.json"
    assert run("replay", trace, "--config", config_file(tmp_path, *lines), "--json", str(out), *virtual) == 2
    check_refusal(capsys, complaint)
    assert sorted(os.listdir(tmp_path)) == ["engine.toml", "trace.jsonl.gz"]
    assert os.listdir(temporary) == []


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ('cpu_bytes_to_use = -1\nchunk_bytes = "4KiB"', "cpu_bytes_to_use: -1 given"),
        ('cpu_bytes_to_use = "9EiB"\nchunk_bytes = "4KiB"', "cpu_bytes_to_use: "),
        ('cpu_bytes_to_use = "1KiB"\nchunk_bytes = "4KiB"', "cpu_bytes_to_use: "),
        ('cpu_bytes_to_use = "512TiB"\nchunk_bytes = "2MiB"', "free"),
        ('cpu_bytes_to_use = "1MiB"', "chunk_bytes: missing"),
        ("cpu_bytes_to_use = ", "is malformed"),
    ],
)
@pytest.mark.parametrize("runner", ["inline", "process"])
def test_an_absurd_size_is_refused_before_anything_is_allocated(
    trace: str,
    tmp_path: Path,
    temporary: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: str,
    complaint: str,
    runner: str,
) -> None:
    config = tmp_path / "engine.toml"
    config.write_text(f'{sizes}\nrunner = "{runner}"\n[[secondary_tiers]]\ntype = "fs"\n')
    assert run("replay", trace, "--config", str(config)) == 2
    check_refusal(capsys, complaint)
    assert os.listdir(temporary) == []


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("option", ["--fs", "root", "--json", "--plot"])
def test_a_directory_without_permission_is_refused(trace: str, tmp_path: Path, temporary: Path, option: str) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    config = config_file(tmp_path, f'[[secondary_tiers]]\ntype = "fs"\nroot = "{locked}"')
    given = {"--fs": ["--fs", locked], "root": ["--config", config]}.get(option, [option, locked / "out.png"])
    command = [*UNPRIVILEGED, *KVTIER[1:], "replay", trace, *map(str, given)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("kvtier: ")
    assert str(locked) in ended.stderr
    assert ended.stderr.endswith("Permission denied\n") or "Permission denied; expected a file" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert os.listdir(locked) == []
    assert os.listdir(temporary) == []


@pytest.mark.parametrize("runner", ["inline", "process"])
def test_a_directory_that_takes_no_files_is_refused(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], runner: str
) -> None:
    """The kernel's own: nobody may make a directory in /proc, not even the superuser."""
    config = config_file(tmp_path, '[[secondary_tiers]]\ntype = "fs"\nroot = "/proc/self"')
    Path(config).write_text(Path(config).read_text().replace("inline", runner))
    assert run("replay", trace, "--config", config) == 2
    check_refusal(capsys, "/proc/self")


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda lines: [*lines[:20], b'{"timestamp": -1}', *lines[21:]], "line 21: "),
        (lambda lines: [*lines[:59], lines[59][:30]], "line 60: Input data was truncated"),
        (lambda lines: [*lines[:5], b"hello"], "line 6: "),
        (lambda _: [], "no requests in it"),
    ],
)
def test_a_bad_trace_is_refused_with_the_lines_number_before_anything_is_made(
    trace: str, tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str], damage: Any, complaint: str
) -> None:
    good = tmp_path / "trace.jsonl"
    write_trace(good, Trace(trace))
    good.write_bytes(b"\n".join(damage(good.read_bytes().splitlines())))
    os.unlink(trace)
    assert run("replay", str(good), "--json", f"{tmp_path}/out.json", "--plot", f"{tmp_path}/out.png") == 2
    check_refusal(capsys, complaint)
    assert os.listdir(tmp_path) == ["trace.jsonl"]
    assert os.listdir(temporary) == []


def check_refusal(capsys: pytest.CaptureFixture[str], complaint: str) -> None:
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvtier: ")
    assert complaint in shown.err
    assert shown.err.count("\n") == 1


# Ctrl-C.


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("virtual", [False, True], ids=["real", "virtual"])
def test_an_interrupt_ends_a_replay_with_130_and_a_report_of_what_was_done(
    tmp_path: Path, temporary: Path, virtual: bool
) -> None:
    long, out, picture = tmp_path / "long.jsonl", tmp_path / "out.json", tmp_path / "out.png"
    prompts = [range(user * 1_000, user * 1_000 + 100 + turn) for turn in range(80) for user in range(50)]
    write_trace(long, [Request(number, 512 * len(ids), 9, tuple(ids)) for number, ids in enumerate(prompts)])
    command = [*KVTIER, "replay", str(long), "--json", str(out), "--plot", str(picture)]
    command += ["--virtual-time"] * virtual
    terminal, theirs = os.openpty()
    with (
        open(terminal, "rb", buffering=0) as screen,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, start_new_session=True) as process,
    ):
        os.close(theirs)
        seen = see(screen, rb"[1-9]\d*/4000")
        process.send_signal(signal.SIGINT)
        seen += see(screen, None)
        shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in seen
    assert b"WARNING" not in seen
    told = report(out)
    assert told["interrupted"] is True
    assert 0 < told["requests"] < 4_000
    assert told["wrong_chunks"] == 0
    assert told["chunk_references"] >= 100 * told["requests"]
    assert f"interrupted after {told['requests']:,} requests" in shown
    assert sorted(os.listdir(tmp_path)) == ["long.jsonl", "out.json"]
    deadline = time.monotonic() + 60
    while os.listdir(temporary):  # What is much to remove is removed in the background.
        assert time.monotonic() < deadline
        time.sleep(0.01)


def see(screen: IO[bytes], pattern: bytes | None) -> bytes:
    """Read what a terminal is sent until a pattern has come; None: until nobody sends anything any more."""
    seen = b""
    while pattern is None or not re.search(pattern, seen):
        try:
            seen += screen.read(4_096)
        except OSError:  # EIO: the last who had the other end open has closed it.
            assert pattern is None, seen
            return seen
    return seen
