"""The engine with a primary alone has exactly the hits that the policy study says, request by request."""

from collections.abc import Iterable, Iterator

import pytest

from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.ledger import LookupResult
from kvtier.engine.steps import StepManager
from kvtier.policies import known_policies
from kvtier.tools.replay.study import measure, simulation
from kvtier.tools.replay.traces import Request, Trace
from kvtier.tools.replay.workload import GeneratedTrace

CHUNK_BYTES = 4_096


def engine_hits(requests: Iterable[Request], policy: str, capacity: int) -> Iterator[int]:
    """Look up, offer the first `capacity` keys, finish: each request's hits by the step protocol."""
    config = {
        "cpu_bytes_to_use": capacity * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "eviction_policy": policy,
        "runner": "thread",
    }
    with StepManager.start(EngineConfig.from_dict(config)) as engine:
        for number, request in enumerate(requests):
            keys = list(map(key_of, request.hash_ids))
            engine.on_new_request(str(number))
            hits = 0
            while hits < len(keys) and engine.lookup(keys[hits], str(number)) is LookupResult.HIT:
                hits += 1
            yield hits
            plan = engine.prepare_store(keys[:capacity], str(number))
            assert plan is not None
            engine.complete_store(plan.keys, str(number))
            engine.on_request_finished(str(number))
            engine.end_step()


def key_of(block: int) -> OffloadKey:
    return make_offload_key(block.to_bytes(8, "big"))


@pytest.mark.parametrize("policy", known_policies())
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2])
def test_on_the_generated_trace_under_every_policy(policy: str, share: float) -> None:
    trace = GeneratedTrace(limit=400)
    capacity = measure(trace).capacity(share)
    assert list(engine_hits(trace, policy, capacity)) == list(simulation(policy)(trace, capacity))


@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl.gz", "agentic_local_b512.jsonl.zst"])
def test_on_the_beginning_of_real_traces_under_lru(traces, name: str) -> None:
    trace = Trace(traces / name, limit=1_500)
    capacity = measure(trace).capacity(0.05)
    hits = list(engine_hits(trace, "lru", capacity))
    assert hits == list(simulation("lru")(trace, capacity))
    assert sum(hits) > 0


def test_with_requests_that_have_holes_and_blocks_twice() -> None:
    blocks = [(1, 2, 3), (2, 9), (1, 2, 3, 4), (7, 7, 8), (1, 5, 2, 6, 3), (9, 2, 1), (3,), (1, 2, 3, 4, 5, 6, 7)]
    trace = [Request(0, 0, 0, hash_ids) for hash_ids in blocks]
    for policy in known_policies():
        for capacity in range(1, 10):
            assert list(engine_hits(trace, policy, capacity)) == list(simulation(policy)(trace, capacity))
