"""Copies between an LLM engine's KV caches and rows, from submission to the result, beside a memcpy of as many bytes.

On the CPU it is CPU time that counts, of all threads: neighbours on a busy machine then do not. On a CUDA device it is
time on the clock, the memcpy is of pinned memory, and a copy for each page is there to compare with. Each layer has an
allocation of its own, which is the hardest case.
"""

import ctypes
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kvcache.layout import (
    CanonicalKVCaches,
    FullAttentionSpec,
    LayerSpec,
    allocate_tensors,
    canonical_kv_caches,
    group_layers,
)
from kvtier.kvcache.layout.axes import KV_JOINED_NHD
from kvtier.kvcache.transfer import CopiersOf, GroupBlocks, TransferWorker, slot_layout
from kvtier.memory import Region, RowLayout
from kvtier.settings import find_class
from kvtier.tools.bench.figures import Pair, Row, Setting, Side, measured_rows, row_of, steps_of
from kvtier.tools.bench.memory import rate_of

MOVED_BYTES = 64 << 20
PAGE_SIZES = (16 << 10, 64 << 10, 256 << 10, 2 << 20)
LAYERS = (1, 8, 80)
PLACES = ("in order", "blocks anywhere", "both anywhere")
TOKEN_BYTES = 4_096  # Of a layer with 8 heads of 128 in bfloat16.
TORCH = torch.__version__
LIMIT_IS = {"cpu": "memcpy, in CPU time", "cuda": "memcpy of pinned memory"}
BACKEND = "kvtier_backends.cpu"

Numbers = npt.NDArray[np.int64]


class Case(NamedTuple):
    """The pages that are copied, from where to where: `place` says what lies in order, of blocks and rows."""

    page_bytes: int
    layers: int
    place: str = "both anywhere"
    device: str = "cpu"
    moves: int = MOVED_BYTES  # About so many bytes: whole chunks of them.

    @property
    def chunks(self) -> int:
        """Chunks of one block."""
        return max(1, self.moves // (self.page_bytes * self.layers))

    @property
    def moved_bytes(self) -> int:
        return self.chunks * self.page_bytes * self.layers


class Copies(NamedTuple):
    """The copies of a case, each way, and those that they are compared with."""

    store: Callable[[], None]
    load: Callable[[], None]
    memcpy: Callable[[], None]  # On a CUDA device: to the host.
    memcpy_to_device: Callable[[], None] | None  # On a CUDA device only.
    page_by_page: Callable[[], None] | None  # Likewise.


def has_device(name: str) -> bool:
    return name == "cpu" or torch.cuda.is_available()


def measure_copies(cases: list[Case], rounds: int, step: Callable[[], None]) -> Iterator[Row]:
    """Yield rows of MB/s for both ways of each case, and on a CUDA device for a copy for each page."""
    for case in cases:
        clock = time.process_time if case.device == "cpu" else time.perf_counter
        with copies(case) as each:
            sides = [
                Side(name, rate_of(copy, case.moved_bytes, clock))
                for name, copy in each._asdict().items()
                if copy is not None
            ]
            yield from measured_rows(sides, rounds, partial(_rows, case, sides), step)


def _rows(case: Case, sides: Sequence[Side], measured: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    settings: dict[str, Setting] = {
        "page_bytes": case.page_bytes,
        "layers": case.layers,
        "place": case.place,
        "device": case.device,
    }
    chunk_bytes = case.page_bytes * case.layers
    for side in sides:
        if not side.name.startswith("memcpy"):
            operation = f"{side.name.replace('_', ' ')} KV pages"
            limit = "memcpy_to_device" if side.name == "load" and case.device == "cuda" else "memcpy"
            limit_is = LIMIT_IS[case.device]
            yield row_of(Pair(operation, chunk_bytes, settings, "MB/s", side.name, limit, limit_is), measured)


def cases_for(device: str) -> list[Case]:
    return [Case(page, layers, place, device) for page in PAGE_SIZES for layers in LAYERS for place in PLACES]


def copies_steps(cases: list[Case], rounds: int) -> int:
    return sum(steps_of(3 if case.device == "cpu" else 5, rounds) for case in cases)


@contextmanager
def copies(case: Case, copiers: CopiersOf | None = None) -> Generator[Copies]:
    """Give a transfer either way, a plain copy of as many bytes, and one for each page.

    `copiers` makes what the transfers copy with; None: what a transfer worker chooses.
    """
    caches = _model(case)
    layout = RowLayout(slot_bytes=slot_layout(caches).slot_bytes, workers=1)
    with ExitStack() as stack:
        region = stack.enter_context(Region.private(2 * case.chunks, layout.row_bytes))
        memory = stack.enter_context(host_memory(region, cuda_runtime() if case.device == "cuda" else None))
        worker = stack.enter_context(TransferWorker(caches, memory.slots(layout, 0), copiers=copiers))
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
            assert result.size_bytes == case.moved_bytes, result
            assert result.error is None, result.error

        yield Copies(
            lambda: see_through(worker.submit_store),
            lambda: see_through(worker.submit_load),
            plain_copy(case),
            plain_copy(case, to_device=True) if case.device == "cuda" else None,
            _page_by_page(caches, memory.rows, blocks, rows) if case.device == "cuda" else None,
        )


def host_memory(region: Region, pin_with: object | None, **options: int) -> Any:
    """Return the region as torch sees it: what knows both belongs to the backends, and is found by name."""
    memory: Any = find_class("host memory", "cpu", {"cpu": f"{BACKEND}:CpuMemory"}, "kvtier.memory.prefault")
    return memory(region, pin_with=pin_with, **options)


def cuda_runtime() -> object | None:
    """Return what pins memory here; None where there is no CUDA device."""
    runtime: Any = find_class("CUDA runtime", "cuda", {"cuda": f"{BACKEND}:cuda_runtime"}, "kvtier.memory.prefault")
    return cast("object | None", runtime())


def _model(case: Case) -> CanonicalKVCaches:
    """Make layers whose pages are of the case's size: 8 heads of 128 in bfloat16, and as many tokens as that takes."""
    spec: LayerSpec = FullAttentionSpec(
        block_size=case.page_bytes // TOKEN_BYTES, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    layers = {str(layer): spec for layer in range(case.layers)}
    config, axes = group_layers(layers, 2 * case.chunks), dict.fromkeys(layers, KV_JOINED_NHD)
    caches = canonical_kv_caches(config, allocate_tensors(config, axes, case.device), axes)
    for tensor in caches.tensors:
        tensor.fill_(1)
    return caches


def plain_copy(case: Case, *, to_device: bool = False) -> Callable[[], None]:
    """Return a plain copy of as many bytes as a case moves, of pinned memory on a CUDA device."""
    on_device = case.device == "cuda"
    there = torch.ones(case.moved_bytes, dtype=torch.int8, device=case.device)
    here = torch.ones(case.moved_bytes, dtype=torch.int8, pin_memory=on_device)
    target, source = (there, here) if to_device else (here, there)

    def copy() -> None:
        if on_device:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
        else:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), case.moved_bytes)

    return copy


def _page_by_page(caches: CanonicalKVCaches, slots: torch.Tensor, blocks: Numbers, rows: Numbers) -> Callable[[], None]:
    def copy() -> None:
        for number, tensor in enumerate(caches.tensors):
            page_bytes = tensor.shape[1]
            place = slice(number * page_bytes, (number + 1) * page_bytes)
            for block, row in zip(blocks.tolist(), rows.tolist(), strict=True):
                slots[row, place].copy_(tensor[block], non_blocking=True)
        torch.cuda.synchronize()

    return copy
