"""What hints are worth to a policy that takes them: said by oracles that know the trace's future, and by liars."""

import math
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.policies import LRU, Density, Hint
from kvtier.tools.replay.study import measure, policy_hits
from kvtier.tools.replay.traces import Request, Trace
from kvtier.tools.replay.workload import GeneratedTrace

CONVERSATION = "mooncake_conversation.jsonl.gz"
AGENTIC = "agentic_local_b512.jsonl.zst"
SEEDS = (1, 2, 3)
OVER = Hint(over=True)


def last_of_sessions(requests: Sequence[Request]) -> list[bool]:
    """Say of each request whether no later one uses its last whole block: the very last is filled in part."""
    used_later: set[int] = set()
    last: list[bool] = []
    for request in reversed(requests):
        last.append(used_later.isdisjoint(request.hash_ids[-2:-1]))
        used_later.update(request.hash_ids)
    return last[::-1]


def returns_s(requests: Sequence[Request]) -> list[float | None]:
    """Say of each request when a later one goes on from what it does not share with other sessions."""
    user: dict[int, int] = {}  # Block -> who used it last.
    shared = [0] * len(requests)
    returns: list[float | None] = [None] * len(requests)
    for number, request in enumerate(requests):
        blocks = request.hash_ids
        known = next((place for place, block in enumerate(blocks) if block not in user), len(blocks))
        if known:
            before = user[blocks[known - 1]]
            if known > shared[before]:
                returns[before] = (request.timestamp_ms - requests[before].timestamp_ms) / 1_000
                shared[number] = next(place for place, block in enumerate(blocks) if user[block] == before)
            else:
                shared[number] = known
        user.update(dict.fromkeys(blocks, number))
    return returns


def over_hints(last: Sequence[bool], share: float, seed: int, *, lies: bool = False) -> list[Hint | None]:
    """Give a share of the sessions' last requests the hint; with `lies`, as many others, too."""
    dice = random.Random(seed)
    false_share = share * sum(last) / (len(last) - sum(last)) if lies else 0.0
    return [OVER if dice.random() < (share if over else false_share) else None for over in last]


def return_hints(returns: Sequence[float | None], share: float, seed: int) -> list[Hint | None]:
    """Give a share of those that return the hint, wrong by a factor of e^0.5 (a standard deviation)."""
    dice = random.Random(seed)
    return [
        Hint(returns_in_s=after_s * math.exp(dice.gauss(0, 0.5)))
        if after_s is not None and dice.random() < share
        else None
        for after_s in returns
    ]


def hit_ratio(requests: Sequence[Request], share: float, hints: Sequence[Hint | None]) -> float:
    extent = measure(requests)
    capacity = extent.capacity(share)
    return extent.hit_ratio(sum(policy_hits(requests, Density[int](capacity), capacity, hints)))


@pytest.fixture(scope="module")
def chats(traces: Path) -> list[Request]:
    return list(Trace(traces / CONVERSATION))


def test_a_policy_that_takes_no_hints_does_what_it_does_without() -> None:
    trace = GeneratedTrace(limit=200)
    assert list(policy_hits(trace, LRU(100), 100, [OVER] * 200)) == list(policy_hits(trace, LRU(100), 100))


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize(("share", "least"), [(0.5, 0.25), (0.9, 0.32)])
def test_hints_that_sessions_are_over_are_worth_more_than_a_policy(
    chats: list[Request], share: float, least: float
) -> None:
    last = last_of_sessions(chats)
    ratios = [hit_ratio(chats, 0.05, over_hints(last, share, seed)) for seed in SEEDS]
    assert round(sum(ratios) / len(ratios), 2) >= least


@pytest.mark.usefixtures("thorough")
def test_hints_of_which_half_are_lies_do_no_harm(chats: list[Request]) -> None:
    last, nothing_said = last_of_sessions(chats), [None] * len(chats)
    lied_to = hit_ratio(chats, 0.05, over_hints(last, 0.5, SEEDS[0], lies=True))
    assert lied_to >= hit_ratio(chats, 0.05, nothing_said) - 0.005


@pytest.mark.usefixtures("thorough")
@pytest.mark.skipif("KVTIER_ALL_TRACES" not in os.environ, reason="takes minutes; KVTIER_ALL_TRACES=1 runs it")
@pytest.mark.parametrize(("share", "least"), [(0.5, 0.575), (1.0, 0.64)])
def test_hints_of_when_agents_return_are_worth_more_than_a_policy(traces: Path, share: float, least: float) -> None:
    requests = list(Trace(traces / AGENTIC))
    assert hit_ratio(requests, 0.01, return_hints(returns_s(requests), share, SEEDS[0])) >= least
