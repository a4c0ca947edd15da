"""The comparison of hot functions with their stored baseline."""

import pytest

from tests.benchmarks.compare import stored
from tests.benchmarks.hot import CALIBRATION, CASES


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_repeated(name):
    work = CASES[name].make()
    for _ in range(4):
        work()


def test_the_stored_baseline_has_every_case():
    counted = stored("3.11")
    assert counted is not None
    assert set(counted) == set(CASES) - {CALIBRATION}
