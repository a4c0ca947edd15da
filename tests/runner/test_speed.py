"""A tier's speed, learned from loads: what is predicted, against what then comes."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.runner.reports import SpeedMeter

MIB = 1 << 20
MEDIAN_ERROR_MAX = 0.25


class Device:
    """A tier that does one load after the other, with noise: what a meter sees of it, and what it had predicted."""

    def __init__(self, *, fixed_s, bytes_per_s, noise, seed=0):
        self.fixed_s, self.bytes_per_s, self.noise = fixed_s, bytes_per_s, noise
        self.meter, self.now, self._random = SpeedMeter(), 0.0, random.Random(seed)

    def loads(self, sizes, *, pause_s=0.05):
        for size in sizes:
            self.now += pause_s
            begun = self.meter.begin_load(self.now)
            speed = self.meter.speed
            seconds = (self.fixed_s + size / self.bytes_per_s) * self._random.lognormvariate(0.0, self.noise)
            self.now += seconds
            self.meter.end_load(begun, size, self.now)
            if speed is not None:
                yield abs(speed.seconds(size) - seconds) / seconds


def sizes(count, seed=1):
    chosen = random.Random(seed)
    return [chosen.choice((1, 2, 8, 32, 64)) * MIB for _ in range(count)]


@given(
    fixed_s=st.floats(0.0, 0.1),
    bytes_per_s=st.floats(5e7, 2e10),
    noise=st.floats(0.0, 0.25),
    seed=st.integers(0, 1_000),
)
def test_half_of_the_predictions_are_within_a_quarter(fixed_s, bytes_per_s, noise, seed):
    errors = list(Device(fixed_s=fixed_s, bytes_per_s=bytes_per_s, noise=noise, seed=seed).loads(sizes(200, seed)))
    assert statistics.median(errors) <= MEDIAN_ERROR_MAX


@pytest.mark.parametrize("factor", [20.0, 1 / 20])
def test_a_tier_that_changes_twentyfold_is_known_after_a_dozen_loads(factor):
    device = Device(fixed_s=1e-3, bytes_per_s=1e9, noise=0.1)
    list(device.loads(sizes(200)))
    device.fixed_s, device.bytes_per_s = device.fixed_s * factor, device.bytes_per_s / factor
    list(device.loads(sizes(12)))
    assert statistics.median(device.loads(sizes(50, 2))) <= MEDIAN_ERROR_MAX


def test_one_load_that_hung_does_not_make_a_tier_look_slow():
    device = Device(fixed_s=1e-3, bytes_per_s=1e9, noise=0.05)
    list(device.loads(sizes(200)))
    device.meter.end_load(device.meter.begin_load(device.now), MIB, device.now + 10.0)
    device.now += 10.0
    list(device.loads(sizes(5)))
    assert statistics.median(device.loads(sizes(50, 2))) <= MEDIAN_ERROR_MAX


def test_concurrent_loads_measure_the_tiers_whole_rate():
    meter = SpeedMeter()
    for number in range(50):
        begun = [meter.begin_load(float(number)) for _ in range(4)]
        for place, each in enumerate(begun):
            meter.end_load(each, 25 * MIB, number + 0.9 + place * 0.02)
    assert meter.speed is not None
    assert meter.speed.seconds(100 * MIB) == pytest.approx(0.96, rel=0.1)


def test_a_load_that_did_not_move_all_is_ignored_and_one_of_no_bytes_counts_as_one_of_a_byte():
    meter = SpeedMeter()
    meter.end_load(meter.begin_load(0.0), MIB, 1.0, moved=False)
    assert meter.speed is None
    for now in range(1, 4):
        meter.end_load(meter.begin_load(now), 0, now + 0.5)
    assert meter.speed is not None
    assert meter.speed.seconds(1) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0.0, 1e4)), max_size=40))
def test_whatever_is_seen_no_factor_is_below_zero_and_every_prediction_is_a_time(seen):
    meter, now = SpeedMeter(), 0.0
    for size, seconds in seen:
        begun = meter.begin_load(now)
        now += seconds
        meter.end_load(begun, size, now)
        now += 0.01
    if meter.speed is not None:
        assert min(meter.speed) >= 0.0
        assert 0.0 < meter.speed.seconds(MIB) < float("inf")
