"""Hit density: its figures on real traces, and the same hits in the study, in the engine and in a naive cache."""

import json
import os
from pathlib import Path

import pytest

from kvtier.policies import Density, policy_class
from kvtier.tools.replay.study import measure, policy_hits, simulation
from kvtier.tools.replay.traces import Trace
from kvtier.tools.replay.workload import GeneratedTrace
from tests.policies.naive_density import NaiveDensity
from tests.tools.replay.test_engine_equals_study import engine_hits

CONVERSATION = "mooncake_conversation.jsonl.gz"
AGENTIC = "agentic_local_b512.jsonl.zst"
MINI_SWE = "lmcache_miniswe_b16.jsonl.gz"
SIZES = ("0.01", "0.05", "0.10", "0.25", "0.50")
WORSE_AT_MOST = 0.006  # Than LRU, in any cell.


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_the_study_has_the_hits_of_a_naive_cache_request_by_request(share: float) -> None:
    trace = GeneratedTrace(limit=1_500)
    capacity = measure(trace).capacity(share)
    naive = list(policy_hits(trace, NaiveDensity(capacity), capacity))
    assert list(policy_hits(trace, Density(capacity), capacity)) == naive
    assert naive != list(simulation("lru")(trace, capacity))


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_the_engine_has_the_hits_of_the_study_when_it_has_learned(share: float) -> None:
    trace = GeneratedTrace(limit=3_000)
    capacity = measure(trace).capacity(share)
    assert list(engine_hits(trace, "density", capacity)) == list(simulation("density")(trace, capacity))


@pytest.mark.usefixtures("thorough")
def test_the_engine_has_the_hits_of_the_study_on_real_chats(traces: Path) -> None:
    trace = Trace(traces / CONVERSATION, limit=3_000)
    capacity = measure(trace).capacity(0.05)
    assert list(engine_hits(trace, "density", capacity)) == list(simulation("density")(trace, capacity))


def hit_ratios(trace: Trace, policy: str, sizes: tuple[str, ...]) -> list[float]:
    extent = measure(trace)
    capacities = [extent.capacity(float(size)) for size in sizes]
    hits = [sum(policy_hits(trace, policy_class(policy)(capacity), capacity)) for capacity in capacities]
    return list(map(extent.hit_ratio, hits))


@pytest.mark.usefixtures("thorough")
def test_a_small_cache_of_real_chats_has_more_hits_than_with_any_other_policy(traces: Path) -> None:
    """Of the other policies, the best have 0.075 (S3-FIFO), 0.210 and 0.286 (LFU), as the policy study says."""
    ratios = hit_ratios(Trace(traces / CONVERSATION), "density", SIZES[:3])
    assert [ratio >= least for ratio, least in zip(ratios, (0.091, 0.218, 0.290), strict=True)] == [True] * 3


@pytest.mark.usefixtures("thorough")
@pytest.mark.skipif("KVTIER_ALL_TRACES" not in os.environ, reason="takes minutes: make test-traces runs it")
def test_a_very_small_cache_of_agents_has_more_hits_than_with_any_other_policy(traces: Path) -> None:
    """The best of the others has 0.494 (ARC), LRU 0.453."""
    assert hit_ratios(Trace(traces / AGENTIC), "density", SIZES[:1])[0] >= 0.545


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("name", [CONVERSATION, MINI_SWE])
def test_at_no_size_are_there_many_fewer_hits_than_with_lru(traces: Path, name: str) -> None:
    assert_near_lru(traces, name)


@pytest.mark.usefixtures("thorough")
@pytest.mark.skipif("KVTIER_ALL_TRACES" not in os.environ, reason="takes minutes: make test-traces runs it")
def test_at_no_size_do_agents_have_many_fewer_hits_than_with_lru(traces: Path) -> None:
    assert_near_lru(traces, AGENTIC)


def assert_near_lru(traces: Path, name: str) -> None:
    lru = json.loads((traces / "reference_hit_ratios.json").read_text())[name]["hit_ratio"]["lru"]
    ratios = hit_ratios(Trace(traces / name), "density", SIZES)
    worse = {
        size: (ratio, lru[size]) for size, ratio in zip(SIZES, ratios, strict=True) if ratio < lru[size] - WORSE_AT_MOST
    }
    assert not worse
