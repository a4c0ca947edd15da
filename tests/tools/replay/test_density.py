"""Hit density: its figures on real traces, and the same hits in the study, in the engine and in a naive cache."""

import json

import pytest

from kvtier.policies import Density
from kvtier.tools.replay.study import measure, policy_hits, simulation
from kvtier.tools.replay.traces import Trace
from kvtier.tools.replay.workload import GeneratedTrace
from tests.policies.naive_density import NaiveDensity
from tests.tools.replay.real import AGENTIC, CONVERSATION, MINI_SWE, SIZES

WORSE_AT_MOST = 0.006  # Than LRU, in any cell.


@pytest.mark.parametrize("share", [0.01, 0.03])
def test_the_study_has_the_hits_of_a_naive_cache_request_by_request(share):
    trace = GeneratedTrace(limit=800)
    capacity = measure(trace).capacity(share)
    naive = list(policy_hits(trace, NaiveDensity(capacity), capacity))
    assert list(policy_hits(trace, Density(capacity), capacity)) == naive
    assert naive != list(simulation("lru")(trace, capacity))


def hit_ratio(traces, name, size):
    extent = traces.extent(name)
    capacity = extent.capacity(float(size))
    return extent.hit_ratio(sum(policy_hits(Trace(traces / name, checked=True), Density(capacity), capacity)))


@pytest.mark.parametrize(("size", "least"), [("0.01", 0.091), ("0.05", 0.218), ("0.10", 0.290)])
def test_a_small_cache_of_real_chats_has_more_hits_than_with_any_other_policy(thorough, traces, size, least):
    """Of the other policies, the best have 0.075 (S3-FIFO), 0.210 and 0.284 (ARC), as the policy study says."""
    assert hit_ratio(traces, CONVERSATION, size) >= least


@pytest.mark.usefixtures("agents")
def test_a_very_small_cache_of_agents_has_more_hits_than_with_any_other_policy(traces):
    """The best of the others has 0.494 (ARC), LRU 0.453."""
    assert hit_ratio(traces, AGENTIC, "0.01") >= 0.545


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [CONVERSATION, MINI_SWE])
def test_at_no_size_are_there_many_fewer_hits_than_with_lru(thorough, traces, name, size):
    assert_near_lru(traces, name, size)


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("size", SIZES[1:])  # The smallest has its own test: it asks for more than LRU has.
def test_at_no_size_do_agents_have_many_fewer_hits_than_with_lru(traces, size):
    assert_near_lru(traces, AGENTIC, size)


def assert_near_lru(traces, name, size):
    lru = json.loads((traces / "reference_hit_ratios.json").read_text())[name]["hit_ratio"]["lru"]
    assert hit_ratio(traces, name, size) >= lru[size] - WORSE_AT_MOST
