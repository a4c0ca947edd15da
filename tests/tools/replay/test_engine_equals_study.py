"""The engine with a primary alone has exactly the hits that the policy study says, request by request."""

import functools

import pytest

from kvtier import EngineConfig, LookupResult, make_offload_key
from kvtier.engine.steps import StepManager, make_region
from kvtier.policies import known_policies
from kvtier.runner.bridge import ThreadBridge
from kvtier.tools.replay.study import measure, simulation
from kvtier.tools.replay.traces import BLOCK_TOKENS, Trace, TraceRequest
from kvtier.tools.replay.workload import GeneratedTrace
from tests.tools.replay.oracle import told

CHUNK_BYTES = 4_096


def engine_hits(requests, policy, capacity):
    """Yield each request's hits by the step protocol; hints are said at a request's begin or end, by turns."""
    config = {
        "cpu_bytes_to_use": capacity * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "eviction_policy": policy,
        "runner": "inline",
        "namespace": {"model_name": "study", "tokens_per_hash": BLOCK_TOKENS, "blocks_per_chunk": 1},
    }
    now_s = 0.0
    with started(EngineConfig.from_dict(config), lambda: now_s) as engine:
        for number, request in enumerate(requests):
            now_s = request.timestamp_ms / 1_000
            engine.end_step()
            keys = list(map(key_of, request.hash_ids))
            engine.on_new_request(str(number), hint=None if number % 2 else request.hint)
            hits = 0
            while hits < len(keys) and engine.lookup(keys[hits], str(number)) is LookupResult.HIT:
                hits += 1
            yield hits
            engine.complete_store(engine.prepare_store(keys[:capacity], str(number)).keys, str(number))
            engine.on_request_finished(str(number), hint=request.hint if number % 2 else None)
            engine.end_step()


def started(config, clock):
    region = make_region(config)
    return StepManager(config, region, ThreadBridge(config, region), clock=clock)


def key_of(block):
    return make_offload_key(block.to_bytes(8, "big"))


@functools.cache
def generated(limit):
    trace = GeneratedTrace(limit=limit)
    return list(trace), told(trace), measure(trace)


@pytest.mark.parametrize("policy", known_policies())
@pytest.mark.parametrize("share", [0.0001, 0.2])
def test_on_the_generated_trace_under_every_policy(policy, share):
    trace, _, extent = generated(200)
    capacity = extent.capacity(share)
    assert list(engine_hits(trace, policy, capacity)) == list(simulation(policy)(trace, capacity))


@pytest.mark.parametrize("policy", known_policies())
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2])
def test_with_hints_of_all_kinds_under_every_policy(policy, share):
    trace, requests, extent = generated(400)
    capacity = extent.capacity(share)
    hits = list(simulation(policy)(requests, capacity))
    assert list(engine_hits(requests, policy, capacity)) == hits
    if share > 0.1:
        assert hits != list(simulation(policy)(trace, capacity))


@pytest.mark.parametrize("policy", known_policies())
def test_with_hints_on_real_chats_under_every_policy(thorough, traces, policy):
    trace = Trace(traces / "mooncake_conversation.jsonl.gz", limit=3_000)
    capacity, requests = measure(trace).capacity(0.05), told(trace)
    assert list(engine_hits(requests, policy, capacity)) == list(simulation(policy)(requests, capacity))


def test_with_requests_that_have_holes_and_blocks_twice():
    blocks = [(1, 2, 3), (), (2, 9), (1, 2, 3, 4), (7, 7, 8), (1, 5, 2, 6, 3), (9, 2, 1), (3,), (1, 2, 3, 4, 5, 6, 7)]
    trace = [TraceRequest(0, 0, 0, hash_ids) for hash_ids in blocks]
    for policy in known_policies():
        for capacity in range(1, 10):
            assert list(engine_hits(trace, policy, capacity)) == list(simulation(policy)(trace, capacity))
