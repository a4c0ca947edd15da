"""Transfers on the device, by each way to copy: many at once, rows after their release, waits that are cancelled."""

import asyncio
import random
from collections.abc import Generator
from contextlib import contextmanager, suppress

import pytest
import torch

from kvtier.kvcache.layout import FullAttentionSpec, ParallelConfig, allocate_tensors, canonical_kv_caches, group_layers
from kvtier.kvcache.layout.axes import KV_JOINED_HND
from kvtier.kvcache.transfer import Direction, GroupBlocks, TransferResult, TransferWorker, slot_layout
from kvtier.memory import Region
from kvtier.tools.selftest.caches import (
    BLOCKS,
    caches_of,
    families,
    move_by_hand,
    plain_caches,
    random_bytes,
    requests_of,
    require_same,
)
from kvtier.tools.selftest.checks import CANARY, ROWS, TRIES, finished, submit, transfer, worker_and_rows
from kvtier.tools.selftest.device import TorchDevice, Wrong, host
from tests.gpu.modelled import Modelled
from tests.gpu.test_checks import Hasty, copiers_of

MANY = 200  # Transfers in flight at once.
PAGES, PAGE_BYTES = 64, 256 << 10  # 16 MiB: a third of a millisecond of a fast link.
EVERYTHING = [GroupBlocks(range(PAGES), range(PAGES))]

Place = tuple[torch.Tensor, torch.Tensor, TransferWorker]


@contextmanager
def cache_and_slots(device: TorchDevice) -> Generator[Place]:
    """Give one layer's cache, as many slots as it has pages, and a worker between them."""
    layer = plain_caches(1, PAGES, PAGE_BYTES, device.place)
    with worker_and_rows(device, layer, PAGES) as (worker, rows):
        yield layer.tensors[0], rows[:, :PAGE_BYTES], worker


def submit_late(device: TorchDevice, worker: TransferWorker, direction: Direction) -> bool:
    """Submit a transfer of everything behind a kernel that spins; return True if that was in time."""
    pending = device.launch_late(lambda: None) if device.has_streams else lambda: True
    submit(worker, direction, EVERYTHING)
    return pending()


def test_of_many_transfers_at_once_the_later_one_wins(each_device: TorchDevice) -> None:
    family = families()[0]
    here, twin = caches_of(family, each_device.place), caches_of(family, torch.device("cpu"))
    here.fill(1)
    twin.fill(1)
    each_device.synchronize()
    slots = slot_layout(here.canonical, family.blocks_per_chunk)
    dice = random.Random(3)
    with worker_and_rows(each_device, here.canonical, ROWS, family.blocks_per_chunk) as (worker, rows):
        right = rows.copy_(random_bytes(tuple(rows.shape), 2)).clone()
        for number in range(MANY):
            direction, groups = dice.choice(list(Direction)), requests_of(family, ROWS, 10 + number)
            submit(worker, direction, groups, number)
            move_by_hand(direction, twin.canonical, slots, right, groups)
        worker.wait(range(MANY))
        assert [result.error for result in worker.poll()] == [None] * MANY
        require_same("rows", rows, right)
        for memory, expected in zip(here.memories, twin.memories, strict=True):
            require_same("caches", memory, expected)


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1)])
def test_canonical_rows_of_some_workers_are_read_by_others(
    writers: int, readers: int, each_device: TorchDevice
) -> None:
    heads, layers, blocks = 8, 3, list(range(0, BLOCKS, 2))
    spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=32, dtype=torch.bfloat16)
    whole = [random_bytes((BLOCKS, heads, spec.page_bytes // heads), layer) for layer in range(layers)]
    request = [GroupBlocks(blocks, list(reversed(range(len(blocks)))))]
    with (
        Region.private(len(blocks), layers * spec.page_bytes) as region,
        host.CpuMemory(region, pin_with=each_device.pin_with) as memory,
    ):
        for count, direction in ((writers, Direction.STORE), (readers, Direction.LOAD)):
            for rank in range(count):
                mine = slice(rank * heads // count, (rank + 1) * heads // count)
                names = list(map(str, range(layers)))
                own = FullAttentionSpec(block_size=16, num_kv_heads=heads // count, head_size=32, dtype=spec.dtype)
                config, axes = group_layers(dict.fromkeys(names, own), BLOCKS), dict.fromkeys(names, KV_JOINED_HND)
                caches = canonical_kv_caches(
                    config,
                    allocate_tensors(config, axes, each_device.place),
                    axes,
                    parallel=ParallelConfig(tp_size=count, rank=rank),
                    total_kv_heads=heads,
                )
                for tensor, right in zip(caches.tensors, whole, strict=True):
                    if direction is Direction.STORE:
                        tensor.copy_(right[:, mine].reshape(tensor.shape))
                with TransferWorker(caches, memory.rows, canonical=True, copiers=each_device.copiers) as worker:
                    transfer(worker, direction, request)
                each_device.synchronize()
                for tensor, right in zip(caches.tensors, whole, strict=True):
                    require_same(f"heads of worker {rank}", tensor[blocks], right[blocks][:, mine].flatten(1))


def overwrite(rows: torch.Tensor) -> None:
    """Write canaries, the last row first: a copy that is late is at the first ones."""
    for row in reversed(range(len(rows))):
        rows[row].fill_(CANARY)


def rows_of_a_store_are_let_go(device: TorchDevice) -> None:
    """Write canaries over rows when their store's result is reported: all of them must live."""
    with cache_and_slots(device) as (cache, rows, worker):
        for _ in range(TRIES):
            cache.fill_(1)
            in_time = submit_late(device, worker, Direction.STORE)
            finished(worker)
            overwrite(rows)
            device.synchronize()
            require_same("rows that a store let go", rows, torch.full_like(rows, CANARY))
            if in_time:
                return
    pytest.fail("no store was submitted before the kernel had finished")


def rows_of_a_load_are_let_go(device: TorchDevice) -> None:
    """Write canaries over rows when their load's result is reported: the blocks must have the bytes from before."""
    with cache_and_slots(device) as (cache, rows, worker):
        right = random_bytes(tuple(rows.shape), 1)
        for _ in range(TRIES):
            cache.fill_(1)
            rows.copy_(right)
            in_time = submit_late(device, worker, Direction.LOAD)
            finished(worker)
            overwrite(rows)
            device.synchronize()
            require_same("blocks whose rows were let go", cache, right)
            if in_time:
                return
    pytest.fail("no load was submitted before the kernel had finished")


async def a_cancelled_wait(device: TorchDevice, steps: int) -> None:
    """Cancel the wait for a store after some steps of the loop: its result is reported once, and it is made."""
    with cache_and_slots(device) as (cache, rows, worker):
        rows.fill_(CANARY)
        cache.copy_(random_bytes(tuple(cache.shape), steps))
        submit_late(device, worker, Direction.STORE)
        results = list[TransferResult]()
        task = asyncio.ensure_future(worker.done(1))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            results.append(await task)
        worker.wait([1])
        results += worker.poll()
        assert [(result.job_id, result.error) for result in results] == [(1, None)]
        require_same("rows of a store whose wait was cancelled", rows, cache.cpu())


def test_rows_are_not_written_after_their_store(each_device: TorchDevice) -> None:
    rows_of_a_store_are_let_go(each_device)


def test_rows_are_not_read_after_their_load(each_device: TorchDevice) -> None:
    rows_of_a_load_are_let_go(each_device)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
async def test_a_cancelled_wait_cancels_no_transfer(steps: int, each_device: TorchDevice) -> None:
    await a_cancelled_wait(each_device, steps)


async def test_a_result_that_comes_early_is_found_by_all_three(modelled: Modelled) -> None:
    modelled.copiers = copiers_of(Hasty, at_once=False)
    with pytest.raises(Wrong):
        rows_of_a_store_are_let_go(modelled)
    with pytest.raises(Wrong):
        rows_of_a_load_are_let_go(modelled)
    with pytest.raises(Wrong) as _wrong:  # Its frames keep the memory.
        await a_cancelled_wait(modelled, 1)
    modelled.synchronize()  # Before the memory goes.
