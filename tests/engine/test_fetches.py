"""Calls that find no row: fetch waits in order of asking, stream reads a run of any length, and what is cut is said."""

import asyncio
import logging

import pytest

from kvtier.errors import EngineClosed, RowsStillRead
from tests.engine.kit import at_rest, chunk, emptied, found, key, keys, ledger_in, now, under_way
from tests.simulation.audit import audit_quiet

pytestmark = pytest.mark.virtual_time

SLOW = {"type": "dummy", "latency_s": 1.0}
HOLD_S = 2.0


async def filled(open_engine, rows, chunks, **fields):
    return await emptied(open_engine, chunks, rows, SLOW, **fields)


async def held(engine, numbers, seconds=HOLD_S):
    """Fetch, hold the rows for a while, and return how many there were."""
    async with engine.fetch(keys(numbers)) as rows:
        await asyncio.sleep(seconds)
        assert [bytes(row) for row in rows] == [chunk(number) for number in numbers[: len(rows)]]
        return len(rows)


def refused(engine):
    return engine.stats().primary.promotions_refused


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
async def test_fetches_of_nearly_all_rows_are_served_in_order_of_asking(open_engine, share):
    engine = await filled(open_engine, 16, 80, limits={"lease_share": share, "lease_s": 10})
    served = []

    async def fetch(task):
        async with engine.fetch(keys(range(16 * task, 16 * task + 12))) as rows:
            served.append((task, len(rows)))
            await asyncio.sleep(HOLD_S)

    async with asyncio.timeout(1_000):
        await asyncio.gather(*(fetch(task) for task in range(5)))
    assert served == [(task, 12) for task in range(5)]
    assert refused(engine) == 0
    assert await at_rest(engine)
    audit_quiet(engine)


async def test_only_what_needs_rows_waits_in_the_line_and_who_leaves_it_lets_the_next_one_through(open_engine):
    engine = await filled(open_engine, 8, 32)
    async with engine.fetch(keys(range(8))):
        first, second = (asyncio.ensure_future(held(engine, range(at, at + 8))) for at in (8, 16))
        await asyncio.sleep(1)
        begun = now()
        assert await found(engine, range(8)) == 8
        assert await found(engine, [1_000]) == 0  # A chunk that no tier has needs no row either.
        assert await engine.prefetch(keys(range(8, 16))) == 0
        assert now() == begun
        assert not first.done()
        first.cancel()
        await asyncio.wait({first})
    assert await second == 8
    async with engine.fetch(keys(range(16, 24))):
        third = await under_way(held(engine, range(24, 32)), 1)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await third


async def test_fetches_that_wait_for_rows_do_not_wake_each_other_for_ever(open_engine, monkeypatch):
    engine = await filled(open_engine, 8, 40)
    ended_at, end_step = [], engine.steps.end_step
    monkeypatch.setattr(engine.steps, "end_step", lambda: (ended_at.append(now()), end_step()))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(held(engine, range(8)))
        await asyncio.sleep(0.5)  # It is short of rows, and loads what it has rows for until the first second is over.
        others = [tasks.create_task(held(engine, (0, at))) for at in (16, 24)]  # Both want a chunk that is loading.
        await asyncio.sleep(0.1)
        assert await found(engine, [1_000]) == 0  # The end of any call wakes all that wait.
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert ended_at.count(now()) < 50
    assert [task.result() for task in (first, *others)] == [8, 2, 2]
    assert await at_rest(engine)


async def test_a_task_that_waits_for_its_own_rows_gets_the_rows_that_are_left(open_engine, caplog):
    engine = await filled(open_engine, 8, 24, limits={"lease_s": 10})
    with caplog.at_level(logging.WARNING):
        async with engine.fetch(keys(range(6))) as rows:
            begun = now()
            assert await found(engine, range(8, 14)) == 2
            assert now() - begun == pytest.approx(12, abs=1)
            assert await found(engine, range(16, 24)) == 2
            assert [bytes(row) for row in rows] == [chunk(number) for number in range(6)]
    assert refused(engine) == 4 + 6
    assert [message.startswith("4 chunks that tiers have were not fetched") for message in caplog.messages] == [True]
    assert await at_rest(engine)


async def test_tasks_that_wait_for_each_other_all_give_up_after_one_lease(open_engine):
    engine = await filled(open_engine, 16, 160, limits={"lease_s": 10})

    async def greedy(task):
        async with engine.fetch([key(20 * task)]):
            await asyncio.sleep(5)
            return await found(engine, range(20 * task + 1, 20 * task + 20))

    begun = now()
    async with asyncio.timeout(100):
        counts = await asyncio.gather(*(greedy(task) for task in range(8)))
    assert max(counts) >= 8
    assert now() - begun < 5 + 2 * 10 + 5
    assert await at_rest(engine)


async def test_a_fetch_waits_for_rows_no_longer_than_computing_would_take(open_engine):
    engine = await filled(open_engine, 8, 24, limits={"lease_s": 1_000}, prefill_tokens_per_s=1.0, chunk_tokens=2)
    async with engine.fetch(keys(range(8))):
        begun = now()
        assert await found(engine, range(8, 16)) == 0
        assert now() - begun == pytest.approx(8 * 2 * 1.5)


async def test_a_run_longer_than_the_primary_is_cut_at_once_and_counted(open_engine):
    engine = await filled(open_engine, 8, 24)
    begun = now()
    assert await found(engine, range(24)) == 8
    assert now() == begun + 2  # Two shares of leases.
    assert refused(engine) == 16


async def read(engine, numbers):
    """Read a run in parts, hold every byte against what was put, and return the parts' lengths."""
    lengths, numbers = [], list(numbers)
    async for rows in engine.stream(keys(numbers)):
        begun = sum(lengths)
        assert [bytes(row) for row in rows] == [chunk(number) for number in numbers[begun : begun + len(rows)]]
        lengths.append(len(rows))
    return lengths


async def test_a_stream_reads_a_run_of_any_length_in_parts(open_engine):
    engine = await filled(open_engine, 16, 100)
    assert await read(engine, range(100)) == [8] * 12 + [4]
    assert await read(engine, range(95, 120)) == [5]
    assert await read(engine, [1_000]) == []
    assert await read(engine, []) == []
    assert refused(engine) == 0
    assert await at_rest(engine)
    audit_quiet(engine)


async def test_the_views_of_a_part_are_gone_at_the_next_part_and_a_kept_slice_is_an_error(open_engine):
    engine = await filled(open_engine, 16, 24)
    parts = engine.stream(keys(range(24)))
    first = (await anext(parts))[0]
    kept = [(await anext(parts))[0][:8]]
    with pytest.raises(ValueError, match="released"):
        first[0]
    with pytest.raises(RowsStillRead, match="1 of 8 rows"):
        await anext(parts)
    assert chunk(8).startswith(bytes(kept[0]))
    kept.clear()
    assert await at_rest(engine)


@pytest.mark.parametrize("how", ["left", "closed", "cancelled"])
async def test_leaving_a_stream_early_gives_the_rows_back(open_engine, how):
    engine = await filled(open_engine, 16, 24)
    parts = engine.stream(keys(range(24)))
    assert len(await anext(parts)) == 8
    if how == "cancelled":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(parts), 0.5)
    elif how == "closed":
        await parts.aclose()
    del parts
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ledger_in(engine).rows_in_use == 0
    assert await at_rest(engine)
    audit_quiet(engine)


async def test_a_stream_may_belong_to_a_request_of_the_callers_and_ends_with_the_engine(open_engine):
    engine = await filled(open_engine, 16, 24)
    engine.steps.on_new_request("r", [])
    assert [len(rows) async for rows in engine.stream(keys(range(24)), request_id="r")] == []
    engine.steps.on_request_finished("r")
    parts = engine.stream(keys(range(24)))
    assert len(await anext(parts)) == 8
    await engine.aclose()
    with pytest.raises(EngineClosed):
        await anext(parts)
