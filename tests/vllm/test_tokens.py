"""The same tokens as with a connector that keeps nothing, to the last bit of every log-probability.

With any connector, vLLM computes some steps in another way than without one. So that is what kvtier is compared with,
and not an engine without a connector, whose answers differ at near ties.
"""

from typing import NamedTuple

from vllm.v1.kv_offload.base import LookupResult

from kvtier.integrations.vllm import KVTierOffloadingSpec
from kvtier.integrations.vllm.manager import VllmManager
from tests.vllm.engines import LIKELY, PROMPT_HITS, Engine, kvtier, prompts, sampling

ENOUGH_BLOCKS = 400  # vLLM's own prefix cache holds all prompts.
BATCH = 4


class Given(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]


class Nothing(KVTierOffloadingSpec):
    def get_manager(self) -> VllmManager:
        manager = super().get_manager()
        assert isinstance(manager, VllmManager)
        manager.lookup = lambda key, req_context: LookupResult.MISS
        manager.prepare_store = lambda keys, req_context: None
        return manager


def asked_at_once(engine, asked):
    """Return answers with their log-probabilities, and how many tokens of each prompt were cached."""
    params = sampling(32)
    params.logprobs = LIKELY
    outputs = engine.llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    steps = [tuple({token: each.logprob for token, each in step.items()} for step in one.logprobs) for one in answers]
    given = [Given(tuple(one.token_ids), likely) for one, likely in zip(answers, steps, strict=True)]
    return given, [output.num_cached_tokens for output in outputs]


def test_tokens_and_log_probabilities_are_those_of_a_connector_that_keeps_nothing(llama, disk):
    single, batch = prompts(6), prompts(BATCH, tokens=200, seed=7)
    nothing = kvtier(spec_name=Nothing.__name__, spec_module_path=__name__)
    with Engine(llama, nothing, gpu_blocks=ENOUGH_BLOCKS) as engine:
        expected = [[asked_at_once(engine, [prompt]) for prompt in single] for _ in range(2)]
        expected_of_batch, _ = asked_at_once(engine, batch)
    assert [cached for _, (cached,) in expected[1]] == [PROMPT_HITS] * len(single)  # In vLLM's own prefix cache.
    with Engine(llama, kvtier(disk)) as engine:
        assert [asked_at_once(engine, [prompt]) for prompt in single] == expected[0]
        assert [asked_at_once(engine, [prompt]) for prompt in single] == expected[1]
        assert asked_at_once(engine, batch)[0] == expected_of_batch
        assert engine.ledger.counters.hits == len(single) * PROMPT_HITS // 32
        engine.settle()
    with Engine(llama, kvtier(disk)) as engine:
        assert [asked_at_once(engine, [prompt]) for prompt in single] == expected[1]
        assert engine.ledger.tiers[0].counters.hits == len(single) * PROMPT_HITS // 32
