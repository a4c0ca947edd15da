"""The engine over one tier has exactly the hits that the tiered study says, request by request, for every cascade."""

import time
from collections.abc import Iterable, Iterator, Sequence

import pytest

from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.answers import LookupResult
from kvtier.engine.steps import Inside, StepManager
from kvtier.policies import known_policies, policy_class
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.tiered import CASCADES, TieredCache
from kvtier.tools.replay.traces import Request, Trace
from kvtier.tools.replay.workload import GeneratedTrace

CHUNK_BYTES = 4_096
PATIENCE_S = 60.0
REAL = ["mooncake_conversation.jsonl.gz", "agentic_local_b512.jsonl.zst", "lmcache_miniswe_b16.jsonl.gz"]


def key_of(block: int) -> OffloadKey:
    return make_offload_key(block.to_bytes(8, "big"))


class Driver:
    """One engine over a dummy tier, driven as the study describes; after each step it waits for all that was moved."""

    def __init__(self, policy: str, capacity: int, tier_capacity: int, cascade: str) -> None:
        tier = {"type": "dummy", "capacity_bytes": tier_capacity * CHUNK_BYTES, "cascade": cascade}
        described = {
            "cpu_bytes_to_use": capacity * CHUNK_BYTES,
            "chunk_bytes": CHUNK_BYTES,
            "eviction_policy": policy,
            "secondary_tiers": [tier],
            "limits": {"lease_share": 1.0, "cascade_share": 1.0},
        }
        self._capacity = capacity
        self.engine = StepManager.start(EngineConfig.from_dict(described))
        self._ledger = Inside(self.engine).ledger
        self._until(lambda: self._ledger.tiers[0].authoritative)

    def hits(self, number: int, blocks: Sequence[int], study: TieredCache) -> int:
        """Serve one request, which the study has served; the tier's contents must be the study's, too."""
        keys, name, engine = list(map(key_of, blocks[: self._capacity])), str(number), self.engine
        engine.on_new_request(name)
        while LookupResult.HIT_PENDING in (found := self._found(keys, name)):
            self._settle()
        hits = len(found)
        engine.prepare_load(keys[:hits], name)
        engine.complete_load(keys[:hits], name)
        plan = engine.prepare_store(keys, name)
        assert plan is not None
        engine.complete_store(plan.keys, name)
        self._settle()
        engine.on_request_finished(name)
        self._settle()
        self._until(lambda: len(self._ledger.residency.mask) == len(study.tier.blocks))
        return hits

    def _found(self, keys: Sequence[OffloadKey], name: str) -> list[LookupResult]:
        found: list[LookupResult] = []
        for key in keys:
            result = self.engine.lookup(key, name)
            if result is LookupResult.MISS:
                break
            found.append(result)
        return found

    def _settle(self) -> None:
        assert self.engine.drain(PATIENCE_S)

    def _until(self, condition) -> None:
        ends_at = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_at, "the tier does not hold what the study says"
            self.engine.end_step()
            time.sleep(0)


def compare(requests: Iterable[Request], policy: str, capacity: int, tier_capacity: int, cascade: str) -> int:
    """Serve all by both, and return the hits."""
    study = TieredCache(policy_class(policy)(capacity), capacity, tier_capacity, cascade)
    driver = Driver(policy, capacity, tier_capacity, cascade)
    total = written = 0
    with driver.engine:
        for number, request in enumerate(requests):
            served = study.serve(request.hash_ids)
            hits = driver.hits(number, request.hash_ids, study)
            assert (number, hits) == (number, served.hits)
            total += hits
            written += served.written
        assert driver.engine.stats().tiers[0].stored == written
    return total


def small(limit: int) -> Iterator[Request]:
    return iter(GeneratedTrace(limit=limit))


@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("policy", known_policies())
def test_on_the_generated_trace_under_every_policy_and_cascade(policy: str, cascade: str) -> None:
    extent = measure(small(250))
    assert compare(small(250), policy, extent.capacity(0.05), extent.capacity(0.1), cascade) > 0


@pytest.mark.parametrize("cascade", CASCADES)
def test_where_a_request_is_larger_than_the_cache_and_the_tier_smaller(cascade: str) -> None:
    extent = measure(small(120))
    compare(small(120), "lru", extent.capacity(0.001), extent.capacity(0.0005), cascade)


@pytest.mark.parametrize("cascade", CASCADES)
def test_on_the_beginning_of_a_real_trace(traces, cascade: str) -> None:
    trace = Trace(traces / REAL[0], limit=400)
    extent = measure(trace)
    assert compare(trace, "lru", extent.capacity(0.05), extent.capacity(0.1), cascade) > 0


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("name", REAL)
def test_on_whole_real_traces(traces, name: str, cascade: str) -> None:
    trace = Trace(traces / name, limit=1_500)
    extent = measure(trace)
    assert compare(trace, "lru", extent.capacity(0.05), extent.capacity(0.1), cascade) > 0
