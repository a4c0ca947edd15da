"""A tier that becomes slow, in the real engine: nobody waits for it, every answer is right, and it is used again."""

from tests.redis.servers import until
from tests.slow_tier import slow_fs
from tests.vllm.engines import PROMPT_HITS, PROMPT_TOKENS, Engine, hits, kvtier, prompts, right, tokens

COMPUTED_TOKENS_PER_S = 1_000.0  # Said, not measured: a prompt takes a second, whatever the machine does.
CRAWLING_BYTES_PER_S = 768 << 10  # A prompt takes more than two and a half.


def over(disk, speed, **changes):
    """Return the configuration of an engine whose primary holds two of its prompts; the tier holds all of them."""
    return kvtier(cpu_bytes_to_use="5MiB", secondary_tiers=[slow_fs(disk, speed)], **changes)


def test_a_tier_that_becomes_slow_is_not_waited_for_and_is_used_again_when_it_is_fast(llama, disk, tmp_path):
    asked, speed = prompts(8), tmp_path / "speed"
    expected = right(llama, asked)
    with Engine(llama, over(disk, speed, prefill_tokens_per_s=COMPUTED_TOKENS_PER_S)) as engine:
        (tier,) = engine.ledger.tiers
        counters = tier.counters
        engine.answer(asked)
        engine.settle()
        assert [engine.answer([prompt])[0].cached for prompt in asked] == [PROMPT_HITS] * len(asked)
        assert counters.declined == counters.given_up == 0

        speed.write_text(str(CRAWLING_BYTES_PER_S))
        (late,) = engine.answer(asked[:1])
        assert (late.tokens, counters.given_up) == (expected[0], 1)
        assert late.cached < PROMPT_HITS
        until(lambda: served(engine, asked, expected) is False and counters.explored > 0)  # A few loads show it.
        assert counters.declined_requests > 0

        speed.unlink()
        until(lambda: served(engine, asked, expected))


def served(engine, asked, expected):
    """Ask for everything once more, be sure that it was right, and say whether all of it was cached."""
    answers = [engine.answer([prompt])[0] for prompt in asked]
    assert tokens(answers) == expected
    return hits(answers) == [PROMPT_HITS] * len(asked)


def test_what_the_connector_measures_decides_about_loads(llama, disk, tmp_path):
    """Without a word of how fast vLLM computes: as soon as that is known, a tier that crawls is declined."""
    asked, speed = prompts(8), tmp_path / "speed"
    expected = right(llama, asked)
    with Engine(llama, over(disk, speed), measured=True) as engine:
        (tier,) = engine.ledger.tiers
        assert tokens(engine.answer(asked)) == expected
        engine.settle()
        assert engine.ledger.prefill.tokens_per_s > 0  # It takes 4,096 tokens.
        speed.write_text(str(CRAWLING_BYTES_PER_S / PROMPT_TOKENS))
        answers = [engine.answer([prompt])[0] for prompt in asked]
        assert tokens(answers) == expected
        assert max(hits(answers)) < PROMPT_HITS
        assert tier.counters.declined_requests > 0
        speed.unlink()
