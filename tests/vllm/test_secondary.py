"""The second door: kvtier's tiers behind vLLM's own manager."""

import pytest

from tests.vllm.engines import PROMPT_HITS, Engine, hits, prompts, right, tokens
from tests.vllm.test_faults import FAULTY
from tests.vllm.vllm_tiering import vllm_tiering


def behind_vllm(disk, *, cpu_bytes=64 << 20, backend="fs", **changes):
    tier = {"type": "KVTierSecondaryTier", "module_path": "kvtier.integrations.vllm", "backend": backend}
    if backend == "fs":
        tier["root"] = str(disk)
    return vllm_tiering(None, secondary_tiers=[tier | changes], cpu_bytes_to_use=cpu_bytes)


def tier_of(engine):
    return engine.manager.secondary_tiers[0]


@pytest.mark.parametrize("operation", ["load", "store", "probe"])
def test_a_tier_that_hangs_gives_its_rows_back_with_its_process(llama, disk, operation):
    asked = prompts(4)
    expected = right(llama, asked)
    inner = {"type": "fs", "root": str(disk), "shared": operation == "probe"}  # Else it says what it has, unasked.
    extra = behind_vllm(
        disk,
        cpu_bytes=5 << 20,
        backend=FAULTY,
        inner=inner,
        script={operation: ["hang"] * 4},
        limits={"deadline_s": 0.5},
    )
    with Engine(llama, extra) as engine:
        take = tier_of(engine).get_stats
        tier_of(engine).get_stats = lambda: None  # Else vLLM takes them step by step.
        for _ in range(3):
            assert tokens(engine.answer(asked)) == expected
            engine.settle()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert tokens(engine.answer(asked)) == expected
        counted = take().data["data"]
    name = f"kvtier:{FAULTY}"
    assert max(counted["kvtier_transfer_seconds"][name, operation]) >= 0.5
    if operation != "probe":
        assert counted["kvtier_tier_failed"][name, "deadline"] > 0
        assert counted["kvtier_runners_lost"][()] > 0


def test_a_reset_drains_the_tier_and_keeps_what_it_has(llama, disk):
    asked = prompts(4)
    expected = right(llama, asked)
    with Engine(llama, behind_vllm(disk)) as engine:
        engine.answer(asked)
        engine.settle()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert (tokens(answers := engine.answer(asked)), hits(answers)) == (expected, [PROMPT_HITS] * 4)
