"""One directory for several tensor-parallel sizes: shared where the bytes are the same, apart where they are not."""

import pytest

from tests.vllm.engines import PROMPT_HITS, Engine, fill, hits, kvtier, prompts, right, tokens
from tests.vllm.models import deepseek_v2, llama_of_few_heads


@pytest.mark.parametrize(("stored_at", "loaded_at"), [(2, 1), (1, 2)])
def test_full_attention_is_shared_by_every_tensor_parallel_size(llama, disk, stored_at, loaded_at):
    asked = prompts(3)
    expected = right(llama, asked)
    assert fill(llama, kvtier(disk), asked, tensor_parallel_size=stored_at) == expected
    with Engine(llama, kvtier(disk), tensor_parallel_size=loaded_at) as engine:
        assert (tokens(answers := engine.answer(asked)), hits(answers)) == (expected, [PROMPT_HITS] * 3)


def test_workers_own_pages_are_each_sizes_own(llama, disk):
    asked = prompts(2)
    expected, own = right(llama, asked), kvtier(disk, canonical_layout=False)
    fill(llama, own, asked)
    with Engine(llama, own, tensor_parallel_size=2) as engine:
        for cached in (0, PROMPT_HITS):
            assert (tokens(answers := engine.answer(asked)), hits(answers)) == (expected, [cached] * 2)
            engine.settle()
            engine.llm.reset_prefix_cache(reset_connector=True)


@pytest.mark.parametrize("canonical", [None, True])
def test_heads_of_which_every_worker_has_a_copy_are_right_at_every_size(checkpoints, disk, canonical):
    """Rows of several workers have room for every copy, so that their length keeps the sizes apart."""
    model, asked = llama_of_few_heads(checkpoints), prompts(2)
    extra = kvtier(disk) if canonical is None else kvtier(disk, canonical_layout=canonical)
    expected = right(model, asked), right(model, asked, tensor_parallel_size=2)
    assert fill(model, extra, asked) == expected[0]
    with Engine(model, extra, tensor_parallel_size=2) as engine:
        assert (tokens(cold := engine.answer(asked)), hits(cold)) == (expected[1], [0, 0])
        assert (tokens(warm := engine.answer(asked)), hits(warm)) == (expected[1], [PROMPT_HITS] * 2)
        engine.settle()
    with Engine(model, extra) as engine:
        assert tokens(engine.answer(asked)) == expected[0]


@pytest.mark.parametrize("canonical", [None, True])
def test_latent_attention_is_shared_by_every_size_if_pages_are_canonical(checkpoints, disk, canonical):
    model, asked = deepseek_v2(checkpoints), prompts(2)
    extra = kvtier(disk) if canonical is None else kvtier(disk, canonical_layout=canonical)
    changes = {"gpu_blocks": 100, "max_num_seqs": 1}
    one = fill(model, extra, asked, **changes)
    with Engine(model, extra, tensor_parallel_size=2, **changes) as engine:
        assert hits(first := engine.answer(asked)) == ([PROMPT_HITS] * 2 if canonical else [0, 0])
        assert [given[0] for given in tokens(first)] == [given[0] for given in one]
        assert hits(engine.answer(asked)) == [PROMPT_HITS] * 2
