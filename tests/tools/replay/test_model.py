"""The scale model: the limits of a tier are those of its model, and the report shows its figures."""

import asyncio
import time
import tomllib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import EngineConfig
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.errors import ConfigError
from kvtier.memory import PAGE_BYTES
from kvtier.policies import LRU
from kvtier.settings import decode
from kvtier.testing.virtual_time import run
from kvtier.tools.replay.model import SSDS, DiskSpeed, disk_speed, scale_model
from kvtier.tools.replay.replay import ChunkSource, ReplayClient, ReplayTally, TierTotals
from kvtier.tools.replay.study import measure, policy_hits
from kvtier.tools.replay.traces import TraceRequest, write_trace
from kvtier.tools.replay.virtual import GPU_LOAD_BYTES_PER_S, Servers, VirtualReplay, arrivals_s, without_tiering_s
from kvtier.tools.replay.workload import GeneratedTrace
from tests.tools.command import reported

BLOCK_TOKENS = 512
MIB = 1 << 20
ROWS = 80
PAUSE_MS = 100_000  # Everything has reached the tiers by then: no request meets another's transfers.
WORKLOAD = [
    TraceRequest(number * PAUSE_MS, BLOCK_TOKENS * len(each.hash_ids[:40]), 1, each.hash_ids[:40])
    for number, each in enumerate(GeneratedTrace(limit=200))
]
EXTENT = measure(WORKLOAD)


def engine(*tiers: dict[str, Any], rows: int = ROWS, chunk_bytes: int = MIB) -> EngineConfig:
    return decode(
        EngineConfig, {"cpu_bytes_to_use": rows * chunk_bytes, "chunk_bytes": chunk_bytes, "secondary_tiers": tiers}
    )


def fs_tier(chunks: int, **more: object) -> dict[str, Any]:
    """Return an fs tier with room for `chunks` chunks of a MiB, each with its footer."""
    return {"type": "fs", "layout": "segments", "capacity_bytes": chunks * (MIB + 4_096), **more}


def replay_of(
    config: EngineConfig, requests: Sequence[TraceRequest] = WORKLOAD, servers: Servers | None = None
) -> VirtualReplay:
    model = scale_model(config).config
    return VirtualReplay(
        requests,
        model,
        ChunkSource(model.chunk_bytes),
        ReplayTally(len(requests)),
        chunk_bytes=config.chunk_bytes,
        block_tokens=BLOCK_TOKENS,
        servers=servers or Servers(cache_tokens=0),
    )


def totals(config: EngineConfig, requests: Sequence[TraceRequest] = WORKLOAD) -> dict[str, TierTotals]:
    tally = run(replay_of(config, requests).run())
    assert tally.wrong_chunks == 0
    return dict(tally.samples[-1].tiers)


# The limits of a tier.


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


async def one_by_one(config: EngineConfig, requests: Sequence[TraceRequest]) -> dict[str, TierTotals]:
    """Replay with real bytes, each request after all that the one before stored has reached the tiers."""
    tally, source = ReplayTally(len(requests)), ChunkSource(config.chunk_bytes)
    async with TieringOffloadingManager.open(config) as manager:
        client = ReplayClient(manager, source, tally, clock=time.perf_counter)
        for request in requests:
            keys = list(map(source.key, request.hash_ids))
            with client.request() as request_id:
                hits = await client.fetch(keys, request_id)
                await client.put(keys, hits, request_id)
            assert await manager.drain()
        tally.sample(manager.stats(), client.seconds)
    assert tally.wrong_chunks == 0
    return dict(tally.samples[-1].tiers)


def test_the_limit_of_stores_in_flight_is_kept() -> None:
    limits = {"store_bytes_in_flight": 3 * MIB}
    requests = [TraceRequest(0, BLOCK_TOKENS * 10, 1, tuple(range(10)))]
    stored = totals(engine({"type": "fs", "limits": limits}), requests)["0:fs"]
    assert (stored.stored, dict(stored.dropped)) == (3, {"budget": 7})


def test_a_tier_without_room_for_a_chunk_holds_none() -> None:
    assert totals(engine(fs_tier(0) | {"capacity_bytes": 1}))["0:fs"].hits == 0


# The engine's own cache.


def both_sides(
    config: EngineConfig, requests: Sequence[TraceRequest], servers: Servers
) -> tuple[VirtualReplay, "array[float]"]:
    """Return the finished replay, and the times to first token without tiering."""
    replay = replay_of(config, requests, servers)
    run(replay.run())
    return replay, without_tiering_s(requests, arrivals_s(requests), servers, BLOCK_TOKENS)


def test_hits_on_the_gpu_never_reach_kvtier_and_cost_nothing() -> None:
    blocks = tuple(range(4))
    requests = [TraceRequest(number * PAUSE_MS, 4 * BLOCK_TOKENS, 1, blocks) for number in range(3)]
    replay, without = both_sides(engine(), requests, Servers(512, 1, 4 * BLOCK_TOKENS))
    assert {name: tier.hits for name, tier in replay.tally.samples[-1].tiers.items()} == {"gpu": 8, "cpu": 0}
    assert replay.tally.hit_ratio == 8 / 12
    for times in (replay.times_to_first_token_s, without):
        assert list(times) == pytest.approx([4.0, 1 / 512, 1 / 512])


def test_kvtier_finds_blocks_that_the_gpus_cache_evicted() -> None:
    """Two prompts by turns, room for one and a half: the leading half of each is still in the cache."""
    prompts = [tuple(range(4)), tuple(range(10, 14))] * 2
    requests = [TraceRequest(number * PAUSE_MS, 4 * BLOCK_TOKENS, 1, ids) for number, ids in enumerate(prompts)]
    replay, without = both_sides(engine(), requests, Servers(512, 2, 3 * BLOCK_TOKENS))
    assert {name: tier.hits for name, tier in replay.tally.samples[-1].tiers.items()} == {"gpu": 4, "cpu": 4}
    copied_s = 2 * MIB / GPU_LOAD_BYTES_PER_S
    assert list(without) == pytest.approx([4.0, 4.0, 2.0, 2.0])
    with_tiering = [4.0, 4.0, copied_s + 1 / 512, copied_s + 1 / 512]
    assert list(replay.times_to_first_token_s) == pytest.approx(with_tiering)


@pytest.mark.parametrize("blocks", [34, 667])
def test_an_engine_that_adds_nothing_is_as_fast_as_none_behind_the_same_cache_on_the_gpu(blocks: int) -> None:
    """Requests a tenth of a second apart queue, and enter the cache in the same order on both sides.

    The primary has one row, whose block the GPU has, too.
    """
    requests = [
        TraceRequest(number * 100, each.input_length, 1, each.hash_ids)
        for number, each in enumerate(GeneratedTrace(limit=200))
    ]
    replay, without = both_sides(engine(rows=1), requests, Servers(slots=3, cache_tokens=blocks * BLOCK_TOKENS))
    assert replay.tally.gpu_hits == replay.tally.hits > 0
    assert sorted(replay.times_to_first_token_s) == pytest.approx(sorted(without))


# Scaling.


def test_a_page_stands_for_a_chunk_and_every_size_is_scaled_with_it() -> None:
    tier = {"type": "dummy", "bandwidth_bytes_per_s": "1GiB", "capacity_bytes": "8GiB", "latency_s": "1ms"}
    config = engine({**tier, "limits": {"load_bytes_in_flight": "512MiB"}}, rows=100, chunk_bytes=64 * MIB)
    model = scale_model(config).config
    assert (model.rows, model.chunk_bytes, model.runner) == (100, PAGE_BYTES, "inline")
    scaled = model.secondary_tiers[0]
    assert scaled.options["bandwidth_bytes_per_s"] == (1 << 30) // 16_384
    assert scaled.options["capacity_bytes"] == (8 << 30) // 16_384
    assert scaled.options["latency_s"] == 0.001
    assert scaled.limits.load_bytes_in_flight == 8 * PAGE_BYTES
    assert model.namespace.row_bytes == PAGE_BYTES


def test_an_fs_tier_is_modelled_as_a_disk_with_its_own_name_and_limits() -> None:
    tier = {"type": "fs", "root": "/nowhere", "name": "ssd", "limits": {"deadline_s": 7}}
    modelled = scale_model(engine(tier, chunk_bytes=PAGE_BYTES)).config.secondary_tiers[0]
    assert (modelled.type, modelled.name, modelled.limits.deadline_s) == ("dummy", "ssd", 7.0)
    assert modelled.options["bandwidth_bytes_per_s"] == SSDS.load_bytes_per_s
    assert modelled.options["store_bandwidth_bytes_per_s"] == SSDS.store_bytes_per_s


def test_a_tier_of_another_type_stays_as_it_is() -> None:
    tier = {"type": "kvtier.testing.faults:FaultyBackend", "inner": {"type": "dummy"}, "faults": {"missing": 0.1}}
    config = engine(tier)
    assert scale_model(config).config.secondary_tiers[0].options == config.secondary_tiers[0].options


@pytest.mark.parametrize(
    ("tier", "complaint"),
    [
        ({"type": "fs", "capacity": 3}, r"secondary_tiers\[0\].capacity: "),
        ({"type": "dummy", "latency": 3}, r"secondary_tiers\[0\].latency: "),
        ({"type": "dummy", "name": "gpu"}, r"secondary_tiers\[0\].name: 'gpu' given"),
    ],
)
def test_wrong_options_and_names_are_rejected_though_nothing_is_opened(tier: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        scale_model(engine(tier))


# What the report says.


CONFIG = """
cpu_bytes_to_use = "80MiB"
chunk_bytes = "1MiB"
[[secondary_tiers]]
type = "fs"
capacity_bytes = "100MiB"
write_budget_bytes_per_day = "1TiB"
ttl_s = "1h"
[[secondary_tiers]]
type = "dummy"
name = "remote"
latency_s = "1ms"
bandwidth_bytes_per_s = "1GiB"
capacity_bytes = "10MiB"
"""


def test_the_report_shows_the_figures_that_the_model_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, engine_file = tmp_path / "trace.jsonl", tmp_path / "engine.toml"
    write_trace(trace, WORKLOAD)
    engine_file.write_text(CONFIG)
    told = reported(
        tmp_path, "simulate", trace, "--config", engine_file, "--disk-speed", "1GB/s,400MB/s", "--gpu-cache-tokens", 7
    )
    parts = told["model"]
    assert list(parts) == ["prefill", "gpu", "cpu", "0:fs", "remote"]
    assert parts["prefill"] == {"tokens_per_s": 20_000, "slots": 4}
    assert parts["gpu"] == {"cache_tokens": 7, "load_bytes_per_s": 25e9}
    assert parts["cpu"] == {"capacity_bytes": 80 * MIB, "chunks": told["engine"]["rows"], "eviction_policy": "lru"}
    assert parts["0:fs"]["not_modelled"] == "ttl_s, write_budget_bytes_per_day"
    config = decode(EngineConfig, tomllib.loads(CONFIG))
    disk = DiskSpeed(1_000_000_000, 400_000_000)
    used = [tier.options for tier in scale_model(config, disk).config.secondary_tiers]
    for figures, options in ((parts["0:fs"], used[0]), (parts["remote"], used[1])):
        assert figures["load_bytes_per_s"] // 256 == options["bandwidth_bytes_per_s"]
        assert figures["latency_s"] == options["latency_s"]
        assert figures["concurrency"] == options["concurrency"]
        assert figures["chunks"] == options["capacity_bytes"] // 4_096
    assert parts["0:fs"]["store_bytes_per_s"] // 256 == used[0]["store_bandwidth_bytes_per_s"]
    shown = capsys.readouterr().out
    assert "load 1.0 GB/s, store 400.0 MB/s, latency 0.1 ms" in shown
    assert "cache tokens 7" in shown
    assert "not modelled ttl_s" in shown


@pytest.mark.parametrize("rates", ["", "7GB/s", "7GB,4GB/s", "fast,slow", "0B/s,1GB/s", "1GB/s,1GB/s,1GB/s"])
def test_rates_of_a_disk_are_two_sizes_a_second(rates: str) -> None:
    assert disk_speed("--disk-speed", " 7GB/s, 4MiB/s ") == DiskSpeed(7_000_000_000, 4 * MIB)
    with pytest.raises(ConfigError, match=rf"--disk-speed '{rates}': expected bytes a second .* as in 7GB/s,4GB/s"):
        disk_speed("--disk-speed", rates)
