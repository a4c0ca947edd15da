"""The checks: every byte in its place, transfers in order with the device's work, and the rates.

A check raises `Wrong` for a broken promise. A check of order proves something only if the kernel still ran when the
transfer was submitted. The check verifies that, and is repeated otherwise.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from kvtier.kvcache.layout import CanonicalKVCaches
from kvtier.kvcache.transfer import Direction, GroupBlocks, TransferResult, TransferWorker, slot_layout
from kvtier.memory import PAGE_BYTES, Region
from kvtier.tools.bench.figures import Pair, Row, Side, interleaved, rate_of, rows_of
from kvtier.tools.selftest import caches
from kvtier.tools.selftest.caches import Family, random_bytes, require_same
from kvtier.tools.selftest.device import NotHere, TorchDevice, Wrong, host

TRIES = 5
PASSES = 3  # Stores and loads of random blocks, for each family.
ROWS = 32
CANARY = -86  # 0xAA.
ORDER_PAGES, ORDER_PAGE_BYTES = 64, 256 << 10  # 16 MiB: a third of a millisecond of a fast link.
RATE_LAYERS, RATE_PAGE_BYTES = 8, 64 << 10  # Pages as long as those of an 8B model's layers.
RATE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
RATE_ROUNDS = 7


def checks() -> list[tuple[str, Callable[[TorchDevice], str]]]:
    """Return every promise and its check, which returns a detail, or raises `Wrong` or `NotHere`."""
    return [
        *((f"blocks come back bit for bit: {each.name}", partial(come_back, each)) for each in caches.families()),
        ("a store waits for the kernel that writes its blocks", partial(transfers_wait, Direction.STORE)),
        ("a load waits for the kernel that reads its blocks", partial(transfers_wait, Direction.LOAD)),
    ]


def come_back(family: Family, device: TorchDevice) -> str:
    """Store random blocks in random rows, load them into others, and compare everything with the twin's."""
    moved = 0
    here, twin = caches.caches_of(family, device.place), caches.caches_of(family, torch.device("cpu"))
    slots = slot_layout(here.canonical, family.blocks_per_chunk)
    with worker_and_rows(device, here.canonical, ROWS, family.blocks_per_chunk) as (worker, rows):
        right = rows.fill_(CANARY).clone()
        for number in range(PASSES):
            here.fill(100 * number)
            twin.fill(100 * number)
            device.synchronize()
            for turn, direction in enumerate((Direction.STORE, Direction.LOAD)):
                groups = caches.requests_of(family, ROWS, 2 * number + turn)
                moved += transfer(worker, direction, groups).size_bytes
                caches.move_by_hand(direction, twin.canonical, slots, right, groups)
                require_same("rows", rows, right)
                for memory, expected in zip(here.memories, twin.memories, strict=True):
                    require_same("caches, compared on the device", memory, expected)
                    require_same("caches, compared on the host", memory.cpu(), expected)
    return f"{PASSES} times each way, {moved:,} bytes"


def transfers_wait(direction: Direction, device: TorchDevice) -> str:
    """Submit a store behind a delayed kernel that writes its blocks, or a load behind one that reads its blocks."""
    if not device.has_streams:
        raise NotHere(f"{device.name} has no streams: it does at once whatever is launched")
    layer = caches.plain_caches(1, ORDER_PAGES, ORDER_PAGE_BYTES, device.place)
    cache, everything = layer.tensors[0], [GroupBlocks(range(ORDER_PAGES), range(ORDER_PAGES))]
    with worker_and_rows(device, layer, ORDER_PAGES) as (worker, whole_rows):
        rows, right = whole_rows[:, :ORDER_PAGE_BYTES], random_bytes(tuple(cache.shape), 1)
        fresh, read = right.to(device.place), torch.empty_like(cache)
        for attempt in range(1, TRIES + 1):
            cache.fill_(CANARY)
            rows.copy_(right) if direction is Direction.LOAD else rows.fill_(CANARY)
            late = partial(read.copy_, cache) if direction is Direction.LOAD else partial(cache.copy_, fresh)
            pending = device.launch_late(late)
            submit(worker, direction, everything)
            in_time = pending()
            finished(worker)
            require_same("rows", rows, right)
            require_same("blocks", cache, right)
            if direction is Direction.LOAD:
                require_same("blocks read before the load", read, torch.full_like(read, CANARY))
            if in_time:
                return f"submitted before the kernel had finished, in attempt {attempt}"
    raise Wrong(f"in {TRIES} attempts the kernel had finished before the transfer was submitted: nothing was proved")


def rates(device: TorchDevice) -> list[Row]:
    """Return MB/s of stores and of loads, each beside one plain copy of as many pinned bytes."""
    moved_bytes, chunk_bytes = RATE_BYTES[device.name], RATE_LAYERS * RATE_PAGE_BYTES
    with copies(device, RATE_LAYERS, RATE_PAGE_BYTES, moved_bytes) as each:
        sides = [Side(name, rate_of(copy, moved_bytes)) for name, copy in each.items()]
        measured = interleaved(sides, RATE_ROUNDS)
    pages = {"page_bytes": RATE_PAGE_BYTES, "layers": RATE_LAYERS}
    pairs = [
        Pair(way, chunk_bytes, pages, "MB/s", way, limit, f"one plain copy {limit}")
        for way, limit in (("store", "to host"), ("load", "to device"))
    ]
    return list(rows_of(pairs, measured))


@contextmanager
def copies(
    device: TorchDevice, layers: int, page_bytes: int, moved_bytes: int
) -> Generator[dict[str, Callable[[], object]]]:
    """Give a store, a load and a plain copy "to host" and "to device" of this many bytes, in whole chunks.

    Each returns when the bytes are there. Chunks of one block lie at random places. Each layer has its own allocation,
    which is the hardest case.
    """
    chunks = max(1, moved_bytes // (layers * page_bytes))
    there = torch.ones(chunks * layers * page_bytes, dtype=torch.int8, device=device.place)
    here = torch.ones(len(there), dtype=torch.int8, pin_memory=device.has_streams)
    paged = caches.plain_caches(layers, 2 * chunks, page_bytes, device.place)

    def plain_copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        device.synchronize()

    with worker_and_rows(device, paged, 2 * chunks) as (worker, _):
        dice = np.random.default_rng(1)
        blocks, into = (dice.permutation(2 * chunks)[:chunks] for _ in range(2))
        yield {
            "store": lambda: transfer(worker, Direction.STORE, [GroupBlocks(blocks, into)]),
            "load": lambda: transfer(worker, Direction.LOAD, [GroupBlocks(blocks, into)]),
            "to host": lambda: plain_copy(here, there),
            "to device": lambda: plain_copy(there, here),
        }


@contextmanager
def worker_and_rows(
    device: TorchDevice, canonical: CanonicalKVCaches, rows: int, blocks_per_chunk: int = 1
) -> Generator[tuple[TransferWorker, torch.Tensor]]:
    """Give a worker between caches and pinned rows, which are a page longer than their slots."""
    slot_bytes = slot_layout(canonical, blocks_per_chunk).slot_bytes
    row_bytes = (slot_bytes // PAGE_BYTES + 1) * PAGE_BYTES
    with Region.private(rows, row_bytes) as region, host.CpuMemory(region, pin_with=device.pin_with) as memory:
        if device.pin_with is not None and not memory.pinned:
            raise Wrong(f"{rows * row_bytes:,} bytes of host memory could not be pinned")
        slots = memory.rows[:, :slot_bytes]
        with TransferWorker(canonical, slots, blocks_per_chunk=blocks_per_chunk, copiers=device.copiers) as worker:
            yield worker, memory.rows


def transfer(worker: TransferWorker, direction: Direction, groups: Sequence[GroupBlocks]) -> TransferResult:
    submit(worker, direction, groups)
    return finished(worker)


def submit(worker: TransferWorker, direction: Direction, groups: Sequence[GroupBlocks], job_id: int = 1) -> None:
    (worker.submit_store if direction is Direction.STORE else worker.submit_load)(job_id, groups)


def finished(worker: TransferWorker) -> TransferResult:
    """Wait for the one transfer in flight and return its result; `Wrong` if it failed."""
    worker.wait([1])
    (result,) = worker.poll()
    if result.error is not None:
        raise Wrong(str(result.error))
    return result
