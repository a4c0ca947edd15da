import asyncio
import random
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from kvtier.testing import virtual_time
from kvtier.testing.virtual_time import Deadlock, NotVirtual, VirtualTimeLoop


def test_an_hour_of_sleeps_takes_no_time():
    async def sleep_an_hour():
        for _ in range(3_600):
            await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(sleep_an_hour()) == 3_600


def test_time_moves_only_when_nothing_is_ready():
    async def watch():
        loop = asyncio.get_running_loop()
        timer = loop.create_task(asyncio.sleep(1))
        for _ in range(1_000):
            await asyncio.sleep(0)
            assert loop.time() == 0
        await timer
        return loop.time()

    assert virtual_time.run(watch()) == 1


def test_timers_fire_in_the_order_of_their_times_and_then_of_their_making():
    async def fire():
        loop, fired = asyncio.get_running_loop(), []
        for delay_s, name in [(2, "c"), (1, "a"), (2, "d"), (1, "b"), (-1, "past")]:
            loop.call_later(delay_s, fired.append, (name, delay_s))
        await asyncio.sleep(3)
        return [name for name, _ in fired]

    assert virtual_time.run(fire()) == ["past", "a", "b", "c", "d"]


def test_a_cancelled_timer_neither_fires_nor_moves_the_clock():
    async def cancel_most():
        loop, fired = asyncio.get_running_loop(), []
        timers = [loop.call_later(10 + second, fired.append, second) for second in range(1_000)]
        for timer in timers[1:]:
            timer.cancel()
        await asyncio.sleep(2_000)
        late = loop.call_later(5, fired.append, "late")
        late.cancel()
        await asyncio.sleep(1)
        return fired, loop.time()

    assert virtual_time.run(cancel_most()) == ([0], 2_001)


def test_timeouts_and_waits_answer_at_their_deadlines():
    async def wait():
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        task = asyncio.create_task(asyncio.sleep(100))
        done, pending = await asyncio.wait({task}, timeout=7)
        assert (done, pending, loop.time()) == (set(), {task}, 12)
        await task
        return loop.time()

    assert virtual_time.run(wait()) == 105


def test_a_deadlock_names_the_tasks_and_where_they_wait():
    async def hold(lock):
        async with lock:
            await asyncio.Event().wait()

    async def main():
        lock = asyncio.Lock()
        tasks = [asyncio.create_task(hold(lock), name=f"holder {number}") for number in range(2)]
        await asyncio.sleep(3)
        await asyncio.gather(*tasks)

    with pytest.raises(Deadlock) as caught:
        virtual_time.run(main())
    story = str(caught.value)
    assert "at 3.000000 s; 3 task(s) wait" in story
    assert "holder 0 in Event.wait, locks.py:" in story
    assert "holder 1 in Lock.acquire, locks.py:" in story
    assert story.index("holder 0") < story.index("holder 1")


def test_what_can_never_end_is_a_deadlock_and_its_tasks_are_cancelled():
    ended = []

    async def main():
        try:
            await asyncio.sleep(float("inf"))
        finally:
            ended.append("finally")

    with pytest.raises(Deadlock):
        virtual_time.run(main())
    assert ended == ["finally"]


def test_polling_while_time_moves_or_in_many_short_runs_is_no_deadlock():
    async def poll():
        for _ in range(5_000):
            await asyncio.sleep(0.001)

    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, iterations_at_one_moment_max=1_000)) as runner:
        runner.run(poll())
        for _ in range(1_000):
            runner.run(asyncio.sleep(0))


def test_what_goes_on_polling_when_it_is_cancelled_is_a_deadlock_too():
    stubborn = True

    async def poll():
        while stubborn:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)

    loop = VirtualTimeLoop(iterations_at_one_moment_max=1_000)
    task = loop.create_task(poll())
    for _ in range(2):
        with pytest.raises(Deadlock, match="something polls"):
            loop.run_until_complete(task)
        task.cancel()
    stubborn = False
    loop.run_until_complete(task)
    loop.close()


def test_a_thread_is_refused():
    async def reach():
        await asyncio.to_thread(time.time)

    with pytest.raises(NotVirtual, match="run_in_executor"):
        virtual_time.run(reach())


def test_a_wake_up_from_another_thread_is_refused_and_reported():
    async def reach():
        loop, refused = asyncio.get_running_loop(), []

        def wake():
            try:
                loop.call_soon_threadsafe(print)
            except NotVirtual as error:
                refused.append(str(error))

        thread = threading.Thread(target=wake, name="waker")
        thread.start()
        thread.join()
        assert "'waker'" in refused[0]
        loop.call_soon_threadsafe(refused.append, "own thread")
        await asyncio.sleep(0)
        assert refused[1:] == ["own thread"]
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="refused a call_soon_threadsafe from thread 'waker'"):
        virtual_time.run(reach())


def test_a_loop_runs_in_another_thread_than_it_was_made_in():
    loop, answers = VirtualTimeLoop(), []

    async def wake_itself():
        woken = loop.create_future()
        loop.call_soon_threadsafe(woken.set_result, "woken")
        answers.append(await woken)

    thread = threading.Thread(target=loop.run_until_complete, args=(wake_itself(),))
    thread.start()
    thread.join()
    loop.close()
    assert answers == ["woken"]


@pytest.mark.parametrize(
    "reach",
    [
        lambda: asyncio.open_connection("localhost", 1),
        lambda: asyncio.create_subprocess_exec("true"),
        lambda: asyncio.get_running_loop().getaddrinfo("localhost", 1),
    ],
)
def test_sockets_and_processes_are_refused(reach):
    async def main():
        await reach()

    with pytest.raises(NotVirtual):
        virtual_time.run(main())


def test_a_loop_keeps_its_time_between_runs():
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(asyncio.sleep(10))
        runner.run(asyncio.sleep(5))
        assert runner.get_loop().time() == 15


def test_a_task_factory_of_the_callers_is_used():
    class Task(asyncio.Task):
        pass

    async def main():
        asyncio.get_running_loop().set_task_factory(lambda loop, coro, **options: Task(coro, loop=loop, **options))
        task = asyncio.create_task(asyncio.sleep(1), name="mine")
        await task
        return type(task), task.get_name()

    assert virtual_time.run(main()) == (Task, "mine")


async def jumble(seed: int) -> list[str]:
    """Fan tasks out and in through everything that keeps tasks in sets; tell what happened."""
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
    ballast = []
    stories = []
    for _ in range(3):
        stories.append(virtual_time.run(jumble(7)))
        ballast.append([object() for _ in range(10_007)])  # Other addresses for the next run's tasks.
    assert stories[0] == stories[1] == stories[2]
    assert stories[0] != virtual_time.run(jumble(8))


@pytest.mark.virtual_time
async def test_the_mark_runs_a_test_in_virtual_time():
    await asyncio.sleep(86_400)
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop)


async def test_without_the_mark_time_is_real():
    assert not isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
