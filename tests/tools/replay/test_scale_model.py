"""The model of a study: what bounds a tier bounds its model, and the report says what was modelled."""

import asyncio
import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import EngineConfig
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.errors import ConfigError
from kvtier.policies import LRU
from kvtier.settings import decode
from kvtier.testing.virtual_time import run
from kvtier.tools.bench.figures import Figures, Row, load, this_machine
from kvtier.tools.cli import main
from kvtier.tools.outputs import as_json
from kvtier.tools.replay.replay import ChunkSource, Client, Tally, TierTotals
from kvtier.tools.replay.study import measure, policy_hits
from kvtier.tools.replay.traces import Request, write_trace
from kvtier.tools.replay.virtual import (
    GPU_CACHE_TOKENS,
    GPU_LOAD_BYTES_PER_S,
    SSD,
    WITH_TIERING,
    WITHOUT_TIERING,
    BenchReport,
    Prefill,
    VirtualReplay,
    read_bench,
    scale_model,
)
from kvtier.tools.replay.workload import GeneratedTrace

BLOCK_TOKENS = 512
MIB = 1 << 20
ROWS = 80
PAUSE_MS = 100_000  # Everything has reached the tiers by then: no request meets another's transfers.
WORKLOAD = [
    Request(number * PAUSE_MS, BLOCK_TOKENS * len(each.hash_ids[:40]), 1, each.hash_ids[:40])
    for number, each in enumerate(GeneratedTrace(limit=200))
]
EXTENT = measure(WORKLOAD)


def engine(*tiers: dict[str, Any], rows: int = ROWS, chunk_bytes: int = MIB) -> EngineConfig:
    return decode(
        EngineConfig, {"cpu_bytes_to_use": rows * chunk_bytes, "chunk_bytes": chunk_bytes, "secondary_tiers": tiers}
    )


def fs_tier(chunks: int, **more: object) -> dict[str, Any]:
    """Return an fs tier with room for so many chunks of a MiB, each with its footer."""
    return {"type": "fs", "layout": "segments", "capacity_bytes": chunks * (MIB + 4_096), **more}


def replay_of(
    config: EngineConfig,
    requests: Sequence[Request] = WORKLOAD,
    *,
    prefill: Prefill | None = None,
    gpu_cache_blocks: int = 0,
    bench: BenchReport | None = None,
) -> VirtualReplay:
    model = scale_model(config, bench=bench).config
    return VirtualReplay(
        requests,
        model,
        ChunkSource(model.chunk_bytes),
        Tally(len(requests)),
        chunk_bytes=config.chunk_bytes,
        block_tokens=BLOCK_TOKENS,
        prefill=prefill or Prefill(),
        gpu_cache_blocks=gpu_cache_blocks,
    )


def totals(config: EngineConfig, requests: Sequence[Request] = WORKLOAD) -> dict[str, TierTotals]:
    tally = run(replay_of(config, requests).run())
    assert tally.wrong_chunks == 0
    return dict(tally.samples[-1].tiers)


# What bounds a tier.


def test_hits_fall_with_the_capacity_and_are_those_of_the_studys_lru_at_every_size() -> None:
    """The primary holds the last of what the tier holds, so both together find what one cache of that size would."""
    found: list[int] = []
    for share in (0.1, 0.2, 0.4, 0.8, 1.0):
        capacity = EXTENT.capacity(share)
        tiers = totals(engine(fs_tier(capacity)))
        assert tiers["cpu"].hits == sum(policy_hits(WORKLOAD, LRU(ROWS), ROWS))
        found.append(sum(tier.hits for tier in tiers.values()))
        assert found[-1] == sum(policy_hits(WORKLOAD, LRU(capacity), capacity))
    assert found == sorted(found)
    assert found[0] < found[-1] == EXTENT.best_hits


@pytest.mark.parametrize(
    "tier",
    [
        {"type": "dummy", "capacity_bytes": 800 * (16 << 10)},
        {"type": "dummy", "capacity_bytes": 1_500 * (16 << 10)},
        {"type": "dummy"},
        {"type": "fs", "layout": "files"},
        {"type": "fs", "layout": "segments"},
    ],
    ids=["room_for_800", "room_for_1500", "memory", "files", "segments"],
)
def test_a_model_has_the_hits_of_the_engine_with_real_bytes_tier_by_tier(tmp_path: Path, tier: dict[str, Any]) -> None:
    root = {"root": str(tmp_path / "tier")} if tier["type"] == "fs" else {}
    config = engine({**tier, **root, "name": "below"}, chunk_bytes=16 << 10)
    real = asyncio.run(one_by_one(config, WORKLOAD[:110]))
    modelled = totals(engine({**tier, "name": "below"}, chunk_bytes=16 << 10), WORKLOAD[:110])
    assert {name: each.hits for name, each in modelled.items()} == {name: each.hits for name, each in real.items()}
    assert real["below"].hits > 0


async def one_by_one(config: EngineConfig, requests: Sequence[Request]) -> dict[str, TierTotals]:
    """Replay with real bytes, each request after all that the one before stored has reached the tiers."""
    tally, source = Tally(len(requests)), ChunkSource(config.chunk_bytes)
    async with TieringOffloadingManager.open(config) as manager:
        client = Client(manager, source, tally, clock=time.perf_counter)
        for request in requests:
            keys = list(map(source.key, request.hash_ids))
            with client.request() as request_id:
                hits = await client.fetch(keys, request_id)
                await client.put(keys, hits, request_id)
            assert await manager.drain()
        tally.sample(manager.stats(), client.seconds)
    assert tally.wrong_chunks == 0
    return dict(tally.samples[-1].tiers)


def test_an_fs_tiers_low_water_mark_is_kept_where_it_has_an_effect() -> None:
    chunks = 100 * (MIB + 8_192)
    blocks = [*range(98), 9, 8, 7, 6, 5]
    requests = [Request(number * PAUSE_MS, BLOCK_TOKENS, 1, (block,)) for number, block in enumerate(blocks)]
    with_mark = engine({"type": "fs", "capacity_bytes": chunks, "low_water": 0.9}, rows=1)
    assert totals(with_mark, requests)["0:fs"].hits == 4  # At 96 chunks they went down to 90: 0 to 5 are gone.
    in_place = engine({"type": "fs", "capacity_bytes": chunks, "layout": "segments"}, rows=1)
    assert totals(in_place, requests)["0:fs"].hits == 5


def test_an_fs_tiers_write_budget_is_kept() -> None:
    budget = {"write_budget_bytes_per_day": 80 * (MIB + 4_096)}
    requests = [Request(number * 1_000, BLOCK_TOKENS, 1, (number,)) for number in range(40)]
    stored = totals(engine({"type": "fs", **budget}), requests)["0:fs"]
    assert (stored.stored, stored.failed) == (10, {"no_space": 30})


def test_what_may_be_in_flight_is_kept() -> None:
    limits = {"store_bytes_in_flight": 3 * MIB}
    requests = [Request(0, BLOCK_TOKENS * 10, 1, tuple(range(10)))]
    stored = totals(engine({"type": "fs", "limits": limits}), requests)["0:fs"]
    assert (stored.stored, dict(stored.dropped)) == (3, {"budget": 7})


def test_a_tier_without_room_for_a_chunk_holds_none() -> None:
    assert totals(engine(fs_tier(0) | {"capacity_bytes": 1}))["0:fs"].hits == 0


def test_options_of_an_fs_tier_are_checked_though_nothing_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\].capacity: "):
        scale_model(engine({"type": "fs", "capacity": 3}))


# The engine's own cache.


def test_what_the_gpu_has_never_reaches_kvtier_and_costs_nothing() -> None:
    blocks = tuple(range(4))
    requests = [Request(number * PAUSE_MS, 4 * BLOCK_TOKENS, 1, blocks) for number in range(3)]
    replay = replay_of(engine(), requests, gpu_cache_blocks=4, prefill=Prefill(tokens_per_s=512))
    tally = run(replay.run())
    tiers = tally.samples[-1].tiers
    assert {name: tier.hits for name, tier in tiers.items()} == {"gpu": 8, "cpu": 0}
    assert tally.hit_ratio == 8 / 12
    for side in (WITH_TIERING, WITHOUT_TIERING):
        assert list(replay.times_to_first_token_s[side]) == pytest.approx([4.0, 1 / 512, 1 / 512])


def test_behind_the_gpus_cache_kvtier_has_what_fell_out_of_it() -> None:
    """Two prompts by turns, room for one and a half: the leading half of what comes is still there."""
    prompts = [tuple(range(4)), tuple(range(10, 14))] * 2
    requests = [Request(number * PAUSE_MS, 4 * BLOCK_TOKENS, 1, ids) for number, ids in enumerate(prompts)]
    replay = replay_of(engine(), requests, gpu_cache_blocks=6, prefill=Prefill(tokens_per_s=512))
    tally = run(replay.run())
    assert {name: tier.hits for name, tier in tally.samples[-1].tiers.items()} == {"gpu": 4, "cpu": 4}
    copied_s = 2 * MIB / GPU_LOAD_BYTES_PER_S
    times = replay.times_to_first_token_s
    assert list(times[WITHOUT_TIERING]) == pytest.approx([4.0, 4.0, 2.0, 2.0])
    assert list(times[WITH_TIERING]) == pytest.approx([4.0, 4.0, copied_s + 1 / 512, copied_s + 1 / 512])


@pytest.mark.parametrize("blocks", [100, 2_000])
def test_an_engine_that_adds_nothing_is_as_fast_as_none_behind_the_same_cache_on_the_gpu(blocks: int) -> None:
    """Requests a tenth of a second apart: they queue, and come into the cache in the same order on both sides.

    The primary has one row, whose block the GPU has, too.
    """
    requests = [
        Request(number * 100, each.input_length, 1, each.hash_ids)
        for number, each in enumerate(GeneratedTrace(limit=200))
    ]
    replay = replay_of(engine(rows=1), requests, gpu_cache_blocks=blocks, prefill=Prefill(slots=3))
    tally = run(replay.run())
    assert tally.gpu_hits == tally.hits > 0
    times = replay.times_to_first_token_s
    assert sorted(times[WITH_TIERING]) == pytest.approx(sorted(times[WITHOUT_TIERING]))


def test_a_tier_may_not_be_called_as_the_engines_own_cache() -> None:
    with pytest.raises(ConfigError, match=r"secondary_tiers\[0\].name: 'gpu' given"):
        scale_model(engine({"type": "dummy", "name": "gpu"}))


# What a disk can do, by a benchmark.


def bench_row(operation: str, mb_per_s: float, chunk_bytes: int = 2 * MIB, **settings: Any) -> Row:
    return Row(
        operation=operation,
        chunk_bytes=chunk_bytes,
        settings={"layout": "files", "io": "direct", "depth": 4, "fsync": False, **settings},
        unit="MB/s",
        figure=mb_per_s,
        limit=9_999.0,
        limit_is="preadv of one file",
        ratio=1.0,
        spread=(1.0, 1.0),
        figure_spread=(1.0, 1.0),
        limit_spread=(1.0, 1.0),
        rounds=7,
    )


BENCH_ROWS = [
    bench_row("load, engine busy in Python", 9_000.0),
    bench_row("load", 1_000.0),
    bench_row("load", 250.0, 128 << 10),
    bench_row("load", 3_000.0, layout="segments"),
    bench_row("store", 500.0),
    bench_row("store", 2_000.0, layout="segments"),
    bench_row("store", 50.0, fsync=True),
]


@pytest.fixture
def bench_file(tmp_path: Path) -> str:
    return bench_of(tmp_path, "kvtier bench")


def bench_of(folder: Path, command: str) -> str:
    figures = Figures(command=command, machine=this_machine(load()), seconds=1.0, rows=BENCH_ROWS)
    path = folder / "bench.json"
    path.write_bytes(as_json(figures))
    return str(path)


@pytest.mark.parametrize(
    ("options", "load_mb_per_s", "store_mb_per_s", "latency_s"),
    [
        ({"layout": "files"}, 1_000, 500, 3 * 2 * MIB / 1e9),
        ({"layout": "segments"}, 3_000, 2_000, 3 * 2 * MIB / 3e9),
    ],
    ids=["files", "segments"],
)
def test_a_benchmark_says_how_fast_the_disk_under_an_fs_tier_is(
    bench_file: str, options: dict[str, Any], load_mb_per_s: int, store_mb_per_s: int, latency_s: float
) -> None:
    model = scale_model(engine({"type": "fs", **options}), bench=read_bench(bench_file))
    device = model.parts[1]
    assert device.figures["load_bytes_per_s"] == load_mb_per_s * 10**6
    assert device.figures["store_bytes_per_s"] == store_mb_per_s * 10**6
    assert device.figures["latency_s"] == pytest.approx(latency_s)
    assert device.source.startswith("bench.json: load of 2,097,152 bytes")
    assert model.config.secondary_tiers[0].options["bandwidth_bytes_per_s"] == load_mb_per_s * 10**6 // 256


def test_the_chunk_size_that_is_nearest_to_the_tiers_counts(bench_file: str) -> None:
    model = scale_model(engine({"type": "fs", "layout": "files"}, chunk_bytes=64 << 10), bench=read_bench(bench_file))
    assert model.parts[1].figures["load_bytes_per_s"] == 250 * 10**6


def test_a_benchmark_without_a_tier_of_these_options_is_refused(bench_file: str) -> None:
    bench = read_bench(bench_file)
    with pytest.raises(ConfigError, match="no figure of 'load' with layout files, fsync False, io buffered; a report"):
        scale_model(engine({"type": "fs", "layout": "files", "io": "buffered"}), bench=bench)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory; a report of kvtier bench --json accepted"),
        (b"rows", "malformed"),
        (b'{"requests": 3}', "missing required field `command`"),
        (
            b'{"command": "kvtier selftest", "rows": []}',
            "a report of 'kvtier selftest' given, a report of kvtier",
        ),
        (b'{"command": "kvtier bench", "rows": []}', "no figure of 'load' with layout segments"),
    ],
    ids=["absent", "no_json", "a_replays", "another_bench", "empty"],
)
def test_a_file_of_another_kind_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, complaint: str
) -> None:
    path, config = tmp_path / "bench.json", tmp_path / "engine.toml"
    if content is not None:
        path.write_bytes(content)
    config.write_text('cpu_bytes_to_use = "1GiB"\nchunk_bytes = "1MiB"\n[[secondary_tiers]]\ntype = "fs"\n')
    args = ["replay", "--virtual-time", "--limit", "2", "--config", str(config), "--bench", str(path)]
    with pytest.raises(SystemExit, match="2"):
        main(args)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"kvtier: --bench {path}: ")
    assert complaint in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--bench", "--gpu-cache-blocks", "--slots"])
def test_what_is_of_the_model_only_is_refused_without_virtual_time(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", option, "1"])
    assert f"kvtier: {option} 1: accepted with --virtual-time only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--load-always",), "--load-always"), (("--prefill-tokens-per-s", "9"), "--prefill-tokens-per-s 9.0")],
)
def test_what_is_of_the_model_only_is_named_as_it_was_given(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", *options])
    assert f"kvtier: {said}: accepted with --virtual-time only" in capsys.readouterr().err


def test_an_option_of_real_time_is_refused_in_virtual_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", "--virtual-time", "--limit", "5", "--concurrency", "3"])
    assert (
        "kvtier: --concurrency 3: accepted without --virtual-time only: in virtual time, --slots says how many "
        "requests are served at once" in " ".join(capsys.readouterr().err.split())
    )


# What the report says.


def report_of(tmp_path: Path, config: str, *args: str) -> dict[str, Any]:
    trace, engine_file, out = tmp_path / "trace.jsonl", tmp_path / "engine.toml", tmp_path / "out.json"
    write_trace(trace, WORKLOAD)
    engine_file.write_text(config)
    command = ["replay", str(trace), "--virtual-time", "--config", str(engine_file), "--json", str(out), *args]
    with pytest.raises(SystemExit, match="0"):
        main(command)
    told: dict[str, Any] = json.loads(out.read_text())
    return told


CONFIG = """
cpu_bytes_to_use = "80MiB"
chunk_bytes = "1MiB"
[[secondary_tiers]]
type = "fs"
capacity_bytes = "{capacity}"
write_budget_bytes_per_day = "1TiB"
low_water = 0.9
ttl_s = "1h"
[[secondary_tiers]]
type = "dummy"
name = "remote"
latency_s = "1ms"
bandwidth_bytes_per_s = "1GiB"
capacity_bytes = "10MiB"
"""


def test_the_reports_model_is_what_was_used_with_where_it_is_from(
    tmp_path: Path, bench_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    told = report_of(tmp_path, CONFIG.format(capacity="100MiB"), "--bench", bench_file, "--gpu-cache-blocks", "7")
    of_disk = "bench.json: load of 2,097,152 bytes, store of 2,097,152 bytes"
    assert [(part["what"], part["source"]) for part in told["model"]] == [
        ("prefill", "--prefill-tokens-per-s, --slots"),
        ("gpu", "--gpu-cache-blocks"),
        ("copy to the GPU", "assumed: sixteen lanes of PCIe 4"),
        ("cpu", "engine.toml"),
        ("0:fs", of_disk),
        ("0:fs", "engine.toml"),
        ("0:fs", "engine.toml"),
        ("remote", "engine.toml"),
    ]
    prefill, gpu, _, cpu, disk, room, left_out, remote = (part["figures"] for part in told["model"])
    assert prefill == told["engine"]["prefill"]
    assert gpu == {"cache_blocks": 7}
    assert cpu == {"capacity_bytes": 80 * MIB, "chunks": told["engine"]["rows"], "eviction_policy": "lru"}
    assert left_out == {"not_modelled": ["ttl_s"]}
    config = decode(EngineConfig, tomllib.loads(CONFIG.format(capacity="100MiB")))
    used = [tier.options for tier in scale_model(config, bench=read_bench(bench_file)).config.secondary_tiers]
    for figures, options in ((disk | room, used[0]), (remote, used[1])):
        assert figures["load_bytes_per_s"] // 256 == options["bandwidth_bytes_per_s"]
        assert figures["latency_s"] == options["latency_s"]
        assert figures["concurrency"] == options["concurrency"]
        assert figures["chunks"] == options["capacity_bytes"] // 4_096
        assert figures["low_water"] == options["low_water"]
    assert disk["store_bytes_per_s"] // 256 == used[0]["store_bandwidth_bytes_per_s"]
    assert room["write_budget_bytes_per_day"] // 256 == used[0]["write_budget_bytes_per_day"]
    shown = capsys.readouterr().out
    assert "load 1.0 GB/s, store 500.0 MB/s, latency 6.291 ms, concurrency 8" in shown
    assert "cache blocks 7" in shown
    assert "not modelled ttl_s" in shown


def test_capacities_of_an_fs_tier_give_reports_of_their_own(tmp_path: Path) -> None:
    found = [
        report_of(tmp_path, CONFIG.format(capacity=capacity), "--gpu-cache-blocks", "0")["hit_ratio"]
        for capacity in ("100MiB", "1GiB", "20TiB")
    ]
    assert found[0] < found[1] < found[2] == EXTENT.hit_ratio(EXTENT.best_hits)


def test_by_default_the_cache_on_the_gpu_has_its_tokens_for_each_server_and_the_disk_is_said_to_be_assumed(
    tmp_path: Path,
) -> None:
    told = report_of(tmp_path, CONFIG.format(capacity="1GiB"), "--slots", "2")
    parts = {(part["what"], part["source"]): part["figures"] for part in told["model"]}
    blocks = 2 * GPU_CACHE_TOKENS // BLOCK_TOKENS
    assert parts["gpu", "default: 262,144 tokens a server"] == {"cache_blocks": blocks}
    assert parts["0:fs", SSD.source]["load_bytes_per_s"] == SSD.load_bytes_per_s
    assert told["hits"]["gpu"] == sum(policy_hits(WORKLOAD, LRU(blocks), blocks))
