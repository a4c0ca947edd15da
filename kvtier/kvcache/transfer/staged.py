"""Chunks by way of a buffer beside the caches, for devices without batched copies.

Pages are gathered into chunks by the device, and whole chunks copied to the host, or the other way round: one copy a
chunk instead of one a page and layer, for the price of a pass over the device's own memory.
"""

from collections.abc import Iterator

import numpy as np
import torch

from kvtier.kvcache.transfer.blocks import Indices, Mask, Pages, repeated
from kvtier.kvcache.transfer.descriptors import Descriptors, joined
from kvtier.kvcache.transfer.jobs import Job, Kind
from kvtier.kvcache.transfer.pieces import Piece
from kvtier.kvcache.transfer.strided import Strided, copy_alike, strided

BUFFER_BYTES_MAX = 64 << 20  # A few milliseconds of a PCIe link; taken from the memory that caches could have.


class StagedCopies:
    """Begins transfers' copies on the current stream, which has to be the same for all: they use one buffer in turn."""

    def __init__(
        self, pieces: tuple[tuple[Piece, ...], ...], slots: torch.Tensor, blocks_per_chunk: int, num_blocks: int
    ) -> None:
        slot_bytes = slots.shape[1]
        rows = max(1, min(slots.shape[0], BUFFER_BYTES_MAX // slot_bytes))
        device = next(piece.memory.device for group in pieces for piece in group)
        self._buffer = torch.empty((rows, slot_bytes), dtype=torch.int8, device=device)
        self._slots = slots
        self._blocks_per_chunk = blocks_per_chunk
        self._groups: list[list[tuple[Piece, Strided]]] = [
            # Whose turn it is follows from the rows, which the buffer does not have.
            [
                (one, strided(one._replace(writers=1, writer_index=0), self._buffer, blocks_per_chunk, num_blocks))
                for one in group
            ]
            for group in pieces
        ]

    def __call__(self, job: Job) -> None:
        for group, pages in zip(self._groups, job.groups, strict=True):
            for some, buffered in self._in_parts(pages):
                if job.kind is Kind.STORE:
                    self._store(group, some, buffered)
                else:
                    self._load(group, some, buffered)

    def _in_parts(self, pages: Pages) -> Iterator[tuple[Pages, Pages]]:
        """Yield as many pages at a time as the buffer has chunks for, by their rows and by the buffer's."""
        starts = np.flatnonzero(np.diff(pages.rows, prepend=-1))
        chunks = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(pages.rows)))
        for first in range(0, len(starts), len(self._buffer)):
            part = (chunks >= first) & (chunks < first + len(self._buffer))
            some = pages.only(part)
            yield some, some._replace(rows=chunks[part] - first)

    def _store(self, group: list[tuple[Piece, Strided]], some: Pages, buffered: Pages) -> None:
        for piece, gather in group:
            moved = buffered.only(self._turn(piece, some))
            copy_alike(Kind.STORE, [gather], moved)
        copies = self._whole(group, some, buffered, stores=True)
        into, out_of = _bytes_of(self._slots), _bytes_of(self._buffer)
        for source, target, size in zip(*(column.tolist() for column in copies), strict=True):
            into[target : target + size].copy_(out_of[source : source + size], non_blocking=True)

    def _load(self, group: list[tuple[Piece, Strided]], some: Pages, buffered: Pages) -> None:
        copies = self._whole(group, some, buffered, stores=False)
        into, out_of = _bytes_of(self._buffer), _bytes_of(self._slots)
        for target, source, size in zip(*(column.tolist() for column in copies), strict=True):
            into[target : target + size].copy_(out_of[source : source + size], non_blocking=True)
        for _, scatter in group:
            copy_alike(Kind.LOAD, [scatter], buffered)

    def _whole(self, group: list[tuple[Piece, Strided]], some: Pages, buffered: Pages, *, stores: bool) -> Descriptors:
        """Return the copies from the buffer to the slots, as offsets into each: whole chunks where pages make them."""
        in_buffer, in_slots, sizes, rows = list[Indices](), list[Indices](), list[Indices](), list[Indices]()
        for piece, _ in group:
            turn = self._turn(piece, some) if stores else np.ones(len(some.rows), dtype=bool)
            repeats = [(repeat.times, repeat.host) for repeat in piece.repeats]
            within = piece.host + some.positions[turn] * piece.host_stride
            in_buffer.append(repeated(within + buffered.rows[turn] * self._buffer.stride(0), repeats))
            in_slots.append(repeated(within + some.rows[turn] * self._slots.stride(0), repeats))
            sizes.append(np.full(len(in_slots[-1]), piece.size_bytes))
            rows.append(repeated(some.rows[turn], [(repeat.times, 0) for repeat in piece.repeats]))
        return joined(*(np.concatenate(column) for column in (in_buffer, in_slots, sizes, rows)))

    def _turn(self, piece: Piece, some: Pages) -> Mask:
        return some.turn(self._blocks_per_chunk, piece.writers, piece.writer_index)


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the bytes from the first row's first on, gaps between rows included."""
    return rows.as_strided(((rows.shape[0] - 1) * rows.stride(0) + rows.shape[1],), (1,))
