"""What goes in comes out, bit for bit, however little room there is and wherever the runner lives."""

import asyncio

import pytest

from tests.engine.kit import FAULTY, at_rest, chunk, found, key, ledger_in, put

DUMMY = {"type": "dummy"}


@pytest.fixture(params=["dummy", "fs", "faulty"])
def tier(request, tmp_path):
    """One tier of each kind."""
    return {
        "dummy": DUMMY,
        "fs": {"type": "fs", "root": str(tmp_path / "tier")},
        "faulty": {"type": FAULTY, "inner": {"type": "dummy"}},
    }[request.param]


async def test_more_than_the_primary_holds_comes_back_from_a_tier(open_engine, runner, tier):
    engine = await open_engine(8, tier, runner=runner)
    for first in range(0, 32, 4):
        assert await put(engine, range(first, first + 4)) == 4
    assert await engine.drain()
    for first in range(0, 32, 4):
        assert await found(engine, range(first, first + 4)) == 4
    (counters,) = (tier.counters for tier in ledger_in(engine).tiers)
    assert (counters.stored, counters.dropped, counters.failed) == (32, {}, {})
    assert ledger_in(engine).counters.hits + counters.hits == 32
    assert await at_rest(engine)


async def test_a_request_larger_than_the_primary_keeps_and_gives_its_leading_part(open_engine, runner):
    engine = await open_engine(4, DUMMY, runner=runner)
    assert await put(engine, range(10)) == 4
    assert await engine.drain()
    assert await found(engine, range(10)) == 4
    assert await at_rest(engine)


async def test_a_run_that_lies_in_a_tier_and_exceeds_the_primary_gives_its_leading_part(open_engine, runner):
    engine = await open_engine(4, DUMMY, runner=runner, limits={"lease_share": 1.0})
    for number in range(10):
        await put(engine, [number])
    assert await engine.drain()
    assert await found(engine, range(10)) == 4
    assert await at_rest(engine)


async def test_after_a_drain_the_statistics_have_what_each_tier_holds(open_engine, runner, tier):
    engine = await open_engine(16, tier, runner=runner)
    for held in (6, 12):
        await put(engine, range(held - 6, held))
        assert await engine.drain()
        assert [each.chunks for each in engine.stats().tiers] == [held]
    assert await engine.delete([key(0), key(1)])
    assert [each.chunks for each in engine.stats().tiers] == [10]


async def test_a_primary_of_one_row_works(open_engine, runner, tier):
    engine = await open_engine(1, tier, runner=runner)
    for number in range(5):
        assert await put(engine, [number]) == 1
    assert await put(engine, [1, 2]) == 1
    for number in range(5):
        assert await found(engine, [number]) == 1
    assert await at_rest(engine)


async def test_without_a_tier_the_primary_serves_what_it_holds(open_engine, runner):
    engine = await open_engine(4, runner=runner)
    assert await put(engine, range(6)) == 4
    assert await found(engine, range(6)) == 4
    assert await put(engine, range(6, 10)) == 4
    assert await found(engine, range(4)) == 0
    assert await at_rest(engine)


async def test_three_tiers_of_different_speeds_all_get_everything(open_engine, runner, tmp_path):
    slow = {"type": "dummy", "latency_s": "5ms", "bandwidth_bytes_per_s": "4MiB"}
    disk = {"type": "fs", "root": str(tmp_path / "tier")}
    engine = await open_engine(8, DUMMY, disk, slow, runner=runner)
    for number in range(0, 24, 3):
        assert await put(engine, range(number, number + 3)) == 3
    assert await engine.drain()
    assert [tier.counters.stored for tier in ledger_in(engine).tiers] == [24, 24, 24]
    assert await found(engine, range(3)) == 3
    assert await at_rest(engine)


async def test_a_chunk_shorter_than_its_row_comes_back_as_long_as_it_was(open_engine, runner):
    engine = await open_engine(2, DUMMY, runner=runner, chunk_bytes=1_000, cpu_bytes_to_use=2 * 4_096)
    assert await engine.put([key(1)], [chunk(1)[:1_000]]) == 1
    assert await engine.put([key(2), key(3)], [chunk(2)[:1_000], chunk(3)[:1_000]]) == 2
    async with engine.fetch([key(1)]) as rows:
        assert [bytes(row) for row in rows] == [chunk(1)[:1_000]]


async def test_what_is_there_keeps_its_chunk(open_engine, runner):
    engine = await open_engine(4, DUMMY, runner=runner)
    await put(engine, [1])
    assert await engine.put([key(1), key(2)], [chunk(9), chunk(2)]) == 2
    assert await found(engine, [1, 2]) == 2


async def test_overlapping_keys_of_many_calls_at_once_are_never_mixed_up(open_engine, runner):
    engine = await open_engine(8, DUMMY, runner=runner)

    async def use(first: int) -> None:
        for turn in range(6):
            numbers = range((first + turn) % 12, (first + turn) % 12 + 5)
            await put(engine, numbers)
            await found(engine, numbers)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for first in range(12):
            tasks.create_task(use(first))
    assert await at_rest(engine)


async def test_what_one_engine_stored_on_disk_the_next_one_finds(open_engine, runner, tmp_path):
    disk = {"type": "fs", "root": str(tmp_path / "tier")}
    engine = await open_engine(8, disk, runner=runner)
    await put(engine, range(4))
    assert await engine.aclose() == 0
    again = await open_engine(8, disk, runner=runner)
    assert await found(again, range(5)) == 4


async def test_keys_of_any_length_are_kept_apart(open_engine, runner, tmp_path):
    engine = await open_engine(4, {"type": "fs", "root": str(tmp_path / "tier")}, runner=runner)
    keys = [b"\0\0\0\0", b"/\0\0\0\0", b"..\0\0\0\0", b"a\0\0\0\0", b"A\0\0\0\0", b"\xff" * 36]
    for number, each in enumerate(keys):
        assert await engine.put([each], [chunk(number)]) == 1
    assert await engine.drain()
    for number, each in enumerate(keys):
        async with engine.fetch([each]) as rows:
            assert [bytes(row) for row in rows] == [chunk(number)]


async def test_deleted_chunks_are_gone_from_every_tier(open_engine, runner, tier):
    engine = await open_engine(8, tier, DUMMY, runner=runner)
    await put(engine, range(4))
    await engine.delete([key(1), key(3), key(99)])
    assert await found(engine, [0]) == 1
    assert [await found(engine, [number]) for number in (0, 1, 2, 3)] == [1, 0, 1, 0]
    assert await put(engine, [1]) == 1
    assert await found(engine, [1]) == 1
    assert await at_rest(engine)


async def test_deleting_waits_for_those_who_hold_the_rows(open_engine, runner):
    engine = await open_engine(8, DUMMY, runner=runner)
    await put(engine, [1])
    async with engine.fetch([key(1)]) as rows:
        deleting = asyncio.ensure_future(engine.delete([key(1)]))
        assert await engine.drain()
        assert not deleting.done()
        assert bytes(rows[0]) == chunk(1)
    await deleting
    assert await found(engine, [1]) == 0


async def test_a_tier_lets_a_long_requests_tail_go_before_its_head(open_engine, runner, tmp_path):
    """Its chunks came in pieces, the head first, and the tier sees each piece alone."""
    tier = {"type": "fs", "root": str(tmp_path / "tier"), "capacity_bytes": "1MiB", "naming": "flat"}
    engine = await open_engine(8, tier, runner=runner, events=True)
    prefix = [key(number) for number in range(6)]
    engine.steps.on_new_request("long")
    for start in range(0, 6, 2):
        chunks = [chunk(start), chunk(start + 1)]
        assert await engine.put(prefix[start : start + 2], chunks, request_id="long") == 2
        assert await engine.drain()
    engine.steps.on_request_finished("long")
    gone: list[bytes] = []
    for newer in range(1_000, 9_000):
        await put(engine, [newer])
        assert await engine.drain()
        removed = [event for event in engine.take_events() if (event.kind.value, event.tier) == ("removed", "0:fs")]
        gone += [one for event in removed for one in event.keys if one in prefix]
        if gone:
            break
    assert gone
    assert sorted(gone) == prefix[-len(gone) :]
