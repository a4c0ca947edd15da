"""The benchmarks in vLLM measure what they say: a round of the smallest size, of both sides."""

import gc
from collections.abc import Iterator

import pytest

from tests.benchmarks import engine_beside_vllm as benchmark
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
