"""What an engine says of itself, inside the engine: stats, sources of hits, events, facts."""

import logging
import os
import re

from vllm import logger
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier import __version__
from kvtier.backend.namespace import Namespace
from kvtier.config import EngineConfig
from kvtier.engine.ledger import ledger_of
from kvtier.engine.metrics import Metrics
from kvtier.integrations.vllm import KVTierOffloadingSpec
from kvtier.integrations.vllm.stats import Stats, engine_series, log_as_vllm, metric_definitions
from tests.vllm.engines import Engine, fill, kvtier, prompts
from tests.vllm.peer import printed

BLOCK_BYTES = 64 << 10
VLLMS = {TieringOffloadingMetrics.CHUNK_HITS, TieringOffloadingMetrics.CHUNK_QUERIES}


def test_every_metric_of_kvtiers_is_declared_to_vllm():
    config = EngineConfig(cpu_bytes_to_use=1 << 20, chunk_bytes=BLOCK_BYTES, namespace=Namespace(model_name="m"))
    own = Metrics(ledger_of(config, None, Stats().observe)).registry
    assert metric_definitions().keys() == {family.name for family in own.collect()} | VLLMS


def test_two_metrics_have_the_names_of_vllms_tiering_too():
    tier = {"type": "dummy"}
    config = EngineConfig.from_dict(
        {"cpu_bytes_to_use": 1 << 20, "chunk_bytes": BLOCK_BYTES, "secondary_tiers": [tier]}
    )
    ledger = ledger_of(config, None, Stats().observe)
    ledger.tiers[0].counters.hits, ledger.tiers[0].counters.misses, ledger.tiers[0].counters.declined = 5, 3, 2
    read = {each.name: (each.labels, each.read()) for each in engine_series(ledger) if each.name in VLLMS}
    assert read == dict(zip(sorted(VLLMS), [(("0:dummy",), 5), (("0:dummy",), 10)], strict=True))


def test_hits_name_their_source_and_facts_are_labels_that_were_declared(llama, disk):
    fill(llama, kvtier(disk), prompts(1))
    with Engine(llama, kvtier(disk), disable_log_stats=False) as engine:
        sources = watch_sources(engine)
        engine.answer(prompts(1))
        engine.answer(prompts(1, seed=1))
        engine.answer(prompts(1, seed=2))
        engine.settle()
        engine.answer(prompts(1))
        primary, tier = engine.manager.config_info()
    assert sources == [{CacheHitSource.DISK: 992}, {CacheHitSource.HOST: 992}]
    assert (primary["tier"], primary["rows"], primary["kvtier_version"]) == ("cpu", 1_024, __version__)
    assert (tier["tier"], tier["sharing"]) == ("0:fs", "any parallel size")
    assert (primary.keys() | tier.keys()) <= set(KVTierOffloadingSpec.config_info_keys(kvtier(disk)))


def watch_sources(engine):
    told: list[dict[CacheHitSource, int]] = []
    ask = engine.connector.get_external_cache_hit_sources

    def noted(request, tokens):
        answer = ask(request, tokens)
        if answer:
            told.append(answer)
        return answer

    engine.connector.get_external_cache_hit_sources = noted
    return told


def one_engine(model, disk):
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    logger._configure_vllm_root_logger()  # As at an import.
    with Engine(model, kvtier(disk)):
        pass


def test_kvtiers_log_comes_in_vllms_form(llama, disk):
    written, info = printed(one_engine, llama, disk), r"INFO \d\d-\d\d \d\d:\d\d:\d\d"
    assert len(re.findall(rf"{info} \[steps.py:\d+\] kvtier \d", written)) == 1
    about = f"tier 0:fs: root {disk}, layout segments; found 0"
    assert len(re.findall(rf"pid=\d+\) {info} \[reports.py:\d+\] {about}", written)) == 1  # The runner's process.
    assert not re.search(r"^(WARNING|INFO|ERROR):kvtier", written, re.MULTILINE)


def test_a_configured_logger_is_left_alone(monkeypatch):
    own, handlers = logging.getLogger("kvtier"), [logging.NullHandler()]
    monkeypatch.setattr(own, "handlers", handlers)
    monkeypatch.setattr(own, "propagate", True)
    log_as_vllm()
    assert (own.handlers, own.propagate) == (handlers, True)
