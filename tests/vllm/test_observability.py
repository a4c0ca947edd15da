"""What an engine says of itself, inside the engine: stats, sources of hits, events, facts."""

import logging
import os
import re
import subprocess
import sys
from collections import Counter
from io import StringIO

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier import __version__
from kvtier.backend.namespace import Namespace
from kvtier.config import EngineConfig
from kvtier.engine.ledger import ledger_of
from kvtier.engine.metrics import Metrics
from kvtier.engine.tier import Tier, TierSpec
from kvtier.integrations.vllm import KVTierOffloadingSpec
from kvtier.integrations.vllm.stats import ObservedTimes, Summary, log_as_vllm, metric_definitions
from kvtier.runner.messages import LOGGERS
from tests.vllm.engines import Engine, fill, kvtier, prompts

BLOCK_BYTES = 64 << 10


def stats_of(engine: Engine) -> dict[tuple[str, tuple[str, ...]], float]:
    stats = engine.manager.get_stats()
    assert stats is not None
    return {
        (name, labels): value for name, by_label in stats.data["data"].items() for labels, value in by_label.items()
    }


def test_counts_and_facts_go_through_vllms_own_stats_as_they_were_declared(llama, disk):
    fill(llama, kvtier(disk), prompts(2))
    with Engine(llama, kvtier(disk)) as engine:
        engine.manager.get_stats = lambda: None  # Else vLLM takes them step by step.
        engine.answer(prompts(2))
        engine.settle()
        del engine.manager.get_stats
        counted = stats_of(engine)
        assert counted["kvtier_tier_hits", ("0:fs",)] == 62
        assert counted["kvtier_tier_bytes", ("0:fs", "load")] == 62 * BLOCK_BYTES
        assert len(counted["kvtier_transfer_seconds", ("0:fs", "load")]) >= 1
        assert counted["kvtier_primary_rows", ("ready",)] == 62
        assert counted["kvtier_tier_breaker", ("0:fs", "closed")] == 1.0
        assert engine.manager.get_stats() is None
        primary, tier = engine.manager.config_info()
    declared = KVTierOffloadingSpec.build_metric_definitions(kvtier(disk))
    assert {name: len(labels) for name, labels in counted} == {
        name: len(declared[name].labelnames) for name, _ in counted
    }
    assert (primary["tier"], primary["rows"], primary["kvtier_version"]) == ("cpu", 1_024, __version__)
    assert (tier["tier"], tier["sharing"]) == ("0:fs", "any parallel size")
    assert (primary.keys() | tier.keys()) <= set(KVTierOffloadingSpec.config_info_keys(kvtier(disk)))


def test_every_metric_of_kvtiers_is_declared_to_vllm():
    config = EngineConfig(cpu_bytes_to_use=1 << 20, chunk_bytes=BLOCK_BYTES, namespace=Namespace(model_name="m"))
    times = ObservedTimes()
    own = Metrics(ledger_of(config, None, times.observe)).registry
    assert metric_definitions().keys() == {family.name for family in own.collect()}


def test_hits_name_their_source(llama, disk):
    fill(llama, kvtier(disk), prompts(1))
    with Engine(llama, kvtier(disk), disable_log_stats=False) as engine:
        sources = watch_sources(engine)
        engine.answer(prompts(1))
        engine.answer(prompts(1, seed=1))
        engine.answer(prompts(1, seed=2))
        engine.settle()
        engine.answer(prompts(1))
    assert sources == [{CacheHitSource.DISK: 992}, {CacheHitSource.HOST: 992}]


def watch_sources(engine: Engine) -> list[dict[CacheHitSource, int]]:
    """Collect what the connector tells vLLM of each external hit."""
    told: list[dict[CacheHitSource, int]] = []
    ask = engine.connector.get_external_cache_hit_sources

    def noted(request, tokens):
        answer = ask(request, tokens)
        if answer:
            told.append(answer)
        return answer

    engine.connector.get_external_cache_hit_sources = noted
    return told


def test_a_request_may_choose_the_tiers_that_it_loads_from(llama, disk):
    asked = prompts(1)
    fill(llama, kvtier(disk), asked)
    with Engine(llama, kvtier(disk)) as engine:
        cached = {}
        for medium in ("CPU", "STORAGE"):
            (answer,) = engine.answer(asked, load_tiers=[{"medium": medium}])
            cached[medium] = answer.cached
            engine.settle()
            engine.llm.reset_prefix_cache(reset_connector=True)
        assert cached == {"CPU": 0, "STORAGE": 992}


def test_events_tell_medium_and_tier(llama, disk):
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    extra = kvtier(disk, cpu_bytes_to_use=40 * BLOCK_BYTES, self_describing_kv_events=True)
    extra["secondary_tiers"][0]["capacity_bytes"] = 70 * BLOCK_BYTES  # Two prompts of three.
    with Engine(llama, extra, kv_events_config=events) as engine:
        told = watch_events(engine)
        for prompt in prompts(3):
            engine.answer([prompt])
            engine.settle()
        for seed in range(9, 29):  # The tier makes room beside the engine, and says so when it has.
            engine.answer(prompts(1, seed=seed))
            engine.settle()
            if any(isinstance(event, BlockRemoved) and event.ownership == "0:fs" for event in told):
                break
    kinds = Counter((type(event), event.medium, event.ownership) for event in told)
    assert kinds[BlockStored, "CPU", None] >= 62
    assert kinds[BlockStored, "STORAGE", "0:fs"] >= 31
    assert kinds[BlockRemoved, "CPU", None] > 0
    assert kinds[BlockRemoved, "STORAGE", "0:fs"] > 0
    described = [event for event in told if isinstance(event, BlockStored) and event.medium == "STORAGE"]
    assert all(len(event.token_ids) == 32 for event in described)


def watch_events(engine: Engine) -> list:
    told: list = []
    take = engine.connector.take_events

    def noted():
        events = list(take())
        told.extend(events)
        return events

    engine.connector.take_events = noted
    return told


# In the log.


@pytest.fixture
def vllm_log():
    """What vLLM's own logger is handed, from INFO on; kvtier's loggers are left as they were."""
    vllm, loggers = logging.getLogger("vllm"), [logging.getLogger(name) for name in LOGGERS]
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in (vllm, *loggers)]
    for each in loggers:  # As in a program that has not made an engine yet.
        each.handlers, each.propagate = [], True
        each.setLevel(logging.NOTSET)
    handler = logging.StreamHandler(StringIO())
    vllm.addHandler(handler)
    vllm.setLevel(logging.INFO)
    yield handler.stream
    for each, level, propagate, handlers in before:
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


ONE_ENGINE = """
import sys
from pathlib import Path
from tests.vllm.engines import Engine, fill, kvtier, prompts
model, disk = sys.argv[1], Path(sys.argv[2])
fill(model, kvtier(disk), prompts(2))
with Engine(model, kvtier(disk)) as engine:
    engine.answer(prompts(2))
    engine.settle()
    engine.manager.get_stats()
"""


@pytest.fixture
def written(llama, disk):
    """What a program with vLLM in it writes that runs one engine after the other, of which the second finds chunks."""
    given = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "0.001", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ONE_ENGINE, llama, str(disk)], env=os.environ | given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


TIME = r"\d\d-\d\d \d\d:\d\d:\d\d"


def test_kvtiers_log_comes_in_vllms_form_and_a_line_says_how_it_goes(written, disk):
    assert len(re.findall(rf"INFO {TIME} \[steps.py:\d+\] kvtier \d", written)) == 2
    about = f"tier 0:fs: root {disk}, layout segments; found"
    started = rf"pid=(\d+)\) INFO {TIME} \[reports.py:\d+\] {about} (\d+)"
    (_, found_first), (_, found_then) = re.findall(started, written)
    assert (found_first, found_then) == ("0", str(6 * 31))
    assert len({pid for pid, _ in re.findall(started, written)}) == 2  # Each runner's process has its own.
    lines = re.findall(rf"INFO {TIME} \[stats.py:\d+\] kvtier: (.*)", written)
    assert any(line.startswith("hit ratio 100.0%, loaded ") for line in lines), lines
    assert any(re.search(r"\bloaded [\d.]+ [KM]iB, stored", line) for line in lines), lines  # Perhaps in a line before.
    assert all(re.search(r"% full, 0:fs holds [\d.]+ ([KM]i)?B", line) for line in lines), lines
    assert not re.search(r"^(WARNING|INFO|ERROR):kvtier", written, re.MULTILINE)


def test_a_configured_logger_is_left_alone(vllm_log):
    own, handler = logging.getLogger("kvtier"), logging.NullHandler()
    own.addHandler(handler)
    log_as_vllm()
    assert (own.handlers, own.propagate) == ([handler], True)


def test_a_tier_behind_vllms_own_manager_says_how_it_goes(vllm_log, monkeypatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "10")
    log_as_vllm()
    tier, seconds = (
        Tier(0, TierSpec("disk", 100, 60.0, 3, 60.0, 2, row_bytes=1 << 30)),
        iter([0.0, 9.0, 11.0, 12.0, 22.0]),
    )
    summary = Summary([tier], clock=lambda: next(seconds))
    tier.counters.stored, tier.counters.loaded, tier.capacity_bytes = 3, 2, 8 << 30
    tier.counters.dropped["breaker"] += 5
    for _ in range(4):
        summary.look()
    (line,) = vllm_log.getvalue().splitlines()
    assert line == "kvtier: loaded 2.0 GiB, stored 3.0 GiB, disk holds 0 B of 8.0 GiB, 5 chunks dropped"
