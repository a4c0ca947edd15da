"""The policy study against naive caches, and against the figures that others found for the real traces."""

import json
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.policies import FIFO, LRU
from kvtier.tools.replay.study import Extent, measure, opt_hits, policy_hits, simulation
from kvtier.tools.replay.traces import Trace, TraceRequest
from tests.tools.replay.real import AGENTIC, CONVERSATION, MINI_SWE, SIZES

POLICIES = ("fifo", "lru", "arc", "s3fifo", "opt")
ONLINE = ("arc", "density", "fifo", "lru", "s3fifo")
TOLERANCE = 0.002


def requests_of(*prompts):
    return [TraceRequest(0, 0, 0, blocks) for blocks in prompts]


def naive_hits(requests, capacity, *, renew):
    order, hits = [], []
    for request in requests:
        blocks = request.hash_ids
        hits.append(next((place for place, block in enumerate(blocks) if block not in order), len(blocks)))
        used = list(dict.fromkeys(blocks[:capacity]))
        missing = [block for block in used if block not in order]
        while len(order) + len(missing) > capacity:
            order.remove(next(block for block in order if block not in used))
        for block in reversed(used):
            if block in missing:
                order.append(block)
            elif renew:
                order.remove(block)
                order.append(block)
    return hits


prompts = st.lists(st.lists(st.integers(0, 9), max_size=8).map(tuple), max_size=15)
any_requests = prompts.map(lambda prompts: requests_of(*prompts))


@given(requests=any_requests, capacity=st.integers(1, 8))
def test_lru_and_fifo_have_the_hits_of_naive_caches_request_by_request(requests, capacity):
    assert list(policy_hits(requests, LRU(capacity), capacity)) == naive_hits(requests, capacity, renew=True)
    assert list(policy_hits(requests, FIFO(capacity), capacity)) == naive_hits(requests, capacity, renew=False)


@given(requests=any_requests, capacity=st.integers(1, 8), name=st.sampled_from(ONLINE))
def test_no_policy_has_more_hits_than_a_cache_that_keeps_everything(requests, capacity, name):
    hits = list(simulation(name)(requests, capacity))
    kept_everything = list(policy_hits(requests, LRU(100), 100))
    assert all(mine <= best for mine, best in zip(hits, kept_everything, strict=True))
    assert sum(kept_everything) == measure(requests).best_hits


def test_a_request_larger_than_the_cache_keeps_its_head():
    requests = requests_of((1, 2, 3, 4), (1, 2, 3, 4))
    for name in (*ONLINE, "opt"):
        assert list(simulation(name)(requests, 2)) == [0, 2]


def test_the_extent_counts_what_is_there_and_a_share_of_it_is_rounded_to_at_least_one():
    extent = measure(requests_of((1, 2, 3), (1, 2, 4), (), (5, 1)))
    assert extent == Extent(requests=4, block_references=8, unique_blocks=5, best_hits=2, lengths={0: 1, 2: 1, 3: 2})
    assert (extent.hit_ratio(2), measure([]).hit_ratio(0)) == (0.25, 0.0)
    assert [extent._replace(unique_blocks=182_790).capacity(share) for share in (1e-9, 0.05)] == [1, 9_140]


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"did you mean 'lru'.*Known: arc, density, fifo.*or 'opt', the best"):
        simulation("lrru")


def assert_reference_ratios(traces, name, policy, sizes):
    reference = json.loads((traces / "reference_hit_ratios.json").read_text())[name]
    extent, trace = traces.extent(name), Trace(traces / name, checked=True)
    for size in sizes:
        capacity = extent.capacity(float(size))
        assert capacity == reference["capacity_blocks"][size]
        ratio = extent.hit_ratio(sum(simulation(policy)(trace, capacity)))
        assert ratio == pytest.approx(reference["hit_ratio"][policy][size], abs=TOLERANCE), (policy, size)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [CONVERSATION, MINI_SWE])
def test_the_real_traces_have_the_hit_ratios_that_others_found(thorough, traces, name, policy):
    assert_reference_ratios(traces, name, policy, SIZES)


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_large_trace_has_the_hit_ratios_that_others_found(traces, policy, size):
    assert_reference_ratios(traces, AGENTIC, policy, (size,))


@st.composite
def prefix_chained(draw):
    """Draw requests whose block ids stand for prefixes: the same id always comes after the same ids."""
    paths = draw(st.lists(st.lists(st.integers(0, 1), max_size=4).map(tuple), max_size=7))
    ids = {}
    prompts = [tuple(ids.setdefault(path[:end], len(ids)) for end in range(1, len(path) + 1)) for path in paths]
    return [TraceRequest(0, 0, 0, blocks) for blocks in prompts]


def best_hits(requests, capacity):
    @cache
    def best_from(number, resident):
        if number == len(requests):
            return 0
        blocks = requests[number].hash_ids
        run = next((place for place, block in enumerate(blocks) if block not in resident), len(blocks))
        candidates = sorted(resident.union(blocks))
        kept = combinations(candidates, min(capacity, len(candidates)))
        return run + max(best_from(number + 1, frozenset(blocks)) for blocks in kept)

    return best_from(0, frozenset())


@given(requests=prefix_chained(), capacity=st.integers(1, 5))
def test_no_choice_of_blocks_to_keep_gives_more_hits(requests, capacity):
    assert sum(opt_hits(requests, capacity)) == best_hits(requests, capacity)


def test_outdated_entries_are_cleared_away_without_a_trace():
    """One prompt again and again outdates each entry as soon as it is made, more often than a heap is renewed."""
    assert list(opt_hits([TraceRequest(0, 0, 0, tuple(range(100)))] * 1_500, 50)) == [0] + [50] * 1_499
