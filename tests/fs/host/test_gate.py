"""The keeper's gate, in virtual time: who waits for whom, and for how many bytes."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier_backends.fs.host.gate import HELD_S, Gate

WIDTH = 1_000
LIGHT = 0

pytestmark = pytest.mark.virtual_time


class Crowd:
    """Sessions at a gate; each batch that is let through takes a second a width."""

    def __init__(self, gate, seconds=0.001):
        self.gate, self.through = gate, []  # Sessions, in the order in which their batches went through.
        self._seconds = seconds
        self.tasks = []

    async def begin(self, session, size_bytes, *, is_store=False):
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

    async def end(self):
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.gate.taken_bytes == 0


SIZES = st.integers(1, 2 * WIDTH)
BATCHES = st.tuples(st.integers(1, 5), SIZES, st.booleans())


@given(st.lists(BATCHES, max_size=30), st.integers(0, 30), st.booleans())
def test_a_light_batch_waits_for_what_is_in_transfer_and_for_no_queue(heavy, steps, is_store):
    """However much others have queued, of the same kind no batch that is not through yet goes before it."""

    async def run():
        crowd = Crowd(Gate(WIDTH))
        for batch in heavy:
            await crowd.begin(batch[0], batch[1], is_store=batch[2])
        for _ in range(steps):
            await asyncio.sleep(0.0005)
        before = len(crowd.through)
        await crowd.begin(LIGHT, 1, is_store=is_store)
        await crowd.end()
        place = next(place for place, (session, _, _) in enumerate(crowd.through) if session == LIGHT)
        assert [batch for batch in crowd.through[before:place] if batch[2] >= is_store] == []

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


@given(st.lists(BATCHES, min_size=1, max_size=30), st.lists(st.integers(0, 29), max_size=10))
def test_every_batch_passes_within_the_width_and_a_larger_one_alone(batches, cancelled):
    """Those that are cancelled leave nothing behind."""

    async def run():
        gate = Gate(WIDTH)
        crowd, most = Crowd(gate), 0
        for session, size_bytes, is_store in batches:
            await crowd.begin(session, size_bytes, is_store=is_store)
        for place in cancelled:
            crowd.tasks[place % len(batches)].cancel()
        while not all(task.done() for task in crowd.tasks):
            alone = gate.taken_bytes in {size_bytes for _, size_bytes, _ in batches}
            assert gate.taken_bytes <= WIDTH or alone
            most = max(most, gate.taken_bytes)
            await asyncio.sleep(0.0001)
        await crowd.end()
        ended = [task for task in crowd.tasks if not task.cancelled()]
        assert len(crowd.through) >= len(ended) > 0 or most == 0 or cancelled

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


async def test_loads_go_before_stores_that_wait():
    crowd = Crowd(Gate(WIDTH))
    for session, is_store in [(1, False), (2, True), (3, True), (4, False), (5, False)]:
        await crowd.begin(session, WIDTH, is_store=is_store)
    await crowd.end()
    assert [session for session, _, _ in crowd.through] == [1, 4, 5, 2, 3]


async def test_two_heavy_sessions_share_the_width():
    crowd = Crowd(Gate(WIDTH))
    for session in (1, 2):
        for _ in range(4):
            await crowd.begin(session, WIDTH)
    await crowd.end()
    assert [session for session, _, _ in crowd.through] == [1, 2, 1, 2, 1, 2, 1, 2]


async def test_a_store_is_not_put_back_for_what_loads_have_taken():
    """Loads have run the clock ahead; among stores the light session is still the next."""
    crowd = Crowd(Gate(WIDTH))
    await crowd.begin(1, WIDTH)
    for _ in range(5):
        await crowd.begin(2, WIDTH, is_store=True)
    for _ in range(5):
        await crowd.begin(1, WIDTH)
    await asyncio.sleep(0.0045)
    await crowd.begin(LIGHT, WIDTH // 2, is_store=True)
    await crowd.end()
    assert [session for session, _, is_store in crowd.through if is_store][:2] == [LIGHT, 2]


async def test_a_batch_that_takes_too_long_holds_nobody():
    crowd, clock = Crowd(Gate(WIDTH), seconds=3_600.0), asyncio.get_running_loop().time
    begun = clock()
    await crowd.begin(1, WIDTH)
    await crowd.begin(2, WIDTH)
    while len(crowd.through) < 2:
        await asyncio.sleep(0.01)
    assert HELD_S <= clock() - begun < 1.1 * HELD_S
    await crowd.end()


async def test_a_session_that_cancels_what_waits_is_not_put_back_for_it():
    crowd = Crowd(Gate(WIDTH))
    await crowd.begin(1, WIDTH)
    for _ in range(10):
        (await crowd.begin(2, WIDTH)).cancel()
    await asyncio.sleep(0)
    for _ in range(2):
        await crowd.begin(3, WIDTH)
    await crowd.begin(2, WIDTH)
    await crowd.end()
    assert [session for session, _, _ in crowd.through] == [1, 3, 2, 3]


async def test_those_behind_a_cancelled_batch_go_at_once():
    crowd, gate = Crowd(Gate(WIDTH)), None
    gate = crowd.gate
    turn = await gate.enter(1, WIDTH // 2, is_store=False)
    large = await crowd.begin(2, WIDTH)
    small = await crowd.begin(2, WIDTH // 2)
    large.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [size_bytes for _, size_bytes, _ in crowd.through] == [WIDTH // 2]
    turn.end()
    await asyncio.wait({small})
    await crowd.end()
