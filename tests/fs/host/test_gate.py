"""The keeper's gate, in virtual time: who waits for whom, and for how many bytes."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier_backends.fs.host.gate import HELD_S, Gate

WIDTH = 1_000
LIGHT, TIMES = 0, 3
BATCHES = st.tuples(st.integers(1, 5), st.integers(1, 2 * WIDTH), st.booleans())

pytestmark = pytest.mark.virtual_time


class Crowd:
    """Sessions at a gate, whose batches take a millisecond each once they are through."""

    def __init__(self, seconds=0.001):
        self.gate, self.tasks = Gate(WIDTH), []
        self.through = []  # Session, bytes and whether it is a store, of each batch that went through, in order.
        self._seconds = seconds

    async def begin(self, session, size_bytes=WIDTH, is_store=False, *, times=1):
        for _ in range(times):
            self.tasks.append(asyncio.create_task(self._batch(session, size_bytes, is_store)))
        await asyncio.sleep(0)
        return self.tasks[-1]

    async def _batch(self, session, size_bytes, is_store):
        turn = await self.gate.enter(session, size_bytes, is_store=is_store)
        self.through.append((session, size_bytes, is_store))
        try:
            await asyncio.sleep(self._seconds)
        finally:
            turn.end()

    async def sessions(self):
        """Wait until all have ended; return the sessions in the order of their batches."""
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.gate.taken_bytes == 0
        return [session for session, _, _ in self.through]


def run(main):
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main())


@given(st.lists(BATCHES.filter(lambda batch: batch[1] > TIMES), max_size=30), st.integers(0, 30), st.booleans())
def test_light_batches_wait_for_what_is_in_transfer_and_for_no_queue(heavy, steps, is_store):
    """However much others have queued, none of the same kind that is larger and not through yet goes before them.

    Of stores, one at most goes before a load: its part of the width is due.
    """

    @run
    async def _():
        crowd = Crowd()
        for batch in heavy:
            await crowd.begin(*batch)
        await asyncio.sleep(steps * 0.0005 + 0.0001)  # Never as one ends, when the next is through and has not begun.
        before = len(crowd.through)
        await crowd.begin(LIGHT, 1, is_store, times=TIMES)
        behind = (await crowd.sessions())[::-1].index(LIGHT)
        kinds = [kind for session, _, kind in crowd.through[before : len(crowd.through) - behind] if session != LIGHT]
        assert is_store not in kinds
        assert is_store or sum(kinds) <= 1


@given(st.lists(BATCHES, min_size=1, max_size=30), st.sets(st.integers(0, 29), max_size=10))
def test_batches_pass_within_the_width_and_a_larger_one_alone(batches, cancelled):
    """Each passes that is not cancelled while it waits, and those that are leave nothing behind."""

    @run
    async def _():
        crowd = Crowd()
        for batch in batches:
            await crowd.begin(*batch)
        for place in cancelled & set(range(len(batches))):
            crowd.tasks[place].cancel()
        while not all(task.done() for task in crowd.tasks):
            taken_bytes = crowd.gate.taken_bytes
            assert 0 <= taken_bytes <= WIDTH or taken_bytes in {size_bytes for _, size_bytes, _ in batches}
            await asyncio.sleep(0.0001)
        assert len(await crowd.sessions()) >= sum(not task.cancelled() for task in crowd.tasks)


async def test_a_large_batch_waits_for_a_quarter_of_the_width_of_each_other_session():
    crowd = Crowd()
    for session in [*range(1, 6)] * 60:
        await crowd.begin(session, WIDTH // 20)
    at_once = len(crowd.through) // 5
    await crowd.begin(LIGHT, 2 * WIDTH)
    sessions = await crowd.sessions()
    assert max(Counter(sessions[: sessions.index(LIGHT)]).values()) <= at_once + 5


async def test_loads_go_before_stores_that_wait():
    crowd = Crowd()
    for session, is_store in [(1, False), (2, True), (3, True), (4, False), (5, False)]:
        await crowd.begin(session, is_store=is_store)
    assert await crowd.sessions() == [1, 4, 5, 2, 3]


async def test_loads_that_never_end_leave_stores_a_part_of_the_width():
    crowd = Crowd()
    await crowd.begin(1, is_store=True, times=4)
    for _ in range(100):
        await crowd.begin(2, times=2)
        await asyncio.sleep(0.001)
    loads_between = "".join("LS"[is_store] for _, _, is_store in crowd.through).split("S")
    assert [len(loads) for loads in loads_between[:4]] == [0, 8, 8, 8]
    await crowd.sessions()


async def test_what_a_session_has_loaded_puts_its_stores_back_no_more_than_others():
    crowd = Crowd()
    await crowd.begin(1, times=5)
    await crowd.begin(2, is_store=True, times=3)
    await crowd.begin(1, is_store=True)
    assert await crowd.sessions() == [1, 1, 1, 1, 1, 2, 1, 2, 2]


async def test_a_batch_that_takes_too_long_holds_nobody():
    crowd, begun = Crowd(seconds=3_600.0), asyncio.get_running_loop().time()
    await crowd.begin(1, times=2)
    while len(crowd.through) < 2:
        await asyncio.sleep(0.01)
    assert HELD_S <= asyncio.get_running_loop().time() - begun < 1.1 * HELD_S
    assert await crowd.sessions() == [1, 1]


async def test_a_session_that_cancels_what_waits_is_not_put_back_for_it():
    crowd = Crowd()
    await crowd.begin(1)
    for _ in range(10):
        (await crowd.begin(2)).cancel()
        await asyncio.sleep(0)
    await crowd.begin(3, times=2)
    await crowd.begin(2)
    assert await crowd.sessions() == [1, 3, 2, 3]


async def test_those_behind_a_cancelled_batch_go_at_once():
    crowd = Crowd()
    turn = await crowd.gate.enter(1, WIDTH // 2, is_store=False)
    large, small = await crowd.begin(2), await crowd.begin(2, WIDTH // 2)
    large.cancel()
    await asyncio.wait({small})
    turn.end()
    assert await crowd.sessions() == [2]
