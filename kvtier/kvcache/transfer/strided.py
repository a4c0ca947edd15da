"""Copies by index between pages and chunks: each side one strided array, its first axis the pages.

On the host, one thread makes the copies. torch's own threads would wait for each other, and for cores that the model
computes on. Beside busy neighbours, their copies took 2 to 20 times as long as a memcpy. Rates were measured alone, in
GB/s at 16, 64 and 256 KiB a page, where a memcpy has 24. numpy's assignment from pages at equal distances has 25, 28
and 29. A memmove for each page has 12, 19 and 23. Through a buffer that stays in the cache it has 10, 17 and 20, which
is best for smaller fragments. These were slower: one-threaded `index_copy_` from equal distances (16, 20, 22) and
through a buffer (9, 12, 14), `_foreach_copy_` over views of pages (5, 11, 18), `process_vm_readv` (6), indexing of
single bytes (3).

Pages at equal distances are a run, and copied as one strided piece of memory.
"""

import ctypes
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import repeat, starmap
from math import gcd, prod
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from kvtier.kvcache.layout.axes import offset_bytes, view_of
from kvtier.kvcache.transfer.jobs import CopyJob, Finish
from kvtier.kvcache.transfer.pages import BlockPages, Direction, Indices, Piece, Sides, repeated

RUN_BYTES_MIN = 1 << 18  # An assignment costs 2 us more than a memmove: below, runs are too short to be worth it.
MEMMOVE_BYTES_MIN = 1 << 14  # A call costs 0.4 us: below, two passes through the cache take less.
TILE_BYTES = 1 << 19  # Stays in a core's cache, and below what torch divides among threads (32,768 elements).
CALL_BYTES_MAX = 1 << 22  # 0.2 ms for which a copy keeps the GIL beyond the interpreter's switch interval.

_ELEMENTS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8)  # Copied, never computed with.
_TILE_ELEMENTS_MAX = 32_767

_memmove = ctypes.PyDLL(None).memmove  # Keeps the GIL: asked back for each page, it may cost milliseconds every time.
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)  # A size_t as wide takes a third longer.
_memmove.restype = None

Items = npt.NDArray[Any]  # dtype numpy.void: opaque bytes that move together.


class HostCopier:
    """The copier of caches in host memory: copies by index, on one thread for both ways."""

    directions = (Direction.LOAD, Direction.STORE)
    ahead = 1

    def __init__(self, sides: Sides) -> None:
        self._groups = list[list[list[Strided]]]()  # Of each group, the pieces that are alike.
        for group in sides.pieces:
            alike = defaultdict[tuple[object, ...], list[Strided]](list)
            for one in (strided(piece, sides) for piece in group):
                alike[one.alike].append(one)
            self._groups.append(list(alike.values()))

    def mark(self) -> object:
        return None

    def begin(self, job: CopyJob) -> Finish:
        for group, pages in zip(self._groups, job.groups, strict=True):
            for pieces in group:
                copy_alike(job.direction, pieces, pages)
        return lambda: None


class Runs(NamedTuple):
    """Runs of pages: an order of them, and the parts of it in which indices grow by `step`."""

    order: Indices
    step: int
    starts: Indices
    stops: Indices

    def parts(self, indices: Indices, pages_max: int) -> Iterator[tuple[int, int, int]]:
        """Yield parts of runs of up to `pages_max` pages: start and end in the order, and the first index."""
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            for first in range(start, stop, pages_max):
                yield first, min(stop, first + pages_max), int(indices[self.order[first]])


def runs_of(indices: Indices, period: int | None = None) -> Runs:
    """Return the order with the fewest runs: ascending, or, for chunks of several pages, by remainders of `period`."""
    ascending = _runs_in(indices, np.argsort(indices, kind="stable"))
    if period in (None, 1) or len(ascending.starts) == 1:
        return ascending
    by_position = _runs_in(indices, np.lexsort((indices, indices % period)))
    return by_position if len(by_position.starts) < len(ascending.starts) else ascending


def _runs_in(indices: Indices, order: Indices) -> Runs:
    distances = np.diff(indices[order])
    if not len(distances):
        return Runs(order, 1, np.array([0]), np.array([len(order)]))
    values, counts = np.unique(distances, return_counts=True)
    step = max(1, int(values[counts.argmax()]))
    breaks = np.flatnonzero(distances != step) + 1
    return Runs(order, step, np.concatenate(([0], breaks)), np.concatenate((breaks, [len(order)])))


class StridedSide(NamedTuple):
    """Pages at multiples of a step: more of them than there are, as the step may be a part of a page."""

    pages: torch.Tensor  # (steps, *repeats, elements), in host memory.
    items: Items  # The same, its elements as one.

    @classmethod
    def over(cls, pages: torch.Tensor) -> Self:
        elements = pages.numpy()
        return cls(pages, elements.view(f"V{elements.shape[-1] * elements.itemsize}")[..., 0])


class Moves(NamedTuple):
    """The moves of pages: page `from_pages[i]` goes to `to_pages[i]`."""

    from_pages: Indices
    to_pages: Indices
    runs: Runs  # Runs of the source pages.


class Strided(NamedTuple):
    """One piece on both sides."""

    piece: Piece
    sides: Sides
    local: StridedSide
    host: StridedSide
    row_steps: int
    page_steps: int

    @property
    def alike(self) -> tuple[object, ...]:
        """The key of pieces of the same slots whose pages move alike: everything except their places."""
        shapes = [(side.pages.dtype, side.pages.shape, side.pages.stride()) for side in (self.local, self.host)]
        return (*shapes, self.piece.writers, self.piece.writer_index)

    def moves(self, direction: Direction, pages: BlockPages) -> Moves:
        moved = self.sides.moved(direction, self.piece, pages)
        index = moved.rows * self.row_steps + moved.positions * self.page_steps
        if direction is Direction.STORE:
            return Moves(moved.blocks, index, runs_of(moved.blocks))
        return Moves(index, moved.blocks, runs_of(index, self.row_steps))

    def ends(self, direction: Direction) -> tuple[StridedSide, StridedSide]:
        """Return the source and the target."""
        return (self.local, self.host) if direction is Direction.STORE else (self.host, self.local)


def strided(piece: Piece, sides: Sides) -> Strided:
    """Bring a piece and the slots of all rows together."""
    slots, blocks_per_chunk = sides.slots, sides.blocks_per_chunk
    row_stride = slots.stride(0)
    host = offset_bytes(slots) + piece.host
    step_bytes = gcd(row_stride, piece.host_stride) if blocks_per_chunk > 1 else row_stride
    row_steps, page_steps = row_stride // step_bytes, piece.host_stride // step_bytes
    steps = (slots.shape[0] - 1) * row_steps + (blocks_per_chunk - 1) * page_steps + 1
    element = _element(piece, host, step_bytes)
    shape = (*(repeat.times for repeat in piece.repeats), piece.size_bytes // element.itemsize)
    local_strides = (piece.local_stride, *(repeat.local for repeat in piece.repeats))
    host_strides = (step_bytes, *(repeat.host for repeat in piece.repeats))
    return Strided(
        piece,
        sides,
        StridedSide.over(_view(piece.memory, element, piece.local, (sides.num_blocks, *shape), local_strides)),
        StridedSide.over(_view(slots, element, host, (steps, *shape), host_strides)),
        row_steps,
        page_steps,
    )


def _element(piece: Piece, host: int, step_bytes: int) -> torch.dtype:
    strides = [stride for repeat in piece.repeats for stride in (repeat.local, repeat.host)]
    common = gcd(piece.local, piece.local_stride, host, step_bytes, piece.size_bytes, *strides)
    return next(element for element in _ELEMENTS if common % element.itemsize == 0)


def _view(
    memory: torch.Tensor, element: torch.dtype, offset: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...]
) -> torch.Tensor:
    return view_of(memory, element, shape, (*(stride // element.itemsize for stride in strides_bytes), 1), offset)


def copy_alike(direction: Direction, pieces: Sequence[Strided], pages: BlockPages) -> None:
    """Copy the pages of pieces that are alike, in as few passes and calls as the pages' places allow."""
    moves = pieces[0].moves(direction, pages)
    ends = [piece.ends(direction) for piece in pieces]
    items = ends[0][0].items
    if not len(moves.from_pages):
        return
    page_bytes = items.itemsize * prod(items.shape[1:])
    if len(moves.from_pages) * page_bytes >= len(moves.runs.starts) * RUN_BYTES_MIN:
        for each in ends:
            _assign_runs(*each, moves, max(1, CALL_BYTES_MAX // page_bytes))
    elif items.itemsize >= MEMMOVE_BYTES_MIN:
        _move_items(ends, moves)
    else:
        for each in ends:
            _through_tiles(*each, moves)


def _assign_runs(source: StridedSide, target: StridedSide, moves: Moves, call_pages: int) -> None:
    step = moves.runs.step
    wanted = moves.to_pages[moves.runs.order]
    for start, stop, first in moves.runs.parts(moves.from_pages, call_pages):
        target.items[wanted[start:stop]] = source.items[first : first + (stop - start) * step : step]


def _move_items(ends: list[tuple[StridedSide, StridedSide]], moves: Moves) -> None:
    items = ends[0][0].items
    order = moves.runs.order  # Reading on in memory is 5 to 10 % faster than reading here and there.
    from_where = _addresses([source for source, _ in ends], moves.from_pages[order])
    to_where = _addresses([target for _, target in ends], moves.to_pages[order])
    call_items = max(1, CALL_BYTES_MAX // items.itemsize)
    size = repeat(ctypes.c_void_p(items.itemsize))  # Made once, not for each call.
    for first in range(0, len(from_where), call_items):
        part = slice(first, first + call_items)
        calls = zip(to_where[part], from_where[part], size, strict=False)  # Sizes have no end.
        deque(starmap(_memmove, calls), maxlen=0)  # A loop in C, and one tuple for all calls.


def _addresses(sides: list[StridedSide], indices: Indices) -> list[int]:
    """Return the addresses of these pages' items, side after side, repeats last."""
    items = sides[0].items
    firsts = np.array([side.pages.data_ptr() for side in sides])
    places: Indices = (firsts[:, None] + indices * items.strides[0]).ravel()
    found: list[int] = repeated(places, zip(items.shape[1:], items.strides[1:], strict=True)).tolist()
    return found


def _through_tiles(source: StridedSide, target: StridedSide, moves: Moves) -> None:
    tile_pages = max(1, min(TILE_BYTES // source.pages.element_size(), _TILE_ELEMENTS_MAX) // source.pages[0].numel())
    tile = StridedSide.over(source.pages.new_empty((min(tile_pages, len(moves.from_pages)), *source.pages.shape[1:])))
    chosen = torch.as_tensor(moves.from_pages)
    for first in range(0, len(moves.from_pages), tile_pages):
        some = chosen[first : first + tile_pages]
        torch.index_select(source.pages, 0, some, out=tile.pages[: len(some)])
        target.items[moves.to_pages[first : first + tile_pages]] = tile.items[: len(some)]
