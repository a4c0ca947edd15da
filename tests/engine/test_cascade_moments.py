"""Write-back in whole engines: a clean end keeps every chunk, a kill loses unwritten ones, steps do not wait."""

import asyncio
import os
import signal

import pytest

from kvtier.engine.manager import TieringOffloadingManager
from tests.engine.kit import FAULTY, PATIENCE_S, at_rest, children, describe, found, ledger_in, put, until

STORER = """
import asyncio, sys
from kvtier.engine.manager import TieringOffloadingManager
from tests.engine.kit import describe, found, put

async def main():
    root, cascade = sys.argv[1:]
    async with TieringOffloadingManager.open(describe(8, {"type": "fs", "root": root, "cascade": cascade})) as engine:
        for number in range(40):
            await put(engine, [number])
        assert await found(engine, range(38, 40)) == 2
        await engine.drain()
        print(engine.stats().tiers[0].stored, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


async def kept(disk, numbers):
    """Open a new engine over the disk and name the chunks that it finds, every byte of which is compared."""
    async with TieringOffloadingManager.open(describe(64, disk)) as engine:
        return [number for number in numbers if await found(engine, [number])]


async def test_a_clean_end_keeps_everything(open_engine, disk):
    engine = await open_engine(8, disk | {"cascade": "evict"})
    for number in range(20):
        await put(engine, [number])
    assert await engine.drain()
    assert ledger_in(engine).tiers[0].counters.stored < 20
    assert await engine.aclose() == 0
    assert await kept(disk, range(20)) == [*range(20)]
    assert engine.stats().tiers[0].skipped == {}


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
async def test_a_clean_end_keeps_everything_though_the_runner_is_killed_in_it(outside, open_engine, disk, delay_s):
    slow = {"type": FAULTY, "inner": disk, "faults": {"delay": 1.0, "delay_s": delay_s}, "cascade": "evict"}
    engine = await open_engine(64, slow, runner="process", limits={"action_chunks": 2, "close_s": PATIENCE_S})
    await put(engine, range(40))
    (runner,) = children()
    if not delay_s:
        os.kill(runner, signal.SIGKILL)
    closing = asyncio.ensure_future(engine.aclose())
    if delay_s:
        await until(lambda: engine.stats().tiers[0].storing)
        os.kill(runner, signal.SIGKILL)
    await closing
    counted = engine.stats()
    assert (counted.runners_lost, counted.tiers[0].skipped) == (1, {})
    assert await kept(disk, range(40)) == [*range(40)]


async def test_a_clean_end_keeps_more_than_the_runner_takes_at_once(outside, open_engine, disk, monkeypatch):
    for place in ("kvtier.runner.process", "kvtier.engine.ledger"):
        monkeypatch.setattr(f"{place}.QUEUED_ACTIONS_MAX", 8)
    limits = {"action_chunks": 1, "close_s": PATIENCE_S}
    engine = await open_engine(128, disk | {"cascade": "evict"}, runner="process", limits=limits, holds=range(100))
    assert await engine.aclose() == 0
    assert (engine.stats().tiers[0].skipped, engine.stats().tiers[0].dropped) == ({}, {})
    assert await kept(disk, range(100)) == [*range(100)]


async def test_an_end_without_time_counts_what_it_did_not_keep(open_engine, disk, caplog):
    engine = await open_engine(8, disk | {"cascade": "evict", "limits": {"store_chunks_in_flight": 1}}, holds=range(4))
    await engine.aclose(0.0)
    assert engine.stats().tiers[0].skipped == {"closed": 3}
    assert "3 chunks were not written to tiers with cascade = 'evict' by the end's deadline" in caplog.text
    while others := asyncio.all_tasks() - {asyncio.current_task()}:  # A tier that had no time closes in its own.
        await asyncio.wait(others)


@pytest.mark.parametrize("cascade", ["evict", "second_use"])
async def test_a_killed_engine_keeps_exactly_the_chunks_that_it_had_written(program, disk, cascade):
    storer = program(STORER, disk["root"], cascade)
    written = int(storer.stdout.readline())
    storer.kill()
    storer.wait()
    left = await kept(disk, range(40))
    assert len(left) == written
    assert left == ([*range(33)] if cascade == "evict" else [38, 39])


async def test_a_put_waits_for_the_writes_that_make_room_for_it(open_engine, disk):
    slow = {"type": FAULTY, "inner": disk, "faults": {"delay": 1.0, "delay_s": 0.02}, "cascade": "evict"}
    engine = await open_engine(16, slow, limits={"action_chunks": 2})
    for first in range(0, 96, 12):
        assert await put(engine, range(first, first + 12)) == 12
    assert engine.stats().tiers[0].skipped == {}
    assert await at_rest(engine)
