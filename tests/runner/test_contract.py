"""The contract of a bridge, inline and to a process: bytes come back, and a bad tier costs its hits only."""

import asyncio
import time

import pytest

from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.tier import BreakerState
from kvtier.errors import EngineClosed
from tests.engine.hung_mount import release, shut
from tests.engine.kit import FAULTY, PATIENCE_S, at_rest, chunk, describe, found, key, ledger_in, put, until
from tests.simulation.audit import audit, audit_quiet

DUMMY = {"type": "dummy"}
RUDE = "tests.engine.rude_tiers"
DEADLINE_S = 0.3


def faulty(script=None, limits=None, **faults):
    return {"type": FAULTY, "inner": DUMMY, "script": script or {}, "faults": faults, "limits": limits or {}}


@pytest.fixture
def gates(tmp_path):
    folder = tmp_path / "gates"
    folder.mkdir()
    yield str(folder)
    for operation in ("load", "store"):
        release(str(folder), operation)


@pytest.fixture
def mount(tmp_path, gates):
    limits = {"deadline_s": DEADLINE_S, "breaker_failures": 2}
    return {
        "type": "tests.engine.hung_mount:HungMount",
        "root": str(tmp_path / "mount"),
        "gates": gates,
        "limits": limits,
    }


# Bytes come back.


async def test_more_than_the_primary_holds_comes_back_from_each_tier_and_in_the_next_engine(
    open_engine, runner, tmp_path
):
    disk = {"type": "fs", "root": str(tmp_path / "tier")}
    slow = {"type": "dummy", "latency_s": "5ms", "bandwidth_bytes_per_s": "4MiB"}
    engine = await open_engine(8, faulty(), disk, slow, runner=runner)
    for first in range(0, 32, 4):
        assert await put(engine, range(first, first + 4)) == 4
    assert await engine.drain()
    for first in range(0, 32, 4):
        assert await found(engine, range(first, first + 4)) == 4
    counters = [tier.counters for tier in ledger_in(engine).tiers]
    assert [(each.stored, each.dropped, each.failed) for each in counters] == [(32, {}, {})] * 3
    assert [tier.chunks for tier in engine.stats().tiers] == [32] * 3
    assert ledger_in(engine).counters.hits + sum(each.hits for each in counters) == 32
    assert await at_rest(engine)
    assert await engine.aclose() == 0
    assert await found(await open_engine(8, disk, runner=runner), range(28, 33)) == 4


async def test_a_chunk_shorter_than_its_row_comes_back_at_its_length(open_engine, runner):
    engine = await open_engine(2, DUMMY, runner=runner, chunk_bytes=1_000, cpu_bytes_to_use=2 * 4_096)
    assert await engine.put([key(1)], [chunk(1)[:1_000]]) == 1
    assert await engine.put([key(2), key(3)], [chunk(2)[:1_000], chunk(3)[:1_000]]) == 2
    async with engine.fetch([key(1)]) as rows:
        assert [bytes(row) for row in rows] == [chunk(1)[:1_000]]


# A tier that fails.


@pytest.mark.promise("It fails again and again")
async def test_a_tier_that_fails_every_call_costs_its_hits_and_harms_no_other(open_engine, runner):
    limits = {"breaker_failures": 2, "breaker_cooldown_s": 1_000}
    engine = await open_engine(8, faulty(unavailable=1.0, limits=limits), DUMMY, runner=runner)
    for first in range(0, 32, 4):
        assert await put(engine, range(first, first + 4)) == 4
        await engine.drain()
    failing, healthy = ledger_in(engine).tiers
    assert failing.breaker.state is BreakerState.OPEN
    assert (failing.counters.failed, failing.counters.dropped) == ({"unavailable": 8}, {"breaker": 24})
    assert (healthy.counters.stored, healthy.counters.failed) == (32, {})
    for first in range(0, 32, 4):
        assert await found(engine, range(first, first + 4)) == 4
    assert await at_rest(engine)


@pytest.mark.parametrize("fault", ["failed", "missing", "corrupt", "no_space"])
async def test_a_chunk_that_fails_to_move_ends_the_run_before_it(open_engine, runner, fault):
    script = {"store": ["none", fault]} if fault == "no_space" else {"load": ["none", fault]}
    engine = await open_engine(8, faulty(script), runner=runner)
    await put(engine, [1])
    await put(engine, [2])
    await engine.drain()
    await engine.reset()
    assert await found(engine, [1]) == 1
    assert await found(engine, [1, 2]) == 1
    assert ledger_in(engine).tiers[0].counters.failed == ({} if fault == "missing" else {fault: 1})
    assert await put(engine, [2]) == 1
    assert await at_rest(engine)


# A tier that hangs. Threads sleep in the kernel, in real time.


@pytest.mark.promise("A load hangs")
async def test_rows_of_a_hung_load_are_lent_to_nobody_until_its_thread_returns(open_engine, mount, gates, runner):
    engine = await open_engine(8, mount, runner=runner, limits={"quarantine_share": 1.0})
    await put(engine, range(4))
    assert await engine.reset(PATIENCE_S)
    with shut(gates, "load"):
        begun = time.monotonic()
        assert await found(engine, range(3)) == 0
        assert time.monotonic() - begun >= DEADLINE_S
        assert ledger_in(engine).tiers[0].counters.failed == {"deadline": 3}
        assert not engine.steps.has_pending_work()
        lost = set(ledger_in(engine).primary.quarantined)
        assert len(lost) == 3
        assert await put(engine, range(10, 18)) < 8
        assert lost.isdisjoint(ledger_in(engine).primary.ready.values())
        stored = [number for number in range(10, 18) if key(number) in ledger_in(engine).primary.ready]
        audit(ledger_in(engine))
    await until(lambda: not ledger_in(engine).primary.quarantined, engine)
    for number in stored:  # The thread came back and wrote its rows: no other chunk's bytes changed.
        assert await found(engine, [number]) == 1
    await until(lambda: not engine.steps.has_pending_work(), engine)
    audit_quiet(engine)


@pytest.mark.promise("A store hangs")
async def test_a_hung_store_keeps_its_rows_and_delays_no_other_tier_and_no_load(
    open_engine, mount, gates, runner, tmp_path
):
    healthy = {"type": "fs", "root": str(tmp_path / "healthy")}
    engine = await open_engine(16, mount, healthy, runner=runner, limits={"quarantine_share": 1.0})
    await put(engine, range(20, 24))
    assert await engine.reset(PATIENCE_S)
    with shut(gates, "store"):
        await put(engine, range(4))
        assert await engine.drain(PATIENCE_S)
        hung, other = ledger_in(engine).tiers
        assert (hung.counters.failed, other.counters.stored) == ({"deadline": 4}, 8)
        assert len(ledger_in(engine).traffic.cascade_rows) == 4
        assert await found(engine, range(4)) == 4
        assert await found(engine, range(20, 24)) == 4
    await until(lambda: not ledger_in(engine).traffic.cascade_rows, engine)
    assert await at_rest(engine)


@pytest.mark.promise("A probe hangs or fails")
async def test_a_hung_probe_is_a_miss_at_its_deadline(open_engine, runner, tmp_path):
    shared = {"type": FAULTY, "inner": {"type": "dummy", "store": str(tmp_path), "shared": True}}
    hung = shared | {"script": {"probe": ["hang"]}, "limits": {"deadline_s": 0.05}, "faults": {"hang_s": 0.2}}
    engine = await open_engine(4, hung, runner=runner)
    assert await found(engine, [1]) == 0
    assert await put(engine, [1]) == 1
    assert await at_rest(engine)


@pytest.mark.promise("Its deletion fails or hangs")
async def test_a_hung_deletion_delays_no_caller_beyond_its_deadline(open_engine, runner):
    engine = await open_engine(4, faulty({"delete": ["hang"]}, {"deadline_s": 0.05}, hang_s=0.5), runner=runner)
    await put(engine, [1])
    await engine.delete([key(1)])
    assert ledger_in(engine).tiers[0].counters.failed == {"deadline": 1}
    assert await found(engine, [1]) == 0


@pytest.mark.promise("The engine is reset while it hangs")
async def test_a_reset_with_a_hung_tier_ends_at_its_deadline(open_engine, mount, gates, runner):
    engine = await open_engine(8, mount | {"limits": {"deadline_s": 600}}, runner=runner)
    with shut(gates, "store"):
        await put(engine, [1, 2])
        begun = time.monotonic()
        assert not await engine.reset(deadline_s=DEADLINE_S)
        assert time.monotonic() - begun >= DEADLINE_S
        assert len(ledger_in(engine).primary.quarantined) == 2
        assert ledger_in(engine).tiers[0].breaker.state is BreakerState.OPEN
        assert await put(engine, range(10, 18)) == 6
        audit(ledger_in(engine))
    await until(lambda: not ledger_in(engine).primary.quarantined, engine)


@pytest.mark.promise("The engine closes while it hangs")
async def test_closing_with_a_hung_tier_ends_at_its_deadline_and_counts_what_it_left(runner):
    hung = faulty({"store": ["hang"]}, {"deadline_s": 1_000})
    engine = await TieringOffloadingManager.open(describe(4, hung, runner=runner))
    await put(engine, [1])
    async with asyncio.timeout(PATIENCE_S):
        assert await engine.aclose(deadline_s=0.2) == 1
    with pytest.raises(EngineClosed):
        await put(engine, [2])


# A tier that breaks its contract.


@pytest.mark.promise("It raises, returns nonsense or exits")
@pytest.mark.parametrize(
    "tier", ["AnswersNothing", "AnswersTooLittle", "AnswersANumber", "AnswersNonsense", "Raises", "Cancels", "Exits"]
)
async def test_a_tier_that_breaks_its_contract_costs_its_hits_only(open_engine, runner, tier, tmp_path):
    engine = await open_engine(4, {"type": f"{RUDE}:{tier}", "store": str(tmp_path), "shared": True}, runner=runner)
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
async def test_a_tier_that_does_not_close_delays_no_other(runner, tier, tmp_path):
    disk = {"type": "fs", "root": str(tmp_path / "tier")}
    engine = await TieringOffloadingManager.open(describe(4, {"type": f"{RUDE}:{tier}"}, disk, runner=runner))
    await put(engine, [1])
    async with asyncio.timeout(PATIENCE_S):
        await engine.aclose(deadline_s=0.2)
    async with TieringOffloadingManager.open(describe(4, disk, runner=runner)) as again:
        assert await found(again, [1]) == 1


async def test_a_tier_that_does_not_stop_reporting_delays_no_closing(runner):
    engine = await TieringOffloadingManager.open(describe(4, {"type": f"{RUDE}:GoesOnReporting"}, runner=runner))
    await put(engine, [1])
    async with asyncio.timeout(PATIENCE_S):
        assert await engine.aclose(deadline_s=0.2) == 1


async def test_the_runner_reports_how_fast_a_tier_is(open_engine, runner):
    engine = await open_engine(4, DUMMY, runner=runner, prefill_tokens_per_s=1.0)
    await put(engine, range(3))
    assert await engine.reset()
    assert await found(engine, range(3)) == 3
    await until(lambda: ledger_in(engine).tiers[0].speed is not None, engine)
