"""A long run in virtual time."""

import pytest

from tests.benchmarks.soak import SETTLED, soak


@pytest.fixture(scope="module")
def run(thorough):
    return soak(requests=1_000, block_tokens=1_024)


def test_hits_are_what_the_policy_study_predicts(run):
    assert run.hit_ratio == pytest.approx(run.predicted, abs=0.01)
    assert run.predicted > 0.05


def test_a_full_tier_stays_full_and_within_its_capacity(run):
    sizes = [sample.tier_bytes for sample in run.samples]
    assert max(sizes) <= run.capacity_bytes
    assert min(sizes[SETTLED:]) > 0.9 * run.capacity_bytes


def test_the_engines_memory_does_not_grow(run):
    assert run.memory_growth < 0.05
    rows, known = ({getattr(sample, name) for sample in run.samples[SETTLED:]} for name in ("rows_ready", "known_keys"))
    assert max(rows) <= run.rows
    assert max(known) <= 1.1 * min(known)
