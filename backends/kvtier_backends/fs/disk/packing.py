"""The packing: the bytes on the disk for a row. They are the row itself or its ciphertext, and a footer behind it.

A row is lent, and others may read it. So it is never encrypted in place. Each chunk under way takes one more buffer of
a row's length.
"""

from abc import ABC, abstractmethod

from kvtier.backend import SEAL_BYTES, OffloadKey, Seal, SealFault, SealOptions, TierContext
from kvtier_backends.fs.disk.footer import (
    FOOTER_BYTES,
    KEY_BYTES_MAX,
    SEALED_KEY_BYTES_MAX,
    ChunkFault,
    Footer,
    judge_chunk,
    judge_footer,
    payload_checksum,
    write_footer,
)

_FAULTS = {SealFault.LENGTH: ChunkFault.FOOTER, SealFault.FOREIGN: ChunkFault.FOOTER, SealFault.SEAL: ChunkFault.FOOTER}
"""What is wrong with a seal in a footer whose checksum is right; the others have one name here and there."""


class Packing(ABC):
    """Packs rows of one length in one namespace, and says whether what came back is the chunk. For any thread.

    Each call has a buffer of at least `beside_bytes` to itself, beside the row; both are aligned by a page.
    """

    def __init__(self, fingerprint: bytes, row_bytes: int, beside_bytes: int, key_bytes_max: int) -> None:
        """Take the namespace's fingerprint, of 32 bytes."""
        self._fingerprint = fingerprint
        self._row_bytes = row_bytes
        self.beside_bytes = beside_bytes
        self.key_bytes_max = key_bytes_max
        """The longest key that a footer has room for."""

    @abstractmethod
    def places(self, row: memoryview, beside: memoryview) -> list[memoryview]:
        """Return the buffers for the disk, in order, to write from or to read into: parts of the two buffers."""

    @abstractmethod
    def close(self, key: OffloadKey, row: memoryview, beside: memoryview, sequence: int = 0) -> None:
        """Pack a row into its places."""

    @abstractmethod
    def judge(self, key: OffloadKey, row: memoryview, beside: memoryview) -> ChunkFault | None:
        """Return the fault of the bytes in the places; None: the row is the chunk, bit for bit.

        If something is wrong, the row is undefined.
        """


class PlainPacking(Packing):
    """The row as it is: nothing is copied."""

    def __init__(self, fingerprint: bytes, row_bytes: int) -> None:
        super().__init__(fingerprint, row_bytes, FOOTER_BYTES, KEY_BYTES_MAX)

    def places(self, row: memoryview, beside: memoryview) -> list[memoryview]:
        return [row, beside]

    def close(self, key: OffloadKey, row: memoryview, beside: memoryview, sequence: int = 0) -> None:
        write_footer(beside, Footer(key, len(row), payload_checksum(row), self._fingerprint, sequence))

    def judge(self, key: OffloadKey, row: memoryview, beside: memoryview) -> ChunkFault | None:
        return judge_chunk(row, beside[:FOOTER_BYTES], key, self._fingerprint)


class SealedPacking(Packing):
    """Ciphertext, with its seal in the footer. The footer's checksum is of the ciphertext: that needs no key."""

    def __init__(self, fingerprint: bytes, row_bytes: int, seal: Seal) -> None:
        """Take a seal that has all that goes out beside the row, the seal itself at the end."""
        super().__init__(fingerprint, row_bytes, row_bytes + FOOTER_BYTES, SEALED_KEY_BYTES_MAX)
        assert seal.beside_bytes == row_bytes + SEAL_BYTES
        self._seal = seal

    def places(self, row: memoryview, beside: memoryview) -> list[memoryview]:  # noqa: ARG002
        return [beside]

    def close(self, key: OffloadKey, row: memoryview, beside: memoryview, sequence: int = 0) -> None:
        self._seal.close(key, row, beside[: self._seal.beside_bytes])
        ciphertext, page = beside[: self._row_bytes], beside[self._row_bytes :]
        checksum, seal = payload_checksum(ciphertext), bytes(page[:SEAL_BYTES])
        write_footer(page, Footer(key, self._row_bytes, checksum, self._fingerprint, sequence, seal))

    def judge(self, key: OffloadKey, row: memoryview, beside: memoryview) -> ChunkFault | None:
        page = beside[self._row_bytes :][:FOOTER_BYTES]
        footer = judge_footer(page, key, self._fingerprint, self._row_bytes)
        if isinstance(footer, ChunkFault):
            return footer
        if not footer.seal:
            return ChunkFault.KIND
        page[:SEAL_BYTES] = footer.seal  # Right behind the ciphertext, as the cipher wants its tag.
        fault = self._seal.open(key, row, beside[: self._seal.beside_bytes])
        return None if fault is None else _FAULTS.get(fault) or ChunkFault(fault.value)


def make_packing(options: SealOptions, context: TierContext) -> Packing:
    """Return the packing that the options ask for. It reads the keys: not for the loop. Raises `ConfigError`."""
    fingerprint, row_bytes = context.mapper.fingerprint, context.row_bytes
    if options.seal == "xxh3":
        return PlainPacking(fingerprint, row_bytes)
    return SealedPacking(fingerprint, row_bytes, options.make_seal(fingerprint, row_bytes))
