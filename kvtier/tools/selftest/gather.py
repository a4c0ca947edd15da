"""A gather kernel: batched copies by the device's own processors instead of its copy engines. Needs Triton.

It is here for comparison, and no transfer uses it by itself. The faster way depends on the device, the link and the
size of pages, and only a measurement shows it. A copy engine takes some microseconds for each page. A kernel takes
processors that the model computes on.
"""

from math import gcd
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.kvcache.transfer.cuda import BatchedCopy, Descriptors

PROGRAMS = 32  # As many keep a PCIe link busy, and leave most processors to the model.
TILE_WORDS = 2_048  # That one program has under way.
WORDS = ((8, tl.int64), (4, tl.int32), (2, tl.int16), (1, tl.int8))


@triton.jit(do_not_specialize=["count", "tiles"])  # Else a transfer of another size is compiled anew, on its way.
def _copy(columns: tl.tensor, count: tl.tensor, tiles: tl.tensor, WORD: tl.constexpr, TILE: tl.constexpr) -> None:  # noqa: N803
    """Copy i moves `columns[2, i]` words from address `columns[0, i]` to `columns[1, i]`."""
    for item in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
        copy = item // tiles
        offsets = (item % tiles) * TILE + tl.arange(0, TILE)
        inside = offsets < tl.load(columns + 2 * count + copy)
        source = tl.load(columns + copy).to(tl.pointer_type(WORD))
        target = tl.load(columns + count + copy).to(tl.pointer_type(WORD))
        tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def gathers_on(place: torch.device) -> BatchedCopy:
    """Return batched copies by a kernel on this device; what Triton raises where it cannot compile, for want of C."""

    def copy(copies: Descriptors, stream: int, stable: bool) -> None:  # noqa: ARG001  # A kernel is of the current stream.
        if not len(copies.sizes):
            return
        common = gcd(*(int(np.gcd.reduce(column)) for column in copies))
        word_bytes, word = next((size, word) for size, word in WORDS if common % size == 0)
        table = torch.as_tensor(np.stack((copies.sources, copies.targets, copies.sizes // word_bytes)))
        columns = table.pin_memory().to(place, non_blocking=True) if place.type == "cuda" else table
        count, tiles = table.shape[1], -(-int(table[2].max()) // TILE_WORDS)
        kernel[(min(PROGRAMS, count * tiles),)](columns, count, tiles, word, TILE_WORDS)

    kernel: Any = _copy
    kernel[(1,)](torch.zeros(3, dtype=torch.int64, device=place), 0, 1, tl.int64, TILE_WORDS)  # Copies nothing.
    return copy
