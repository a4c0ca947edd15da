"""How bytes move between the engine's memory and the primary: what each device offers, behind one small protocol."""

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Protocol

import torch

from kvtier.kvcache.transfer.blocks import Pages
from kvtier.kvcache.transfer.jobs import Job, Kind
from kvtier.kvcache.transfer.pieces import Piece
from kvtier.kvcache.transfer.strided import Strided, copy_alike, strided

Finish = Callable[[], None]
"""Blocks until a copy has ended; raises `RuntimeError` or `MemoryError` if it failed."""


class Copier(Protocol):
    """Copies transfers, one after the other, from one thread."""

    @property
    def kinds(self) -> Collection[Kind]:
        """Those it takes, the more urgent first."""
        ...

    @property
    def ahead(self) -> int:
        """How many it can begin before the first has ended."""
        ...

    def mark(self) -> object:
        """Note, from the thread that submits, what the engine's device has been told to do until now."""
        ...

    def begin(self, job: Job) -> Finish:
        """Begin a transfer, behind those begun before and behind its mark."""
        ...


class StridedCopies:
    """Copies by index, both sides in memory that one device reaches."""

    def __init__(
        self, pieces: tuple[tuple[Piece, ...], ...], slots: torch.Tensor, blocks_per_chunk: int, num_blocks: int
    ) -> None:
        self._groups = [
            _alike([strided(piece, slots, blocks_per_chunk, num_blocks) for piece in group]) for group in pieces
        ]

    def copy(self, kind: Kind, groups: tuple[Pages, ...]) -> None:
        for group, pages in zip(self._groups, groups, strict=True):
            for pieces in group:
                copy_alike(kind, pieces, pages)


def _alike(pieces: list[Strided]) -> list[list[Strided]]:
    kinds = defaultdict[tuple[object, ...], list[Strided]](list)
    for piece in pieces:
        kinds[piece.alike].append(piece)
    return list(kinds.values())


class HostCopier:
    """Caches in host memory: torch's own copies, which release the GIL, on one thread for both ways."""

    kinds = (Kind.LOAD, Kind.STORE)
    ahead = 1

    def __init__(self, copies: StridedCopies) -> None:
        self._copies = copies

    def mark(self) -> object:
        return None

    def begin(self, job: Job) -> Finish:
        self._copies.copy(job.kind, job.groups)
        return _nothing


def _nothing() -> None: ...
