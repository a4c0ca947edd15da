"""Embedding in an LLM engine: shared rows, sources of hits, choices of tiers, lost events."""

import os

import pytest

from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.config import EngineConfig, TierConfig
from kvtier.engine.ledger import LookupResult
from kvtier.engine.steps import StepManager
from kvtier.engine.tier import TierMatcher
from kvtier.errors import ConfigError
from kvtier.memory.region import Region
from tests.own import new_shared_memory

PAGE = 4_096
ROWS = 4
KEYS = [make_offload_key(bytes([index]) * 8) for index in range(ROWS)]


def config(**changes: object) -> EngineConfig:
    fields = {"cpu_bytes_to_use": ROWS * PAGE, "chunk_bytes": PAGE, "secondary_tiers": (TierConfig(type="dummy"),)}
    return EngineConfig(**fields | changes)


@pytest.fixture
def engine(outside):
    with StepManager.start(config()) as started:
        yield started


def store(engine: StepManager, keys: list[OffloadKey], request_id: str) -> None:
    engine.on_new_request(request_id)
    plan = engine.prepare_store(keys, request_id)
    for row in plan.rows:
        engine.region.row(row)[:] = bytes([row + 1]) * PAGE
    engine.complete_store(plan.keys, request_id)
    engine.on_request_finished(request_id)


def forget_primary(engine: StepManager) -> None:
    assert engine.drain()
    assert engine.reset()
    engine.on_reset_flushed()


def test_an_engine_runs_on_rows_that_other_processes_share(outside):
    meeting = {"path": new_shared_memory(), "rows": ROWS, "row_bytes": PAGE, "participants": 2}
    worker, region = (Region.shared(**meeting, participant=number) for number in range(2))
    with worker, StepManager.start(config(), region=region) as engine:
        engine.on_new_request("a")
        plan = engine.prepare_store(KEYS[:1], "a")
        worker.row(plan.rows[0])[:] = b"\x07" * PAGE
        engine.complete_store(plan.keys, "a")
        forget_primary(engine)
        worker.row(plan.rows[0])[:] = bytes(PAGE)
        while engine.lookup(KEYS[0], "a") is not LookupResult.HIT:
            engine.drain()
        assert worker.row(engine.prepare_load(KEYS[:1], "a")[0]) == b"\x07" * PAGE
    with pytest.raises(ValueError, match="released"):
        region.row(0)


def test_rows_of_another_size_are_refused():
    with Region.private(ROWS + 1, PAGE) as region, pytest.raises(ValueError, match="5 rows of 4,096 bytes"):
        StepManager.start(config(), region=region)


def test_rows_that_other_processes_have_not_mapped_yet_are_refused():
    path = new_shared_memory()
    region = Region.shared(path, ROWS, PAGE, participant=1, participants=3)
    with pytest.raises(ConfigError, match=f"^{path}: participants 0, 2 of 3 have not mapped it on "):
        StepManager.start(config(), region=region)
    assert not os.path.exists(path)


def test_a_start_that_fails_gives_the_rows_back():
    region = Region.private(ROWS, PAGE)
    with pytest.raises(ConfigError):
        StepManager.start(config(secondary_tiers=(TierConfig(type="nothing"),)), region=region)
    with pytest.raises(ValueError, match="released"):
        region.row(0)


def test_the_source_of_a_hit_is_the_tier_that_loaded_it(engine):
    store(engine, KEYS[:2], "first")
    forget_primary(engine)
    engine.on_new_request("second")
    while engine.lookup(KEYS[0], "second") is not LookupResult.HIT:
        engine.drain()
    store(engine, KEYS[2:3], "third")
    assert engine.lookup(KEYS[2], "second") is LookupResult.HIT
    assert engine.source(KEYS[0], "second").name == "0:dummy"
    assert engine.source(KEYS[2], "second") is None
    assert engine.source(KEYS[0], "unknown") is None


def test_a_choice_of_tiers_to_load_from_does_not_limit_where_chunks_are_stored(engine):
    engine.on_new_request("first", load_matchers=[])
    plan = engine.prepare_store(KEYS[:1], "first")
    engine.complete_store(plan.keys, "first")
    forget_primary(engine)
    assert engine.lookup(KEYS[0], "first") is LookupResult.MISS
    engine.on_new_request("second", load_matchers=[TierMatcher()])
    while engine.lookup(KEYS[0], "second") is not LookupResult.HIT:
        engine.drain()


def test_a_reset_forgets_requests_that_were_kept_for_their_stores_alone(engine):
    engine.on_new_request("first")
    engine.prepare_store(KEYS[:1], "first")
    engine.on_request_finished("first")
    forget_primary(engine)
    engine.on_new_request("first")  # The id is free again.


def test_lost_events_are_counted(outside, monkeypatch):
    monkeypatch.setattr("kvtier.engine.steps.EVENTS_MAX", 1)
    with StepManager.start(config(events=True, secondary_tiers=())) as engine:
        store(engine, KEYS[:1], "first")
        store(engine, KEYS[1:2], "second")
        assert engine.events_dropped == 1
