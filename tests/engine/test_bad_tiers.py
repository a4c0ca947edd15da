"""Tiers that fail, hang or break their contract cost their hits: never a byte, a row for good, or the engine."""

import asyncio

import pytest

from kvtier.backend.keys import make_offload_key
from kvtier.engine.ledger import LookupResult
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.steps import StepManager
from kvtier.engine.tier import BreakerState
from kvtier.errors import EngineClosed
from tests.engine.kit import FAULTY, PATIENCE_S, at_rest, chunk, describe, found, key, ledger_in, put, settled, until

DUMMY = {"type": "dummy"}
RUDE = "tests.engine.rude_tiers"
BREAKER = {"breaker_failures": 2, "breaker_cooldown_s": 1_000}


def faulty(script=None, limits=None, **faults):
    return {"type": FAULTY, "inner": DUMMY, "script": script or {}, "faults": faults, "limits": limits or {}}


async def test_a_tier_that_fails_every_call_costs_its_hits_only(open_engine, runner):
    engine = await open_engine(8, faulty(unavailable=1.0, limits=BREAKER), runner=runner)
    for first in range(0, 32, 4):
        assert await put(engine, range(first, first + 4)) == 4
        await engine.drain()
        assert await found(engine, range(first, first + 4)) == 4
    assert await found(engine, [0]) == 0
    (tier,) = ledger_in(engine).tiers
    assert tier.breaker.state is BreakerState.OPEN
    assert (tier.counters.failed, tier.counters.dropped) == ({"unavailable": 8}, {"breaker": 24})
    assert await at_rest(engine)


async def test_a_healthy_tier_is_not_harmed_by_one_that_fails(open_engine, runner):
    engine = await open_engine(8, faulty(unavailable=1.0, limits=BREAKER), DUMMY, runner=runner)
    for first in range(0, 32, 4):
        await put(engine, range(first, first + 4))
    await engine.drain()
    for first in range(0, 32, 4):
        assert await found(engine, range(first, first + 4)) == 4
    assert await at_rest(engine)


@pytest.mark.parametrize("fault", ["failed", "missing", "corrupt"])
async def test_what_fails_on_its_way_ends_the_run_before_it(open_engine, runner, fault):
    engine = await open_engine(8, faulty({"load": ["none", fault]}), runner=runner)
    await put(engine, [1])
    await put(engine, [2])
    await engine.drain()
    await engine.reset()
    assert await found(engine, [1]) == 1
    assert await found(engine, [1, 2]) == 1
    assert await at_rest(engine)


async def test_a_flipped_bit_is_a_miss(open_engine, runner):
    engine = await open_engine(8, {"type": "dummy", "corruption_rate": 1.0}, runner=runner)
    await put(engine, range(3))
    assert await engine.reset()
    assert await found(engine, range(3)) == 0
    assert ledger_in(engine).tiers[0].counters.failed == {"corrupt": 3}
    assert await put(engine, range(3)) == 3
    assert await at_rest(engine)


async def test_a_tier_without_space_drops_what_it_cannot_hold(open_engine, runner):
    engine = await open_engine(8, faulty(no_space=1.0), runner=runner)
    await put(engine, range(3))
    assert await engine.reset()
    assert await found(engine, range(3)) == 0
    assert ledger_in(engine).tiers[0].counters.failed == {"no_space": 3}


@pytest.mark.parametrize("layout", ["files", "segments"])
async def test_keys_that_are_too_long_cost_their_own_chunks_and_open_no_breaker(open_engine, runner, tmp_path, layout):
    tier = {"type": "fs", "root": str(tmp_path / "tier"), "layout": layout, "limits": {"breaker_failures": 1}}
    engine = await open_engine(8, tier, runner=runner)
    for number in range(4):
        keys = [key(number), make_offload_key(number.to_bytes(8, "big") * 1_000)]
        assert await engine.put(keys, [chunk(number)] * 2) == 2
    assert await engine.reset()
    assert await found(engine, range(4)) == 4
    (disk,) = ledger_in(engine).tiers
    assert (disk.counters.stored, disk.counters.failed, disk.counters.dropped) == (4, {"no_space": 4}, {})


async def test_a_hung_load_is_a_miss_when_its_time_is_up_and_its_rows_come_back_when_it_does(open_engine, runner):
    tier = faulty({"load": ["hang"]}, {"deadline_s": 0.05}, hang_s=0.3)
    engine = await open_engine(4, tier, runner=runner, limits={"quarantine_share": 1.0})
    await put(engine, [1])
    assert await engine.reset()
    assert await found(engine, [1]) == 0
    assert ledger_in(engine).tiers[0].counters.failed == {"deadline": 1}
    assert await put(engine, [2, 3, 4]) == 3
    assert await found(engine, [2, 3]) == 2
    await until(lambda: settled(engine), engine)
    assert await put(engine, [5, 6, 7, 8]) == 4


async def test_a_hung_store_keeps_its_rows_readable_until_it_gives_them_back(open_engine, runner):
    tier = faulty({"store": ["hang"]}, {"deadline_s": 0.05}, hang_s=0.3)
    engine = await open_engine(2, tier, runner=runner, limits={"quarantine_share": 1.0})
    await put(engine, [1])
    await engine.drain()
    assert ledger_in(engine).tiers[0].counters.failed == {"deadline": 1}
    assert await found(engine, [1]) == 1
    await until(lambda: settled(engine), engine)
    assert await put(engine, [2, 3]) == 2


async def test_a_hung_probe_is_a_miss_when_its_time_is_up(open_engine, runner, tmp_path):
    shared = {"type": FAULTY, "inner": {"type": "dummy", "store": str(tmp_path), "shared": True}}
    hung = shared | {"script": {"probe": ["hang"]}, "limits": {"deadline_s": 0.05}, "faults": {"hang_s": 0.2}}
    engine = await open_engine(4, hung, runner=runner)
    assert await found(engine, [1]) == 0
    assert await put(engine, [1]) == 1
    assert await at_rest(engine)


async def test_a_hung_deletion_holds_nobody_up_for_longer_than_its_time(open_engine, runner):
    engine = await open_engine(4, faulty({"delete": ["hang"]}, {"deadline_s": 0.05}, hang_s=0.5), runner=runner)
    await put(engine, [1])
    await engine.delete([key(1)])
    assert ledger_in(engine).tiers[0].counters.failed == {"deadline": 1}
    assert await found(engine, [1]) == 0


@pytest.mark.parametrize("tier", ["AnswersNothing", "AnswersTooLittle", "Raises", "Cancels", "Exits"])
async def test_a_tier_that_breaks_its_contract_costs_its_hits_only(open_engine, runner, tier, tmp_path):
    rude = {"type": f"{RUDE}:{tier}", "store": str(tmp_path), "shared": True}
    engine = await open_engine(4, rude, runner=runner)
    async with asyncio.timeout(PATIENCE_S):
        assert await found(engine, [9]) == 0
        assert await put(engine, [1]) == 1
        await engine.drain()
        assert await put(engine, [2, 3, 4, 5]) == 4
        assert await found(engine, [1]) == 0
        await engine.delete([key(1)])
        assert await found(engine, [2, 3]) == 2
    assert ledger_in(engine).tiers[0].counters.transfers_failed > 0
    assert await at_rest(engine)


@pytest.mark.parametrize("tier", ["NeverCloses", "FailsToClose"])
async def test_a_tier_that_does_not_close_holds_nobody_up(runner, tier, tmp_path):
    disk = {"type": "fs", "root": str(tmp_path / "tier")}
    engine = await TieringOffloadingManager.open(describe(4, {"type": f"{RUDE}:{tier}"}, disk, runner=runner))
    await put(engine, [1])
    async with asyncio.timeout(PATIENCE_S):
        await engine.aclose(deadline_s=0.2)
    again = await TieringOffloadingManager.open(describe(4, disk, runner=runner))
    assert await found(again, [1]) == 1
    await again.aclose()


async def test_closing_with_a_hung_tier_is_bounded_and_says_what_it_left(runner):
    hung = faulty({"store": ["hang"]}, {"deadline_s": 1_000})
    engine = await TieringOffloadingManager.open(describe(4, hung, runner=runner))
    await put(engine, [1])
    async with asyncio.timeout(PATIENCE_S):
        assert await engine.aclose(deadline_s=0.2) == 1
    with pytest.raises(EngineClosed):
        await put(engine, [2])


@pytest.mark.usefixtures("outside")
def test_shutting_down_with_a_hung_tier_is_bounded_and_says_what_it_left():
    hung = faulty({"store": ["hang"]}, {"deadline_s": 1_000})
    with StepManager.start(describe(4, hung)) as engine:
        engine.on_new_request("r")
        plan = engine.prepare_store([key(1)], "r")
        engine.region.row(plan.rows[0])[:] = chunk(1)
        engine.complete_store(plan.keys, "r")
        assert engine.close(deadline_s=0.2) == 1
        assert engine.close() == 0


@pytest.mark.usefixtures("outside")
def test_a_reset_with_a_hung_tier_is_bounded_and_takes_the_tier_out_of_use():
    hung = faulty({"store": ["hang"]}, {"deadline_s": 1_000, "breaker_cooldown_s": 1_000})
    config = describe(4, hung, limits={"quarantine_share": 1.0})
    with StepManager.start(config) as engine:
        engine.on_new_request("r")
        plan = engine.prepare_store([key(1)], "r")
        engine.region.row(plan.rows[0])[:] = chunk(1)
        engine.complete_store(plan.keys, "r")
        engine.end_step()
        assert not engine.reset(deadline_s=0.05)
        assert engine.lookup(key(1), "r") is LookupResult.MISS
        engine.on_reset_flushed()
        assert engine.prepare_store([key(number) for number in range(4)], "r") is None
        assert engine.prepare_store([key(number) for number in range(3)], "r") is not None
        engine.complete_store([key(number) for number in range(3)], "r")
        assert ledger_in(engine).tiers[0].counters.dropped == {"breaker": 3}
        assert engine.close(deadline_s=0.1) == 1
