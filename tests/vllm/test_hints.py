"""Hints in `kv_transfer_params` reach kvtier through both doors; no request fails for its hint, whatever is in it."""

import math

import pytest

from tests.vllm.engines import PROMPT_HITS, Engine, fill, hits, kvtier, prompts, right, tokens
from tests.vllm.test_secondary import behind_vllm, tier_of

BLOCKS = PROMPT_HITS // 32

NO_HINTS: list[object] = [  # Integers of more than 64 bits vLLM itself refuses, wherever they are in a request.
    "over",
    b"over",
    ["over"],
    {"over": "yes"},
    {"returns_in_s": math.nan},
    {"returns_in_s": -(1 << 63)},
    {"class": "x" * 100_000},
    {"no_store": {"0:fs": True}},
    {"forever": True},
    {7: True},
]
HINTS: list[dict[str, object]] = [
    {},
    {"over": True, "class": "agent"},
    {"returns_in_s": 30, "retain_s": 600.5, "priority": 99, "tokens": 512},
    {"tokens": 1 << 60, "retain_s": 1e308},
]


def door(name, disk):
    return kvtier(disk) if name == "first" else behind_vllm(disk)


def of_kvtier(engine, name):
    if name == "first":
        return engine.ledger.tiers[0], engine.ledger.hints_ignored.counts
    tier = tier_of(engine)
    return tier.tier, tier.hints_ignored.counts


@pytest.mark.parametrize("name", ["first", "second"])
def test_nothing_of_a_request_that_says_so_is_stored_in_a_tier(llama, disk, name):
    secret, other = prompts(2)
    expected = right(llama, [secret, other])
    with Engine(llama, door(name, disk)) as engine:
        tier, ignored = of_kvtier(engine, name)
        (answer,) = engine.answer([secret], hint={"no_store": True})
        engine.settle()
        assert (answer.tokens, tier.counters.stored) == (expected[0], 0)
        assert tier.counters.skipped == {"no_store": BLOCKS}
        engine.answer([other], hint={"no_store": ["another tier"]})
        engine.settle()
        assert tier.counters.stored == BLOCKS
        assert ignored == ({"tier": 1} if name == "first" else {})  # Behind vLLM's manager a tier knows no other.
    with Engine(llama, door(name, disk)) as engine:
        answers = engine.answer([secret, other])
        assert (tokens(answers), hits(answers)) == (expected, [0, PROMPT_HITS])


@pytest.mark.parametrize("name", ["first", "second"])
def test_no_request_fails_for_its_hint_and_no_answer_changes(llama, disk, name):
    asked, new = prompts(4), prompts(2, seed=1)
    expected = right(llama, asked + new)
    assert fill(llama, door(name, disk), asked) == expected[:4]
    with Engine(llama, door(name, disk)) as engine:
        tier, ignored = of_kvtier(engine, name)
        for hint in HINTS:
            for _ in range(2):
                answers = engine.answer(asked, hint=hint)
                assert (tokens(answers), hits(answers)) == (expected[:4], [PROMPT_HITS] * 4), hint
                engine.settle()
                engine.llm.reset_prefix_cache()
        assert ignored == {}
        for count, given in enumerate(NO_HINTS, 1):
            assert tokens(engine.answer(new[count % 2 :][:1], hint=given)) == [expected[4 + count % 2]], given
            assert sum(ignored.values()) == count, given
        engine.settle()
        assert tier.counters.stored == 2 * BLOCKS
