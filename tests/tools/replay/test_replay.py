"""A trace through a whole engine: loaded bytes are right, and the counts are true."""

import asyncio

import pytest

from kvtier.config import EngineConfig
from kvtier.errors import TraceError
from kvtier.policies import policy_class
from kvtier.settings import decode
from kvtier.tools.replay.replay import SAMPLES_MAX, ChunkSource, Replay, ReplayTally
from kvtier.tools.replay.study import measure, policy_hits
from kvtier.tools.replay.traces import Trace, TraceRequest
from kvtier.tools.replay.workload import GeneratedTrace, Workload

CHUNK_BYTES = 4_096
SLOW = {"type": "dummy", "latency_s": "2ms", "concurrency": 4}


@pytest.fixture(scope="module")
def requests():
    return tuple(GeneratedTrace(Workload(seed=3), limit=90))


def replay_of(requests, *tiers, rows, concurrency=8, runner="inline", policy="lru", **limits):
    config = decode(
        EngineConfig,
        {
            "cpu_bytes_to_use": rows * CHUNK_BYTES,
            "chunk_bytes": CHUNK_BYTES,
            "runner": runner,
            "eviction_policy": policy,
            "secondary_tiers": tiers,
            "limits": limits,
        },
    )
    tally = ReplayTally(len(requests), CHUNK_BYTES)
    return Replay(requests, config, ChunkSource(CHUNK_BYTES), tally, concurrency=concurrency)


def tiers_of(tally):
    return dict(tally.samples[-1].tiers)


def check(tally, requests):
    assert (tally.wrong_chunks, tally.requests) == (0, len(requests))
    assert tally.chunk_references == measure(requests).block_references
    assert sum(tier.hits for tier in tiers_of(tally).values()) == tally.hits
    assert tally.drained


@pytest.mark.virtual_time
@pytest.mark.parametrize("concurrency", [1, 32])
async def test_over_a_tier_of_everything_the_hits_are_the_best_possible_at_any_concurrency(requests, concurrency):
    tally = await replay_of(requests, SLOW, rows=300, concurrency=concurrency).run()
    check(tally, requests)
    extent = measure(requests)
    assert tally.hits == extent.best_hits
    tiers = tiers_of(tally)
    assert tiers["0:dummy"].chunks_stored == extent.unique_blocks
    assert tiers["cpu"].chunks_stored == extent.unique_blocks
    assert tiers["0:dummy"].chunks_loaded >= tiers["0:dummy"].hits > 0
    assert tiers["cpu"].hits > 0
    assert tiers["0:dummy"].dropped == {}


@pytest.mark.virtual_time
@pytest.mark.filterwarnings("default")
async def test_a_tier_that_fails_every_call_costs_its_hits_and_is_reported(requests):
    faulty = {"type": "kvtier.testing.faults:FaultyBackend", "name": "bad"}
    failing = faulty | {"inner": {"type": "dummy"}, "faults": {"unavailable": 1.0}}
    tally = await replay_of(requests, failing, rows=300, concurrency=1).run()
    check(tally, requests)
    tiers = tiers_of(tally)
    assert tally.hits == tiers["cpu"].hits == sum(policy_hits(requests, policy_class("lru")(300), 300))
    assert tiers["bad"].hits == tiers["bad"].chunks_loaded == tiers["bad"].chunks_stored == 0
    assert tiers["bad"].failed["unavailable"] > 0
    assert tiers["bad"].dropped["breaker"] > 0


@pytest.mark.virtual_time
async def test_a_cancelled_replay_ends_within_a_second_and_has_counted_what_it_did(requests):
    replay = replay_of(requests, {"type": "dummy", "latency_s": "1h", "concurrency": 1}, rows=300)
    task = asyncio.create_task(replay.run())
    await asyncio.sleep(5)
    assert not task.done()
    task.cancel()
    cancelled_at = asyncio.get_running_loop().time()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.get_running_loop().time() - cancelled_at < 1
    tally = replay.tally
    assert 0 < tally.requests < len(requests)
    assert tally.samples[-1].requests == tally.requests
    assert not tally.drained


async def test_a_trace_that_turns_out_bad_ends_the_replay_with_its_own_error(tmp_path):
    line = b'{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [%d]}\n'
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line % 1 + line % 2 + b"{}\n")
    config = EngineConfig(cpu_bytes_to_use=1 << 20, chunk_bytes=CHUNK_BYTES, runner="inline")
    replay = Replay(Trace(path), config, ChunkSource(CHUNK_BYTES), ReplayTally(3, CHUNK_BYTES))
    with pytest.raises(TraceError, match="line 3"):
        await replay.run()
    assert replay.tally.requests <= 2


async def test_calls_are_timed_and_totals_are_sampled(requests):
    steps, replay = [], replay_of(requests, {"type": "dummy"}, rows=300)
    tally = await replay.run(lambda: steps.append(replay.tally.requests))
    assert (steps, len(tally.latencies_s["fetch"])) == (list(range(1, len(requests) + 1)), len(requests))
    assert {"put", "0:dummy load", "0:dummy store"} <= tally.latencies_s.keys()
    assert len(requests) <= len(tally.samples) <= SAMPLES_MAX + 1
    assert [sample.seconds for sample in tally.samples] == sorted(sample.seconds for sample in tally.samples)
    assert tally.samples[-1].seconds == tally.seconds


@pytest.mark.parametrize("blocks", [((), (1, 2), (1, 2)), ((1, 2, 1, 3), (1, 2, 1, 3))])
async def test_requests_without_blocks_and_with_a_block_twice_count(blocks):
    requests = [TraceRequest(at, 512 * len(ids), 1, ids) for at, ids in enumerate(blocks)]
    tally = await replay_of(requests, {"type": "dummy"}, rows=8).run()
    check(tally, requests)
    assert tally.hits == len(blocks[-1])
