"""Pieces of pages, as strides: equal fragments of a worker's pages, and where they go in a chunk's bytes.

A piece is one copy for many blocks. Pieces that lie at equal distances from each other on both sides, as layers of one
allocation do, are one: so the number of copies follows the layout's variety, not the number of layers.

A chunk has each tensor's pages one after the other, tensor after tensor. It is the order of vLLM's own rows, so that a
tier written by either can be read by the other. Workers' own pages fill a worker's slot of a row; canonical pages fill
the row, and every worker writes its parts of them.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout.blocks import offset_bytes, storage_of
from kvtier.kvcache.layout.canonical import CanonicalKVCaches, DataRef
from kvtier.kvcache.layout.mapping import Run


class SlotLayout(NamedTuple):
    """Offsets and lengths in bytes, one a tensor."""

    blocks_per_chunk: int
    offsets: tuple[int, ...]
    page_bytes: tuple[int, ...]
    canonical: bool

    @property
    def slot_bytes(self) -> int:
        """Bytes of a chunk: what a `RowLayout` needs for a worker's slot, or for the row where pages are canonical."""
        return self.blocks_per_chunk * sum(self.page_bytes)


def slot_layout(caches: CanonicalKVCaches, blocks_per_chunk: int = 1, *, canonical: bool = False) -> SlotLayout:
    """Lay out chunks of `blocks_per_chunk` blocks."""
    if blocks_per_chunk < 1:
        raise ConfigError(f"blocks_per_chunk: {blocks_per_chunk} given, at least 1 accepted")
    page_bytes = [tensor.shape[1] for tensor in caches.tensors]
    if canonical:
        page_bytes = [0] * len(page_bytes)
        for ref in (ref for refs in caches.groups for ref in refs):
            page_bytes[ref.tensor] = max(page_bytes[ref.tensor], ref.mapping.canonical_bytes)
    offsets = [blocks_per_chunk * sum(page_bytes[:index]) for index in range(len(page_bytes))]
    return SlotLayout(blocks_per_chunk, tuple(offsets), tuple(page_bytes), canonical)


class Repeat(NamedTuple):
    """The same again, so many `times`, `local` and `host` bytes further on each side."""

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
    def page_bytes(self) -> int:
        """Bytes that move of each page."""
        moved = self.size_bytes
        for repeat in self.repeats:
            moved *= repeat.times
        return moved

    @property
    def alike(self) -> tuple[object, ...]:
        """What pieces that can be one have in common: all but their places."""
        storage = storage_of(self.memory)
        return (storage, self.local_stride, self.host_stride, self.size_bytes, self.repeats, self.writers)


def pieces_of(caches: CanonicalKVCaches, layout: SlotLayout) -> tuple[tuple[Piece, ...], ...]:
    """Return each group's pieces, as few as there can be."""
    return tuple(_merged([piece for ref in refs for piece in _of_ref(caches, layout, ref)]) for refs in caches.groups)


def _of_ref(caches: CanonicalKVCaches, layout: SlotLayout, ref: DataRef) -> list[Piece]:
    tensor = caches.tensors[ref.tensor]
    runs: tuple[Run, ...] = (Run(0, 0, ref.page_bytes),)
    writers, writer_index = 1, 0
    if layout.canonical:
        runs, writers, writer_index = ref.mapping.runs, ref.mapping.writers, ref.mapping.writer_index
    return [
        Piece(
            memory=tensor,
            local=offset_bytes(tensor) + run.local_offset,
            local_stride=tensor.stride(0),
            host=layout.offsets[ref.tensor] + run.canonical_offset,
            host_stride=layout.page_bytes[ref.tensor],
            size_bytes=run.size_bytes,
            repeats=(Repeat(run.count, run.local_stride, run.canonical_stride),) if run.count > 1 else (),
            writers=writers,
            writer_index=writer_index,
        )
        for run in runs
    ]


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Join neighbours at equal distances, until nothing can be joined: runs of a page first, then layers."""
    while True:
        merged = _merged_once(pieces)
        if len(merged) == len(pieces):
            return tuple(merged)
        pieces = merged


def _merged_once(pieces: list[Piece]) -> list[Piece]:
    series: list[list[Piece]] = []
    for piece in pieces:
        if series and _continues(series[-1], piece):
            series[-1].append(piece)
        else:
            series.append([piece])
    return [_joined(parts) for parts in series]


def _continues(series: list[Piece], piece: Piece) -> bool:
    """Say whether a piece is as far from the last of a series as its parts from each other, further on in both."""
    distances = {_distance(one, other) for one, other in pairwise([*series, piece])}
    return series[0].alike == piece.alike and len(distances) == 1 and min(distances.pop()) > 0


def _joined(parts: list[Piece]) -> Piece:
    first = parts[0]
    if len(parts) == 1:
        return first
    local, host = _distance(*parts[:2])
    return first._replace(repeats=(Repeat(len(parts), local, host), *first.repeats))


def _distance(one: Piece, other: Piece) -> tuple[int, int]:
    return other.local - one.local, other.host - one.host
