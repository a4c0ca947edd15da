"""The asyncio face: each call waits for what it needs, never for ever, and a cancelled call leaves nothing."""

import asyncio

import numpy as np
import pytest

from kvtier import EngineClosed, LookupResult, TieringOffloadingManager
from kvtier_backends.dummy import forget_store
from tests.engine.kit import FAULTY, at_rest, chunk, describe, found, key, ledger_in, now, put, settled, under_way

pytestmark = pytest.mark.virtual_time

SLOW = {"type": "dummy", "latency_s": 1.0}


def faulty(deadline_s=10.0, hang_s=None, **script):
    """Describe a tier that does what the script says, call by call, and afterwards works."""
    faults = {} if hang_s is None else {"faults": {"hang_s": hang_s}}
    limits = {"deadline_s": deadline_s}
    return {"type": FAULTY, "inner": {"type": "dummy"}, "script": script, "limits": limits, **faults}


async def test_a_long_put_has_its_turn_among_many_short_ones(open_engine):
    one_at_a_time = {**SLOW, "concurrency": 1, "limits": {"store_chunks_in_flight": 4}}
    engine = await open_engine(200, one_at_a_time)
    ended = []

    async def put_in_turn(name, numbers):
        await put(engine, numbers)
        ended.append(name)

    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(put_in_turn(number, [number]))
        tasks.create_task(put_in_turn("long", range(100, 104)))
        for number in range(10, 60):
            tasks.create_task(put_in_turn(number, [number]))
    assert ended == [*range(10), "long", *range(10, 60)]


@pytest.mark.parametrize("by", ["a fetch", "a load of the step protocol"])
async def test_put_waits_for_rows_that_are_read_and_not_for_those_that_an_unfinished_step_found(open_engine, by):
    engine = await open_engine(2, holds=[1, 2])
    steps = engine.steps
    steps.on_new_request("stepping")
    if by == "a fetch":
        async with engine.fetch([key(1), key(2)]):
            putting = await under_way(put(engine, [3, 4]), 100)
            assert not putting.done()
    else:
        assert [steps.lookup(key(number), "stepping") for number in (1, 2)] == [LookupResult.HIT] * 2
        steps.prepare_load([key(1)], "stepping")
        putting = await under_way(put(engine, [3, 4]), 1)
        assert not putting.done()
        steps.complete_load([key(1)], "stepping")
    async with asyncio.timeout(60):
        assert await putting == 2


@pytest.mark.parametrize(("success", "chunks"), [(True, 2), (False, 1)])
async def test_fetch_waits_for_a_store_of_the_step_protocol_and_ends_where_it_fails(open_engine, success, chunks):
    engine = await open_engine(4, holds=[1])
    engine.steps.on_new_request("stepping")
    plan = engine.steps.prepare_store([key(2)], "stepping")
    fetching = await under_way(found(engine, [1, 2]), 1)
    engine.steps.region.row(plan.rows[0])[:] = chunk(2)
    engine.steps.complete_store(plan.keys, "stepping", success=success)
    engine.steps.end_step()
    assert await fetching == chunks


async def test_a_reset_waits_for_rows_in_use_and_calls_during_a_reset_wait_for_it(open_engine):
    engine = await open_engine(4, faulty(deadline_s=100, hang_s=50, store=["hang"]), holds=[1])
    async with engine.fetch([key(1)]) as rows:
        resetting = await under_way(engine.reset(deadline_s=5), 1)
        async with engine.fetch([key(1)]) as more:
            await asyncio.sleep(10)
            assert not resetting.done()
            assert bytes(rows[0]) == bytes(more[0]) == chunk(1)
    await asyncio.sleep(1)
    calls = [asyncio.ensure_future(found(engine, [1])), asyncio.ensure_future(put(engine, [2, 3, 4]))]
    await asyncio.sleep(3)
    assert not any(call.done() for call in calls)
    assert not await resetting
    assert await asyncio.gather(*calls) == [0, 3]
    assert await found(engine, [2, 3, 4]) == 3


async def test_a_cancelled_reset_leaves_an_engine_that_promotes(open_engine):
    engine = await open_engine(2, faulty(hang_s=5, store=["hang"]), holds=[1])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.reset(), 1)
    await put(engine, [2, 3])
    assert await found(engine, [1]) == 1


async def test_waiting_calls_fail_when_the_engine_closes():
    tier = faulty(deadline_s=100, load=["hang"], store=["none", "hang"])
    engine = await TieringOffloadingManager.open(describe(4, tier))
    await put(engine, [1])
    await engine.drain()
    await engine.reset()
    fetching = await under_way(found(engine, [1]), 1)
    stuck = await under_way(put(engine, [2, 3]), 1)
    waiting = await under_way(put(engine, [4, 5]), 1)
    assert await engine.aclose(deadline_s=5) == 2
    results = await asyncio.gather(fetching, stuck, waiting, return_exceptions=True)
    assert [type(result) for result in results] == [EngineClosed, int, EngineClosed]


async def test_put_waits_for_rows_that_waiting_requests_lease(open_engine):
    engine = await open_engine(2, SLOW, limits={"lease_share": 1.0, "lease_s": 10}, holds=[1, 2])
    assert await engine.reset()
    engine.steps.on_new_request("waiting")
    begun = now()
    assert [engine.steps.lookup(key(number), "waiting") for number in (1, 2)] == [LookupResult.HIT_PENDING] * 2
    assert await engine.drain()
    assert await put(engine, [3, 4]) == 2
    assert 10 <= now() - begun <= 12


@pytest.mark.parametrize("cancelled", [None, 0.0, 0.5])
async def test_a_closing_that_is_cancelled_goes_on(cancelled):
    engine = await TieringOffloadingManager.open(describe(4, SLOW))
    await put(engine, [1])
    with pytest.raises(RuntimeError, match="aclose"):  # An inline engine cannot be shut down without its loop.
        engine.steps.close()
    closing = asyncio.ensure_future(engine.aclose())
    if cancelled is not None:
        asyncio.get_running_loop().call_later(cancelled, closing.cancel)
        await asyncio.wait([closing])
        assert closing.cancelled()
    assert await asyncio.gather(engine.aclose(), engine.aclose()) == [0, 0]
    assert now() == 1.0
    with pytest.raises(EngineClosed):
        await put(engine, [3])


async def test_a_delete_waits_no_longer_than_its_deadline(open_engine):
    engine = await open_engine(4, faulty(deadline_s=100, store=["hang"]), holds=[1, 2])
    begun = now()
    assert not await engine.delete([key(1)], deadline_s=5)
    assert now() == begun + 5
    assert await found(engine, [1]) == 1  # What is held when the deadline comes stays.
    async with asyncio.timeout(300):
        assert await engine.delete([key(1)], deadline_s=200)
    assert await found(engine, [1]) == 0


async def test_after_closing_every_call_raises_engine_closed():
    engine = await TieringOffloadingManager.open(describe(4, SLOW, events=True))
    await put(engine, [1])
    engine.steps.on_new_request("late")
    plan = engine.steps.prepare_store([key(2)], "late")
    await engine.aclose()
    engine.steps.complete_store(plan.keys, "late")  # Late completions do no harm.
    for call in (lambda: put(engine, [1]), lambda: found(engine, [1]), lambda: engine.delete([key(1)]), engine.reset):
        with pytest.raises(EngineClosed):
            await call()
    for step in (
        lambda: engine.steps.on_new_request("later"),
        lambda: engine.steps.lookup(key(1), "late"),
        lambda: engine.steps.prepare_load([key(1)], "late"),
        lambda: engine.steps.prepare_store([key(2)], "late"),
        lambda: engine.steps.touch([key(1)], "late"),
        engine.steps.reset,
    ):
        with pytest.raises(EngineClosed):
            step()
    engine.steps.on_request_finished("late")
    engine.steps.end_step()
    assert not engine.steps.has_pending_work()
    assert engine.take_events()


WRONG = {
    "None": (None, TypeError, r"None \(NoneType\) given, bytes or a contiguous buffer of them accepted"),
    "number": (7, TypeError, r"7 \(int\) given"),
    "text": ("x" * 4_096, TypeError, r"\(str\) given"),
    "gaps": (memoryview(bytes(2 * 4_096))[::2], TypeError, "a memoryview with gaps given"),
    "wide items": (memoryview(bytes(8 * 4_096)).cast("d"), TypeError, "a memoryview with items of 8 bytes given"),
    "too short": (chunk(1)[1:], ValueError, "4,095 bytes, not 4,096"),
    "other bytes": (bytes(4_096), ValueError, "given twice, with different bytes"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_invalid_chunk_is_refused_by_key_and_type_before_any_store(open_engine, wrong):
    engine = await open_engine(4)
    given, error, words = WRONG[wrong]
    with pytest.raises(LookupError, match="'r' is unknown: call on_new_request"):
        await put(engine, [1], request_id="r")
    with pytest.raises(ValueError, match="2 keys but 1 chunks"):
        await engine.put([key(1), key(2)], [chunk(1)])
    with pytest.raises(error, match=f"^{key(1).hex()}: .*{words}"):
        await engine.put([key(2), key(1), key(1)], [chunk(2), chunk(1), given])
    with pytest.raises(TypeError, match=r"keys\[1\]: 'key' \(str\) given"):
        await engine.put([key(2), "key"], [chunk(2), chunk(1)])
    assert ledger_in(engine).primary.rows_free == 4
    assert settled(engine)


async def test_any_buffer_of_bytes_is_a_chunk_and_a_key_may_be_given_twice_with_the_same(open_engine):
    engine = await open_engine(8)
    same = [bytearray(chunk(1)), np.frombuffer(chunk(1), np.int8).reshape(64, 64), memoryview(chunk(1)).cast("c")]
    assert await engine.put([key(1)] * 3, same) == 3
    for number, each in enumerate(same):
        await engine.delete([key(1)])
        assert await engine.put([key(1)], [each]) == 1, number
        assert await engine.get([key(1)]) == [chunk(1)]


@pytest.mark.promise("A call is cancelled")
@pytest.mark.parametrize("after", range(12))
async def test_calls_cancelled_at_any_moment_leave_nothing_pinned(open_engine, after):
    engine = await open_engine(6, SLOW, holds=range(20, 23))
    numbers = [range(first, first + 4) for first in (0, 2, 20)]
    calls = [asyncio.ensure_future(call(engine, each)) for each in numbers for call in (put, found)]
    for _ in range(after):
        await asyncio.sleep(0.25)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert await at_rest(engine)
    here = [number for number in range(6) if key(number) in ledger_in(engine).primary.ready]
    assert [await found(engine, [number]) for number in here] == [1] * len(here)


async def test_a_scan_goes_on_without_calls(open_engine):
    disk = {"type": "dummy", "store": "scanned"}
    first = await open_engine(5_000, disk, holds=range(5_000))
    await first.aclose()
    again = await open_engine(2, disk)
    await asyncio.sleep(1)
    assert len(ledger_in(again).locations.mask) == 5_000
    assert ledger_in(again).tiers[0].authoritative
    forget_store("scanned")


@pytest.mark.parametrize("call", ["put", "fetch"])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_request_that_finishes_during_its_own_call_is_forgotten_when_that_is_over(open_engine, call, cancelled):
    engine = await open_engine(8, SLOW, limits={"lease_s": 1_000}, holds=range(8))
    assert await engine.reset()
    engine.steps.on_new_request("r")
    work = put(engine, range(8, 16), request_id="r") if call == "put" else found(engine, range(8), request_id="r")
    calling = await under_way(work, 0.5)
    engine.steps.on_request_finished("r")
    with pytest.raises(ValueError, match="'r' has finished, but a store or a fetch of it has not"):
        engine.steps.on_new_request("r")
    await asyncio.sleep(call == "fetch")  # What it looked for since is leased to it, too.
    if cancelled:
        calling.cancel()
    await asyncio.wait([calling])
    assert cancelled or await calling == 8
    assert await at_rest(engine)
    engine.steps.on_new_request("r")
    assert await put(engine, [99], request_id="r") == 1
    engine.steps.on_request_finished("r")
    assert await at_rest(engine)


async def test_a_put_that_outlives_its_request_keeps_to_the_request_s_tiers(open_engine):
    engine = await open_engine(2, SLOW)
    engine.steps.on_new_request("r", [])
    await put(engine, [1, 2], request_id="r")
    async with engine.fetch([key(1), key(2)]):
        putting = await under_way(put(engine, [3, 4], request_id="r"), 1)
        engine.steps.on_request_finished("r")
    assert await putting == 2
    assert await at_rest(engine)
    assert ledger_in(engine).tiers[0].counters.stored == 0


async def test_a_synchronous_reset_during_a_put_or_fetch_names_the_one_that_can_wait():
    engine = await TieringOffloadingManager.open(describe(8, SLOW))
    putting = await under_way(put(engine, range(8)), 0.5)
    with pytest.raises(RuntimeError, match=r"1 put or fetch in progress.*: await .*Manager\.reset\(\)"):
        engine.steps.reset()
    assert await putting == 8
    async with engine.fetch([key(1)]) as rows:
        await engine.drain()
        with pytest.raises(RuntimeError, match="1 put or fetch"):
            engine.steps.reset()
        assert bytes(rows[0]) == chunk(1)
    assert engine.steps.reset()
    assert await at_rest(engine)
    await engine.aclose()


async def test_a_step_that_was_due_at_a_fork_raises_nothing_in_the_loop_and_ends_who_waits(open_engine):
    engine = await open_engine(4, SLOW)
    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    waiting = asyncio.create_task(put(engine, range(8)))
    await asyncio.sleep(0.5)
    engine._progress._wake()
    engine._progress._steps.forked()
    with pytest.raises(EngineClosed, match="is a fork of it"):
        await waiting
    assert errors == []
