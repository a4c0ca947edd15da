"""What to copy: an engine's blocks and the primary's rows, brought together page by page."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class GroupBlocks(NamedTuple):
    """Consecutive blocks of one request in one group, and the rows of the chunks that they lie in, in order.

    The first and the last chunk may be covered in part: `first_block` is the first block's number within the request.
    """

    blocks: Sequence[int] | npt.NDArray[np.integer]
    rows: Sequence[int] | npt.NDArray[np.integer]
    first_block: int = 0


NO_BLOCKS = GroupBlocks((), ())


class Pages(NamedTuple):
    """Page i of a group: an engine's block, a row, and which of the row's blocks."""

    blocks: Indices
    rows: Indices
    positions: Indices

    def turn(self, blocks_per_chunk: int, writers: int, writer_index: int) -> Mask:
        """Say which pages are one worker's to write: by their number in the primary, which all count alike."""
        turn: Mask = (self.rows * blocks_per_chunk + self.positions) % writers == writer_index
        return turn

    def only(self, mask: Mask) -> "Pages":
        """Return the pages that a mask names."""
        return Pages(self.blocks[mask], self.rows[mask], self.positions[mask])

    def written_by(self, blocks_per_chunk: int, writers: int, writer_index: int) -> "Pages":
        """Return the pages that are one worker's to write."""
        return self if writers == 1 else self.only(self.turn(blocks_per_chunk, writers, writer_index))


def pages_of(group: GroupBlocks, blocks_per_chunk: int, *, num_blocks: int, num_rows: int) -> Pages:
    """Return a group's pages.

    Raises `ValueError`, before anything moves, for blocks or rows that are not there, and where rows are more or fewer
    than the blocks need.
    """
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
    return Pages(blocks, rows[place // blocks_per_chunk], place % blocks_per_chunk)


def repeated(places: Indices, repeats: Iterable[tuple[int, int]]) -> Indices:
    """Return where all repeats are, (count, stride) each, outermost first, of things at these places."""
    for count, stride in repeats:
        places = (places[:, None] + np.arange(count) * stride).ravel()
    return places


def _require_within(what: str, indices: Indices, count: int) -> None:
    if len(indices) and (indices.min() < 0 or indices.max() >= count):
        wrong = indices[(indices < 0) | (indices >= count)][0]
        raise ValueError(f"{what} {wrong} of {count}")
