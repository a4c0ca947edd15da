"""The bytes of a trace's chunks: they say in every word which chunk they are and where in it they belong.

Each 8-byte word is a random word of its place, XOR a random word of the chunk's id. So a mixture of two chunks, two
chunks exchanged and bytes at another offset all show, wherever they are, and a chunk costs one pass over its memory:
2 µs for 16 KiB, or a second for the 4.7 GB that an hour of chat asks for.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.backend import OffloadKey, make_offload_key

WORD_BYTES = 8
COMPARED_BYTES = 4 << 20  # Made at once for a comparison: more would only leave the processor's cache.


class ChunkSource:
    """The keys and the bytes of a trace's chunks, by block id. The same arguments always give the same ones."""

    def __init__(self, chunk_bytes: int, *, seed: int = 0, trace: bytes = b"") -> None:
        """`trace`: what tells this trace from others, whose equal ids stand for other tokens."""
        self.chunk_bytes = chunk_bytes
        self._salt = hashlib.sha256(b"%d " % seed + trace).digest()
        words = -(-chunk_bytes // WORD_BYTES)
        places = np.random.Philox(np.frombuffer(self._salt, np.uint32).tolist())
        self._words_of_places: npt.NDArray[np.uint64] = places.random_raw(words)

    def key(self, block_id: int) -> OffloadKey:
        """Return the key of a block: a hash as long as an engine's own, 32 bytes, and KV-cache group 0."""
        return make_offload_key(hashlib.sha256(self._salt + b"%d" % block_id).digest())

    def chunks(self, keys: Sequence[OffloadKey]) -> list[memoryview]:
        """Make the chunks of these keys, one after the other in fresh memory."""
        return [row.data for row in self._rows(keys)]

    def wrong(self, keys: Sequence[OffloadKey], chunks: Sequence[memoryview]) -> list[OffloadKey]:
        """Return the keys whose chunk is not, byte for byte, what was made for them; leading keys have chunks.

        Keeps no hold of the chunks.
        """
        size = max(1, COMPARED_BYTES // self.chunk_bytes)
        return [
            key
            for start in range(0, len(chunks), size)
            for key in self._wrong(keys[start : start + size], chunks[start : start + size])
        ]

    def _wrong(self, keys: Sequence[OffloadKey], chunks: Sequence[memoryview]) -> Iterator[OffloadKey]:
        for key, made, chunk in zip(keys, self._rows(keys), chunks, strict=False):
            if not np.array_equal(made, np.frombuffer(chunk, np.uint8)):
                yield key

    def _rows(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.uint8]:
        words = np.frombuffer(b"".join(key[:WORD_BYTES] for key in keys), np.uint64)
        made = np.bitwise_xor(words[:, np.newaxis], self._words_of_places)
        return made.view(np.uint8)[:, : self.chunk_bytes]
