"""The worth of hints to a policy that takes them: from oracles that know the trace's future, and with lies."""

import random
from collections.abc import Sequence
from functools import cache
from statistics import mean
from typing import NamedTuple

import pytest

from kvtier.policies import Density
from kvtier.settings.hints import Hint
from kvtier.tools.replay.study import policy_hits
from kvtier.tools.replay.traces import Trace, TraceRequest
from kvtier.tools.replay.workload import GeneratedTrace, Workload
from tests.tools.replay.oracle import Future, Saying, future, hinted, hints
from tests.tools.replay.real import AGENTIC, CONVERSATION
from tests.tools.replay.written import write_trace

SEEDS = (1, 2, 3)


def request(at_s, *blocks, tokens=None):
    return TraceRequest(at_s * 1_000, 512 * len(blocks) if tokens is None else tokens, 1, blocks)


def test_a_session_returns_with_what_it_does_not_share_and_is_over_with_its_last_whole_block():
    requests = [
        request(0, 0, 1, 2),  # The first session, behind a system prompt,
        request(5, 0, 3),  # and the second, which never returns.
        request(9, 0, 1, 2, 4),
        request(20, 0, 5),  # The third shares the system prompt only.
        request(30, 0, 1, 2, 4, 6),
    ]
    assert future(requests, 512) == Future([False, True, False, True, True], [9.0, None, 21.0, None, None])


def said(saying, known):
    return list(hints(known, saying))


def hit_ratio(requests, extent, share, said):
    capacity = extent.capacity(share)
    return extent.hit_ratio(sum(policy_hits(requests, Density[int](capacity), capacity, said)))


@pytest.fixture(scope="module")
def told_chats(traces):
    """Return what the hit ratio of real chats is at 5 % when an oracle says this."""
    chats, extent = list(Trace(traces / CONVERSATION)), traces.extent(CONVERSATION)
    known = future(chats, 512)
    return cache(lambda saying: hit_ratio(chats, extent, 0.05, said(saying, known)))


def test_the_study_uses_the_hints_of_a_traces_lines(tmp_path):
    trace = GeneratedTrace(limit=600)
    told = list(hinted(trace, future(trace, 512), Saying(over=0.9, seed=1)))
    write_trace(tmp_path / "trace.jsonl", told)
    said = [each.hint for each in told]
    hits = list(policy_hits(Trace(tmp_path / "trace.jsonl"), Density[int](200), 200))
    assert hits == list(policy_hits(trace, Density[int](200), 200, said))
    assert sum(hits) > sum(policy_hits(trace, Density[int](200), 200))


BUSY, IDLE = (Hint(class_=name) for name in ("planner", "title"))


class Classed(NamedTuple):
    """Requests, which of their sessions return, and how much is found of them if nothing is said."""

    requests: Sequence[TraceRequest]
    returns: Sequence[bool]
    unsaid: Sequence[float]  # Hit ratios, by a thousand requests.

    def gains(self, said):
        return [told - untold for told, untold in zip(found(self.requests, said), self.unsaid, strict=True)]


def found(requests, said):
    hits = list(policy_hits(requests, Density[int](2_600), 2_600, said))
    parts = [slice(begin, begin + 1_000) for begin in range(0, len(requests), 1_000)]
    return [sum(hits[part]) / sum(len(each.hash_ids) for each in requests[part]) for part in parts]


@pytest.fixture(scope="module", params=[0, 1])
def classed(request, thorough):
    """Give a generated trace, of whose first 6,000 requests' blocks the cache holds a twentieth."""
    requests = list(GeneratedTrace(Workload(requests=10_000, seed=request.param)))
    return Classed(requests, [not last for last in future(requests, 512).last], found(requests, [None] * len(requests)))


def test_a_class_whose_sessions_return_more_often_is_learned_whatever_its_name(classed):
    gains = classed.gains([BUSY if returns else IDLE for returns in classed.returns])
    assert mean(gains) > 0.02
    assert min(gains[1:]) > 0


@pytest.mark.parametrize("lie", ["noise", "the contrary"])
def test_a_class_that_begins_to_lie_is_unlearned(classed, lie):
    dice = random.Random(5)

    def said(number, returns):
        lied = number >= 2_000 and (lie == "the contrary" or dice.random() < 0.5)
        return BUSY if returns != lied else IDLE

    gains = classed.gains([said(number, returns) for number, returns in enumerate(classed.returns)])
    assert mean(gains[:2]) > 0.03  # It was believed,
    assert mean(gains[2:4]) < 0  # for too long,
    assert mean(gains[6:]) > -0.01  # and is not any more.


@pytest.mark.parametrize(("share", "least"), [(0.5, 0.25), (0.9, 0.32)])
def test_hints_that_sessions_are_over_are_worth_more_than_a_policy(thorough, told_chats, share, least):
    assert mean(told_chats(Saying(over=share, seed=seed)) for seed in SEEDS) >= least


@pytest.mark.parametrize("saying", [Saying(over=0.5), Saying(over=0.9), Saying(returns=1)])
def test_hints_of_which_half_are_lies_do_no_harm(thorough, told_chats, saying):
    assert told_chats(saying._replace(lies=0.5, error=0.5, seed=1)) >= told_chats(Saying()) - 0.005


@pytest.fixture(scope="module")
def known_agents(agents):
    return future(Trace(agents), 512)


@pytest.mark.parametrize(("share", "least"), [(0.5, 0.60), (1.0, 0.66)])
def test_hints_of_when_agents_return_are_worth_more_than_a_policy(traces, agents, known_agents, share, least):
    told = said(Saying(returns=share, error=0.5, seed=1), known_agents)
    assert hit_ratio(Trace(agents, checked=True), traces.extent(AGENTIC), 0.01, told) >= least
