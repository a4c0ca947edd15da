"""KVTierConnector in the real engine: what it measures of prefill, and that it is vLLM's connector in all else."""

import time

from tests.vllm.engines import PROMPT_HITS, PROMPT_TOKENS, Engine, hits, kvtier, prompts, right, tokens
from tests.vllm.test_secondary import behind_vllm


def test_prefill_is_measured_from_the_steps_unless_its_speed_is_configured(llama, monkeypatch):
    asked, pieces = prompts(8), {"max_num_batched_tokens": 512}
    with Engine(llama, **pieces) as alone:  # Some processors round other batches in another way.
        expected = tokens(alone.answer(asked))
    with Engine(llama, kvtier(), measured=True, **pieces) as engine:
        noted: list[tuple[int, float]] = []
        note = engine.kvtier.note_prefill
        monkeypatch.setattr(engine.kvtier, "note_prefill", lambda *step: (noted.append(step), note(*step)))
        begun = time.monotonic()
        answers, took_s = engine.answer(asked), time.monotonic() - begun
        assert (tokens(answers), sum(count for count, _ in noted)) == (expected, len(asked) * PROMPT_TOKENS)
        assert 0.0 < sum(seconds for _, seconds in noted) < took_s
        speeds = [count / seconds for count, seconds in noted if count]
        assert 0.99 * min(speeds) < engine.ledger.prefill.tokens_per_s < 1.01 * max(speeds)


def test_behind_vllms_own_manager_the_connector_is_vllms(llama, disk):
    asked = prompts(4)
    expected = right(llama, asked)
    for cached in (0, PROMPT_HITS):
        with Engine(llama, behind_vllm(disk), measured=True) as engine:
            answers = engine.answer(asked)
            assert (tokens(answers), hits(answers)) == (expected, [cached] * len(asked))
            engine.settle()
