import asyncio

import pytest

from kvtier.backend.contract import Abandoned
from kvtier.backend.lending import Calls
from kvtier.errors import BackendClosed

pytestmark = pytest.mark.virtual_time


async def sleep_in(calls: Calls, seconds: float) -> None:
    with calls.one():
        await asyncio.sleep(seconds)


async def test_closing_waits_for_the_last_call_and_no_longer():
    calls = Calls("0:tier")
    under_way = [asyncio.create_task(sleep_in(calls, seconds)) for seconds in (1, 3, 2)]
    await asyncio.sleep(0)
    assert await calls.close(10) == Abandoned(0)
    assert asyncio.get_running_loop().time() == 3
    await asyncio.gather(*under_way)


async def test_closing_gives_up_at_its_deadline_and_counts_what_it_leaves():
    calls = Calls("0:tier")
    under_way = [asyncio.create_task(sleep_in(calls, seconds)) for seconds in (1, 20, 30)]
    await asyncio.sleep(0)
    assert await calls.close(10) == Abandoned(2)
    assert await calls.close(0) == Abandoned(2)
    assert asyncio.get_running_loop().time() == 10
    assert await calls.close(100) == Abandoned(0)
    await asyncio.gather(*under_way)


async def test_a_call_after_closing_is_refused_by_name():
    calls = Calls("0:tier")
    assert await calls.close(0) == Abandoned(0)
    with pytest.raises(BackendClosed, match="tier 0:tier"):
        await sleep_in(calls, 1)


async def test_calls_that_fail_or_are_cancelled_are_over():
    calls = Calls("0:tier")
    with pytest.raises(ZeroDivisionError), calls.one():
        raise ZeroDivisionError
    call = asyncio.create_task(sleep_in(calls, 100))
    await asyncio.sleep(1)
    call.cancel()
    await asyncio.wait({call})
    assert await calls.close(0) == Abandoned(0)
