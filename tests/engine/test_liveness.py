"""A tier that hangs costs its hits and its rows for as long as it hangs: not the engine, not a step, not the exit.

Threads that really sleep in the kernel, in real time; only what must happen is waited for, however long it takes, and
what must not have happened before its time is checked by the clock.
"""

import asyncio
import time

import pytest

from kvtier.engine.ledger import LookupResult
from kvtier.engine.steps import StepManager
from kvtier.engine.tier import BreakerState
from tests.engine.hung_mount import release, shut
from tests.engine.kit import CHUNK_BYTES, FAULTY, PATIENCE_S, at_rest, describe, found, key, ledger_in, put, until
from tests.simulation.audit import audit, audit_quiet

DEADLINE_S = 0.3
COOLDOWN_S = 1.0  # Longer than a busy machine takes for the few calls that must come before its end.
HUNG_MOUNT = "tests.engine.hung_mount:HungMount"


@pytest.fixture
def gates(tmp_path):
    folder = tmp_path / "gates"
    folder.mkdir()
    yield str(folder)
    for operation in ("load", "store"):
        release(str(folder), operation)


@pytest.fixture
def mount(tmp_path, gates):
    limits = {"deadline_s": DEADLINE_S, "breaker_failures": 2, "breaker_cooldown_s": COOLDOWN_S}
    return {"type": HUNG_MOUNT, "root": str(tmp_path / "tier"), "gates": gates, "limits": limits}


async def filled(open_engine, mount, runner, rows=8, *more, **fields):
    """Open an engine whose mount holds chunks 0 to 3, and whose primary does not."""
    engine = await open_engine(rows, mount, *more, runner=runner, **fields)
    await put(engine, range(4))
    assert await engine.reset(PATIENCE_S)
    return engine


def sample(engine, name, **labels):
    return engine.metrics.get_sample_value(name, labels)


async def test_a_load_that_hangs_ends_at_its_deadline_as_a_miss(open_engine, mount, gates, runner):
    engine = await filled(open_engine, mount, runner, limits={"quarantine_share": 1.0})
    with shut(gates, "load"):
        begun = time.monotonic()
        assert await found(engine, [0, 1]) == 0
        assert DEADLINE_S <= time.monotonic() - begun < PATIENCE_S
        assert ledger_in(engine).tiers[0].counters.failed == {"deadline": 2}
        assert not engine.steps.has_pending_work()
    await until(lambda: not ledger_in(engine).primary.quarantined, engine)
    assert await at_rest(engine)


async def test_rows_of_a_hung_load_are_nobody_elses_until_its_thread_is_back(open_engine, mount, gates, runner):
    engine = await filled(open_engine, mount, runner, limits={"quarantine_share": 1.0})
    with shut(gates, "load"):
        await found(engine, range(3))
        lost = set(ledger_in(engine).primary.quarantined)
        assert len(lost) == 3
        assert await put(engine, range(10, 18)) < 8
        assert lost.isdisjoint(ledger_in(engine).primary.ready.values())
        stored = [number for number in range(10, 18) if key(number) in ledger_in(engine).primary.ready]
        audit(ledger_in(engine))
    await until(lambda: not ledger_in(engine).primary.quarantined, engine)
    for number in stored:  # The thread came back and wrote its rows: nobody else's bytes.
        assert await found(engine, [number]) == 1
    await until(lambda: not engine.steps.has_pending_work(), engine)
    audit_quiet(engine)


async def test_a_hung_store_keeps_its_rows_and_stops_no_other(open_engine, mount, gates, runner, tmp_path):
    healthy = {"type": "fs", "root": str(tmp_path / "healthy")}
    engine = await open_engine(16, mount, healthy, runner=runner, limits={"quarantine_share": 1.0})
    with shut(gates, "store"):
        await put(engine, range(4))
        assert await engine.drain(PATIENCE_S)
        hung, other = ledger_in(engine).tiers
        assert hung.counters.failed == {"deadline": 4}
        assert other.counters.stored == 4
        assert len(ledger_in(engine).transfers.cascade_rows) == 4
        assert await put(engine, range(10, 14)) == 4
        assert await found(engine, range(10, 14)) == 4
    await until(lambda: not ledger_in(engine).transfers.cascade_rows, engine)
    assert await at_rest(engine)


async def test_loads_go_on_while_every_store_hangs(open_engine, mount, gates, runner):
    engine = await filled(open_engine, mount, runner, rows=16, limits={"quarantine_share": 1.0})
    with shut(gates, "store"):
        await put(engine, range(10, 14))
        assert await found(engine, range(4)) == 4


async def test_the_breaker_opens_tries_and_closes_and_the_metrics_say_so(open_engine, mount, gates, runner):
    engine = await filled(open_engine, mount, runner, rows=16, limits={"quarantine_share": 1.0})
    tier = ledger_in(engine).tiers[0]
    name = tier.spec.name

    def states():
        return {
            state.value: sample(engine, "kvtier_tier_breaker", tier=name, state=state.value) for state in BreakerState
        }

    assert states() == {"closed": 1.0, "open": 0.0, "half_open": 0.0}
    with shut(gates, "load"):
        for number in range(2):
            await found(engine, [number])
        assert states() == {"closed": 0.0, "open": 1.0, "half_open": 0.0}
        assert await found(engine, [2]) == 0  # At once: nobody asks.
        assert sample(engine, "kvtier_tier_promoted_total", tier=name) == 2
        await asyncio.sleep(1.1 * COOLDOWN_S)  # It still hangs.
        await found(engine, [2])
        assert states() == {"closed": 0.0, "open": 1.0, "half_open": 0.0}
        assert sample(engine, "kvtier_tier_failed_total", tier=name, reason="deadline") == 3
    await asyncio.sleep(1.1 * COOLDOWN_S)
    assert tier.breaker.admits(asyncio.get_running_loop().time() + 1e6)
    assert states() == {"closed": 0.0, "open": 0.0, "half_open": 1.0}
    assert await found(engine, [3]) == 1
    assert states() == {"closed": 1.0, "open": 0.0, "half_open": 0.0}
    assert tier.breaker.opened == 2
    await until(lambda: not ledger_in(engine).primary.quarantined, engine)


@pytest.mark.usefixtures("outside")
async def test_a_runner_with_too_many_hung_rows_is_replaced_and_they_come_back(open_engine, mount, gates):
    engine = await filled(open_engine, mount, "process", limits={"quarantine_share": 0.1})
    with shut(gates, "load"):
        assert await found(engine, range(3)) == 0
        await until(lambda: engine.steps.runners_lost == 1 and not ledger_in(engine).primary.quarantined, engine)
    await until(lambda: ledger_in(engine).runner_up, engine)
    await asyncio.sleep(1.1 * COOLDOWN_S)
    assert await found(engine, [3]) == 1


def test_a_reset_of_a_hung_engine_ends_at_its_deadline(start_engine, mount, gates):
    mount["limits"] = {"deadline_s": 600}
    engine = start_engine(8, mount)
    with shut(gates, "store"):
        store(engine, [1, 2])
        begun = time.monotonic()
        assert not engine.reset(deadline_s=DEADLINE_S)
        assert DEADLINE_S <= time.monotonic() - begun < PATIENCE_S
        engine.on_reset_flushed()
        assert len(ledger_in(engine).primary.quarantined) == 2
        assert ledger_in(engine).tiers[0].breaker.state is BreakerState.OPEN
        assert store(engine, range(10, 18)) == 0
        assert store(engine, range(10, 16)) == 6
        audit(ledger_in(engine))
    begun = time.monotonic()
    while ledger_in(engine).primary.quarantined and time.monotonic() - begun < PATIENCE_S:
        engine.drain(0.01)
    assert not ledger_in(engine).primary.quarantined


@pytest.mark.usefixtures("outside")
def test_a_shutdown_of_a_hung_engine_ends_at_its_deadline_and_says_what_it_left(mount, gates):
    mount["limits"] = {"deadline_s": 600}
    engine = StepManager.start(describe(8, mount))
    with shut(gates, "store"):
        store(engine, [1, 2])
        begun = time.monotonic()
        assert engine.close(deadline_s=DEADLINE_S) == 1
        assert 2 * DEADLINE_S <= time.monotonic() - begun < PATIENCE_S


def store(engine, numbers):
    """Store by the step protocol; return for how many keys there was room."""
    engine.on_new_request("storing")
    plan = engine.prepare_store([key(number) for number in numbers], "storing")
    if plan is not None:
        engine.complete_store(plan.keys, "storing")
    engine.on_request_finished("storing")
    engine.end_step()
    return 0 if plan is None else len(plan.keys)


# In virtual time, where a deadline is exact.


@pytest.mark.virtual_time
async def test_a_probe_that_hangs_is_a_miss_at_its_deadline(open_engine, caplog):
    asked = {"type": "dummy", "shared": True}
    tier = {"type": FAULTY, "inner": asked, "script": {"probe": ["hang"]}, "limits": {"deadline_s": 5}}
    engine = await open_engine(2, tier)
    assert await found(engine, [1]) == 0
    assert asyncio.get_running_loop().time() == 5.0
    assert ledger_in(engine).tiers[0].counters.probes_failed == 1
    assert "a question about 1 chunks ran out of time" in caplog.text


@pytest.mark.virtual_time
async def test_a_deletion_that_hangs_is_counted_and_logged(open_engine, caplog):
    tier = {"type": FAULTY, "inner": {"type": "dummy"}, "script": {"delete": ["hang"]}, "limits": {"deadline_s": 5}}
    engine = await open_engine(4, tier)
    await put(engine, range(2))
    await engine.drain()
    await engine.delete([key(0), key(1)])
    assert await at_rest(engine)
    assert ledger_in(engine).tiers[0].counters.failed == {"deadline": 2}
    assert "a deletion of 2 chunks ran out of time" in caplog.text
    assert await found(engine, [0]) == 0


@pytest.mark.virtual_time
@pytest.mark.parametrize(("fault", "said"), [("hang", "ran out of time"), ("unavailable", "cannot be reached")])
async def test_a_tier_that_fails_call_after_call_says_each_kind_of_failure_once_a_minute(
    open_engine, caplog, fault, said
):
    limits = {"deadline_s": 0.5, "breaker_failures": 1_000}
    faulty = {"type": FAULTY, "inner": {"type": "dummy"}, "script": {"delete": [fault] * 100}, "limits": limits}
    engine = await open_engine(4, faulty)
    begun = asyncio.get_running_loop().time()
    for number in range(100):
        engine.forget([key(number)])
        await engine.drain()
    minutes = int((asyncio.get_running_loop().time() - begun) // 60)
    assert len([line for line in caplog.messages if said in line]) == 1 + minutes
    assert ledger_in(engine).tiers[0].counters.transfers_failed == 100


@pytest.mark.virtual_time
async def test_waiting_for_a_budget_that_hung_loads_hold_ends_at_the_deadline(open_engine):
    limits = {"deadline_s": 5, "load_bytes_in_flight": CHUNK_BYTES, "breaker_failures": 100}
    tier = {"type": FAULTY, "inner": {"type": "dummy"}, "script": {"load": ["hang", "hang"]}, "limits": limits}
    engine = await open_engine(8, tier)
    await put(engine, range(4))
    await engine.reset()
    counts = await asyncio.gather(*(found(engine, [number]) for number in range(4)))
    assert asyncio.get_running_loop().time() <= 10.0
    assert sum(counts) <= 2


@pytest.mark.virtual_time
async def test_a_tier_slower_than_the_stores_drops_cascades_and_says_how_many(open_engine):
    crawling = {
        "type": "dummy",
        "bandwidth_bytes_per_s": 4_096,
        "limits": {"store_chunks_in_flight": 2, "deadline_s": 100},
    }
    engine = await open_engine(16, crawling, limits={"cascade_share": 0.25})
    for first in range(0, 100, 4):
        assert store(engine.steps, range(first, first + 4)) == 4
        await asyncio.sleep(1.0)
    await engine.drain(1_000)
    (tier,) = ledger_in(engine).tiers
    assert tier.counters.stored + tier.counters.dropped["budget"] == 100
    assert tier.counters.stored >= 12
    assert ledger_in(engine).counters.stores_refused == 0
    assert (
        sample(engine, "kvtier_tier_dropped_total", tier=tier.spec.name, reason="budget") == 100 - tier.counters.stored
    )


@pytest.mark.virtual_time
async def test_hung_stores_pin_no_more_than_their_share_and_the_rest_is_dropped(open_engine):
    tier = {"type": FAULTY, "inner": {"type": "dummy"}, "faults": {"hang": 1.0}, "limits": {"breaker_failures": 1_000}}
    engine = await open_engine(16, tier, limits={"cascade_share": 0.25})
    for first in range(0, 64, 4):
        assert store(engine.steps, range(first, first + 4)) == 4
        await asyncio.sleep(100)
    assert ledger_in(engine).tiers[0].counters.dropped == {"pinned": 60}
    engine.steps.on_new_request("looking")
    assert engine.steps.lookup(key(63), "looking") is LookupResult.HIT
