"""`kvtier simulate`: the scale model's limits and figures, and how long each request waits for its first token."""

import asyncio
import time

import pytest

from kvtier.config import EngineConfig
from kvtier.engine.manager import ON_LOOP_BYTES_MAX, TieringOffloadingManager
from kvtier.errors import ConfigError, TraceError
from kvtier.memory import PAGE_BYTES
from kvtier.policies import LRU
from kvtier.settings import decode
from kvtier.testing.virtual_time import run
from kvtier.tools.replay import simulate
from kvtier.tools.replay.replay import ChunkSource, ReplayClient, ReplayTally
from kvtier.tools.replay.study import measure, policy_hits
from kvtier.tools.replay.traces import TraceRequest
from kvtier.tools.replay.workload import GeneratedTrace
from tests.benchmarks.load_or_recompute import Case, replayed
from tests.tools.replay.real import CONVERSATION

BLOCK_TOKENS = 512
MIB = 1 << 20
ROWS = 80
PAUSE_MS = 100_000  # Everything has reached the tiers by then: no request meets another's transfers.
WORKLOAD = [
    TraceRequest(number * PAUSE_MS, BLOCK_TOKENS * len(each.hash_ids[:40]), 1, each.hash_ids[:40])
    for number, each in enumerate(GeneratedTrace(limit=110))
]
EXTENT = measure(WORKLOAD)


def engine(*tiers, rows=ROWS, chunk_bytes=MIB):
    sizes = {"cpu_bytes_to_use": rows * chunk_bytes, "chunk_bytes": chunk_bytes}
    return decode(EngineConfig, sizes | {"secondary_tiers": tiers})


def fs_tier(chunks, **more):
    return {"type": "fs", "layout": "segments", "capacity_bytes": chunks * (MIB + 4_096), **more}


def replay_of(config, requests=WORKLOAD, servers=None):
    model = simulate.scale_model(config)
    given = {"chunk_bytes": config.chunk_bytes, "servers": servers or simulate.Servers(cache_tokens=0)}
    source, tally = ChunkSource(model.chunk_bytes), ReplayTally(len(requests), config.row_bytes)
    return simulate.VirtualReplay(requests, model, source, tally, block_tokens=BLOCK_TOKENS, **given)


def totals(config, requests=WORKLOAD):
    tally = run(replay_of(config, requests).run())
    assert tally.wrong_chunks == 0
    return dict(tally.samples[-1].tiers)


def test_hits_fall_with_the_capacity_and_are_those_of_the_studys_lru_at_every_size():
    """The primary holds the last of what the tier holds, so both together find what one cache of that size would."""
    found = []
    for share in (0.1, 0.4, 1.0):
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
        {"type": "fs", "layout": "files"},
        {"type": "fs", "layout": "segments"},
    ],
    ids=["room_for_800", "room_for_1500", "files", "segments"],
)
def test_a_model_has_the_hits_of_the_engine_with_real_bytes_tier_by_tier(tmp_path, tier):
    root = {"root": str(tmp_path / "tier")} if tier["type"] == "fs" else {}
    config = engine({**tier, **root, "name": "below"}, chunk_bytes=16 << 10)
    some = WORKLOAD[:25] if root else WORKLOAD
    real = asyncio.run(one_by_one(config, some))
    modelled = totals(engine({**tier, "name": "below"}, chunk_bytes=16 << 10), some)
    assert {name: each.hits for name, each in modelled.items()} == {name: each.hits for name, each in real.items()}
    assert real["below"].hits > 0


async def one_by_one(config, requests):
    tally, source = ReplayTally(len(requests), config.row_bytes), ChunkSource(config.chunk_bytes)
    async with TieringOffloadingManager.open(config) as manager:
        client = ReplayClient(manager, source, tally, clock=time.perf_counter)
        for request in requests:
            keys = list(map(source.key, request.hash_ids))
            with client.request() as request_id:
                await client.put(keys, await client.fetch(keys, request_id), request_id)
            assert await manager.drain()
        tally.sample(manager.stats(), client.seconds)
    assert tally.wrong_chunks == 0
    return dict(tally.samples[-1].tiers)


def test_the_limit_of_stores_in_flight_is_kept():
    limits = {"store_bytes_in_flight": 3 * MIB}
    requests = [TraceRequest(0, BLOCK_TOKENS * 10, 1, tuple(range(10)))]
    stored = totals(engine({"type": "fs", "limits": limits}), requests)["0:fs"]
    assert (stored.chunks_stored, dict(stored.dropped)) == (3, {"budget": 7})


def both_sides(config, requests, servers):
    replay = replay_of(config, requests, servers)
    run(replay.run())
    return replay, simulate.without_tiering_s(requests, simulate.arrivals_s(requests), servers, BLOCK_TOKENS)


def test_hits_on_the_gpu_never_reach_kvtier_and_cost_nothing():
    blocks = tuple(range(4))
    requests = [TraceRequest(number * PAUSE_MS, 4 * BLOCK_TOKENS, 1, blocks) for number in range(3)]
    replay, without = both_sides(engine(), requests, simulate.Servers(512, 1, 4 * BLOCK_TOKENS))
    assert {name: tier.hits for name, tier in replay.tally.samples[-1].tiers.items()} == {"gpu": 8, "cpu": 0}
    assert replay.tally.hit_ratio == 8 / 12
    for times in (replay.times_to_first_token_s, without):
        assert list(times) == pytest.approx([4.0, 1 / 512, 1 / 512])


@pytest.mark.parametrize("blocks", [34, 667])
def test_an_engine_that_adds_nothing_is_as_fast_as_none_behind_the_same_cache_on_the_gpu(blocks):
    """Requests queue and enter the cache in one order on both sides; the GPU has the one row's block, too."""
    trace = enumerate(GeneratedTrace(limit=200))
    requests = [TraceRequest(number * 100, each.input_length, 1, each.hash_ids) for number, each in trace]
    replay, without = both_sides(
        engine(rows=1), requests, simulate.Servers(slots=3, cache_tokens=blocks * BLOCK_TOKENS)
    )
    assert replay.tally.gpu_hits == replay.tally.hits > 0
    assert sorted(replay.times_to_first_token_s) == pytest.approx(sorted(without))


def test_a_tier_of_another_type_stays_as_it_is():
    tier = {"type": "kvtier.testing.faults:FaultyBackend", "inner": {"type": "dummy"}, "faults": {"missing": 0.1}}
    config = engine(tier)
    assert simulate.scale_model(config).secondary_tiers[0].options == config.secondary_tiers[0].options


@pytest.mark.parametrize(
    ("tier", "complaint"),
    [
        ({"type": "fs", "capacity": 3}, r"secondary_tiers\[0\].capacity: "),
        ({"type": "dummy", "latency": 3}, r"secondary_tiers\[0\].latency: "),
        ({"type": "dummy", "name": "gpu"}, r"secondary_tiers\[0\].name: 'gpu' given"),
    ],
)
def test_wrong_options_and_names_are_rejected_though_nothing_is_opened(tier, complaint):
    with pytest.raises(ConfigError, match=complaint):
        simulate.scale_model(engine(tier))


@pytest.mark.parametrize("rates", ["", "7GB/s", "7GB,4GB/s", "fast,slow", "0B/s,1GB/s", "1GB/s,1GB/s,1GB/s"])
def test_rates_of_a_disk_are_two_sizes_a_second(rates):
    assert simulate.disk_speed("--disk-speed", " 7GB/s, 4MiB/s ") == simulate.DiskSpeed(7_000_000_000, 4 * MIB)
    with pytest.raises(ConfigError, match=rf"--disk-speed '{rates}': expected bytes a second .* as in 7GB/s,4GB/s"):
        simulate.disk_speed("--disk-speed", rates)


def at(*stamps_ms):
    return [TraceRequest(stamp, 1, 1, ()) for stamp in stamps_ms]


def prompts(*prompts):
    return [TraceRequest(at_ms, len(blocks) * BLOCK_TOKENS, 1, tuple(blocks)) for at_ms, blocks in prompts]


def servers_of(tokens_per_s=512, slots=4, cache_tokens=0):
    return simulate.Servers(tokens_per_s, slots, cache_tokens)


def first_tokens_s(requests, config, servers=None):
    replay = replay_of(config, requests, servers or servers_of())
    tally = run(replay.run())
    assert (tally.wrong_chunks, tally.requests) == (0, len(requests))
    return list(replay.times_to_first_token_s)


def test_a_primary_that_a_real_loop_prepares_in_a_thread_is_modelled_too():
    rows = ON_LOOP_BYTES_MAX // PAGE_BYTES + 1  # Of a scale model, in which a page stands for a chunk.
    replay = replay_of(engine(rows=rows), prompts((0, [1, 2]), (1_000, [1, 2])), servers_of(1_000, 1))
    assert run(replay.run()).hits == 2


@pytest.mark.parametrize(
    ("stamps_ms", "arrivals"),
    [
        ((1_000, 1_250, 4_000), [0.0, 0.25, 3.0]),
        ((0, 0, 0, 3_000, 3_000, 9_000), [0.0, 1.0, 2.0, 3.0, 4.5, 9.0]),  # Batches are spread over their time,
        ((0, 3_000, 3_000, 3_000), [0.0, 3.0, 4.0, 5.0]),  # the last one, too.
        ((7, 7, 7), [0.0, 0.0, 0.0]),
        ((), []),
    ],
)
def test_requests_arrive_at_the_times_of_the_trace(stamps_ms, arrivals):
    assert list(simulate.arrivals_s(at(*stamps_ms))) == arrivals


def test_decreasing_times_are_rejected_with_the_request():
    with pytest.raises(TraceError, match="request 3: timestamp 4 after 5"):
        simulate.arrivals_s(at(0, 5, 4))


def test_without_tiering_prompts_queue_for_the_servers_and_are_computed_whole():
    requests = prompts((0, range(2)), (0, range(2)), (0, range(4)), (5_000, range(1)))
    assert list(simulate.without_tiering_s(requests, [0.0, 0.0, 0.0, 5.0], servers_of(slots=2))) == [2.0, 2.0, 6.0, 1.0]


def test_a_prefix_in_the_primary_takes_the_time_of_its_copy_to_the_gpu():
    requests = prompts((0, range(4)), (60_000, range(6)), (120_000, range(2)))
    copied_s = MIB / simulate.GPU_LOAD_BYTES_PER_S
    assert first_tokens_s(requests, engine(rows=64)) == pytest.approx([4.0, 2.0 + 4 * copied_s, 2 * copied_s + 1 / 512])


def test_a_prefix_in_a_tier_takes_the_tiers_time_too():
    """Four chunks of a MiB at a MiB a second and half a second of latency; two others had pushed them out."""
    tier = {"type": "dummy", "latency_s": 0.5, "bandwidth_bytes_per_s": "1MiB"}
    requests = prompts((0, range(4)), (60_000, range(100, 106)), (120_000, range(200, 206)), (180_000, range(6)))
    times = first_tokens_s(requests, engine(tier, rows=12))
    assert times == pytest.approx([4.0, 6.0, 6.0, 4.5 + 4 * MIB / simulate.GPU_LOAD_BYTES_PER_S + 2.0])


def test_an_interrupted_replay_has_the_times_of_the_requests_that_were_served():
    replay = replay_of(engine(rows=64), prompts((0, range(2)), (3_600_000, range(2))), servers_of())

    async def interrupted():
        task = asyncio.create_task(replay.run())
        await asyncio.sleep(60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(interrupted())
    assert (list(replay.times_to_first_token_s), replay.tally.requests) == ([2.0], 1)


WEIGHED_REQUESTS = 900  # Of the conversation: four minutes of it, and with them the slow one.


@pytest.mark.parametrize(("gb_per_s", "slow"), [(0.2, False), (1.0, False), (7.0, False), (7.0, True)])
def test_no_disk_makes_a_conversation_wait_longer_than_none(thorough, traces, gb_per_s, slow):
    case = Case(str(traces / CONVERSATION), WEIGHED_REQUESTS, 64 << 30, gb_per_s, slow, weighed=True)
    found = replayed(case)
    assert found.wrong_chunks == 0
    assert max(found.p50, found.p99) <= 1.02
    if gb_per_s == 7.0 and not slow:
        assert found.hit_ratio >= replayed(case._replace(weighed=False)).hit_ratio - 0.02
