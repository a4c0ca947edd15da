"""Transfers between caches and rows; `make bench` runs it. `kvtier bench cpu` compares them with a plain memcpy."""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from kvtier.tools.bench.copies import Case, copies

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [1, 80])
@pytest.mark.parametrize("page_kib", [16, 64, 256, 2_048])
@pytest.mark.parametrize("way", ["store", "load", "memcpy"])
def test_move_pages_from_and_to_anywhere(
    benchmark: BenchmarkFixture, way: str, page_kib: int, layers: int, device: str
) -> None:
    with copies(Case(page_kib << 10, layers, device=device)) as each:
        benchmark.pedantic(getattr(each, way), rounds=5, warmup_rounds=1)
