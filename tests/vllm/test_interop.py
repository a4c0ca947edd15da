"""A directory that vLLM's own file tier and kvtier both use."""

import multiprocessing

import pytest

from kvtier.errors import ConfigError
from tests.vllm.engines import PROMPT_HITS, Engine, fill, hits, kvtier, kvtier_files, prompts, right, tokens
from tests.vllm.models import gemma3
from tests.vllm.vllm_tiering import vllm_tiering

WAYS = {
    "canonical pages": ({"canonical_layout": True}, {"canonical_layout": True}),
    "canonical pages, which kvtier takes by itself": ({"canonical_layout": True}, {}),
    "one worker's own pages": ({}, {"interop": "vllm"}),
}


def ours(disk, **changes):
    return kvtier(None, secondary_tiers=[{"type": "fs", "root": str(disk), "unverified": "accept"}], **changes)


def folders(disk):
    return {path.name for path in disk.iterdir() if path.is_dir()}


@pytest.mark.parametrize(
    ("first", "way"), [*(("vllm", way) for way in WAYS), ("kvtier", "canonical pages, which kvtier takes by itself")]
)
def test_what_one_wrote_the_other_hits(llama, disk, way, first):
    theirs_option, ours_option = WAYS[way]
    engines = {"vllm": vllm_tiering(disk, **theirs_option), "kvtier": ours(disk, **ours_option)}
    asked = prompts(3)
    expected = right(llama, asked)
    disk.mkdir()
    assert fill(llama, engines.pop(first), asked) == expected
    before = folders(disk)
    (second,) = engines.values()
    with Engine(llama, second) as engine:
        assert (tokens(answers := engine.answer(asked)), hits(answers)) == (expected, [PROMPT_HITS] * 3)
    assert folders(disk) == before


def test_canonical_pages_are_shared_with_vllm_at_another_size(llama, disk):
    asked = prompts(2)
    expected = right(llama, asked)
    disk.mkdir()
    fill(llama, vllm_tiering(disk, canonical_layout=True), asked)
    with Engine(llama, ours(disk), tensor_parallel_size=2) as engine:
        assert (tokens(answers := engine.answer(asked)), hits(answers)) == (expected, [PROMPT_HITS] * 2)


def test_a_hybrid_models_directory_is_shared_without_an_option(checkpoints, disk):
    model, asked = gemma3(checkpoints), prompts(2)
    expected = right(model, asked)
    disk.mkdir()
    assert fill(model, vllm_tiering(disk), asked, gpu_blocks=260) == expected
    with Engine(model, ours(disk), gpu_blocks=260) as engine:
        assert tokens(answers := engine.answer(asked)) == expected
        assert min(hits(answers)) > 0


def test_files_without_a_footer_are_refused_unless_they_are_accepted(llama, disk):
    asked = prompts(2)
    expected = right(llama, asked)
    disk.mkdir()
    fill(llama, vllm_tiering(disk), asked)
    with Engine(llama, kvtier_files(disk, interop="vllm")) as engine:
        assert (tokens(answers := engine.answer(asked)), hits(answers)) == (expected, [0, 0])


def test_vllms_default_rows_of_several_workers_are_refused(llama, disk):
    before = set(multiprocessing.active_children())
    with pytest.raises((ConfigError, RuntimeError), match=r"interop|initialization failed"):
        Engine(llama, kvtier(disk, interop="vllm"), tensor_parallel_size=2)
    for worker in set(multiprocessing.active_children()) - before:  # vLLM leaves them without a scheduler.
        worker.kill()
