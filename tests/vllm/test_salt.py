"""vLLM's `cache_salt`: requests find what others with the same salt have stored, and nothing else."""

from tests.vllm.engines import PROMPT_HITS, Engine, hits, kvtier, prompts, right, tokens

NOTHING, ALL = [0, 0], [PROMPT_HITS] * 2


def test_a_prompt_with_another_salt_or_none_is_a_miss_in_memory_and_on_disk(llama, disk):
    asked = prompts(2)
    expected = right(llama, asked)
    with Engine(llama, kvtier(disk)) as engine:
        assert hits(engine.answer(asked, salt="one tenant")) == NOTHING
        assert hits(engine.answer(asked, salt="one tenant")) == ALL
        for salt in ("another", None):
            assert (tokens(answers := engine.answer(asked, salt=salt)), hits(answers)) == (expected, NOTHING)
        engine.settle()
    with Engine(llama, kvtier(disk)) as engine:
        assert hits(engine.answer(asked, salt="a third")) == NOTHING
        assert (tokens(answers := engine.answer(asked, salt="one tenant")), hits(answers)) == (expected, ALL)
        assert engine.ledger.tiers[0].counters.hits == 2 * 31
