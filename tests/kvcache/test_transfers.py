"""Whatever a model's layout, what is stored comes back bit for bit and nothing else changes; and what is refused."""

import re
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError, TransferFailed
from kvtier.kvcache.layout import (
    CanonicalKVCaches,
    DataRef,
    PageMapping,
    PageRun,
    allocate_rows,
    allocate_tensors,
    canonical_kv_caches,
)
from kvtier.kvcache.transfer import NO_BLOCKS, Direction, GroupBlocks, TransferWorker, slot_layout, strided
from tests.kvcache.families import GROUPS, family
from tests.kvcache.models import contents, fill, models, requests, storages, touched

KIB = 1 << 10
PAGE_BYTES, BLOCKS = 48, 8

# The device is the same for all examples.
ONE_DEVICE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def every_way(monkeypatch):
    monkeypatch.setattr(strided, "RUN_BYTES_MIN", 100)
    monkeypatch.setattr(strided, "MEMMOVE_BYTES_MIN", 64)
    monkeypatch.setattr(strided, "CALL_BYTES_MAX", 150)


@ONE_DEVICE
@given(model=models(), data=st.data())
def test_what_is_stored_is_loaded_bit_for_bit_and_nothing_else_changes(model, data, device, every_way):
    num_rows, workers = 9, 2
    layers, canonical = model.allocate(device)
    groups = data.draw(requests(model.config, model.blocks_per_chunk, num_rows))
    for seed, memory in enumerate(storages(layers).values()):
        fill(memory, seed)
    slot_bytes = slot_layout(canonical, model.blocks_per_chunk).slot_bytes
    rows = torch.empty((num_rows, workers * slot_bytes + data.draw(st.sampled_from([0, 8, 64]))), dtype=torch.int8)
    fill(rows, 100)
    before, stored = rows.clone(), contents(model.config, model.axes, layers, groups)
    kept = {address: memory.clone() for address, memory in storages(layers).items()}
    slots = rows[:, slot_bytes : 2 * slot_bytes]
    with TransferWorker(canonical, slots, blocks_per_chunk=model.blocks_per_chunk) as worker:
        worker.submit_store(1, groups)
        assert worker.wait([1])
        used = sorted(row for group in groups for row in group.rows)
        others = [row for row in range(num_rows) if row not in used]
        assert torch.equal(rows[:, :slot_bytes], before[:, :slot_bytes])
        assert torch.equal(rows[:, 2 * slot_bytes :], before[:, 2 * slot_bytes :])
        assert torch.equal(rows[others], before[others])
        for address, memory in storages(layers).items():
            assert torch.equal(memory, kept[address])

        for seed, memory in enumerate(storages(layers).values()):
            fill(memory, 200 + seed)
        cleared = {address: memory.cpu().clone() for address, memory in storages(layers).items()}
        worker.submit_load(2, groups)
        assert worker.wait([2])
    assert contents(model.config, model.axes, layers, groups) == stored
    masks = touched(model, layers, canonical, groups)
    for address, memory in storages(layers).items():
        untouched = ~masks[address]
        assert torch.equal(memory.cpu()[untouched], cleared[address][untouched])
    store, load = sorted(worker.poll())
    assert (store.error, load.error) == (None, None)
    assert store.size_bytes == load.size_bytes


# Layers in each group, page bytes of each group's first layer, tensors (or rows), bytes of a block of one worker.
SHAPES = {
    "llama_3_8b": ([32], [64 * KIB], 32, 2 * KIB * KIB),
    "gemma_3_27b": ([10, 9, 9, 9, 9, 8, 8], [128 * KIB] * 7, 10, 1_280 * KIB),
    "gpt_oss_20b": ([12, 12], [32 * KIB] * 2, 12, 384 * KIB),
    "deepseek_v3": ([61], [73_728], 61, 61 * 73_728),
    "deepseek_v4": ([12, 8, 8, 4], [37_376, 37_376, 32_768, 32_768], 1, 8 * 37_440),
    "jamba": ([4] * 8, [320 * KIB] + [311_296] * 7, 4, 4 * 320 * KIB),
    "nemotron_h_8b": ([4] * 7, [2_112 * KIB] + [2_158_592] * 6, 4, 4 * 2_112 * KIB),
    "qwen_3_next": ([12] * 4, [1_088 * KIB] + [1_097_728] * 3, 12, 12 * 1_088 * KIB),
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_familys_pages_have_their_true_sizes_and_come_back_bit_for_bit(name):
    in_groups, page_bytes, tensors, block_bytes = SHAPES[name]
    made = family(name, len(in_groups) + 1)
    groups = [GroupBlocks([block], [block + 1]) for block in range(len(in_groups))]
    in_rows = allocate_rows(made.config, made.axes)
    ways = [(in_rows.layers, in_rows.canonical)]
    if name != "deepseek_v4":  # Its pages differ.
        layers = allocate_tensors(made.config, made.axes)
        ways.insert(0, (layers, canonical_kv_caches(made.config, layers, made.axes)))
    canonical = ways[0][1]
    assert [len(group.layers) for group in made.config.groups] == in_groups
    unpadded = [next(iter(group.layers.values())).unpadded_page_bytes for group in made.config.groups]
    assert (unpadded, len(canonical.tensors)) == (page_bytes, tensors)
    assert slot_layout(canonical).slot_bytes == block_bytes
    for layers, canonical in ways:
        for seed, memory in enumerate(storages(layers).values()):
            fill(memory, seed)
        stored = contents(made.config, made.axes, layers, groups)
        slots = torch.zeros((len(groups) + 1, slot_layout(canonical).slot_bytes), dtype=torch.int8)
        with TransferWorker(canonical, slots) as worker:
            worker.submit_store(1, groups)
            assert worker.wait([1])
            for memory in storages(layers).values():
                memory.zero_()
            worker.submit_load(2, groups)
            assert worker.wait([2])
        assert contents(made.config, made.axes, layers, groups) == stored


# Canonical pages: a token's heads lie together, and each worker has some of them; latent pages are every worker's.

HEADS, HEAD_BYTES, TOKENS, LATENT_BYTES = 8, 8, 4, 96
REQUEST = [GroupBlocks([4, 1, 3], [2, 0], 1), GroupBlocks([0, 5], [4], 0)]  # From the middle of a chunk of two.


def worker_of(tp_size, rank, device):
    """Return the caches of one of so many workers: two layers' heads, and a latent layer in the other group."""
    own, whole = HEADS // tp_size * HEAD_BYTES, TOKENS * HEADS * HEAD_BYTES
    runs = (PageRun(0, rank * own, own, TOKENS, own, HEADS * HEAD_BYTES),)
    heads = PageMapping(canonical_page_size_bytes=whole, runs=runs)
    latent = PageMapping(
        canonical_page_size_bytes=LATENT_BYTES,
        runs=(PageRun(0, 0, LATENT_BYTES),),
        num_writers=tp_size,
        writer_index=rank,
    )
    sizes = (TOKENS * own, TOKENS * own, LATENT_BYTES)
    tensors = tuple(torch.zeros((BLOCKS, size), dtype=torch.int8, device=device) for size in sizes)
    refs = [DataRef(0, sizes[0], mapping=heads), DataRef(1, sizes[1], mapping=heads)]
    return CanonicalKVCaches(tensors, (tuple(refs), (DataRef(2, LATENT_BYTES, mapping=latent),)))


def parts_of(tp_size, rank):
    own, dice = HEADS // tp_size, np.random.default_rng(1)
    tables = [
        torch.from_numpy(dice.integers(-128, 128, (BLOCKS, TOKENS, HEADS, HEAD_BYTES), dtype=np.int8)) for _ in range(2)
    ]
    latent = torch.from_numpy(dice.integers(-128, 128, (BLOCKS, LATENT_BYTES), dtype=np.int8))
    return [*(table[:, :, rank * own : (rank + 1) * own].flatten(1) for table in tables), latent]


def store_all(tp_size, device):
    slot_bytes = slot_layout(worker_of(tp_size, 0, device), 2, canonical=True).slot_bytes
    rows, moved = torch.zeros((5, slot_bytes + 32), dtype=torch.int8), list[int]()
    for rank in range(tp_size):
        caches = worker_of(tp_size, rank, device)
        for tensor, part in zip(caches.tensors, parts_of(tp_size, rank), strict=True):
            tensor.copy_(part)
        with TransferWorker(caches, rows, blocks_per_chunk=2, canonical=True) as worker:
            worker.submit_store(1, REQUEST)
        (result,) = worker.poll()
        assert result.error is None
        moved.append(result.size_bytes)
    return rows, moved


@pytest.mark.parametrize("writers", [1, 2, 4, 8])
def test_rows_written_by_some_workers_are_read_by_any_others(writers, device):
    alone, moved_alone = store_all(1, device)
    rows, moved = store_all(writers, device)
    assert torch.equal(rows, alone)
    assert [sum(moved)] == moved_alone  # Each byte was written once.
    for readers in (1, 2, 4, 8):
        for rank in range(readers):
            caches = worker_of(readers, rank, device)
            with TransferWorker(caches, rows, blocks_per_chunk=2, canonical=True) as worker:
                worker.submit_load(1, REQUEST)
            for number, (tensor, part) in enumerate(zip(caches.tensors, parts_of(readers, rank), strict=True)):
                expected, blocks = torch.zeros_like(part), list(REQUEST[number // 2].blocks)
                expected[blocks] = part[blocks]
                assert torch.equal(tensor.cpu(), expected)


def test_each_of_the_workers_that_hold_the_same_bytes_writes_its_turn(device):
    assert store_all(2, device)[1] == [3 * TOKENS * HEADS * HEAD_BYTES + LATENT_BYTES] * 2  # One of two latent pages.


def slot_caches(*groups):
    """Tensors with pages of 64 and 32 bytes; groups by tensor and what of its pages they use, in one of 3 workers."""

    def ref(tensor, used):
        return DataRef(
            tensor, used, mapping=PageMapping(canonical_page_size_bytes=3 * used, runs=(PageRun(0, 0, used),))
        )

    return CanonicalKVCaches(
        (torch.zeros((4, 64), dtype=torch.int8), torch.zeros((4, 32), dtype=torch.int8)),
        tuple(tuple(ref(*each) for each in group.items()) for group in groups),
    )


def test_a_chunk_has_its_pages_tensor_after_tensor():
    layout = slot_layout(slot_caches({0: 60, 1: 32}), blocks_per_chunk=3)  # Workers' own, with their padding.
    assert (layout.offsets, layout.page_bytes, layout.slot_bytes) == ((0, 192), (64, 32), 288)
    for groups in ([{0: 60, 1: 32}, {0: 40, 1: 8}], [{0: 40, 1: 8}, {0: 60, 1: 32}]):
        layout = slot_layout(slot_caches(*groups), blocks_per_chunk=2, canonical=True)  # As long as the longest.
        assert (layout.offsets, layout.page_bytes, layout.slot_bytes) == ((0, 360), (180, 96), 552)
    with pytest.raises(ConfigError, match="blocks_per_chunk: 0 given, at least 1 accepted"):
        slot_layout(slot_caches({0: 64}), blocks_per_chunk=0)


def caches_on(device, groups=1):
    tensor = torch.arange(BLOCKS, dtype=torch.int8, device=device)[:, None].repeat(1, PAGE_BYTES)
    return CanonicalKVCaches((tensor,), ((DataRef(0, PAGE_BYTES),),) * groups)


def slots_for(rows, blocks_per_chunk=1):
    return torch.full((rows, blocks_per_chunk * PAGE_BYTES), -1, dtype=torch.int8)


def test_a_closed_worker_has_no_thread_that_would_free_tensors_while_the_process_exits():
    slow_to_go = type("SlowToGo", (), {"__call__": lambda self: None, "__del__": lambda self: time.sleep(0.2)})
    copier = type("Copier", (strided.HostCopier,), {"begin": lambda self, job: slow_to_go()})
    worker = TransferWorker(caches_on("cpu"), slots_for(3), copiers=lambda sides: [copier(sides)])
    worker.submit_store(1, [GroupBlocks([4], [0])])
    assert worker.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-copies"]


def test_a_worker_that_cannot_start_all_its_threads_leaves_none(monkeypatch):
    begun = []

    def start_thread(thread):
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        thread.start()

    monkeypatch.setattr("kvtier.kvcache.transfer.worker.start_thread", start_thread)
    with pytest.raises(RuntimeError, match="can't start"):
        TransferWorker(caches_on("cpu"), slots_for(3), copiers=lambda sides: [strided.HostCopier(sides)] * 2)
    assert not begun[0].is_alive()


def test_a_load_of_a_block_that_is_being_stored_comes_after(device):
    caches, slots = caches_on(device), slots_for(3)
    slots[2] = 99
    with TransferWorker(caches, slots) as worker:
        for number in range(50):
            worker.submit_store(2 * number, [GroupBlocks([4], [0])])
            worker.submit_load(2 * number + 1, [GroupBlocks([4], [2])])
            worker.submit_store(1_000 + number, [GroupBlocks([4], [1])])
    assert (slots[:, 0].tolist(), caches.tensors[0][4, 0]) == ([99, 99, 99], 99)


@pytest.mark.parametrize(
    ("first_block", "blocks", "rows", "expected"),
    [
        (0, [7, 6, 5], [2], [[-1, -1, -1], [-1, -1, -1], [7, 6, 5]]),
        (1, [7, 6, 5], [2, 0], [[5, -1, -1], [-1, -1, -1], [-1, 7, 6]]),
        (5, [7, 6], [1, 0], [[6, -1, -1], [-1, -1, 7], [-1, -1, -1]]),
        (3, [7], [1], [[-1, -1, -1], [7, -1, -1], [-1, -1, -1]]),
    ],
)
def test_a_request_may_begin_and_end_inside_a_chunk(device, first_block, blocks, rows, expected):
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
def test_unknown_blocks_and_rows_are_refused_and_nothing_moves(groups, message):
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
def test_slots_that_chunks_do_not_fit_into_are_refused(slots):
    with pytest.raises(ConfigError, match=r"\(rows, 48 or more\) int8 side by side in host memory accepted"):
        TransferWorker(caches_on("cpu"), slots)


def test_caches_on_several_devices_or_on_an_unknown_one_are_refused():
    here, there = caches_on("cpu"), caches_on("meta")
    both = CanonicalKVCaches((*here.tensors, *there.tensors), (*here.groups, (DataRef(1, PAGE_BYTES),)))
    with pytest.raises(ConfigError, match="caches on cpu and meta: one device accepted"):
        TransferWorker(both, torch.zeros((3, 2 * PAGE_BYTES), dtype=torch.int8))
    with pytest.raises(ConfigError, match="caches on meta: cpu or cuda accepted"):
        TransferWorker(there, slots_for(1))


class Failing:
    directions = (Direction.LOAD, Direction.STORE)
    ahead = 2
    at_begin = {1: RuntimeError("no stream"), 4: MemoryError("no room for addresses"), 5: IndexError("no such page")}  # noqa: RUF012

    def mark(self):
        return None

    def begin(self, job):
        if job.job_id in self.at_begin:
            raise self.at_begin[job.job_id]
        return self._fail if job.job_id == 2 else lambda: None

    def _fail(self):
        raise RuntimeError("an illegal address")


def test_a_transfer_that_fails_says_so_and_the_others_go_on():
    with TransferWorker(caches_on("cpu"), slots_for(4), copiers=lambda sides: [Failing()]) as worker:
        for number in (1, 2, 4, 5, 3):
            worker.submit_store(number, [GroupBlocks([number], [number % 4])])
        assert worker.wait([1, 2, 3, 4, 5], timeout_s=30)
        errors = {result.job_id: result.error for result in worker.poll()}
    assert errors.pop(3) is None
    assert all(isinstance(error, TransferFailed) for error in errors.values())
    assert {number: str(error) for number, error in errors.items()} == {
        1: "store 1 of 48 bytes: no stream",
        2: "store 2 of 48 bytes: an illegal address",
        4: "store 4 of 48 bytes: no room for addresses",
        5: "store 5 of 48 bytes: no such page",
    }
