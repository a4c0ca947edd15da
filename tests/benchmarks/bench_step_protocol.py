"""The step protocol on one core; `make bench` runs it. Chunks a second are 65,536 ÷ the time shown."""

from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from tests.benchmarks.protocol import Steps


@pytest.fixture
def steps() -> Iterator[Steps]:
    steps = Steps()
    yield steps
    steps.close()


def test_look_up_chunks_that_are_ready(benchmark: BenchmarkFixture, steps: Steps) -> None:
    batches = steps.new_keys()
    steps.each(batches, steps.store)
    benchmark.pedantic(steps.each, (batches, steps.look_up), rounds=7, warmup_rounds=1)


def test_store_chunks_evicting_as_many(benchmark: BenchmarkFixture, steps: Steps) -> None:
    steps.each(steps.new_keys(), steps.store)
    benchmark.pedantic(steps.each, setup=lambda: ((steps.new_keys(), steps.store), {}), rounds=7, warmup_rounds=1)


def test_touch_and_load_chunks(benchmark: BenchmarkFixture, steps: Steps) -> None:
    batches = steps.new_keys()
    steps.each(batches, steps.store)
    benchmark.pedantic(steps.each, (batches, steps.load), rounds=7, warmup_rounds=1)
