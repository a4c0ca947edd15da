"""The worker as an engine uses it: submitted, polled or awaited, closed; and what it refuses."""

import asyncio
import re

import pytest
import torch

from kvtier.errors import ConfigError, TransferFailed
from kvtier.kvcache.layout import CanonicalKVCaches, DataRef, ParallelConfig
from kvtier.kvcache.layout.mapping import own_part
from kvtier.kvcache.transfer import NO_BLOCKS, Direction, GroupBlocks, TransferWorker
from kvtier.kvcache.transfer import worker as worker_module
from kvtier.kvcache.transfer.jobs import CopyJob, Finish
from kvtier.memory.region import Region, RowLayout
from kvtier_backends.cpu import CpuMemory, cuda_runtime

PAGE_BYTES = 48
BLOCKS = 8


def caches_on(device: str, groups: int = 1) -> CanonicalKVCaches:
    tensor = torch.arange(BLOCKS, dtype=torch.int8, device=device)[:, None].repeat(1, PAGE_BYTES)
    ref = DataRef(0, PAGE_BYTES, ("layer",), own_part(PAGE_BYTES, ParallelConfig()))
    return CanonicalKVCaches((tensor,), ((ref,),) * groups)


def slots_for(rows: int, blocks_per_chunk: int = 1) -> torch.Tensor:
    return torch.full((rows, blocks_per_chunk * PAGE_BYTES), -1, dtype=torch.int8)


async def test_a_store_and_a_load_are_awaited(device: str) -> None:
    caches, slots = caches_on(device), slots_for(4)
    with TransferWorker(caches, slots) as worker:
        worker.submit_store(1, [GroupBlocks([5, 3], [0, 2])])
        stored = await worker.done(1)
        assert slots[:, 0].tolist() == [5, -1, 3, -1]
        worker.submit_load(2, [GroupBlocks([0, 1], [2, 0])])
        loaded = await worker.done(2)
    assert caches.tensors[0][:, 0].tolist() == [3, 5, 2, 3, 4, 5, 6, 7]
    assert [(result.direction, result.size_bytes, result.error) for result in (stored, loaded)] == [
        (Direction.STORE, 2 * PAGE_BYTES, None),
        (Direction.LOAD, 2 * PAGE_BYTES, None),
    ]


async def test_many_transfers_are_awaited_side_by_side(device: str) -> None:
    slots = slots_for(BLOCKS)
    with TransferWorker(caches_on(device), slots) as worker:
        for block in range(BLOCKS):
            worker.submit_store(block, [GroupBlocks([block], [BLOCKS - 1 - block])])
        results = await asyncio.gather(*(worker.done(block) for block in range(BLOCKS)))
    assert [result.job_id for result in results] == list(range(BLOCKS))
    assert slots[:, 0].tolist() == list(reversed(range(BLOCKS)))


def test_a_load_of_a_block_that_is_being_stored_comes_after(device: str) -> None:
    caches, slots = caches_on(device), slots_for(3)
    slots[2] = 99
    with TransferWorker(caches, slots) as worker:
        for number in range(50):
            worker.submit_store(2 * number, [GroupBlocks([4], [0])])
            worker.submit_load(2 * number + 1, [GroupBlocks([4], [2])])
            worker.submit_store(1_000 + number, [GroupBlocks([4], [1])])
    assert slots[:, 0].tolist() == [99, 99, 99]
    assert caches.tensors[0][4, 0] == 99


@pytest.mark.parametrize(
    ("first_block", "blocks", "rows", "expected"),
    [
        (0, [7, 6, 5], [2], [[-1, -1, -1], [-1, -1, -1], [7, 6, 5]]),
        (1, [7, 6, 5], [2, 0], [[5, -1, -1], [-1, -1, -1], [-1, 7, 6]]),
        (5, [7, 6], [1, 0], [[6, -1, -1], [-1, -1, 7], [-1, -1, -1]]),
        (3, [7], [1], [[-1, -1, -1], [7, -1, -1], [-1, -1, -1]]),
    ],
)
def test_a_request_may_begin_and_end_inside_a_chunk(
    device: str, first_block: int, blocks: list[int], rows: list[int], expected: list[list[int]]
) -> None:
    slots = slots_for(3, blocks_per_chunk=3)
    with TransferWorker(caches_on(device), slots, blocks_per_chunk=3) as worker:
        worker.submit_store(1, [GroupBlocks(blocks, rows, first_block)])
    pages = slots.view(3, 3, PAGE_BYTES)
    assert torch.equal(pages, pages[:, :, :1].expand(-1, -1, PAGE_BYTES))
    assert pages[:, :, 0].tolist() == expected


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "blocks of 0 groups given, the caches have 2"),
        ([NO_BLOCKS, GroupBlocks([1], [])], "1 blocks from number 0 on lie in 1 chunks of 2, 0 rows given"),
        ([NO_BLOCKS, GroupBlocks([1, 2], [0], 1)], "2 blocks from number 1 on lie in 2 chunks of 2, 1 rows given"),
        ([NO_BLOCKS, GroupBlocks([8], [0])], "block 8 of 8"),
        ([NO_BLOCKS, GroupBlocks([-1], [0])], "block -1 of 8"),
        ([NO_BLOCKS, GroupBlocks([1], [3])], "row 3 of 3"),
    ],
)
def test_unknown_blocks_and_rows_are_refused_and_nothing_moves(groups: list[GroupBlocks], message: str) -> None:
    slots = slots_for(3, 2)
    with TransferWorker(caches_on("cpu", groups=2), slots, blocks_per_chunk=2) as worker:
        with pytest.raises(ValueError, match=re.escape(message)):
            worker.submit_store(1, groups)
        worker.submit_store(1, [NO_BLOCKS, NO_BLOCKS])  # The id is free, and nothing is a transfer, too.
        assert worker.wait([1])
        assert worker.poll()[0].size_bytes == 0
    assert bool((slots == -1).all())


@pytest.mark.parametrize(
    "slots",
    [
        torch.zeros((3, 47), dtype=torch.int8),
        torch.zeros((3, 48)),
        torch.zeros(48, dtype=torch.int8),
        torch.zeros((3, 48), dtype=torch.int8, device="meta"),
        torch.zeros((48, 3), dtype=torch.int8).t(),
    ],
)
def test_slots_that_chunks_do_not_fit_into_are_refused(slots: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"\(rows, 48 or more\) int8 side by side in host memory accepted"):
        TransferWorker(caches_on("cpu"), slots)


def test_caches_on_several_devices_or_on_an_unknown_one_are_refused() -> None:
    here, there = caches_on("cpu"), caches_on("meta")
    both = CanonicalKVCaches((*here.tensors, *there.tensors), (*here.groups, (there.groups[0][0]._replace(tensor=1),)))
    with pytest.raises(ConfigError, match="caches on cpu and meta: one device accepted"):
        TransferWorker(both, torch.zeros((3, 2 * PAGE_BYTES), dtype=torch.int8))
    with pytest.raises(ConfigError, match="caches on meta: cpu or cuda accepted"):
        TransferWorker(there, slots_for(1))


class Failing:
    """A copier that fails to begin the first transfer, the fourth and the fifth, and to end the second."""

    directions = (Direction.LOAD, Direction.STORE)
    ahead = 2

    def mark(self) -> object:
        return None

    def begin(self, job: CopyJob) -> Finish:
        if job.job_id == 1:
            raise RuntimeError("no stream")
        if job.job_id == 4:
            raise MemoryError("no room for addresses")
        if job.job_id == 5:
            raise IndexError("no such page")
        return self._fail if job.job_id == 2 else lambda: None

    def _fail(self) -> None:
        raise RuntimeError("an illegal address")


def test_a_transfer_that_fails_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_copiers", lambda sides: [Failing()])
    with TransferWorker(caches_on("cpu"), slots_for(4)) as worker:
        for number in (1, 2, 4, 5, 3):
            worker.submit_store(number, [GroupBlocks([number], [number % 4])])
        assert worker.wait([1, 2, 3, 4, 5], timeout_s=30)
        errors = {result.job_id: result.error for result in worker.poll()}
    assert isinstance(errors[1], TransferFailed)
    assert isinstance(errors[2], TransferFailed)
    assert str(errors[1]) == "store 1 of 48 bytes: no stream"
    assert str(errors[2]) == "store 2 of 48 bytes: an illegal address"
    assert str(errors[4]) == "store 4 of 48 bytes: no room for addresses"
    assert str(errors[5]) == "store 5 of 48 bytes: no such page"
    assert errors[3] is None


def test_a_closed_worker_refuses_and_may_be_closed_again() -> None:
    worker = TransferWorker(caches_on("cpu"), slots_for(4))
    worker.submit_store(1, [GroupBlocks([1], [1])])
    assert worker.close()
    assert worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit_load(2, [GroupBlocks([1], [1])])
    assert [result.job_id for result in worker.poll()] == [1]


def test_workers_share_the_rows_of_the_primary(device: str) -> None:
    layout = RowLayout(slot_bytes=2 * PAGE_BYTES, workers=3)
    with (
        Region.private(4, layout.row_bytes) as region,
        CpuMemory(region, pin_with=cuda_runtime() if device == "cuda" else None) as memory,
    ):
        for rank in range(3):
            caches = caches_on(device)
            caches.tensors[0].add_(10 * rank)
            with TransferWorker(caches, memory.slots(layout, rank), blocks_per_chunk=2) as worker:
                worker.submit_store(1, [GroupBlocks([3, 4], [2])])
        row = bytes(region.row(2))
        assert row[: 6 * PAGE_BYTES : PAGE_BYTES] == bytes([3, 4, 13, 14, 23, 24])
        assert not any(row[6 * PAGE_BYTES :])
