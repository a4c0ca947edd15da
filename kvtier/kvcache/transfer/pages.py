"""Pages to copy: which of the LLM engine's blocks belongs to which row, and the pieces that a page is made of.

A piece is one copy for many blocks: equal fragments of a worker's pages, and where they go in a chunk's bytes, as
strides. Pieces at equal distances on both sides, such as layers of one allocation, become one.

A chunk has each tensor's pages one after the other, in the order of vLLM's own rows: either can read the other's tier.
Workers' own pages fill a worker's slot of a row; canonical pages fill the row, and every worker writes its parts.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout.axes import offset_bytes, storage_of
from kvtier.kvcache.layout.canonical import CanonicalKVCaches, DataRef, PageMapping, PageRun

Indices = npt.NDArray[np.int64]


class Direction(Enum):
    """The direction in which a transfer copies."""

    LOAD = "load"  # From the primary into the LLM engine's blocks.
    STORE = "store"


class GroupBlocks(NamedTuple):
    """Consecutive blocks of one request in one group, and the rows of the chunks that they lie in, in order.

    The first and the last chunk may be covered in part: `first_block` is the first block's number within the request.
    """

    blocks: Sequence[int] | npt.NDArray[np.integer]
    rows: Sequence[int] | npt.NDArray[np.integer]
    first_block: int = 0


NO_BLOCKS = GroupBlocks((), ())


class BlockPages(NamedTuple):
    """Page i of a group: one of the LLM engine's blocks, a row, and which of the row's blocks."""

    blocks: Indices
    rows: Indices
    positions: Indices


def pages_of(group: GroupBlocks, blocks_per_chunk: int, *, num_blocks: int, num_rows: int) -> BlockPages:
    """Return a group's pages. ValueError, before anything moves, for wrong blocks, rows or numbers of rows."""
    blocks, rows = np.asarray(group.blocks, dtype=np.int64), np.asarray(group.rows, dtype=np.int64)
    skipped = group.first_block % blocks_per_chunk
    needed = -(-(skipped + len(blocks)) // blocks_per_chunk) if len(blocks) else 0
    if len(rows) != needed:
        raise ValueError(
            f"{len(blocks)} blocks from number {group.first_block} on lie in {needed} chunks of {blocks_per_chunk}, "
            f"{len(rows)} rows given"
        )
    _require_within("block", blocks, num_blocks)
    _require_within("row", rows, num_rows)
    place = np.arange(skipped, skipped + len(blocks))
    return BlockPages(blocks, rows[place // blocks_per_chunk], place % blocks_per_chunk)


class SlotLayout(NamedTuple):
    """Offsets and lengths in bytes, one a tensor."""

    blocks_per_chunk: int
    offsets: tuple[int, ...]
    page_bytes: tuple[int, ...]
    canonical: bool

    @property
    def slot_bytes(self) -> int:  # Of a worker's slot, or of the row where pages are canonical.
        return self.blocks_per_chunk * sum(self.page_bytes)


def slot_layout(caches: CanonicalKVCaches, blocks_per_chunk: int = 1, *, canonical: bool = False) -> SlotLayout:
    """Lay out chunks of `blocks_per_chunk` blocks."""
    if blocks_per_chunk < 1:
        raise ConfigError(f"blocks_per_chunk: {blocks_per_chunk} given, at least 1 accepted")
    page_bytes = [tensor.shape[1] for tensor in caches.tensors]
    if canonical:
        page_bytes = [0] * len(page_bytes)
        for ref in (ref for refs in caches.groups for ref in refs):
            page_bytes[ref.tensor] = max(page_bytes[ref.tensor], _mapping(ref).canonical_page_size_bytes)
    offsets = [blocks_per_chunk * sum(page_bytes[:index]) for index in range(len(page_bytes))]
    return SlotLayout(blocks_per_chunk, tuple(offsets), tuple(page_bytes), canonical)


class Repeat(NamedTuple):
    """`times` fragments, each `local` and `host` bytes after the previous one on either side."""

    times: int
    local: int
    host: int


class Piece(NamedTuple):
    """`size_bytes` of every page, and of its repeats, outermost first."""

    memory: torch.Tensor  # Any tensor on the worker's storage.
    local: int  # Bytes from the start of the storage, in block 0.
    local_stride: int  # From block to block.
    host: int  # Bytes from the start of a chunk, in its first page.
    host_stride: int  # From page to page of a chunk.
    size_bytes: int
    repeats: tuple[Repeat, ...]
    writers: int = 1
    writer_index: int = 0

    @property
    def page_bytes(self) -> int:  # That move of each page.
        return self.size_bytes * prod(repeat.times for repeat in self.repeats)

    @property
    def alike(self) -> tuple[object, ...]:
        """The key of pieces that can be joined: everything except their places."""
        storage = storage_of(self.memory)
        return (storage, self.local_stride, self.host_stride, self.size_bytes, self.repeats, self.writers)


class Sides(NamedTuple):
    """Both sides of a copy: each group's pieces of the caches, and the slots of all rows in host memory."""

    pieces: tuple[tuple[Piece, ...], ...]
    slots: torch.Tensor  # (rows, slot_bytes), int8.
    blocks_per_chunk: int
    num_blocks: int

    def moved(self, direction: Direction, piece: Piece, pages: BlockPages) -> BlockPages:
        """Return the pages that this worker moves: of a store, those whose turn it is by number in the primary."""
        if direction is Direction.LOAD or piece.writers == 1:
            return pages
        turn = (pages.rows * self.blocks_per_chunk + pages.positions) % piece.writers == piece.writer_index
        return BlockPages(pages.blocks[turn], pages.rows[turn], pages.positions[turn])


def pieces_of(caches: CanonicalKVCaches, layout: SlotLayout) -> tuple[tuple[Piece, ...], ...]:
    """Return each group's pieces, joined as far as possible."""
    return tuple(_merged([piece for ref in refs for piece in _of_ref(caches, layout, ref)]) for refs in caches.groups)


def repeated(places: Indices, repeats: Iterable[tuple[int, int]]) -> Indices:
    """Return the places of all repeats, (count, stride) each, outermost first, that start at these places."""
    for count, stride in repeats:
        places = (places[:, None] + np.arange(count) * stride).ravel()
    return places


def _require_within(what: str, indices: Indices, count: int) -> None:
    if len(indices) and (indices.min() < 0 or indices.max() >= count):
        wrong = indices[(indices < 0) | (indices >= count)][0]
        raise ValueError(f"{what} {wrong} of {count}")


def _mapping(ref: DataRef) -> PageMapping:
    return ref.mapping or PageMapping(canonical_page_size_bytes=ref.page_bytes, runs=(PageRun(0, 0, ref.page_bytes),))


def _of_ref(caches: CanonicalKVCaches, layout: SlotLayout, ref: DataRef) -> list[Piece]:
    tensor = caches.tensors[ref.tensor]
    mapping = _mapping(ref if layout.canonical else ref._replace(mapping=None))
    return [
        Piece(
            memory=tensor,
            local=offset_bytes(tensor) + run.local_offset,
            local_stride=tensor.stride(0),
            host=layout.offsets[ref.tensor] + run.canonical_offset,
            host_stride=layout.page_bytes[ref.tensor],
            size_bytes=run.fragment_size,
            repeats=(Repeat(run.num_fragments, run.local_stride, run.canonical_stride),)
            if run.num_fragments > 1
            else (),
            writers=mapping.num_writers,
            writer_index=mapping.writer_index,
        )
        for run in mapping.runs
    ]


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Join neighbours at equal distances until none are left: runs of a page first, then layers."""
    while True:
        series = list[list[Piece]]()
        for piece in pieces:
            if series and _continues(series[-1], piece):
                series[-1].append(piece)
            else:
                series.append([piece])
        if len(series) == len(pieces):
            return tuple(pieces)
        pieces = [_joined(parts) for parts in series]


def _continues(series: list[Piece], piece: Piece) -> bool:
    """Return True if a piece follows the last of a series at the series' own distance, on both sides."""
    distances = {_distance(one, other) for one, other in pairwise([*series, piece])}
    return series[0].alike == piece.alike and len(distances) == 1 and min(distances.pop()) > 0


def _joined(parts: list[Piece]) -> Piece:
    first = parts[0]
    if len(parts) == 1:
        return first
    return first._replace(repeats=(Repeat(len(parts), *_distance(*parts[:2])), *first.repeats))


def _distance(one: Piece, other: Piece) -> tuple[int, int]:
    return other.local - one.local, other.host - one.host
