"""Many clients at once, some of whom are cancelled, over tiers that fail, whatever the runner."""

import asyncio
import random

import pytest

from tests.engine.kit import FAULTY, PATIENCE_S, found, key, put, settled, until

THINK_S = 0.01


async def client(engine, dice, done):
    """Serve some requests with shared prefixes: fetch, hold every byte against what it must be, compute the rest."""
    for _ in range(6):
        first = dice.choice([0, 0, 100, 200])
        numbers = range(first, first + dice.randrange(1, 8))
        run = await found(engine, numbers)
        await asyncio.sleep(dice.choice([0, 0.01, 1.0]) * THINK_S)
        await put(engine, numbers[run:])
        if dice.random() < 0.1:
            await engine.delete([key(number) for number in numbers[-2:]])
        done.append(run)


async def impatient(engine, dice, done):
    """Be a client that is cancelled at some moment."""
    task = asyncio.ensure_future(client(engine, dice, []))
    await asyncio.sleep(dice.uniform(0, 20 * THINK_S))
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or not task.exception()
    done.append(0)


@pytest.mark.parametrize("seed", range(3))
async def test_clients_cancelled_resets_and_faults_leave_no_row_behind(open_engine, runner, seed, tmp_path):
    faults = {"failed": 0.1, "delay": 0.3, "hang": 0.02, "delay_s": 0.01, "hang_s": 0.3}
    limits = {"deadline_s": 0.1, "breaker_cooldown_s": 0.05, "answer_ttl_s": 0.02}
    disk = {"type": "fs", "root": str(tmp_path / "tier")}
    shared = {"type": "dummy", "store": str(tmp_path), "shared": True}
    tiers = [{"type": FAULTY, "inner": inner, "faults": faults, "limits": limits} for inner in (disk, shared)]
    engine = await open_engine(12, *tiers, runner=runner, limits={"action_chunks": 3, "quarantine_share": 1.0})
    done: list[int] = []
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as clients:
        for number in range(8):
            dice = random.Random(f"{seed} {number}")
            clients.create_task(client(engine, dice, done))
            clients.create_task(impatient(engine, dice, done))
        await asyncio.sleep(10 * THINK_S)
        await engine.reset()
    assert len(done) == 8 * 6 + 8
    await until(lambda: settled(engine), engine)
