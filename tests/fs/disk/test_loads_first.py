"""Stores give way to loads: all but one lane wait, that one goes on, and nobody waits for what hangs."""

import threading
from types import SimpleNamespace

import pytest

from kvtier_backends.fs.disk import lanes as module
from kvtier_backends.fs.disk.lanes import LoadsFirst
from tests.fs.conftest import DEADLINE_S


class Lane:
    """A thread that stores one chunk in two slices, and stays at each until it is told to go on."""

    def __init__(self, loads_first):
        self.began, self.slice, self.second, self.end, self.ended = (threading.Event() for _ in range(5))
        self._loads_first = loads_first
        threading.Thread(target=self._store, daemon=True).start()

    def _store(self):
        with self._loads_first.storing():
            self.began.set()
            self.slice.wait(DEADLINE_S)
            self._loads_first.give_way()
            self.second.set()
            self.end.wait(DEADLINE_S)
        self.ended.set()

    def finish(self):
        self.slice.set()
        self.end.set()


@pytest.fixture
def patient(monkeypatch):
    """Let no lane lose its patience in a test that counts who waits."""
    monkeypatch.setattr(module, "PATIENCE_S", DEADLINE_S)


def wait_for_one(lanes):
    pause = threading.Event()
    for _ in range(2_000):
        for lane in lanes:
            if lane.began.is_set() and not lane.end.is_set():
                return lane
        pause.wait(0.01)
    raise AssertionError("no lane stores")


def test_beside_a_load_one_lane_stores_after_the_other_and_waits_for_nobody(patient):
    loads_first = LoadsFirst()
    with loads_first.loading():
        lanes = [Lane(loads_first) for _ in range(4)]
        for number in range(4):
            going = wait_for_one(lanes)
            assert sum(lane.began.is_set() for lane in lanes) == number + 1
            going.finish()
            assert going.ended.wait(DEADLINE_S)


def test_a_lane_that_was_at_a_chunk_before_the_load_came_waits_at_its_next_slice(patient):
    loads_first = LoadsFirst()
    early = Lane(loads_first)
    assert early.began.wait(DEADLINE_S)
    with loads_first.loading():
        going = Lane(loads_first)
        assert going.began.wait(DEADLINE_S)
        early.slice.set()
        assert not early.second.wait(0.05)
        going.finish()
        assert early.second.wait(DEADLINE_S)
    early.finish()


def test_all_lanes_store_a_little_after_the_last_load(patient):
    clock = SimpleNamespace(now=100.0)
    loads_first = LoadsFirst(lambda: clock.now)
    with loads_first.loading():
        lanes = [Lane(loads_first) for _ in range(4)]
        going = wait_for_one(lanes)
        assert not any(lane.began.wait(0.01) for lane in lanes if lane is not going), "they wait by now"
    clock.now += module.CALM_S / 2
    late = Lane(loads_first)
    assert not late.began.wait(0.002)
    clock.now += 2 * module.CALM_S
    going.finish()
    assert all(lane.began.wait(DEADLINE_S / 4) for lane in (*lanes, late))
    for lane in (*lanes, late):
        lane.finish()


def test_a_lane_that_hangs_beside_a_load_that_hangs_does_not_stop_the_others(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    loads_first = LoadsFirst()
    with loads_first.loading():
        lanes = [Lane(loads_first) for _ in range(3)]
        assert all(lane.began.wait(DEADLINE_S) for lane in lanes)
        for lane in lanes:
            lane.finish()
