import threading
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import TransferFailed
from kvtier.kvcache.transfer.jobs import CopyJob, CopyJobs, Direction, TransferResult
from kvtier.kvcache.transfer.pages import BlockPages

BOTH = (Direction.LOAD, Direction.STORE)


def clock():
    ticks = count()
    return lambda: float(next(ticks))


@pytest.fixture
def jobs():
    return CopyJobs(clock())


def job(number, direction, *, blocks=(), rows=()):
    pages = BlockPages(np.array(blocks, dtype=np.int64), np.array(rows, dtype=np.int64), np.zeros(0, dtype=np.int64))
    return CopyJob(number, direction, (pages,), size_bytes=100 + number)


def started(jobs):
    order = list[int]()
    while (taken := jobs.take(BOTH, wait=False)) is not None:
        order.append(taken.job_id)
        jobs.finish(taken, None)
    return order


def test_loads_start_before_stores_unless_an_earlier_one_touches_the_same_bytes(jobs):
    jobs.submit(job(0, Direction.STORE, blocks=(1, 2), rows=(8,)))
    jobs.submit(job(1, Direction.STORE, blocks=(3,), rows=(9,)))
    jobs.submit(job(2, Direction.LOAD, blocks=(6,), rows=(6,)))
    jobs.submit(job(3, Direction.LOAD, blocks=(2,), rows=(5,)))
    jobs.submit(job(4, Direction.LOAD, blocks=(7,), rows=(7,)))
    assert started(jobs) == [2, 0, 3, 4, 1]


def test_a_store_waits_for_an_earlier_load_of_its_blocks(jobs):
    jobs.submit(job(0, Direction.LOAD, blocks=(1,), rows=(1,)))
    jobs.submit(job(1, Direction.STORE, blocks=(1,), rows=(2,)))
    assert jobs.take([Direction.STORE], wait=False) is None
    load = jobs.take([Direction.LOAD], wait=False)
    assert jobs.take([Direction.STORE], wait=False) is None  # Begun is not done.
    jobs.finish(load, None)
    assert jobs.take([Direction.STORE], wait=False).job_id == 1


def test_transfers_of_one_way_begin_without_waiting_for_each_other(jobs):
    for number in range(2):
        jobs.submit(job(number, Direction.STORE, blocks=(1,), rows=(1,)))
    begun = [jobs.take(BOTH, wait=False) for _ in range(2)]
    assert [one.job_id for one in begun if one is not None] == [0, 1]


@given(
    submitted=st.lists(
        st.tuples(st.sampled_from(BOTH), st.frozensets(st.integers(0, 5)), st.frozensets(st.integers(0, 5)))
    )
)
def test_whatever_is_submitted_all_of_it_starts_and_conflicts_keep_their_order(submitted):
    jobs = CopyJobs(clock())
    for number, (direction, blocks, rows) in enumerate(submitted):
        jobs.submit(job(number, direction, blocks=tuple(blocks), rows=tuple(rows)))
    order = started(jobs)
    assert sorted(order) == list(range(len(submitted)))
    for later, (direction, blocks, rows) in enumerate(submitted):
        for earlier, (other, earlier_blocks, earlier_rows) in enumerate(submitted[:later]):
            if direction is other or blocks & earlier_blocks or rows & earlier_rows:
                assert order.index(earlier) < order.index(later)


def test_a_result_says_what_ended_how_long_it_took_and_how(jobs):
    error = TransferFailed("store 1: the device is lost")
    for number, direction in enumerate(BOTH):
        jobs.submit(job(number, direction))
        jobs.finish(jobs.take(BOTH, wait=False), error if number else None)
    assert jobs.poll() == [
        TransferResult(0, Direction.LOAD, 100, 1.0, None),
        TransferResult(1, Direction.STORE, 101, 1.0, error),
    ]
    assert jobs.poll() == []


def test_an_id_in_use_is_refused_until_its_result_is_returned(jobs):
    jobs.submit(job(7, Direction.LOAD))
    with pytest.raises(ValueError, match="transfer 7 is still in use"):
        jobs.submit(job(7, Direction.STORE))
    assert started(jobs) == [7]
    with pytest.raises(ValueError, match="transfer 7 is still in use"):
        jobs.submit(job(7, Direction.STORE))
    jobs.poll()
    jobs.submit(job(7, Direction.STORE))


def test_waiting_ends_with_the_transfers_or_the_time(jobs):
    jobs.submit(job(0, Direction.LOAD))
    assert not jobs.wait([0], timeout_s=0.0)
    assert jobs.wait([99], timeout_s=0.0)  # Not about: nothing to wait for.
    assert not jobs.close(timeout_s=0.0)
    started(jobs)
    assert jobs.wait([0], timeout_s=0.0)


def test_closing_refuses_new_transfers_and_still_serves_one_that_waits_for_another(jobs):
    jobs.submit(job(0, Direction.LOAD, blocks=(1,), rows=(1,)))
    jobs.submit(job(1, Direction.STORE, blocks=(1,), rows=(2,)))
    load = jobs.take([Direction.LOAD], wait=False)
    assert not jobs.close(timeout_s=0.0)
    with pytest.raises(RuntimeError, match="closed"):
        jobs.submit(job(2, Direction.LOAD))
    taken = list[CopyJob | None]()
    thread = threading.Thread(target=lambda: taken.append(jobs.take([Direction.STORE], wait=True)))
    thread.start()
    jobs.finish(load, None)
    thread.join()
    assert [store.job_id for store in taken if store is not None] == [1]
    assert jobs.take([Direction.LOAD], wait=True) is None
