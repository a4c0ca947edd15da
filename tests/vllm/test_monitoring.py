"""What the board, the alerts and their page name is on vLLM's own `/metrics`, too."""

import os

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm import __version__

from tests.engine.kit import FAULTY
from tests.monitoring.queries import EVERY, OF_PROMETHEUS, samples_of, unknown
from tests.vllm.engines import Engine, kvtier, prompts
from tests.vllm.peer import start

BLOCK_BYTES = 64 << 10
ROWS = 48  # One prompt of 31 chunks and half of another.


@pytest.fixture(scope="module")
def page(llama, tmp_path_factory):
    place = {"root": str(tmp_path_factory.mktemp("disk")), "layout": "files"}
    disk = {"type": "fs", "name": "disk", "capacity_bytes": 100 * BLOCK_BYTES, **place}
    inner, limits = {"type": "dummy", "capacity_bytes": "1GiB"}, {"store_chunks_in_flight": 8}
    peer = {"type": FAULTY, "name": "peer", "inner": inner, "faults": {"failed": 1.0}, "limits": limits}
    extra = kvtier(None, secondary_tiers=[disk, peer], cpu_bytes_to_use=ROWS * BLOCK_BYTES, prefill_tokens_per_s=1.0)
    with Engine(llama, extra, disable_log_stats=False) as engine:
        for seed in range(4):
            engine.answer(prompts(1, seed=seed))
            engine.settle()
        engine.answer(prompts(1, seed=2))
        engine.settle()
        for seed in range(9, 40):  # The tier says about once a second what it has evicted.
            engine.answer(prompts(1, seed=seed))
            engine.settle()
            if "evicted" in engine.ledger.tiers[0].counters.reported:
                break
        engine.answer(prompts(1, seed=50))  # What the last step changed shows in the next one.
        return generate_latest(REGISTRY).decode()


def test_every_metric_and_label_that_is_named_is_there_and_none_that_a_scrape_adds(page):
    assert unknown(EVERY, samples_of(page)) == []
    own = {name: series for name, series in samples_of(page).items() if name.startswith("kvtier_")}
    assert [labels["vllm"] for labels in own["kvtier_build_info"]] == [__version__]
    assert [name for name, series in own.items() if any(OF_PROMETHEUS & labels.keys() for labels in series)] == []


def test_an_engine_after_another_in_one_process_counts_from_zero(page, llama, tmp_path):
    with Engine(llama, kvtier(tmp_path), disable_log_stats=False) as engine:
        engine.answer(prompts(1, tokens=100))
        engine.settle()
        engine.answer(prompts(1, tokens=100, seed=1))
        found = samples_of(generate_latest(REGISTRY).decode())
        assert {series["tier"] for series in found["kvtier_tier_used_bytes"]} == {"0:fs"}


NAMES = ("kvtier_tier_stored_total", "vllm:prompt_tokens_total")


def two_engines(connection, model, folder):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # Each has a process, so that one can have two.

    def served(name):
        return Engine(model, kvtier(folder / name), disable_log_stats=False, served_model_name=name)

    def counted(engine, seed):
        for each in (seed, seed + 1):  # What a step has changed shows in the next one.
            engine.answer(prompts(1, seed=each))
        found = [sample for family in REGISTRY.collect() for sample in family.samples if sample.name in NAMES]
        return {(sample.name, sample.labels["model_name"]): sample.value for sample in found}

    first = served("first")
    connection.send(counted(first, 0))
    second = served("second")
    connection.send(counted(second, 0))
    first.close()
    connection.send(counted(second, 2))
    second.close()


def test_an_engine_that_ends_takes_no_metrics_of_one_that_started_after_it(llama, tmp_path):
    """vLLM's own metrics, too, are those of the engine that started last: the first one's have gone by then."""
    process, connection = start(two_engines, llama, tmp_path)
    told = [connection.recv() for _ in range(3)]
    process.join()
    assert told == [
        {("kvtier_tier_stored_total", name): chunks, ("vllm:prompt_tokens_total", name): tokens}
        for name, chunks, tokens in (("first", 62.0, 2_000.0), ("second", 62.0, 2_000.0), ("second", 124.0, 4_000.0))
    ]
