"""A client's coroutine is waited for, whoever is cancelled: its buffers are the caller's when the call comes back."""

import asyncio
import gc
import weakref

import pytest

from kvtier.backend import BackendUnavailable, in_task


class Client:
    """A call that says when it has begun, and goes on when it is let go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.done = False

    async def call(self, fails: Exception | None = None) -> str:
        self.begun.set()
        await self.go_on.wait()
        self.done = True
        if fails is not None:
            raise fails
        return "through"


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_result_or_error_of_a_call_is_passed_on() -> None:
    client = Client()
    client.go_on.set()
    assert await in_task(client.call()) == "through"
    with pytest.raises(ZeroDivisionError):
        await in_task(client.call(ZeroDivisionError()))


@pytest.mark.parametrize("fails", [None, ZeroDivisionError()])
async def test_a_cancelled_waiter_waits_for_the_call_however_often_it_is_cancelled(fails: Exception | None) -> None:
    client = Client()
    waiter = asyncio.create_task(in_task(client.call(fails)))
    await client.begun.wait()
    for _ in range(3):
        waiter.cancel()
        await turns()
        assert not waiter.done()
    client.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert client.done


async def test_a_waiter_cancelled_in_the_tick_its_call_ends_is_cancelled() -> None:
    client = Client()
    waiter = asyncio.create_task(in_task(client.call()))
    await client.begun.wait()
    client.go_on.set()
    await turns(1)
    assert client.done
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter


async def test_a_waiter_cancelled_before_its_first_step_calls_nothing() -> None:
    client = Client()
    call = client.call()
    waiter = asyncio.create_task(in_task(call))
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not client.begun.is_set()
    call.close()


async def test_a_timeout_comes_with_the_end_of_the_call_not_before() -> None:
    client, limit = Client(), asyncio.timeout(None)

    async def limited() -> None:
        async with limit:
            await in_task(client.call())

    waiter = asyncio.create_task(limited())
    await client.begun.wait()
    limit.reschedule(0)
    while not limit.expired():
        await turns()
    assert not waiter.done()
    client.go_on.set()
    with pytest.raises(TimeoutError):
        await waiter


async def test_a_client_that_cancels_itself_is_away_and_its_caller_is_not_cancelled() -> None:
    async def gives_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(BackendUnavailable, match="cancelled its own call"):
        await in_task(gives_up())


async def test_a_finished_call_keeps_nothing() -> None:
    class Buffer(bytearray):
        """One that can be watched."""

    async def use(buffer: Buffer, *, fail: bool) -> int:
        await asyncio.sleep(0)
        size = len(buffer)
        del buffer
        if fail:
            raise ZeroDivisionError
        return size

    buffer = Buffer(8)
    gone = weakref.ref(buffer)
    assert await in_task(use(buffer, fail=False)) == 8
    with pytest.raises(ZeroDivisionError):
        await in_task(use(buffer, fail=True))
    await turns()
    gc.disable()  # Reference counts alone must do: nobody knows when a collection comes.
    try:
        del buffer
        assert gone() is None
    finally:
        gc.enable()
