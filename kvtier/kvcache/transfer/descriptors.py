"""Indices for a copy engine: where from, where to, how many bytes; neighbours joined."""

from typing import NamedTuple

import numpy as np
import torch

from kvtier.kvcache.layout.blocks import storage_of
from kvtier.kvcache.transfer.blocks import Indices, Pages, repeated
from kvtier.kvcache.transfer.jobs import Kind
from kvtier.kvcache.transfer.pieces import Piece


class Descriptors(NamedTuple):
    """Copy i moves `sizes[i]` bytes from `sources[i]` to `targets[i]`. No two share bytes of their targets."""

    sources: Indices
    targets: Indices
    sizes: Indices


def descriptors(
    pieces: tuple[tuple[Piece, ...], ...],
    slots: torch.Tensor,
    kind: Kind,
    groups: tuple[Pages, ...],
    blocks_per_chunk: int,
) -> Descriptors:
    """Return the copies of a transfer between the caches and the slots of all rows, (rows, slot_bytes) int8."""
    local, host, sizes, rows = list[Indices](), list[Indices](), list[Indices](), list[Indices]()
    for group, pages in zip(pieces, groups, strict=True):
        for piece in group:
            moved = pages
            if kind is Kind.STORE:
                moved = pages.written_by(blocks_per_chunk, piece.writers, piece.writer_index)
            start = storage_of(piece.memory) + piece.local
            slot = slots.data_ptr() + piece.host
            local.append(
                repeated(start + moved.blocks * piece.local_stride, [(r.times, r.local) for r in piece.repeats])
            )
            in_rows = slot + moved.rows * slots.stride(0) + moved.positions * piece.host_stride
            host.append(repeated(in_rows, [(r.times, r.host) for r in piece.repeats]))
            sizes.append(np.full(len(local[-1]), piece.size_bytes))
            rows.append(repeated(moved.rows, [(r.times, 0) for r in piece.repeats]))
    both = (np.concatenate(local or [_NONE]), np.concatenate(host or [_NONE]))
    sources, targets = both if kind is Kind.STORE else both[::-1]
    return joined(sources, targets, np.concatenate(sizes or [_NONE]), np.concatenate(rows or [_NONE]))


def joined(sources: Indices, targets: Indices, sizes: Indices, rows: Indices) -> Descriptors:
    """Order copies by their targets, and make one of those that follow each other on both sides, within a row.

    Not beyond: rows are pinned in slices, and CUDA refuses a copy that reaches over two of them.
    """
    order = np.argsort(targets, kind="stable")
    sources, targets, sizes, rows = sources[order], targets[order], sizes[order], rows[order]
    follows = (sources[:-1] + sizes[:-1] == sources[1:]) & (targets[:-1] + sizes[:-1] == targets[1:])
    follows &= rows[:-1] == rows[1:]
    firsts = np.flatnonzero(np.concatenate((np.ones(min(1, len(sizes)), dtype=bool), ~follows)))
    return Descriptors(sources[firsts], targets[firsts], np.add.reduceat(sizes, firsts) if len(sizes) else sizes)


_NONE = np.empty(0, dtype=np.int64)
