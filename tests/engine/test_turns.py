"""The asyncio face shares its loop: whatever a program calls in a loop, its other tasks go on, and nothing spins."""

import asyncio

import pytest
import uvloop

from kvtier import EngineClosed, TieringOffloadingManager, WrongLoop
from kvtier.testing.virtual_time import VirtualTimeLoop
from tests.engine.kit import FAULTY, chunk, describe, found, key, keys, ledger_in, put

HIT, ABSENT = [key(1)], [key(404)]
CALLS = {
    "put of a hit": lambda engine: engine.put(HIT, [chunk(1)]),
    "fetch of a hit": lambda engine: found(engine, [1]),
    "fetch of a miss": lambda engine: found(engine, [404]),
    "get": lambda engine: engine.get(HIT),
    "stream": lambda engine: streamed(engine),
    "prefetch": lambda engine: engine.prefetch(HIT),
    "delete": lambda engine: engine.delete(ABSENT),
    "drain": lambda engine: engine.drain(),
    "reset": lambda engine: engine.reset(),
    "put that is refused": lambda engine: refused(engine),
}
LOOPS = {"asyncio": None, "uvloop": uvloop.new_event_loop, "virtual": VirtualTimeLoop}


async def streamed(engine):
    async for rows in engine.stream(HIT):
        assert [bytes(row) for row in rows] == [chunk(1)]


async def refused(engine):
    with pytest.raises(ValueError, match="1 keys but 0 chunks"):
        await engine.put(HIT, [])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("call", CALLS)
def test_a_loop_of_calls_lets_other_tasks_turn_between_each_two_of_them(call, loop):
    async def main():
        async with TieringOffloadingManager.open(describe(4)) as engine:
            await put(engine, [1])
            await asyncio.sleep(0)
            turns = 0

            async def other():
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task, before = asyncio.ensure_future(other()), []
            for _ in range(10):
                await CALLS[call](engine)
                before.append(turns)
            task.cancel()
            assert before[-1] >= 9

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


@pytest.mark.virtual_time
async def test_a_call_alone_in_its_turn_costs_no_turn(open_engine):
    engine = await open_engine(4, holds=[1])
    await asyncio.sleep(0)
    turned = []
    asyncio.get_running_loop().call_soon(turned.append, True)
    assert await found(engine, [1]) == 1
    assert not turned


HUNG_LOADS = {"type": FAULTY, "inner": {"type": "dummy"}, "script": {"load": ["hang"]}, "limits": {"deadline_s": 1}}
HUNG_STORES = HUNG_LOADS | {"script": {"store": ["hang", "hang"]}}


@pytest.mark.virtual_time
async def test_puts_that_hung_stores_keep_from_their_tier_let_timers_fire(open_engine):
    engine = await open_engine(4, HUNG_STORES | {"faults": {"hang_s": 100.0}}, holds=[1, 2])
    await engine.drain()
    assert not ledger_in(engine).pending
    assert len(ledger_in(engine).traffic.cascade_rows) == 2

    async def put_on():
        for number in range(10, 1_000_000):
            assert await put(engine, [number]) == 1

    putting = asyncio.ensure_future(put_on())
    for _ in range(100):
        await asyncio.sleep(0)
    assert not putting.done()
    putting.cancel()
    await asyncio.wait({putting})


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("hung", "rows", "stored", "share"), [(HUNG_LOADS, 4, 2, 1.0), (HUNG_STORES, 8, 4, 0.25)], ids=["loads", "stores"]
)
async def test_put_stores_all_that_hung_transfers_leave_room_for_while_others_keep_tiers_busy(
    open_engine, hung, rows, stored, share
):
    """The engine is never without pending work, and yet nothing that is pending gives a row back."""
    asked = {"type": "dummy", "latency_s": 1.0, "shared": True, "limits": {"answer_ttl_s": 0.001}}
    engine = await open_engine(rows, hung, asked, limits={"cascade_share": share})
    engine.steps.on_new_request("r")
    await put(engine, [1, 2])
    if hung is HUNG_LOADS:
        await engine.reset()
        assert await found(engine, [1, 2]) == 0
    await asyncio.sleep(10)
    assert len(ledger_in(engine).primary.quarantined) + len(ledger_in(engine).traffic.cascade_rows) == 2

    async def ask_for_ever(number):
        await asyncio.sleep(0.3 * number)
        while True:
            await found(engine, [404 + number])

    asking = [asyncio.ensure_future(ask_for_ever(number)) for number in range(3)]
    await asyncio.sleep(0.5)
    assert ledger_in(engine).pending
    async with asyncio.timeout(100):
        assert await put(engine, range(10, 14)) == stored
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


@pytest.mark.virtual_time
async def test_a_long_put_and_a_long_get_let_the_loop_turn_while_they_copy(monkeypatch, open_engine):
    monkeypatch.setattr("kvtier.engine.manager.COPIED_BYTES_MAX", 4 * 4_096)
    engine = await open_engine(64)
    turns = 0

    def count():
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(count)

    count()
    assert await put(engine, range(64)) == 64
    assert turns >= 16
    turns = 0
    assert len(await engine.get(keys(range(64)))) == 64
    assert turns >= 14


def test_calls_on_another_loop_are_refused_by_name():
    with asyncio.Runner() as first:
        opened = first.run(opening())
        for call in (*CALLS.values(), lambda engine: engine.aclose()):
            with (
                asyncio.Runner() as second,
                pytest.raises(WrongLoop, match="loop that opened it, which is another one"),
            ):
                second.run(_awaited(call, opened))
        first.run(opened.aclose())
        for runner in (first, asyncio.Runner()):
            with pytest.raises(EngineClosed):
                runner.run(found(opened, [1]))
            assert runner.run(_awaited(lambda engine: engine.aclose(), opened)) is None
        runner.close()


def test_an_engine_whose_loop_is_closed_can_be_closed_by_its_steps(outside):
    opened = asyncio.run(opening(runner="process"))
    with pytest.raises(WrongLoop, match="which is closed"):
        asyncio.run(found(opened, [1]))
    assert opened.steps.close() == 0
    with pytest.raises(EngineClosed):
        asyncio.run(found(opened, [1]))


async def _awaited(call, engine):
    await call(engine)


async def opening(**fields):
    return await TieringOffloadingManager.open(describe(4, **fields))
