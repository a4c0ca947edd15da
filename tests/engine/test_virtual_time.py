"""Whole engines in virtual time: schedules to the second, and seeded faults by the hundred."""

import asyncio
import random

import pytest

from kvtier.config import EngineConfig
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.tier import BreakerState
from kvtier.errors import EngineClosed
from kvtier.testing.virtual_time import run
from tests.engine.kit import CHUNK_BYTES, FAULTY, client, describe, found, impatient, ledger_in, put, settled

SEEDS = range(200)
TENS = [*range(4), *(pytest.param(tens, marks=pytest.mark.outside) for tens in range(4, len(SEEDS) // 10))]


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.virtual_time
async def test_a_load_takes_its_latency_and_its_bytes_share_of_the_bandwidth(open_engine):
    second_a_chunk = {"type": "dummy", "latency_s": 10.0, "bandwidth_bytes_per_s": CHUNK_BYTES, "concurrency": 64}
    engine = await open_engine(8, second_a_chunk)
    await put(engine, range(4))
    assert await engine.drain(deadline_s=100)
    assert now() == 10 + 4
    assert await engine.reset()
    assert await found(engine, range(4)) == 4
    assert now() == 14 + 10 + 4


@pytest.mark.virtual_time
async def test_chunks_beyond_a_devices_slots_wait_for_the_next_one(open_engine):
    engine = await open_engine(8, {"type": "dummy", "latency_s": 1.0, "concurrency": 2})
    await put(engine, range(4))
    assert await engine.drain()
    assert now() == 2.0


@pytest.mark.virtual_time
async def test_loads_do_not_wait_for_the_budget_of_stores(open_engine):
    budget = {"store_chunks_in_flight": 1, "load_bytes_in_flight": CHUNK_BYTES}
    engine = await open_engine(64, {"type": "dummy", "latency_s": 1.0, "limits": budget})
    await put(engine, [0])
    assert await engine.reset()
    assert now() == 1.0
    storing = asyncio.ensure_future(put(engine, range(1, 21)))
    await asyncio.sleep(0.5)
    assert await found(engine, [0]) == 1
    assert now() == 2.5
    await storing
    assert now() == 1.0 + 19  # One at a time, the last of them not waited for.


@pytest.mark.virtual_time
async def test_loads_queue_for_their_budget_in_order(open_engine):
    budget = {"load_bytes_in_flight": CHUNK_BYTES}
    engine = await open_engine(8, {"type": "dummy", "latency_s": 1.0, "limits": budget}, limits={"action_chunks": 1})
    await put(engine, range(3))
    assert await engine.reset()
    begun = now()
    assert await asyncio.gather(*(found(engine, [number]) for number in range(3))) == [1, 1, 1]
    assert now() == begun + 3.0


@pytest.mark.virtual_time
async def test_a_breaker_opens_tries_and_closes_and_the_metrics_show_it(open_engine):
    failing = {"type": FAULTY, "inner": {"type": "dummy"}, "script": {"store": ["unavailable"] * 3}}
    engine = await open_engine(8, failing | {"limits": {"breaker_failures": 2, "breaker_cooldown_s": 60.0}})
    (tier,) = ledger_in(engine).tiers

    def state():
        shown = {
            each.value: engine.metrics.get_sample_value(
                "kvtier_tier_breaker", {"tier": tier.spec.name, "state": each.value}
            )
            for each in BreakerState
        }
        (found,) = [name for name, value in shown.items() if value]
        return found

    assert state() == "closed"
    for number in range(3):
        await put(engine, [number])
        await engine.drain()
    assert state() == "open"
    assert (tier.counters.failed, tier.counters.dropped) == ({"unavailable": 2}, {"breaker": 1})
    await asyncio.sleep(60)
    await put(engine, [3])  # The tier still fails.
    await engine.drain()
    assert state() == "open"
    await asyncio.sleep(60)
    assert tier.breaker.admits(now())
    assert state() == "half_open"
    await put(engine, [4])
    await engine.drain()
    assert (state(), tier.counters.stored, tier.breaker.opened) == ("closed", 1, 2)


@pytest.mark.virtual_time
async def test_a_busy_tiers_occupancy_is_reported_once_a_second_and_after_the_last_store(open_engine):
    engine = await open_engine(64, {"type": "dummy", "latency_s": 0.1, "concurrency": 1})
    (tier,) = ledger_in(engine).tiers
    for number in range(30):
        await put(engine, [number])
    told = set()
    while ledger_in(engine).pending:
        told.add(tier.chunks)
        await asyncio.sleep(0.05)
    assert 2 <= len(told) <= 5
    assert (tier.chunks, tier.used_bytes) == (30, 30 * CHUNK_BYTES)


# The simulation: clients, tiers and faults that follow from a seed.


def configuration(dice: random.Random) -> EngineConfig:
    """Make up an engine of which much goes wrong."""
    rows = dice.choice([1, 2, 5, 16])
    tiers = [tier(dice, index) for index in range(dice.choice([1, 1, 2, 3]))]
    limits = {
        "action_chunks": dice.choice([1, 3, 64]),
        "lease_s": dice.choice([0.1, 10.0]),
        "lease_share": dice.choice([0.3, 1.0]),
        "cascade_share": dice.choice([0.3, 1.0]),
    }
    return describe(
        rows, *tiers, limits=limits, eviction_policy=dice.choice(["lru", "s3fifo", "arc", "fifo", "density"])
    )


def tier(dice: random.Random, index: int) -> dict[str, object]:
    faults = ("unavailable", "late_unavailable", "delay", "hang", "failed", "missing", "corrupt", "no_space")
    rates = {fault: dice.choice([0, 0, 0, 0.05, 0.3]) for fault in faults}
    inner = {
        "type": "dummy",
        "latency_s": dice.choice([0, 0.001, 0.5]),
        "capacity_bytes": dice.choice([None, 8 * CHUNK_BYTES]),
        "shared": dice.choice([True, False]),
        "concurrency": dice.randrange(1, 1_001),
    }
    limits = {
        "deadline_s": dice.choice([0.2, 2.0]),
        "breaker_failures": dice.choice([1, 5]),
        "breaker_cooldown_s": dice.choice([0.5, 5.0]),
        "answer_ttl_s": dice.choice([0.001, 1.0]),
        "store_chunks_in_flight": dice.choice([1, 4_096]),
    }
    return {
        "type": FAULTY,
        "inner": inner,
        "faults": rates | {"delay_s": 1.0, "hang_s": dice.choice([1.0, 10.0])},
        "seed": dice.randrange(1_000),
        "limits": limits,
        "request_level": dice.choice([True, False]),
    }


async def simulate(seed: int) -> list[object]:
    """Run an engine under faults to its end; give what can be told of it."""
    dice = random.Random(seed)
    engine = await TieringOffloadingManager.open(configuration(dice))
    done: list[int] = []
    async with asyncio.timeout(3_600), asyncio.TaskGroup() as clients:
        for number in range(5):
            clients.create_task(client(engine, random.Random(f"{seed} {number}"), done))
        for number in range(2):
            clients.create_task(impatient(engine, random.Random(f"{seed} impatient {number}"), done, wait_s=5.0))
        if dice.random() < 0.3:
            await asyncio.sleep(dice.uniform(0, 5))
            await engine.reset(deadline_s=dice.choice([0.1, 10.0]))
    assert len(done) == 5 * 6 + 2
    await engine.drain(deadline_s=60)
    await asyncio.sleep(60)  # What hangs has come back by now.
    engine.steps.end_step()
    assert settled(engine)
    story = [now(), done, *((tier.counters.failed, tier.counters.dropped) for tier in ledger_in(engine).tiers)]
    assert await engine.aclose() == 0
    with pytest.raises(EngineClosed):
        await put(engine, [1])
    return story


@pytest.mark.parametrize("tens", TENS)
def test_under_faults_every_request_ends_with_right_bytes_and_no_row_is_lost(tens):
    for seed in SEEDS[10 * tens : 10 * tens + 10]:
        try:
            run(simulate(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("seed", [95, 105, 113])
def test_fetches_that_wait_for_rows_do_not_wake_each_other_for_ever(seed):
    run(simulate(seed))


def test_the_same_seed_tells_the_same_story():
    assert run(simulate(7)) == run(simulate(7))
