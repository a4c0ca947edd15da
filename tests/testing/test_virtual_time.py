import asyncio
import random
import threading
import time
from contextlib import suppress

import pytest

from kvtier.testing import virtual_time
from kvtier.testing.virtual_time import Deadlock, NotVirtual, VirtualTimeLoop


async def test_without_the_mark_time_is_real():
    assert not isinstance(asyncio.get_running_loop(), VirtualTimeLoop)


@pytest.mark.virtual_time
async def test_time_moves_only_when_nothing_is_ready():
    loop = asyncio.get_running_loop()
    timer = loop.create_task(asyncio.sleep(1))
    for _ in range(1_000):
        await asyncio.sleep(0)
        assert loop.time() == 0
    await timer
    assert loop.time() == 1


@pytest.mark.virtual_time
async def test_timers_fire_in_the_order_of_their_times_and_then_of_their_making():
    fired = []
    for delay_s, name in [(2, "c"), (1, "a"), (2, "d"), (1, "b"), (-1, "past")]:
        asyncio.get_running_loop().call_later(delay_s, fired.append, name)
    await asyncio.sleep(3)
    assert fired == ["past", "a", "b", "c", "d"]


@pytest.mark.virtual_time
async def test_a_cancelled_timer_neither_fires_nor_moves_the_clock():
    loop, fired = asyncio.get_running_loop(), []
    timers = [loop.call_later(10 + second, fired.append, second) for second in range(1_000)]
    for timer in (*timers[1:], loop.call_later(2_005, fired.append, "late")):
        timer.cancel()
    await asyncio.sleep(2_000)
    assert (fired, loop.time()) == ([0], 2_000)


@pytest.mark.virtual_time
async def test_timeouts_and_waits_answer_at_their_deadlines():
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await asyncio.Event().wait()
    task = asyncio.create_task(asyncio.sleep(100))
    assert (await asyncio.wait({task}, timeout=7), loop.time()) == ((set(), {task}), 12)
    await task
    assert loop.time() == 105


def test_a_deadlock_names_the_tasks_and_where_they_wait_and_cancels_them():
    ended = []

    async def hold(lock):
        async with lock:
            try:
                await asyncio.sleep(float("inf"))
            finally:
                ended.append("finally")

    async def main():
        lock = asyncio.Lock()
        tasks = [asyncio.create_task(hold(lock), name=f"holder {number}") for number in range(2)]
        await asyncio.sleep(3)
        await asyncio.gather(*tasks)

    with pytest.raises(Deadlock) as caught:
        virtual_time.run(main())
    story = str(caught.value)
    assert "at 3.000000 s; 3 task(s) wait" in story
    assert "holder 0 in sleep, tasks.py:" in story
    assert "holder 1 in Lock.acquire, locks.py:" in story
    assert story.index("holder 0") < story.index("holder 1")
    assert ended == ["finally"]


def test_polling_is_a_deadlock_unless_time_moves_or_runs_are_many_and_short():
    stubborn = True

    async def poll():
        while stubborn:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)

    async def poll_in_time():
        for _ in range(5_000):
            await asyncio.sleep(0.001)

    loop = VirtualTimeLoop(iterations_at_one_moment_max=1_000)
    loop.run_until_complete(poll_in_time())
    for _ in range(1_000):
        loop.run_until_complete(asyncio.sleep(0))
    task = loop.create_task(poll())
    for _ in range(2):
        with pytest.raises(Deadlock, match="something polls"):
            loop.run_until_complete(task)
        task.cancel()
    stubborn = False
    loop.run_until_complete(task)
    loop.close()


@pytest.mark.parametrize(
    "reach",
    [
        lambda: asyncio.to_thread(time.time),
        lambda: asyncio.open_connection("localhost", 1),
        lambda: asyncio.create_subprocess_exec("true"),
        lambda: asyncio.get_running_loop().getaddrinfo("localhost", 1),
    ],
)
@pytest.mark.virtual_time
async def test_threads_sockets_and_processes_are_refused(reach):
    with pytest.raises(NotVirtual):
        await reach()


def test_a_wake_up_from_another_thread_is_refused_and_reported():
    async def reach():
        loop, woken = asyncio.get_running_loop(), []
        loop.call_soon_threadsafe(woken.append, "own thread")

        def wake():
            with pytest.raises(NotVirtual, match="'waker'"):
                loop.call_soon_threadsafe(woken.append, "another thread")

        thread = threading.Thread(target=wake, name="waker")
        thread.start()
        thread.join()
        await asyncio.sleep(0)
        assert woken == ["own thread"]
        await asyncio.Event().wait()

    failed = []

    def run():  # The loop belongs to the thread that runs it, whichever made it.
        with pytest.raises(Deadlock, match="refused a call_soon_threadsafe from thread 'waker'"):
            loop.run_until_complete(reach())
        failed.append("as it must")

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop, thread = runner.get_loop(), threading.Thread(target=run)
        thread.start()
        thread.join()
        assert failed == ["as it must"]


def test_a_loop_keeps_its_time_between_runs():
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(asyncio.sleep(10))
        runner.run(asyncio.sleep(5))
        assert runner.get_loop().time() == 15


async def jumble(seed):
    rng, story, loop = random.Random(seed), [], asyncio.get_running_loop()

    async def work(name):
        try:
            await asyncio.sleep(rng.choice([0, 1, 2]))
            if rng.random() < 0.1:
                raise ZeroDivisionError
            await asyncio.sleep(rng.random())
        finally:
            story.append(f"{loop.time()} {name}")

    waiting = {asyncio.create_task(work(number)) for number in range(50)}
    while waiting:
        done, waiting = await asyncio.wait(waiting, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        story += [str(task.exception()) for task in done]
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(work(f"grouped {number}"))
    except* ZeroDivisionError as failed:
        story.append(str(len(failed.exceptions)))
    return story


def test_the_same_seed_tells_the_same_story():
    ballast, stories = [], []
    for _ in range(3):
        stories.append(virtual_time.run(jumble(7)))
        ballast.append([object() for _ in range(10_007)])  # Other addresses for the next run's tasks.
    assert stories[0] == stories[1] == stories[2]
    assert stories[0] != virtual_time.run(jumble(8))
