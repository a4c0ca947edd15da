"""Transfers on the device, by each way to copy: many at once, and rows after their release."""

import random
from contextlib import contextmanager

import pytest
import torch

from kvtier.kvcache.transfer import Direction, GroupBlocks, slot_layout
from kvtier.tools.selftest_checks import (
    CANARY,
    ROWS,
    TRIES,
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
from tests.gpu.test_checks import Hasty, copiers_of

MANY = 200  # Transfers in flight at once.
PAGES, PAGE_BYTES = 64, 256 << 10  # 16 MiB: a third of a millisecond of a fast link.
EVERYTHING = [GroupBlocks(range(PAGES), range(PAGES))]


@contextmanager
def cache_and_slots(device):
    layer = plain_caches(1, PAGES, PAGE_BYTES, device.place)
    with worker_and_rows(device, layer, PAGES) as (worker, rows):
        yield layer.tensors[0], rows[:, :PAGE_BYTES], worker


def test_of_many_transfers_at_once_the_later_one_wins(each_device):
    family = families()[0]
    here, twin = caches_of(family, each_device.place), caches_of(family, torch.device("cpu"))
    here.fill(1)
    twin.fill(1)
    each_device.synchronize()
    slots, dice = slot_layout(here.canonical, family.blocks_per_chunk), random.Random(3)
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


def rows_are_let_go(direction, device):
    """Write canaries over rows when their transfer's result is reported, the last row first: it is late at the first.

    Of a store, all canaries must live; of a load, the blocks must have the bytes from before.
    """
    with cache_and_slots(device) as (cache, rows, worker):
        right, canaries = random_bytes(tuple(rows.shape), 1), torch.full_like(rows, CANARY)
        for _ in range(TRIES):
            cache.fill_(1)
            rows.copy_(right)
            pending = device.launch_late(lambda: None) if device.has_streams else lambda: True
            submit(worker, direction, EVERYTHING)
            in_time = pending()
            finished(worker)
            for row in reversed(range(len(rows))):
                rows[row].fill_(CANARY)
            device.synchronize()
            require_same("rows that were let go", rows, canaries)
            if direction is Direction.LOAD:
                require_same("blocks whose rows were let go", cache, right)
            if in_time:
                return
    pytest.fail("no transfer was submitted before the kernel had finished")


@pytest.mark.parametrize("direction", Direction)
def test_rows_are_the_callers_when_their_transfer_is_reported(direction, each_device):
    rows_are_let_go(direction, each_device)


@pytest.mark.parametrize("direction", Direction)
def test_a_result_that_comes_early_is_found(direction, modelled):
    modelled.copiers = copiers_of(Hasty, at_once=False)
    with pytest.raises(Wrong) as _wrong:  # Its frames keep the memory.
        rows_are_let_go(direction, modelled)
    modelled.synchronize()  # Before the memory goes.
