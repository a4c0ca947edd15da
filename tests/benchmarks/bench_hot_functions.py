"""Every hot function by itself; `make bench` runs it. `tests.benchmarks.compare` compares it with the baseline."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.hot import CASES


@pytest.mark.parametrize("name", CASES)
def test_a_hot_function(benchmark: BenchmarkFixture, name: str) -> None:
    case = CASES[name]
    benchmark.extra_info["operations"] = case.operations
    benchmark(case.make())
