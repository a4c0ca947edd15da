"""An engine that is dropped and was never closed says so, and ends what it started, without waiting for it."""

import asyncio
import gc
import logging
import threading
import warnings
import weakref

import pytest

from kvtier import StepManager, TieringOffloadingManager
from tests.engine.kit import describe, found, put, store, wait_for


@pytest.fixture
def told():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ResourceWarning)
        yield said


def dropped(said, gone):
    wait_for(lambda: gc.collect() is None or gone() is None)  # A runner's thread may be about to wake it.
    return [str(each.message) for each in said if each.category is ResourceWarning and "kvtier" in str(each.message)]


@pytest.mark.parametrize("loop", ["running", "closed", "none"])
def test_an_engine_that_its_loop_drops_is_named_and_leaves_nothing(nothing_left, told, disk, runner, loop, caplog):
    async def main():
        engine = await TieringOffloadingManager.open(describe(8, disk, runner=runner))
        assert await put(engine, range(2)) == 2
        if loop == "closed":
            return engine
        assert await engine.drain()
        await asyncio.sleep(0.1)  # What a loop is about to call, it keeps.
        gone = weakref.ref(engine.steps)
        del engine
        assert len(dropped(told, gone)) == 1
        async with TieringOffloadingManager.open(describe(8, disk, runner=runner)) as again:
            assert await found(again, range(2)) == 2
            return weakref.ref(again.steps)

    if loop == "none":
        engine = StepManager.start(describe(8, disk)) if runner == "process" else pytest.skip("it needs a loop")
        store(engine, range(2))
    else:
        engine = asyncio.run(main())
    gone = weakref.ref(getattr(engine, "steps", engine)) if loop != "running" else engine
    del engine
    (said,) = dropped(told, gone)  # One that was closed is dropped in silence.
    assert "StepManager: 2 of 8 rows ready; tiers: 0:fs (fs, breaker closed)> was dropped" in said
    assert "kvtier help engine-not-closed" in said
    for closing in (thread for thread in threading.enumerate() if thread.name == "kvtier-closing"):
        closing.join()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_repr_shows_rows_and_tiers(open_engine, disk):
    engine = await open_engine(8, disk, {"type": "dummy", "name": "far"}, holds=range(2))
    tiers = "2 of 8 rows ready; tiers: 0:fs (fs, breaker closed), far (dummy, breaker closed)"
    assert repr(engine) == f"<TieringOffloadingManager: {tiers}>"
    assert repr(engine.steps) == f"<StepManager: {tiers}>"
    await engine.aclose()
    assert repr(engine) == f"<TieringOffloadingManager (closed): {tiers}>"
