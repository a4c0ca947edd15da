"""Stores give way to loads: all but one lane wait, that one goes on, and nobody waits for what hangs."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier_backends.fs.disk import lanes as module
from kvtier_backends.fs.disk.lanes import LoadsFirst

DEADLINE_S = 20.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Lane:
    """A thread that stores one chunk, and stays at it until it is told to end."""

    def __init__(self, loads_first: LoadsFirst) -> None:
        self.began, self.end, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._loads_first = loads_first
        threading.Thread(target=self._store, daemon=True).start()

    def _store(self) -> None:
        with self._loads_first.storing():
            self.began.set()
            self.end.wait(DEADLINE_S)
        self.ended.set()


def begun(lanes: list[Lane]) -> int:
    return sum(lane.began.is_set() for lane in lanes)


@pytest.fixture
def patient(monkeypatch) -> None:
    """Let no lane lose its patience in a test that counts who waits."""
    monkeypatch.setattr(module, "PATIENCE_S", DEADLINE_S)


def test_without_loads_every_lane_stores(patient) -> None:
    lanes = [Lane(loads_first := LoadsFirst()), *(Lane(loads_first) for _ in range(3))]
    assert all(lane.began.wait(DEADLINE_S) for lane in lanes)
    for lane in lanes:
        lane.end.set()


def test_beside_a_load_one_lane_stores_after_the_other(patient) -> None:
    loads_first = LoadsFirst()
    with loads_first.loading():
        lanes = [Lane(loads_first) for _ in range(4)]
        for number in range(4):
            going = wait_for_one(lanes)
            assert begun(lanes) == number + 1
            going.end.set()
            assert going.ended.wait(DEADLINE_S)


def wait_for_one(lanes: list[Lane]) -> Lane:
    """Wait for a lane that has begun and was not told to end."""
    pause = threading.Event()
    for _ in range(2_000):
        for lane in lanes:
            if lane.began.is_set() and not lane.end.is_set():
                return lane
        pause.wait(0.01)
    raise AssertionError("no lane stores")


def test_the_lane_that_goes_on_waits_for_nobody_between_two_slices(patient) -> None:
    loads_first = LoadsFirst()
    with loads_first.loading(), loads_first.storing():
        loads_first.give_way()
        loads_first.give_way()


def test_a_lane_that_was_at_a_chunk_before_the_load_came_waits_at_its_next_slice(patient) -> None:
    loads_first = LoadsFirst()
    waits = threading.Event()

    def store(beside: Callable[[], None]) -> None:
        with loads_first.storing():
            beside()
            loads_first.give_way()
            waits.set()

    with ThreadPoolExecutor(1) as early:
        came = threading.Event()
        began = early.submit(store, lambda: came.wait(DEADLINE_S))
        with loads_first.loading():
            going = Lane(loads_first)
            assert going.began.wait(DEADLINE_S)
            came.set()
            assert not waits.wait(0.05)
            going.end.set()
            assert waits.wait(DEADLINE_S)
        began.result(DEADLINE_S)


def test_all_lanes_go_on_a_little_after_the_last_load() -> None:
    clock = Clock()
    loads_first = LoadsFirst(clock)
    with loads_first.loading():
        pass
    first = Lane(loads_first)
    assert first.began.wait(DEADLINE_S)
    clock.now += module.CALM_S / 2
    second = Lane(loads_first)
    assert not second.began.wait(0.002)
    clock.now += module.CALM_S
    assert second.began.wait(DEADLINE_S)
    first.end.set()
    second.end.set()


def test_a_lane_that_hangs_beside_a_load_that_hangs_does_not_stop_the_others(monkeypatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    loads_first = LoadsFirst()
    with loads_first.loading():
        lanes = [Lane(loads_first) for _ in range(3)]
        assert all(lane.began.wait(DEADLINE_S) for lane in lanes)
        for lane in lanes:
            lane.end.set()


def test_all_lanes_that_waited_go_on_when_loads_have_ended(patient) -> None:
    clock = Clock()
    loads_first = LoadsFirst(clock)
    with loads_first.loading():
        lanes = [Lane(loads_first) for _ in range(4)]
        going = wait_for_one(lanes)
        assert not any(lane.began.wait(0.01) for lane in lanes if lane is not going), "they wait by now"
    clock.now += 2 * module.CALM_S
    going.end.set()
    assert all(lane.began.wait(DEADLINE_S / 4) for lane in lanes)
    for lane in lanes:
        lane.end.set()
