"""Buffers lent to threads and tasks come back, and threads that hang hold nobody up."""

import asyncio
import gc
import queue
import subprocess
import sys
import threading
import weakref

import aiofiles
import aiofiles.os
import pytest

from kvtier.backend import Abandoned, Calls, Lanes, in_task, in_thread, in_threads
from kvtier.errors import BackendClosed, BackendUnavailable

DEADLINE_S = 20.0  # For what happens at once; only a broken promise reaches it.


@pytest.fixture
async def lanes():
    lanes = Lanes(2, "test")
    yield lanes
    assert await lanes.aclose(DEADLINE_S) == 0


class Gate:
    def __init__(self):
        self.entered, self.opened, self.done = threading.Event(), threading.Event(), False

    def __call__(self):
        self.entered.set()
        assert self.opened.wait(DEADLINE_S)
        self.done = True
        return "through"

    async def wait_entered(self):
        assert await asyncio.to_thread(self.entered.wait, DEADLINE_S)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture(params=["thread", "task"])
def lend(request, lanes):
    if request.param == "thread":
        return lambda call: in_thread(lanes, call)
    return lambda call: in_task(asyncio.to_thread(call))


async def test_the_result_or_error_of_a_call_is_passed_on(lend):
    assert await lend(lambda: divmod(7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await lend(lambda: divmod(7, 0))


async def test_calls_run_side_by_side_and_answer_in_order(lanes):
    both = threading.Barrier(2)
    assert sorted(await in_threads(lanes, [lambda: both.wait(DEADLINE_S)] * 2)) == [0, 1]
    assert await in_threads(lanes, [lambda number=number: number for number in range(50)]) == list(range(50))
    assert await in_threads(lanes, []) == []


async def test_every_call_ends_before_a_failure_is_raised(lanes, gate):
    whole = asyncio.create_task(in_threads(lanes, [lambda: 1 / 0, gate]))
    await gate.wait_entered()
    await turns()
    assert not whole.done()
    gate.opened.set()
    with pytest.raises(ZeroDivisionError):
        await whole
    assert gate.done


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_call_waits_for_its_end_however_often_it_is_cancelled(lend, gate, fails):
    waiting = asyncio.ensure_future(lend(lambda: gate() and 1 // (not fails)))
    await gate.wait_entered()
    for _ in range(3):
        waiting.cancel()
        await turns()
        assert not waiting.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert gate.done


async def test_a_call_cancelled_in_the_tick_its_end_comes_is_cancelled(lend):
    ended = threading.Event()
    waiting = asyncio.ensure_future(lend(ended.set))
    await turns(3)
    assert ended.wait(DEADLINE_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_timeout_comes_with_the_end_of_the_call_not_before(lend, gate):
    limit = asyncio.timeout(None)

    async def limited():
        async with limit:
            await lend(gate)

    waiting = asyncio.create_task(limited())
    await gate.wait_entered()
    limit.reschedule(0)
    while not limit.expired():
        await turns()
    assert not waiting.done()
    gate.opened.set()
    with pytest.raises(TimeoutError):
        await waiting


async def test_a_client_that_cancels_itself_is_away_and_its_caller_is_not_cancelled():
    async def gives_up():
        raise asyncio.CancelledError

    with pytest.raises(BackendUnavailable, match="cancelled its own call"):
        await in_task(gives_up())


async def test_a_task_cancelled_before_its_first_step_calls_nothing(gate):
    call = asyncio.to_thread(gate)
    waiting = asyncio.create_task(in_task(call))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not gate.entered.is_set()
    call.close()


async def test_a_cancelled_whole_waits_for_the_part_that_runs_and_drops_the_part_that_waits(gate):
    lanes, ran = Lanes(1, "test"), []
    whole = asyncio.create_task(in_threads(lanes, [gate, lambda: ran.append(2)]))
    await gate.wait_entered()
    whole.cancel()
    await turns()
    assert not whole.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await whole
    await in_thread(lanes, ran.append, 3)
    assert ran == [3]
    assert await lanes.aclose(DEADLINE_S) == 0


async def test_a_call_without_a_lent_buffer_leaves_its_thread_at_it_when_it_is_cancelled(lanes, gate):
    assert await lanes.run(divmod, 7, 2) == (3, 1)
    call = asyncio.create_task(lanes.run(gate))
    await gate.wait_entered()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not gate.done


class Buffer(bytearray):
    """One that can be watched."""


async def test_a_finished_call_keeps_nothing(lanes):
    async def use(buffer, *, fail):
        await asyncio.sleep(0)
        size = len(buffer)
        del buffer
        return size // (not fail)

    buffer = Buffer(8)
    gone = weakref.ref(buffer)
    await in_thread(lanes, len, buffer)
    with pytest.raises(TypeError):
        await in_thread(lanes, divmod, buffer, 1)
    await in_threads(lanes, [threading.Barrier(2).wait] * 2)  # Both lanes have moved on.
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


async def test_closing_waits_for_running_calls(lanes, gate):
    call = asyncio.create_task(in_thread(lanes, gate))
    await gate.wait_entered()
    closing = asyncio.create_task(lanes.aclose(DEADLINE_S))
    await turns()
    assert not closing.done()
    gate.opened.set()
    assert await closing == 0
    assert await call == "through"


async def test_closing_counts_what_its_deadline_left_and_may_be_repeated(gate):
    lanes, other = Lanes(2, "test"), Gate()
    whole = asyncio.create_task(in_threads(lanes, [gate, other]))
    await gate.wait_entered()
    await other.wait_entered()
    assert await lanes.aclose(0) == 1  # One call, though it holds two threads.
    gate.opened.set()
    other.opened.set()
    assert await lanes.aclose(DEADLINE_S) == 0
    assert await whole == ["through", "through"]


async def test_closing_drops_calls_behind_a_hung_one(gate):
    lanes = Lanes(1, "test")
    hung = asyncio.create_task(in_thread(lanes, gate))
    await gate.wait_entered()
    ran = []
    waiting = asyncio.create_task(in_thread(lanes, ran.append, 1))
    through_aiofiles = asyncio.create_task(aiofiles.os.wrap(ran.append)(2, executor=lanes))
    await turns()
    assert await lanes.aclose(0) == 1
    with pytest.raises(BackendClosed):
        await waiting
    with pytest.raises(BackendClosed):  # Not a cancellation that nobody asked for.
        await through_aiofiles
    gate.opened.set()
    assert (await hung, ran) == ("through", [])


async def test_a_callback_runs_once_when_no_call_is_left(gate):
    lanes, ended = Lanes(2, "test"), queue.SimpleQueue[bool]()
    call = asyncio.create_task(in_thread(lanes, gate))
    await gate.wait_entered()
    lanes.when_ended(lambda: ended.put(gate.done))
    assert await lanes.aclose(0) == 1
    assert ended.empty()
    gate.opened.set()
    assert await asyncio.to_thread(ended.get, timeout=DEADLINE_S)
    assert await call == "through"
    assert await lanes.aclose(DEADLINE_S) == 0
    assert ended.empty()
    lanes.when_ended(lambda: ended.put(True))  # At once, if the threads have ended.
    assert ended.get_nowait()


def test_lanes_are_an_executor_without_a_loop():
    with Lanes(2, "test") as lanes:
        assert list(lanes.map(abs, [-1, 2, -3])) == [1, 2, 3]
    with pytest.raises(BackendClosed):
        lanes.submit(int)


async def test_an_executor_that_is_left_has_ended_its_calls(gate):
    lanes = Lanes(1, "test")
    lanes.submit(gate)
    leaving = asyncio.create_task(asyncio.to_thread(lanes.shutdown))
    await gate.wait_entered()
    assert not (await asyncio.wait({leaving}, timeout=0.05))[0]
    gate.opened.set()
    await leaving
    assert gate.done


@pytest.mark.parametrize("ending", ["", "import asyncio; asyncio.run(lanes.aclose(0))"])
def test_a_hung_lane_does_not_hold_up_the_interpreters_exit(outside, ending):
    script = f"""
import threading
from kvtier.backend.lending import Lanes
lanes, entered = Lanes(2, "hung"), threading.Event()
def hang():
    entered.set()
    threading.Event().wait()
lanes.submit(hang)
entered.wait()
{ending}
print("leaving", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=DEADLINE_S, check=True)
    assert (done.stdout, done.stderr) == (b"leaving\n", b"")


def test_a_thread_that_outlives_its_loop_ends_quietly(gate, caplog):
    lanes, loop = Lanes(1, "test"), asyncio.new_event_loop()
    call = loop.create_task(in_thread(lanes, gate))
    loop.run_until_complete(gate.wait_entered())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gate.opened.set()
    lanes.shutdown(wait=True)
    assert not call.done()
    call.get_coro().close()  # As the interpreter's end would; a pending task complains.
    call._log_destroy_pending = False
    assert caplog.records == []


async def sleep_in(calls, seconds):
    with calls.one():
        await asyncio.sleep(seconds)


@pytest.mark.virtual_time
class TestCalls:
    async def test_closing_waits_for_the_last_call_and_counts_those_that_its_deadline_left(self):
        calls = Calls("0:tier")
        running = [asyncio.create_task(sleep_in(calls, seconds)) for seconds in (1, 20, 30)]
        await asyncio.sleep(0)
        assert await calls.close(10) == Abandoned(2)
        assert (await calls.close(0), asyncio.get_running_loop().time()) == (Abandoned(2), 10)
        assert (await calls.close(100), asyncio.get_running_loop().time()) == (Abandoned(0), 30)
        await asyncio.gather(*running)
        with pytest.raises(BackendClosed, match="tier 0:tier"):
            await sleep_in(calls, 1)

    async def test_calls_that_fail_or_are_cancelled_are_over(self):
        calls = Calls("0:tier")
        with pytest.raises(ZeroDivisionError), calls.one():
            raise ZeroDivisionError
        call = asyncio.create_task(sleep_in(calls, 100))
        await asyncio.sleep(1)
        call.cancel()
        await asyncio.wait({call})
        assert await calls.close(0) == Abandoned(0)
