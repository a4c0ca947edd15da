"""Where pages lie in a chunk's bytes: each tensor's pages of the chunk one after the other, tensor after tensor.

It is the order of vLLM's own rows, so that a tier written by either can be read by the other. Workers' own pages fill a
worker's slot of a row; canonical pages fill the row, and every worker writes its parts of them.
"""

from typing import NamedTuple

from kvtier.errors import ConfigError
from kvtier.kvcache.layout.canonical import CanonicalKVCaches


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
