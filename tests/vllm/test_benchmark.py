"""The benchmarks in vLLM measure what they say: a round of the smallest size, of both sides."""

import gc
from collections.abc import Iterator

import pytest

from tests.benchmarks import engine_beside_vllm as benchmark
from tests.benchmarks import hung_remote, slow_tier_in_vllm
from tests.vllm.engines import PROMPT_HITS


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """A round freezes what there is, which is for a process of its own."""
    yield
    gc.unfreeze()


def test_a_round_finds_what_it_says_where_it_says_so(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "EACH", 1)
    rounds = {side: [benchmark.one_round(side, llama, tmp_path / side, seed=0)] for side in ("kvtier", "vllm")}
    cached = {"cold": 0, "cpu": PROMPT_HITS, "fs": PROMPT_HITS, "mixed": 2 * PROMPT_HITS}
    for (served,) in rounds.values():
        assert {mix: each.cached_tokens for mix, each in served.items()} == cached
        assert all(0 < each.manager_s_per_step_p50 <= each.manager_s_per_step_p99 for each in served.values())
    rows = list(benchmark.compared(rounds))
    assert [(row["mix"], row["figure"]) for row in rows] == [
        (mix, figure) for mix in benchmark.MIXES for figure in benchmark.FIGURES
    ]
    assert [row["better_by"] for row in rows if row["figure"] == "cached_tokens"] == [None, 1, 1, 1]


def test_a_round_has_full_steps_on_both_sides_and_waits_for_the_hung_service_on_one(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(hung_remote, "EACH", 4)
    alone, hung = [hung_remote.one_round(side, llama, tmp_path, seed=0) for side in hung_remote.SIDES]
    for served in (alone, hung):
        assert max(step.tokens for step in served.steps) == hung_remote.STEP_TOKENS
        assert len(served.request_s) == 4
    assert min(hung.request_s) > hung_remote.TIMEOUT_S  # Its answer is awaited, and never comes.
    assert hung_remote.figures_of(hung).keys() == set(hung_remote.FIGURES)


def test_a_tier_that_becomes_slow_is_loaded_from_on_the_side_that_always_loads(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(slow_tier_in_vllm, "PROMPTS", 6)
    found = slow_tier_in_vllm.run(llama, tmp_path, 6, [8_000_000])
    assert list(found) == ["fast", "8 MB/s", "fast again"]
    for by_side in found.values():
        assert list(by_side) == list(slow_tier_in_vllm.SIDES)
        assert by_side["without"]["p99_share"] == 1.0
        assert by_side["without"]["cached_share"] < by_side["always"]["cached_share"] == PROMPT_HITS / 1_000
