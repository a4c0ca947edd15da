"""The gather kernel moves the right bytes: on the device or, where Triton is installed, in its interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = """
import random, sys
import numpy as np, torch
from kvtier.kvcache.transfer.cuda import Descriptors
from kvtier.tools.selftest.gather import gathers_on

place = torch.device(sys.argv[1])
source = torch.randint(-128, 127, (200_000,), dtype=torch.int8, device=place)
target = torch.zeros(200_000, dtype=torch.int8, device=place)
copy, dice = gathers_on(place), random.Random(1)
for unit in (1, 2, 4, 8, 16):  # Of addresses and sizes: the words that are moved.
    starts = np.arange(10) * 20_000
    elsewhere = starts[dice.sample(range(10), 10)]
    sizes = np.array([dice.randrange(1, 19_000 // unit) * unit for _ in starts])
    right = target.zero_().clone()
    copy(Descriptors(source.data_ptr() + starts, target.data_ptr() + elsewhere, sizes), 0, True)
    for start, place, size in zip(starts, elsewhere, sizes):
        right[place : place + size] = source[start : start + size]
    assert torch.equal(target, right), unit
copy(Descriptors(*(np.empty(0, dtype=np.int64) for _ in range(3))), 0, True)
"""


@pytest.mark.usefixtures("outside")
def test_a_gather_kernel_moves_bytes_of_any_length_and_no_others() -> None:
    device = os.environ.get("KVTIER_DEVICE", "cpu")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}  # Read when Triton is imported.
    subprocess.run([sys.executable, "-c", PROGRAM, device], env=environment, check=True)
