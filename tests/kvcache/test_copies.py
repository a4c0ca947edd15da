"""Every way to copy moves the same bytes: by index, and by addresses as a copy engine gets them, or one by one."""

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.kvcache.layout import CanonicalKVCaches, DataRef, PageMapping, PageRun
from kvtier.kvcache.transfer import cuda, strided
from kvtier.kvcache.transfer.cuda import descriptors, joined
from kvtier.kvcache.transfer.jobs import CopyJob
from kvtier.kvcache.transfer.pages import (
    Direction,
    GroupBlocks,
    Piece,
    Repeat,
    Sides,
    _merged,
    pages_of,
    pieces_of,
    slot_layout,
)
from kvtier.kvcache.transfer.strided import HostCopier
from tests.kvcache.models import fill, models, requests, storages

NUM_ROWS = 7


def by_index(sides):
    copier = HostCopier(sides)
    return lambda direction, groups: copier.begin(CopyJob(1, direction, groups))()


def by_address(sides):
    def move(direction, groups):
        columns = (each.tolist() for each in descriptors(sides, direction, groups))
        for source, target, size in zip(*columns, strict=True):
            ctypes.memmove(target, source, size)

    return move


def one_by_one(sides):
    copy = cuda.one_by_one(sides)
    return lambda direction, groups: copy(CopyJob(1, direction, groups))


@pytest.fixture(params=[by_address, one_by_one], ids=lambda strategy: strategy.__name__)
def strategy(request, monkeypatch):
    monkeypatch.setattr(strided, "RUN_BYTES_MIN", 100)  # So that each way by index is taken by some models.
    monkeypatch.setattr(strided, "MEMMOVE_BYTES_MIN", 64)
    return request.param


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(model=models(), data=st.data(), canonical_rows=st.booleans(), rank=st.integers(0, 3))
def test_each_strategy_moves_what_copies_by_index_move(model, data, canonical_rows, rank, strategy):
    layers, caches = model.allocate("cpu")
    caches = in_a_group_of_four(caches, rank)
    layout = slot_layout(caches, model.blocks_per_chunk, canonical=canonical_rows)
    slots = torch.empty((NUM_ROWS, layout.slot_bytes + 24), dtype=torch.int8)[:, 8 : 8 + layout.slot_bytes]
    groups = data.draw(requests(model.config, model.blocks_per_chunk, NUM_ROWS))
    pages = tuple(
        pages_of(group, model.blocks_per_chunk, num_blocks=caches.num_blocks, num_rows=NUM_ROWS) for group in groups
    )
    sides = Sides(pieces_of(caches, layout), slots, model.blocks_per_chunk, caches.num_blocks)
    for direction in (Direction.STORE, Direction.LOAD):
        ways = (by_index(sides), strategy(sides))
        one, other = (moved(way, direction, pages, slots, layers) for way in ways)
        assert one == other


def in_a_group_of_four(caches, rank):
    """Four workers take turns with the first group's pages; the other pages are each one's own."""

    def mapped(ref, group):
        size = ref.page_bytes
        if not group:
            return ref._replace(
                mapping=PageMapping(
                    canonical_page_size_bytes=size, runs=(PageRun(0, 0, size),), num_writers=4, writer_index=rank
                )
            )
        return ref._replace(
            mapping=PageMapping(canonical_page_size_bytes=4 * size, runs=(PageRun(0, rank * size, size),))
        )

    groups = (tuple(mapped(ref, number) for ref in refs) for number, refs in enumerate(caches.groups))
    return caches._replace(groups=tuple(groups))


def moved(move, direction, pages, slots, layers):
    for seed, memory in enumerate(storages(layers).values()):
        fill(memory, seed)
    rows = slots._base
    fill(rows, 50)
    move(direction, pages)
    return [memory.numpy().tobytes() for memory in (*storages(layers).values(), rows)]


@pytest.mark.parametrize("scattered", ["blocks", "rows", "both", "neither"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_runs_are_assigned_and_scattered_pages_moved_one_by_one_or_in_tiles(scattered, blocks_per_chunk, monkeypatch):
    """Bytes are the same whichever way is taken: the limits between them are moved so that each is."""
    chunks, page_bytes = 8, 64
    count, random = chunks * blocks_per_chunk, np.random.default_rng(7)
    blocks = random.permutation(count) if scattered in ("blocks", "both") else np.arange(count)
    rows = random.permutation(2 * chunks)[:chunks] if scattered in ("rows", "both") else np.arange(3, 3 + chunks)
    cache = torch.empty((count, page_bytes), dtype=torch.int8)
    fill(cache, 1)
    for run_bytes_min, memmove_bytes_min in ((1 << 40, 1 << 40), (1 << 40, 0), (0, 0), (4 * page_bytes, 1 << 40)):
        monkeypatch.setattr(strided, "RUN_BYTES_MIN", run_bytes_min)
        monkeypatch.setattr(strided, "MEMMOVE_BYTES_MIN", memmove_bytes_min)
        monkeypatch.setattr(strided, "TILE_BYTES", 200)
        monkeypatch.setattr(strided, "CALL_BYTES_MAX", 300)
        slots = torch.zeros((2 * chunks, blocks_per_chunk * page_bytes), dtype=torch.int8)
        piece = Piece(cache, 0, page_bytes, 0, page_bytes, page_bytes, ())
        pages = pages_of(GroupBlocks(blocks, rows), blocks_per_chunk, num_blocks=len(cache), num_rows=len(slots))
        one = strided.strided(piece, Sides(((piece,),), slots, blocks_per_chunk, len(cache)))
        strided.copy_alike(Direction.STORE, [one], pages)
        expected = torch.zeros_like(slots)
        expected[rows] = cache[blocks].view(chunks, -1)
        assert torch.equal(slots, expected)
        before = cache.clone()
        fill(cache, 2)
        strided.copy_alike(Direction.LOAD, [one], pages)
        assert torch.equal(cache, before)


@pytest.mark.parametrize("limits", [(0, 0), (1 << 40, 0), (1 << 40, 1 << 40)], ids=["runs", "one by one", "tiles"])
def test_repeats_may_lie_at_distances_that_are_no_multiples_of_their_length(limits, monkeypatch):
    monkeypatch.setattr(strided, "RUN_BYTES_MIN", limits[0])
    monkeypatch.setattr(strided, "MEMMOVE_BYTES_MIN", limits[1])
    cache, slots = torch.empty((4, 48), dtype=torch.int8), torch.zeros((4, 64), dtype=torch.int8)
    fill(cache, 1)
    piece = Piece(cache, 0, 48, 0, 64, 16, (Repeat(2, 24, 40),))
    pages = pages_of(GroupBlocks([3, 0, 1], [1, 2, 0]), 1, num_blocks=4, num_rows=4)
    strided.copy_alike(Direction.STORE, [strided.strided(piece, Sides(((piece,),), slots, 1, 4))], pages)
    expected = torch.zeros_like(slots)
    expected[[1, 2, 0], :16], expected[[1, 2, 0], 40:56] = cache[[3, 0, 1], :16], cache[[3, 0, 1], 24:40]
    assert torch.equal(slots, expected)


def test_pieces_that_are_alike_but_for_whose_turn_it_is_move_apart():
    everyones, shared = (torch.full((4, 32), value, dtype=torch.int8) for value in (1, 2))
    slots = torch.zeros((4, 64), dtype=torch.int8)
    pieces = (Piece(everyones, 0, 32, 0, 64, 32, ()), Piece(shared, 0, 32, 32, 64, 32, (), 2, 1))
    pages = pages_of(GroupBlocks(range(4), range(4)), 1, num_blocks=4, num_rows=4)
    by_index(Sides((pieces,), slots, 1, 4))(Direction.STORE, (pages,))
    assert slots[:, [0, 32]].tolist() == [[1, 0], [1, 2], [1, 0], [1, 2]]


def test_neighbours_on_both_sides_are_one_copy():
    columns = ([300, 100, 110, 500], [30, 10, 20, 40], [10, 10, 10, 10], [3, 3, 3, 3])
    copies = joined(*(np.array(column) for column in columns))
    assert [column.tolist() for column in copies] == [[100, 300, 500], [10, 30, 40], [20, 10, 10]]


@pytest.mark.parametrize("direction", Direction)
def test_no_copy_reaches_from_one_row_into_the_next(direction):
    """Rows are pinned in slices: a copy over two of them is refused, and rows that are neighbours may lie in two."""
    caches = CanonicalKVCaches((torch.zeros((6, 64), dtype=torch.int8),), ((DataRef(0, 64),),))
    slots = torch.zeros((3, 128), dtype=torch.int8)
    pages = pages_of(GroupBlocks(range(6), range(3)), 2, num_blocks=6, num_rows=3)
    copies = descriptors(
        Sides(pieces_of(caches, slot_layout(caches, 2)), slots, 2, caches.num_blocks), direction, (pages,)
    )
    assert copies.sizes.tolist() == [128, 128, 128]  # The two blocks of a chunk are neighbours, and one copy.


def test_layers_of_one_allocation_are_one_piece():
    caches = CanonicalKVCaches(tuple(torch.zeros((40, 6, 64), dtype=torch.int8).unbind(0)), ((),))
    refs = tuple(DataRef(layer, 64) for layer in range(40))
    (pieces,) = pieces_of(caches._replace(groups=(refs,)), slot_layout(caches, 2))
    assert [piece.repeats for piece in pieces] == [((40, 6 * 64, 2 * 64),)]


def test_pieces_of_several_allocations_or_turns_stay_apart():
    one, other = torch.zeros(100, dtype=torch.int8), torch.zeros(100, dtype=torch.int8)
    first = Piece(one, 0, 8, 0, 8, 8, ())
    for second in (first._replace(memory=other), first._replace(writers=2)):
        assert len(_merged([first, second._replace(local=16, host=16)])) == 2
    assert len(_merged([first, first._replace(local=16, host=16)])) == 1


def test_no_copy_reaches_from_one_allocation_into_the_next(strategy):
    memory = np.zeros(256, dtype=np.int8)  # The second layer's allocation begins where the first one's ends.
    layers = [torch.frombuffer(memory[start : start + 128], dtype=torch.int8).view(2, 64) for start in (0, 128)]
    pieces = (tuple(Piece(layer, 0, 64, 128 * number, 64, 64, ()) for number, layer in enumerate(layers)),)
    slots = torch.zeros((1, 256), dtype=torch.int8)
    pages = (pages_of(GroupBlocks([0, 1], [0]), 2, num_blocks=2, num_rows=1),)
    sides = Sides(pieces, slots, 2, 2)
    assert len(descriptors(sides, Direction.STORE, pages).sizes) == 2
    memory[:] = np.arange(256, dtype=np.uint8).view(np.int8)
    strategy(sides)(Direction.STORE, pages)
    assert slots.numpy().tobytes() == memory.tobytes()
    memory[:] = 0
    strategy(sides)(Direction.LOAD, pages)
    assert memory.tobytes() == slots.numpy().tobytes()


@pytest.mark.parametrize(
    ("indices", "period", "runs"),
    [
        ([4, 2, 3], None, [[2, 3, 4]]),
        ([9, 0, 6, 1, 3], None, [[0], [1], [3, 6, 9]]),  # The commonest distance, not the smallest.
        ([0, 1, 5, 6, 10, 11], None, [[0, 1], [5, 6], [10, 11]]),
        ([0, 1, 5, 6, 10, 11], 5, [[0, 5, 10], [1, 6, 11]]),  # Two pages of each of three rows: by position.
        ([0, 1, 2, 5, 6, 7], 5, [[0, 1, 2], [5, 6, 7]]),  # Three of two: row by row.
        ([7], 5, [[7]]),
    ],
)
def test_runs_are_as_few_as_there_can_be(indices, period, runs):
    given = np.array(indices)
    found = strided.runs_of(given, period)
    bounds = zip(found.starts.tolist(), found.stops.tolist(), strict=True)
    assert [given[found.order[start:stop]].tolist() for start, stop in bounds] == runs
