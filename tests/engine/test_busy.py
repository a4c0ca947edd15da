"""Many clients at once, some of whom are cancelled, over tiers that fail, whatever the runner."""

import asyncio
import random

import pytest

from tests.engine.kit import FAULTY, PATIENCE_S, client, impatient, settled, until

THINK_S = 0.01


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
            clients.create_task(client(engine, dice, done, think_s=THINK_S))
            clients.create_task(impatient(engine, dice, done, wait_s=20 * THINK_S))
        await asyncio.sleep(10 * THINK_S)
        await engine.reset()
    assert len(done) == 8 * 6 + 8
    await until(lambda: settled(engine), engine)
