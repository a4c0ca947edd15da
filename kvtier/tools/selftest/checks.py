"""The checks of the copies: every byte where it belongs, in the right order, and none moved after its time.

Each is a promise and a function that raises `Wrong` where it is broken; they run on any device, for each way to copy.
A check of order is worth nothing unless the work that must come first was still under way: it looks, and says so.
"""

import asyncio
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch

from kvtier.kvcache.layout import (
    CanonicalKVCaches,
    FullAttentionSpec,
    ParallelConfig,
    allocate_tensors,
    canonical_kv_caches,
    group_layers,
)
from kvtier.kvcache.layout.axes import KV_JOINED_HND
from kvtier.kvcache.transfer import Direction, GroupBlocks, TransferResult, TransferWorker, slot_layout
from kvtier.memory import PAGE_BYTES, Region
from kvtier.tools.bench.copies import host_memory
from kvtier.tools.selftest.device import Device, NotHere, Way, Wrong
from kvtier.tools.selftest.models import (
    BLOCKS,
    Caches,
    Family,
    families,
    move_by_hand,
    random_bytes,
    requests_of,
    require_same,
)

WAIT_S = 60.0  # For what takes milliseconds: a transfer that has not ended by then never will.
SPIN_S = 0.2  # Longer than any thread sleeps on a busy machine, unless it is not run at all: then it is tried again.
TRIES = 5
ROUNDS = 3  # Of random pages, for each family.
ROWS = 32
MANY = 200  # Transfers under way at once.
CANARY = -86  # A byte that nobody stores: 0xAA.
LARGE_PAGES, LARGE_PAGE_BYTES = 64, 256 << 10  # 16 MiB: a third of a millisecond of a fast link.
CANCEL_AFTER = (0, 1, 2, 5)  # Steps of the event loop.


class Check(NamedTuple):
    """A promise, and what raises `Wrong` where it is broken or `NotHere` where it cannot be checked."""

    part: str
    promise: str
    run: Callable[[Device, Way], str]
    each_way: bool = True  # Made for each way to copy; else for the one that transfers use.


def checks() -> list[Check]:
    """Return the checks that are made in this process, in order."""
    layouts = [
        Check("bytes", f"pages come back bit for bit: {family.name}", partial(pages_come_back, family))
        for family in families()
    ]
    return [
        *layouts,
        Check("bytes", "rows that one worker wrote are read by two", partial(workers_share_rows, 1, 2)),
        Check("bytes", "rows that two workers wrote are read by one", partial(workers_share_rows, 2, 1)),
        Check("bytes", "many transfers at once end as if one came after the other", many_at_once),
        Check("order", "a store waits for the kernel that writes its blocks", stores_wait_for_their_kernel),
        Check("order", "a load waits for the kernel that reads its blocks", loads_wait_for_their_kernel),
        Check("order", "a row that a store gave back is not written any more", rows_of_a_store_are_let_go),
        Check("order", "a row that a load gave back is not read any more", rows_of_a_load_are_let_go),
        Check("order", "a cancelled wait cancels no transfer, and its result is told once", cancelled_waits),
    ]


# Every byte.


def pages_come_back(family: Family, device: Device, way: Way) -> str:
    """Store random blocks in random rows and load them into others, and compare everything with the twin's."""
    moved = 0
    here, twin = Caches.of(family, device.place), Caches.of(family, torch.device("cpu"))
    layout = slot_layout(here.canonical, family.blocks_per_chunk)
    with row_memory(device, ROWS, layout.slot_bytes) as rows:
        wanted = torch.full_like(rows, CANARY)
        rows.copy_(wanted)
        with worker_of(here.canonical, rows[:, : layout.slot_bytes], way, family.blocks_per_chunk) as worker:
            for number in range(ROUNDS):
                here.fill(100 * number)
                twin.fill(100 * number)
                device.synchronize()
                stored, loaded = (requests_of(family, ROWS, 2 * number + turn) for turn in range(2))
                for direction, groups in ((Direction.STORE, stored), (Direction.LOAD, loaded)):
                    moved += see_through(worker, direction, groups).size_bytes
                    move_by_hand(direction, twin.canonical, layout, wanted, groups)
                    require_as_by_hand(here, twin, rows, wanted)
    return f"{ROUNDS} rounds, {moved:,} bytes"


def require_as_by_hand(here: Caches, twin: Caches, rows: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare the rows on the host, and the caches both on the device and on the host."""
    require_same("rows", rows, wanted)
    for memory, right in zip(here.memories, twin.memories, strict=True):
        require_same("caches, compared on the device", memory, right)
        require_same("caches, compared on the host", memory.cpu(), right)


def many_at_once(device: Device, way: Way) -> str:
    """Submit many transfers of few blocks and rows: where two touch the same, the later one wins."""
    family = families()[0]
    here, twin = Caches.of(family, device.place), Caches.of(family, torch.device("cpu"))
    here.fill(1)
    twin.fill(1)
    device.synchronize()
    layout = slot_layout(here.canonical, family.blocks_per_chunk)
    dice = random.Random(3)
    with row_memory(device, ROWS, layout.slot_bytes) as rows:
        wanted = random_bytes(rows.nbytes, 2).view(torch.int8).view(rows.shape)
        rows.copy_(wanted)
        with worker_of(here.canonical, rows[:, : layout.slot_bytes], way, family.blocks_per_chunk) as worker:
            for number in range(MANY):
                direction, groups = dice.choice(list(Direction)), requests_of(family, ROWS, 10 + number)
                submit(worker, number, direction, groups)
                move_by_hand(direction, twin.canonical, layout, wanted, groups)
            results = [ended(worker, number) for number in range(MANY)]
        require_as_by_hand(here, twin, rows, wanted)
    return f"{MANY} transfers, {sum(result.size_bytes for result in results):,} bytes"


def workers_share_rows(writers: int, readers: int, device: Device, way: Way) -> str:
    """Write canonical rows with so many workers' caches on this device, and read them with another number."""
    heads, layers, blocks = 8, 3, list(range(0, BLOCKS, 2))
    spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=32, dtype=torch.bfloat16)
    whole = [random_bytes(BLOCKS * spec.page_bytes, layer).view(BLOCKS, heads, -1) for layer in range(layers)]
    slot_bytes = layers * spec.page_bytes
    request = [GroupBlocks(blocks, list(reversed(range(len(blocks)))))]
    with row_memory(device, len(blocks), slot_bytes) as rows:
        for count, direction in ((writers, Direction.STORE), (readers, Direction.LOAD)):
            for rank in range(count):
                mine = slice(rank * heads // count, (rank + 1) * heads // count)
                tensors, canonical = _worker(spec, heads, layers, count, rank, device.place)
                if direction is Direction.STORE:
                    for tensor, right in zip(tensors, whole, strict=True):
                        tensor.copy_(right[:, mine].reshape(tensor.shape))
                with worker_of(canonical, rows[:, :slot_bytes], way, canonical=True) as worker:
                    see_through(worker, direction, request)
                for tensor, right in zip(tensors, whole, strict=True):
                    require_same(
                        f"heads of worker {rank} of {count}", tensor[blocks], right[blocks][:, mine].flatten(1)
                    )
    return f"{writers} to {readers} workers, {len(blocks) * slot_bytes:,} bytes"


def _worker(
    spec: FullAttentionSpec, heads: int, layers: int, workers: int, rank: int, place: torch.device
) -> tuple[list[torch.Tensor], CanonicalKVCaches]:
    """Return one worker's caches, as bytes of each block, and their pages."""
    own = FullAttentionSpec(
        block_size=spec.block_size, num_kv_heads=heads // workers, head_size=spec.head_size, dtype=spec.dtype
    )
    names = [f"layers.{layer}" for layer in range(layers)]
    config, axes = group_layers(dict.fromkeys(names, own), BLOCKS), dict.fromkeys(names, KV_JOINED_HND)
    caches = allocate_tensors(config, axes, place)
    parallel = ParallelConfig(tp_size=workers, rank=rank)
    canonical = canonical_kv_caches(config, caches, axes, parallel=parallel, total_kv_heads=heads)
    return [tensor.view(torch.uint8) for tensor in canonical.tensors], canonical


# In the right order.


def stores_wait_for_their_kernel(device: Device, way: Way) -> str:
    """Store blocks that a kernel behind a spinning one is about to write: the rows have what it wrote."""
    with large(device, way) as (cache, rows, worker):
        fresh = random_bytes(cache.nbytes, 1).view(torch.int8).view(cache.shape).to(device.place)

        def turn() -> bool:
            cache.fill_(CANARY)
            busy = _behind_a_spin(device, lambda: cache.copy_(fresh))
            submit(worker, 1, Direction.STORE, _all_blocks())
            in_time = busy()
            ended(worker, 1)
            require_same("rows of a store that had to wait", rows, fresh.cpu())
            return in_time

        return _until_in_time(device, turn)


def loads_wait_for_their_kernel(device: Device, way: Way) -> str:
    """Load into blocks that a kernel behind a spinning one is about to read: it reads what was there before."""
    with large(device, way) as (cache, rows, worker):
        rows.copy_(random_bytes(rows.nbytes, 1).view(torch.int8).view(rows.shape))
        kept = torch.empty_like(cache)

        def turn() -> bool:
            cache.fill_(CANARY)
            busy = _behind_a_spin(device, lambda: kept.copy_(cache))
            submit(worker, 1, Direction.LOAD, _all_blocks())
            in_time = busy()
            ended(worker, 1)
            device.synchronize()
            require_same("what was read before a load", kept, torch.full(kept.shape, CANARY, dtype=torch.int8))
            require_same("blocks of a load that had to wait", cache, rows)
            return in_time

        return _until_in_time(device, turn)


def rows_of_a_store_are_let_go(device: Device, way: Way) -> str:
    """Write canaries over rows as soon as their store's result is told: all of them live."""
    with large(device, way) as (cache, rows, worker):

        def turn() -> bool:
            cache.fill_(1)
            busy = _behind_a_spin(device, lambda: None)
            submit(worker, 1, Direction.STORE, _all_blocks())
            in_time = busy()
            ended(worker, 1)
            _overwrite(rows)
            device.synchronize()
            see_through(worker, Direction.STORE, [GroupBlocks((), ())])  # Behind whatever was still to come.
            require_same("rows that a store gave back", rows, torch.full(rows.shape, CANARY, dtype=torch.int8))
            return in_time

        return _until_in_time(device, turn, without_streams=True)


def rows_of_a_load_are_let_go(device: Device, way: Way) -> str:
    """Write over rows as soon as their load's result is told: the blocks have what was there before."""
    with large(device, way) as (cache, rows, worker):
        right = random_bytes(rows.nbytes, 1).view(torch.int8).view(rows.shape)

        def turn() -> bool:
            cache.fill_(1)
            rows.copy_(right)
            busy = _behind_a_spin(device, lambda: None)
            submit(worker, 1, Direction.LOAD, _all_blocks())
            in_time = busy()
            ended(worker, 1)
            _overwrite(rows)
            device.synchronize()
            require_same("blocks whose rows were given back", cache, right)
            return in_time

        return _until_in_time(device, turn, without_streams=True)


def cancelled_waits(device: Device, way: Way) -> str:
    """Cancel who waits for a transfer, after some steps of the loop: the transfer ends, and tells somebody once."""
    with large(device, way) as (cache, rows, worker):

        async def turn(number: int, steps: int) -> None:
            rows.fill_(CANARY)
            cache.copy_(random_bytes(cache.nbytes, number).view(torch.int8).view(cache.shape))
            _behind_a_spin(device, lambda: None)
            submit(worker, number, Direction.STORE, _all_blocks())
            told = list[TransferResult]()
            task = asyncio.ensure_future(worker.done(number))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                told.append(await task)
            if not worker.wait([number], WAIT_S):
                raise Wrong(f"a transfer whose awaiter was cancelled has not ended after {WAIT_S:.0f} s")
            told += worker.poll()
            if [result.job_id for result in told] != [number] or told[0].error is not None:
                raise Wrong(f"cancelled after {steps} steps, a transfer's results were {told}: one expected")
            require_same("rows of a store whose awaiter was cancelled", rows, cache.cpu())

        for number, steps in enumerate(CANCEL_AFTER):
            asyncio.run(turn(number, steps))
    return f"cancelled after {', '.join(map(str, CANCEL_AFTER))} steps of the loop"


# What they stand on.


@contextmanager
def row_memory(device: Device, rows: int, size_bytes: int) -> Generator[torch.Tensor]:
    """Give rows that are a page longer than so many bytes, pinned for the device."""
    row_bytes = (size_bytes // PAGE_BYTES + 1) * PAGE_BYTES
    with Region.private(rows, row_bytes) as region, host_memory(region, device.pin_with) as memory:
        if device.pin_with is not None and not memory.pinned:
            raise Wrong(f"{rows * row_bytes:,} bytes of host memory could not be pinned")
        yield memory.rows


@contextmanager
def worker_of(
    caches: CanonicalKVCaches, slots: torch.Tensor, way: Way, blocks_per_chunk: int = 1, *, canonical: bool = False
) -> Generator[TransferWorker]:
    """Give a transfer worker that is closed at the end; `Wrong` if one of its transfers hangs."""
    worker = TransferWorker(caches, slots, blocks_per_chunk=blocks_per_chunk, canonical=canonical, copiers=way.copiers)
    closed = False
    try:
        yield worker
    finally:
        closed = worker.close(WAIT_S)
    if not closed:
        raise Wrong(f"a transfer has not ended after {WAIT_S:.0f} s")


@contextmanager
def large(device: Device, way: Way) -> Generator[tuple[torch.Tensor, torch.Tensor, TransferWorker]]:
    """Give one layer's cache, as many rows that are as long as its pages, and a worker between them."""
    spec = FullAttentionSpec(block_size=LARGE_PAGE_BYTES // 4_096, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config, axes = group_layers({"layer": spec}, LARGE_PAGES), {"layer": KV_JOINED_HND}
    canonical = canonical_kv_caches(config, allocate_tensors(config, axes, device.place), axes)
    (cache,) = canonical.tensors
    with row_memory(device, LARGE_PAGES, LARGE_PAGE_BYTES) as rows:
        slots = rows[:, :LARGE_PAGE_BYTES]
        with worker_of(canonical, slots, way) as worker:
            yield cache, slots, worker


def see_through(worker: TransferWorker, direction: Direction, groups: Sequence[GroupBlocks]) -> TransferResult:
    submit(worker, -1, direction, groups)
    return ended(worker, -1)


def submit(worker: TransferWorker, number: int, direction: Direction, groups: Sequence[GroupBlocks]) -> None:
    (worker.submit_store if direction is Direction.STORE else worker.submit_load)(number, groups)


def ended(worker: TransferWorker, number: int) -> TransferResult:
    """Return a transfer's result; `Wrong` if it failed, or does not end."""
    if not worker.wait([number], WAIT_S):
        raise Wrong(f"a transfer has not ended after {WAIT_S:.0f} s")
    result = asyncio.run(worker.done(number))
    if result.error is not None:
        raise Wrong(str(result.error))
    return result


def _all_blocks() -> list[GroupBlocks]:
    return [GroupBlocks(range(LARGE_PAGES), range(LARGE_PAGES))]


def _behind_a_spin(device: Device, work: Callable[[], object]) -> Callable[[], bool]:
    """Launch work behind a spinning kernel; return what says whether it is still to be done."""
    device.synchronize()
    device.spin(SPIN_S)
    device.launch(lambda: _done(work))
    reached = device.mark()
    return lambda: not reached()


def _done(work: Callable[[], object]) -> None:
    work()


def _until_in_time(device: Device, turn: Callable[[], bool], *, without_streams: bool = False) -> str:
    """Take turns until in one the transfer was submitted before the kernel had ended."""
    if not device.has_streams and not without_streams:
        raise NotHere(f"{device.name} has no streams: what is launched there is done at once")
    for number in range(TRIES):
        if turn():
            return f"submitted before the kernel had ended, in turn {number + 1}"
        if not device.has_streams:
            return "without streams"
    raise Wrong(f"in {TRIES} turns the kernel had ended before the transfer was submitted: nothing was proved")


def _overwrite(rows: torch.Tensor) -> None:
    """Write canaries, the last row first: a copy that is late is at the first ones."""
    for row in reversed(range(len(rows))):
        rows[row].fill_(CANARY)
