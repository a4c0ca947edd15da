"""Models whose layers do not all see the same tokens, and KV caches of other types."""

from functools import partial

import pytest
import torch

from tests.vllm.engines import PROMPT_HITS, Engine, fill, hits, kvtier, prompts, right, tokens
from tests.vllm.models import another_llama, deepseek_v2, gemma3, lfm2, llama
from tests.vllm.vllm_tiering import vllm_tiering

KINDS = {  # The model, and what its engine needs: GPU blocks for little more than one prompt.
    "sliding windows": (gemma3, 260, {}),
    "short convolutions": (lfm2, 44, {"block_size": None, "max_num_seqs": 1}),  # Answers depend on the batch.
}


@pytest.mark.parametrize(
    ("kind", "blocks_per_chunk", "least"),
    [("sliding windows", 1, PROMPT_HITS), ("sliding windows", 4, 896), ("short convolutions", 1, 896)],
)
def test_models_of_every_kind_have_hits_and_are_right(checkpoints, disk, kind, blocks_per_chunk, least):
    make, gpu_blocks, changes = KINDS[kind]
    model, asked = make(checkpoints), prompts(5)
    expected = right(model, asked, **changes)
    start = partial(Engine, model, gpu_blocks=gpu_blocks, **changes)
    extra = kvtier(disk, blocks_per_chunk=blocks_per_chunk)
    with start(extra) as engine:
        assert (tokens(engine.answer(asked)), tokens(warm := engine.answer(asked))) == (expected, expected)
        assert min(hits(warm)) >= least, hits(warm)
        assert engine.ledger.counters.hits > 0
        engine.settle()
    with start(extra) as engine:
        assert tokens(again := engine.answer(asked)) == expected
        assert min(hits(again)) >= least, hits(again)
        assert engine.ledger.tiers[0].counters.hits > 0


def test_latent_attention_answers_from_kvtiers_chunks_as_from_vllms_own(checkpoints, disk):
    """What vLLM's CPU build answers here depends on the batch, and on what is cached: both are the same."""
    model, asked = deepseek_v2(checkpoints), prompts(4)
    changes = {"gpu_blocks": 100, "max_num_seqs": 1}
    with Engine(model, vllm_tiering(None, blocks_per_chunk=4), **changes) as engine:
        expected = [tokens(engine.answer(asked)), tokens(engine.answer(asked))]
    extra = kvtier(disk, blocks_per_chunk=4)
    with Engine(model, extra, **changes) as engine:
        assert tokens(engine.answer(asked)) == expected[0]
        assert tokens(warm := engine.answer(asked)) == expected[1]
        assert min(hits(warm)) >= 960
        engine.settle()
    with Engine(model, extra, **changes) as engine:
        assert tokens(again := engine.answer(asked)) == expected[1]
        assert min(hits(again)) >= 960


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM has fp8 KV caches on processors with AVX-512 or AMX alone",
)
def test_fp8_kv_has_hits_is_right_and_has_names_of_its_own(llama, disk):
    asked = prompts(4)
    expected = right(llama, asked, kv_cache_dtype="fp8_e4m3")
    fill(llama, kvtier(disk), asked)
    with Engine(llama, kvtier(disk), kv_cache_dtype="fp8_e4m3") as engine:
        assert (tokens(cold := engine.answer(asked)), hits(cold)) == (expected, [0] * 4)
        assert (tokens(warm := engine.answer(asked)), hits(warm)) == (expected, [PROMPT_HITS] * 4)


def test_a_revision_of_the_weights_has_names_of_its_own(checkpoints, disk, tmp_path):
    asked, link = prompts(2), tmp_path / "model"
    link.symlink_to(llama(checkpoints))
    fill(str(link), kvtier(disk, revision="one"), asked)
    expected = right(another_llama(checkpoints), asked)
    link.unlink()
    link.symlink_to(another_llama(checkpoints))
    with Engine(str(link), kvtier(disk, revision="two")) as engine:
        assert (tokens(answers := engine.answer(asked)), hits(answers)) == (expected, [0, 0])
    with Engine(str(link), kvtier(disk, revision="one")) as engine:  # What the revision keeps apart.
        assert hits(engine.answer(asked)) == [PROMPT_HITS] * 2


def test_weights_that_change_while_the_engine_runs_find_the_chunks_of_their_own_revision_alone(llama, disk, tmp_path):
    asked, revision = prompts(2), tmp_path / "revision"

    def found(engine, name):
        """Change the weights, as far as caches are concerned; return how many tokens they find then, and once more."""
        revision.write_text(name)
        engine.settle()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        return [hits(engine.answer(asked)) for _ in range(2)]

    revision.write_text("one")
    nothing, all_of_it = [0, 0], [PROMPT_HITS] * 2
    with Engine(llama, kvtier(disk, revision_file=str(revision))) as engine:
        assert found(engine, "one") == [nothing, all_of_it]
        assert found(engine, "two") == [nothing, all_of_it]
        assert found(engine, "one") == [all_of_it, all_of_it]
    with Engine(llama, kvtier(disk, revision_file=str(revision))) as engine:
        assert hits(engine.answer(asked)) == all_of_it
        assert found(engine, "three") == [nothing, all_of_it]
