"""Copies between caches and rows, from submission to the result, beside a plain memcpy of as many bytes.

    .venv/bin/python tests/benchmarks/transfer_rates.py [cpu | cuda]

Writes how fast transfers are as parts of the memcpy's speed. Each round does all of them in turn and has a part of its
own; what is written is their median and, in brackets, their quartiles. On the CPU it is CPU time that counts, of all
threads: neighbours on a busy machine then take caches and bandwidth from all copies of a round alike, and no time. On a
CUDA device it is time on the clock, the memcpy is of pinned memory, and a copy for each page is there to compare with.
Blocks and rows lie in order, blocks anywhere, or both anywhere; each layer has an allocation of its own, which is the
hardest case.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from kvtier.layout import (
    CanonicalKVCaches,
    FullAttentionSpec,
    LayerSpec,
    allocate_tensors,
    canonical_kv_caches,
    group_layers,
)
from kvtier.layout.axes import KV_JOINED_NHD
from kvtier.region import Region, RowLayout
from kvtier.transfer import GroupBlocks, TransferWorker, slot_layout
from kvtier_backends.cpu import CpuMemory, cuda_runtime

MOVED_BYTES = 64 << 20
ROUNDS = 9
PAGE_SIZES = (16 << 10, 64 << 10, 256 << 10, 2 << 20)
LAYERS = (1, 8, 32, 80)
PLACES = ("in order", "blocks anywhere", "both anywhere")


class Case(NamedTuple):
    page_bytes: int
    layers: int
    place: str = "both anywhere"
    device: str = "cpu"

    @property
    def chunks(self) -> int:
        """Chunks of one block."""
        return max(1, MOVED_BYTES // (self.page_bytes * self.layers))

    @property
    def moved_bytes(self) -> int:
        return self.chunks * self.page_bytes * self.layers


class Copies(NamedTuple):
    store: Callable[[], None]
    load: Callable[[], None]
    memcpy: Callable[[], None]
    page_by_page: Callable[[], None]  # On a CUDA device: torch's threads would blur what the CPU's others take.


class Part(NamedTuple):
    """Of the memcpy's speed, over all rounds."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


class Speeds(NamedTuple):
    """Parts of the memcpy's speed, and that one."""

    store: Part
    load: Part
    page_by_page: Part
    memcpy_bytes_per_s: float


@contextmanager
def copies(case: Case) -> Iterator[Copies]:
    """A transfer either way, a plain copy of as many bytes, and one for each page."""
    caches = model(case)
    layout = RowLayout(slot_bytes=slot_layout(caches).slot_bytes, workers=1)
    with (
        Region.private(2 * case.chunks, layout.row_bytes) as region,
        CpuMemory(region, pin_with=cuda_runtime() if case.device == "cuda" else None) as memory,
        TransferWorker(caches, memory.slots(layout, 0)) as worker,
    ):
        random = np.random.default_rng(1)
        anywhere, elsewhere = (random.permutation(2 * case.chunks)[: case.chunks] for _ in range(2))
        blocks = np.arange(case.chunks) if case.place == "in order" else anywhere
        rows = elsewhere if case.place == "both anywhere" else np.arange(case.chunks)
        numbers = count()

        def see_through(submit: Callable[[int, list[GroupBlocks]], None]) -> None:
            number = next(numbers)
            submit(number, [GroupBlocks(blocks, rows)])
            worker.wait([number])
            (result,) = worker.poll()
            assert result.size_bytes == case.moved_bytes
            assert result.error is None

        yield Copies(
            lambda: see_through(worker.submit_store),
            lambda: see_through(worker.submit_load),
            plain_copy(case),
            page_by_page(caches, memory.rows, blocks, rows) if case.device == "cuda" else plain_copy(case),
        )


def model(case: Case) -> CanonicalKVCaches:
    """Layers whose pages are of the case's size: 8 heads of 128 in bfloat16, and as many tokens as that takes."""
    spec: LayerSpec = FullAttentionSpec(
        block_size=case.page_bytes // 4_096, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    layers = {str(layer): spec for layer in range(case.layers)}
    config, axes = group_layers(layers, 2 * case.chunks), dict.fromkeys(layers, KV_JOINED_NHD)
    caches = canonical_kv_caches(config, allocate_tensors(config, axes, case.device), axes)
    for tensor in caches.tensors:
        tensor.fill_(1)
    return caches


def plain_copy(case: Case) -> Callable[[], None]:
    pinned = case.device == "cuda"
    source = torch.ones(case.moved_bytes, dtype=torch.int8, device=case.device)
    target = torch.ones(case.moved_bytes, dtype=torch.int8, pin_memory=pinned)

    def copy() -> None:
        if pinned:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), case.moved_bytes)

    return copy


def page_by_page(
    caches: CanonicalKVCaches, slots: torch.Tensor, blocks: np.ndarray, rows: np.ndarray
) -> Callable[[], None]:
    def copy() -> None:
        for number, tensor in enumerate(caches.tensors):
            page_bytes = tensor.shape[1]
            place = slice(number * page_bytes, (number + 1) * page_bytes)
            for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
                slots[row, place].copy_(tensor[block], non_blocking=True)
        torch.cuda.synchronize()

    return copy


def speeds(case: Case, rounds: int = ROUNDS) -> Speeds:
    clock = time.process_time if case.device == "cpu" else time.perf_counter
    taken = np.empty((rounds + 1, len(Copies._fields)))
    with copies(case) as each:
        for of_round in taken:
            for index, copy in enumerate(each):
                begun = clock()
                copy()
                of_round[index] = clock() - begun
    store, load, memcpy, pages = taken[1:].T  # The first round touches memory and starts threads.
    parts = [Part(*np.quantile(memcpy / way, (0.25, 0.5, 0.75)).tolist()) for way in (store, load, pages)]
    return Speeds(*parts, case.moved_bytes / float(np.median(memcpy)))


def main(device: str) -> None:
    sys.stdout.write("parts of a plain memcpy's speed: store, load, on a CUDA device a copy for each page\n")
    for page_bytes in PAGE_SIZES:
        for layers in LAYERS:
            found = [speeds(Case(page_bytes, layers, place, device)) for place in PLACES]
            cells = [
                f"{place} {each.store} {each.load}" + f" {each.page_by_page}" * (device == "cuda")
                for place, each in zip(PLACES, found, strict=True)
            ]
            rate = max(each.memcpy_bytes_per_s for each in found) / 1e9
            row = f"{page_bytes >> 10:5} KiB x {layers:2} layers  memcpy {rate:5.1f} GB/s  {'   '.join(cells)}\n"
            sys.stdout.write(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cpu"]))
