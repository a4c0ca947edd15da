"""Tiers that are written later, in the real engine: what has left the primary is a hit, and every answer is right."""

from tests.vllm.engines import PROMPT_HITS, Engine, hits, kvtier, prompts, right, tokens

BLOCKS = PROMPT_HITS // 32


def over(disk, cascade):
    """Return the configuration of an engine whose primary holds two of its prompts, and writes half of it ahead."""
    tier = {"type": "fs", "root": str(disk), "cascade": cascade}
    return kvtier(cpu_bytes_to_use="5MiB", secondary_tiers=[tier], limits={"leaving_share": 0.5})


def asked_in_turn(engine, asked):
    """Ask for each prompt by itself, and have all written that is due after it."""
    answers = []
    for prompt in asked:
        answers += engine.answer([prompt])
        engine.settle()
    return answers


def test_what_was_evicted_from_the_primary_is_written_and_is_a_hit_later(llama, disk):
    asked = prompts(6)
    expected = right(llama, asked)
    with Engine(llama, over(disk, "evict")) as engine:
        counters = engine.ledger.tiers[0].counters
        assert tokens(asked_in_turn(engine, asked[:1])) == [expected[0]]
        assert counters.stored == 0, "it has not left"
        assert tokens(asked_in_turn(engine, asked[1:])) == expected[1:]
        assert engine.ledger.primary.evictions > 0
        assert 0 < counters.stored < len(asked) * BLOCKS, "what is in the primary is not written"
        assert counters.skipped == {}
        again = asked_in_turn(engine, asked)
        assert (tokens(again), hits(again)) == (expected, [PROMPT_HITS] * len(asked))
        assert counters.hits > 0
    with Engine(llama, over(disk, "evict")) as engine:
        again = asked_in_turn(engine, asked)
        assert (tokens(again), hits(again)) == (expected, [PROMPT_HITS] * len(asked)), "its end wrote the rest"
