"""Copies between pages and chunks by index, as torch sees them: each side one strided tensor, its first axis the pages.

Bytes are moved in the widest elements that all strides allow: torch moves an element at a time where an index decides.
Measured on two cores (memcpy 21 to 25 GB/s): `index_select` into pages at equal distances 22 to 30 GB/s at any page
size, `index_copy_` from such pages 22 to 28; where neither side has them, both through a megabyte that stays in the
cache, 14 to 16 GB/s at 16 KiB, 20 at 64 KiB and above. What was slower: `_foreach_copy_` over views of pages (5 GB/s at
16 KiB, 11 at 64), advanced indexing of bytes (2.7) and of 8-byte elements (13), numpy's `take` and assignment (11 to
17), `process_vm_readv` (6), and two passes without a cache between them (3).
"""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

import numpy as np
import torch

from kvtier.layout.memory import offset_bytes, view_of
from kvtier.transfer.blocks import Indices, Pages
from kvtier.transfer.pieces import Piece

TILE_BYTES = 1 << 20  # A part of a core's cache; larger gains nothing, smaller leaves torch's threads unused.
RUN_BYTES_MIN = 1 << 19  # A call costs 4 us: below, one pass with a call a run loses to two passes over tiles.

_ELEMENTS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8)  # Copied, never computed with.


class Side(NamedTuple):
    """Pages at multiples of a step: more of them than there are, as the step may be a part of a page."""

    pages: torch.Tensor  # (steps, *repeats, elements)
    period: int | None  # Steps from row to row; None: its pages have no rows.


class Strided(NamedTuple):
    """One piece on both sides."""

    local: Side
    host: Side
    row_steps: int
    page_steps: int
    blocks_per_chunk: int
    writers: int
    writer_index: int

    def store(self, pages: Pages) -> None:
        """Copy the blocks that are this worker's turn into their rows."""
        turn = pages.written_by(self.blocks_per_chunk, self.writers, self.writer_index)
        copy_pages(self.local, turn.blocks, self.host, self._host_index(turn))

    def load(self, pages: Pages) -> None:
        """Copy rows into their blocks."""
        copy_pages(self.host, self._host_index(pages), self.local, pages.blocks)

    def _host_index(self, pages: Pages) -> Indices:
        return pages.rows * self.row_steps + pages.positions * self.page_steps


def strided(piece: Piece, slots: torch.Tensor, blocks_per_chunk: int, num_blocks: int) -> Strided:
    """Bring a piece and the slots of all rows, (rows, slot_bytes) int8, together."""
    row_stride = slots.stride(0)
    host = offset_bytes(slots) + piece.host
    step_bytes = gcd(row_stride, piece.host_stride) if blocks_per_chunk > 1 else row_stride
    row_steps, page_steps = row_stride // step_bytes, piece.host_stride // step_bytes
    steps = (slots.shape[0] - 1) * row_steps + (blocks_per_chunk - 1) * page_steps + 1
    element = _element(piece, host, step_bytes)
    counts = tuple(repeat.times for repeat in piece.repeats)
    local_strides = (piece.local_stride, *(repeat.local for repeat in piece.repeats))
    host_strides = (step_bytes, *(repeat.host for repeat in piece.repeats))
    size = piece.size_bytes // element.itemsize
    return Strided(
        Side(_view(piece.memory, element, piece.local, (num_blocks, *counts, size), local_strides), None),
        Side(_view(slots, element, host, (steps, *counts, size), host_strides), row_steps),
        row_steps,
        page_steps,
        blocks_per_chunk,
        piece.writers,
        piece.writer_index,
    )


def _element(piece: Piece, host: int, step_bytes: int) -> torch.dtype:
    strides = [stride for repeat in piece.repeats for stride in (repeat.local, repeat.host)]
    common = gcd(piece.local, piece.local_stride, host, step_bytes, piece.size_bytes, *strides)
    return next(element for element in _ELEMENTS if common % element.itemsize == 0)


def _view(
    memory: torch.Tensor, element: torch.dtype, offset: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...]
) -> torch.Tensor:
    strides = (*(stride // element.itemsize for stride in strides_bytes), 1)
    return view_of(memory, element, shape, strides, offset)


class _Runs(NamedTuple):
    """An order of the pages, and where it has runs at equal distances."""

    order: Indices
    step: int
    starts: Indices
    stops: Indices


def copy_pages(source: Side, from_pages: Indices, target: Side, to_pages: Indices) -> None:
    """Do `target[to_pages] = source[from_pages]`, in one pass where either side has long runs, in tiles elsewhere."""
    if not len(from_pages):
        return
    page_bytes = source.pages[0].numel() * source.pages.element_size()
    into = _runs(to_pages, target.period)
    out_of = _runs(from_pages, source.period)
    fewest = into if len(into.starts) <= len(out_of.starts) else out_of
    if len(from_pages) * page_bytes < len(fewest.starts) * RUN_BYTES_MIN:
        _copy_tiles(source.pages, from_pages, target.pages, to_pages, max(1, TILE_BYTES // page_bytes))
    elif fewest is into:
        chosen = torch.as_tensor(from_pages[into.order], device=source.pages.device)
        for start, stop, out in _run_views(target.pages, to_pages, into):
            torch.index_select(source.pages, 0, chosen[start:stop], out=out)
    else:
        chosen = torch.as_tensor(to_pages[out_of.order], device=target.pages.device)
        for start, stop, run in _run_views(source.pages, from_pages, out_of):
            target.pages.index_copy_(0, chosen[start:stop], run)


def _copy_tiles(
    source: torch.Tensor, from_pages: Indices, target: torch.Tensor, to_pages: Indices, tile_pages: int
) -> None:
    tile = source.new_empty((min(tile_pages, len(from_pages)), *source.shape[1:]))
    chosen = torch.as_tensor(from_pages, device=source.device)
    wanted = torch.as_tensor(to_pages, device=target.device)
    for first in range(0, len(from_pages), tile_pages):
        some = chosen[first : first + tile_pages]
        part = tile[: len(some)]
        torch.index_select(source, 0, some, out=part)
        target.index_copy_(0, wanted[first : first + tile_pages], part)


def _runs(indices: Indices, period: int | None) -> _Runs:
    """Return the order with the fewest runs: ascending or, where chunks have several pages, position by position."""
    runs = _runs_in(indices, np.argsort(indices, kind="stable"))
    if period is None or len(runs.starts) == 1:
        return runs
    other = _runs_in(indices, np.lexsort((indices, indices % period)))
    return other if len(other.starts) < len(runs.starts) else runs


def _runs_in(indices: Indices, order: Indices) -> _Runs:
    distances = np.diff(indices[order])
    if not len(distances):
        return _Runs(order, 1, np.array([0]), np.array([len(order)]))
    values, counts = np.unique(distances, return_counts=True)
    step = max(1, int(values[counts.argmax()]))
    breaks = np.flatnonzero(distances != step) + 1
    return _Runs(order, step, np.concatenate(([0], breaks)), np.concatenate((breaks, [len(order)])))


def _run_views(pages: torch.Tensor, indices: Indices, runs: _Runs) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield where each run begins and ends in the order, and its pages."""
    firsts = indices[runs.order[runs.starts]]
    strides = (runs.step * pages.stride(0), *pages.stride()[1:])
    for start, stop, first in zip(runs.starts.tolist(), runs.stops.tolist(), firsts.tolist(), strict=True):
        offset = pages.storage_offset() + first * pages.stride(0)
        yield start, stop, pages.as_strided((stop - start, *pages.shape[1:]), strides, offset)
