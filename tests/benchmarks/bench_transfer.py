"""Transfers between caches and rows beside a plain copy of as many bytes; `make bench` runs it."""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from kvtier.tools.selftest.checks import copies
from kvtier.tools.selftest.device import TorchDevice

MOVED_BYTES = 64 << 20
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [1, 80])
@pytest.mark.parametrize("page_kib", [16, 64, 256, 2_048])
@pytest.mark.parametrize("way", ["store", "load", "to host"])
def test_move_pages_from_and_to_anywhere(
    benchmark: BenchmarkFixture, way: str, page_kib: int, layers: int, device: str
) -> None:
    with copies(TorchDevice(device), layers, page_kib << 10, MOVED_BYTES) as each:
        benchmark.pedantic(each[way], rounds=5, warmup_rounds=1)
