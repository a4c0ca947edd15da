"""Views of rows that a caller keeps after `fetch`: they read the right bytes, and delay no other call."""

import asyncio
import logging
import pickle

import numpy as np
import pytest

from kvtier import RowsStillRead, TieringOffloadingManager
from tests.engine.kit import CHUNK_BYTES, at_rest, chunk, describe, found, key, keys, ledger_in, put

pytestmark = pytest.mark.virtual_time

WAYS = {
    "slice": lambda view: view[: CHUNK_BYTES // 2],
    "cast": lambda view: view.cast("d"),
    "numpy": lambda view: np.frombuffer(view, np.uint8),
    "pickle": pickle.PickleBuffer,  # Exports the view itself, as pyarrow's buffers do.
}


@pytest.fixture(params=WAYS)
def make(request):
    """Make something of a view that outlives the view's release."""
    return WAYS[request.param]


def starts_with(made, number):
    whole = bytes(made)
    return bool(whole) and chunk(number).startswith(whole)


async def keep(engine, numbers, make):
    made = []
    with pytest.raises(RowsStillRead):
        async with engine.fetch(keys(numbers)) as rows:
            made += map(make, rows)
    return made


@pytest.mark.promise("A caller keeps a view of a fetched row")
async def test_a_kept_view_reads_its_chunk_and_never_the_next(open_engine, make):
    engine = await open_engine(2, holds=[1, 2])
    made = await keep(engine, [1], make)
    for number in range(3, 9):
        assert await put(engine, [number]) == 1
    assert starts_with(made[0], 1)
    assert await found(engine, [1]) == 1


@pytest.mark.promise("A caller keeps a view of a fetched row")
async def test_a_kept_row_delays_no_put_or_reset_and_is_reused_when_released(open_engine, make):
    engine = await open_engine(2, holds=[1, 2])
    made = await keep(engine, [1, 2], make)
    async with asyncio.timeout(60):
        assert await put(engine, [3, 4]) == 0
        assert await engine.reset()
        assert await put(engine, [3, 4]) == 0
    assert starts_with(made[0], 1)
    del made[0]
    assert await put(engine, [3, 4]) == 1
    made.clear()
    assert await put(engine, [5, 6]) == 2
    assert await at_rest(engine)


async def test_the_error_the_log_and_the_metric_name_the_rows_still_read(open_engine, caplog):
    engine = await open_engine(8, holds=range(5))
    with caplog.at_level(logging.WARNING), pytest.raises(RowsStillRead) as raised:
        async with engine.fetch(keys(range(5))) as rows:
            kept = [row[:1] for row in rows[1:]]
    for told in (str(raised.value), *(record.getMessage() for record in caplog.records)):
        assert "4 of 5 rows" in told
        assert all(key(number).hex() in told for number in (1, 2, 3))
        assert "copy the bytes" in told
        assert "drop" in told
    assert len(caplog.records) == 1
    assert engine.metrics.get_sample_value("kvtier_primary_rows_kept_total") == 4
    assert engine.metrics.get_sample_value("kvtier_primary_rows_held", {"reason": "kept"}) == 4
    kept.clear()
    assert await at_rest(engine)
    assert engine.metrics.get_sample_value("kvtier_primary_rows_held", {"reason": "kept"}) == 0


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_an_exception_of_the_block_is_raised_with_a_note_also_if_rows_are_kept(open_engine, error):
    engine = await open_engine(2, holds=[1])
    kept = []

    async def fetch_and_fail():
        async with engine.fetch([key(1)]) as rows:
            kept.append(rows[0][:10])
            raise error

    with pytest.raises(error) as raised:
        await fetch_and_fail()
    if error is ZeroDivisionError:
        assert ["1 of 1 rows" in note for note in raised.value.__notes__] == [True]
    assert starts_with(kept.pop(), 1)
    assert not ledger_in(engine).rows_in_use
    assert await at_rest(engine)


async def test_a_row_that_two_fetches_left_behind_is_free_when_both_are_through(open_engine, make):
    engine = await open_engine(1, holds=[1])
    first, second = await keep(engine, [1], make), await keep(engine, [1], make)
    first.clear()
    assert await put(engine, [2]) == 0
    assert starts_with(second[0], 1)
    second.clear()
    assert await put(engine, [2]) == 1


async def test_a_delete_waits_for_a_fetch_and_not_for_kept_views(open_engine):
    engine = await open_engine(1, holds=[1])
    made = await keep(engine, [1], WAYS["numpy"])
    async with engine.fetch([key(1)]):
        assert not await engine.delete([key(1)], deadline_s=5)
    async with asyncio.timeout(60):
        assert await engine.delete([key(1)])
        assert await found(engine, [1]) == 0
        assert await put(engine, [1]) == 0
    assert starts_with(made[0], 1)
    made.clear()
    assert await put(engine, [2]) == 1
    assert await at_rest(engine)


async def test_a_kept_view_outlives_the_engine(nothing_left, make):
    engine = await TieringOffloadingManager.open(describe(2))
    await put(engine, [1, 2])
    made = await keep(engine, [1, 2], make)
    await engine.aclose()
    assert [starts_with(each, number) for each, number in zip(made, [1, 2], strict=True)] == [True, True]
