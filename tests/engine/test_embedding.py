import os

import pytest

from kvtier import ConfigError, LookupResult, StepManager, TierMatcher
from kvtier.memory.region import Region
from tests.engine.kit import CHUNK_BYTES, chunk, describe, key, store
from tests.own import new_shared_memory

ROWS = 4
CONFIG = describe(ROWS, {"type": "dummy"})


def loaded(engine, number, request_id):
    assert engine.drain()
    assert engine.reset()
    engine.on_reset_flushed()
    while engine.lookup(key(number), request_id) is not LookupResult.HIT:
        engine.drain()
    return bytes(engine.region.row(engine.prepare_load([key(number)], request_id)[0]))


def test_an_engine_runs_on_rows_that_other_processes_share(outside):
    meeting = {"path": new_shared_memory(), "rows": ROWS, "row_bytes": CHUNK_BYTES, "participants": 2}
    worker, region = (Region.shared(**meeting, participant=number) for number in range(2))
    with worker, StepManager.start(CONFIG, region=region) as engine:
        engine.on_new_request("a")
        plan = engine.prepare_store([key(1)], "a")
        worker.row(plan.rows[0])[:] = chunk(1)
        engine.complete_store(plan.keys, "a")
        assert loaded(engine, 1, "a") == chunk(1)
    with pytest.raises(ValueError, match="released"):
        region.row(0)


def test_rows_that_do_not_fit_are_refused_and_a_start_that_fails_gives_the_rows_back():
    path = new_shared_memory()
    unmet = Region.shared(path, ROWS, CHUNK_BYTES, participant=1, participants=3)
    with pytest.raises(ConfigError, match=f"^{path}: participants 0, 2 of 3 have not mapped it on "):
        StepManager.start(CONFIG, region=unmet)
    assert not os.path.exists(path)
    with Region.private(ROWS + 1, CHUNK_BYTES) as region, pytest.raises(ValueError, match="5 rows of 4,096 bytes"):
        StepManager.start(CONFIG, region=region)
    region = Region.private(ROWS, CHUNK_BYTES)
    with pytest.raises(ConfigError):
        StepManager.start(describe(ROWS, {"type": "nothing"}), region=region)
    with pytest.raises(ValueError, match="released"):
        region.row(0)


def test_the_source_of_a_hit_is_the_tier_that_loaded_it(start_engine):
    engine = start_engine(ROWS, {"type": "dummy"})
    store(engine, [1])
    engine.on_new_request("second")
    assert loaded(engine, 1, "second") == chunk(1)
    store(engine, [3])
    assert engine.lookup(key(3), "second") is LookupResult.HIT
    assert engine.source(key(1), "second").name == "0:dummy"
    assert engine.source(key(3), "second") is engine.source(key(1), "unknown") is None


def test_a_choice_of_tiers_to_load_from_does_not_limit_where_chunks_are_stored(start_engine):
    engine = start_engine(ROWS, {"type": "dummy"})
    engine.on_new_request("first", load_matchers=[])
    engine.complete_store(engine.prepare_store([key(1), key(2)], "first").keys, "first")
    engine.on_new_request("second", load_matchers=[TierMatcher()])
    loaded(engine, 1, "second")
    assert engine.lookup(key(2), "first") is LookupResult.MISS
