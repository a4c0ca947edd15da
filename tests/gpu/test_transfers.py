"""Transfers on the device, by each way to copy: many at once, and rows after their release."""

import random
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch

from kvtier.kvcache.transfer import Direction, GroupBlocks, TransferWorker, slot_layout
from kvtier.tools.selftest_checks import (
    CANARY,
    ROWS,
    TRIES,
    TorchDevice,
    Wrong,
    caches_of,
    families,
    finished,
    move_by_hand,
    plain_caches,
    random_bytes,
    requests_of,
    require_same,
    submit,
    worker_and_rows,
)
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


def test_rows_are_not_written_after_their_store(each_device: TorchDevice) -> None:
    rows_of_a_store_are_let_go(each_device)


def test_rows_are_not_read_after_their_load(each_device: TorchDevice) -> None:
    rows_of_a_load_are_let_go(each_device)


def test_a_result_that_comes_early_is_found_by_both(modelled: Modelled) -> None:
    modelled.copiers = copiers_of(Hasty, at_once=False)
    with pytest.raises(Wrong):
        rows_of_a_store_are_let_go(modelled)
    with pytest.raises(Wrong) as _wrong:  # Its frames keep the memory.
        rows_of_a_load_are_let_go(modelled)
    modelled.synchronize()  # Before the memory goes.
