"""The seal: 128 bytes behind a row that left the host, so that nothing else can be taken for the chunk.

`xxh3` finds chunks that were damaged, mixed up or written by another program; a writer can still forge it.
`aes-256-gcm` also keeps the row secret, and cannot be forged without the key. It needs the extra `kvtier[seal]`.

Little-endian: proof 16, magic 8, version u16, kind u8, zero u8, row length u64, namespace fingerprint 32, XXH3-128 of
the key 16, key id 8, salt 16, nonce 12, XXH3-64 of all bytes before it 8. The proof is the row's XXH3-128, or the GCM
tag, right behind the ciphertext so that both are one buffer. Magic, version and the last sum keep their places in every
version. Checksums have seed 0 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
"""

import struct
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvtier.backend.namespace import OffloadKey
from kvtier.errors import ChunkCorrupt, ChunkError, ChunkMissing

SEAL_BYTES = 128
SECRET_BYTES = 32

MAGIC = b"\x89kvseal\n"  # Not text, and damaged by programs that rewrite line ends.
VERSION = 1

_LAYOUT = struct.Struct("<16s8sHBxQ32s16s8s16s12s")
_VERSION = struct.Struct("<H")
_SUM = struct.Struct("<Q")
PROOF_BYTES, SALT_BYTES, NONCE_BYTES, KEY_ID_BYTES = 16, 16, 12, 8
SUM_BYTES = _SUM.size
assert _LAYOUT.size + SUM_BYTES == SEAL_BYTES


class SealFault(StrEnum):
    """The reasons why a stored value is not the chunk, as they are counted and shown."""

    LENGTH = "length"  # Not as long as its seal says, or longer than a row and a seal.
    FOREIGN = "foreign"  # No seal of ours.
    SEAL = "seal"  # A seal of ours, damaged.
    SWAPPED = "swapped"  # Another key's chunk.
    NAMESPACE = "namespace"  # The key's chunk of another model, layout or row length.
    PAYLOAD = "payload"  # The bytes are not those that were stored.
    VERSION = "version"  # A seal or codec that this version does not know: not corrupt, and left alone.
    KIND = "kind"  # Another kind of seal than this tier's: left alone.
    KEY = "key"  # Sealed with a key that this tier does not have: left alone.

    @property
    def corrupt(self) -> bool:
        """True if the value is useless to every tier, and may be deleted."""
        return self not in (SealFault.VERSION, SealFault.KIND, SealFault.KEY)

    def outcome(self, key: OffloadKey) -> ChunkError:
        return (ChunkCorrupt if self.corrupt else ChunkMissing)(f"{key.hex()}: {_WORDS[self]}")


_WORDS = {
    SealFault.LENGTH: "the stored value does not have the length of a row and its seal",
    SealFault.FOREIGN: "the stored value has no seal of kvtier's",
    SealFault.SEAL: "the seal is damaged",
    SealFault.SWAPPED: "the stored value is another key's chunk",
    SealFault.NAMESPACE: "the stored value belongs to another model, layout or length of rows",
    SealFault.PAYLOAD: "the bytes are not those that were sealed",
    SealFault.VERSION: "sealed by a version of kvtier that this one does not know",
    SealFault.KIND: "sealed with another kind of seal than this tier's option `seal`",
    SealFault.KEY: "sealed with a key that this tier was not given",
}


class Seal(ABC):
    """Seals rows in one namespace, and verifies them. For any thread.

    Each call gets a row and a private buffer of `beside_bytes`: for the seal, or for all that is sent. A row may be
    shorter than `row_bytes`; the seal then has its length.
    """

    kind_number: int  # As it is written in the seal.

    def __init__(self, fingerprint: bytes, row_bytes: int, beside_bytes: int) -> None:
        self._fingerprint = fingerprint
        self.row_bytes = row_bytes
        self.sealed_bytes = row_bytes + SEAL_BYTES  # Sent for each row.
        self.beside_bytes = beside_bytes

    @abstractmethod
    def close(self, key: OffloadKey, row: memoryview, beside: memoryview) -> list[memoryview]:
        """Seal a row, and return the bytes to send, in order: parts of the two buffers."""

    @abstractmethod
    def places(self, row: memoryview, beside: memoryview) -> list[memoryview]:
        """Return the places for received bytes, in order: parts of the two buffers."""

    @abstractmethod
    def open(self, key: OffloadKey, row: memoryview, beside: memoryview) -> SealFault | None:
        """Verify received bytes in their places. None: the row is the chunk, bit for bit; else it is undefined."""

    def write(self, key: OffloadKey, into: memoryview, given: "Given", row_bytes: int) -> None:
        _LAYOUT.pack_into(
            *(into, 0, given.proof, MAGIC, VERSION, self.kind_number, row_bytes, self._fingerprint),
            *(xxh3_128_digest(key), given.key_id, given.salt, given.nonce),
        )
        self.sum_up(into)

    def sum_up(self, seal: memoryview) -> None:
        _SUM.pack_into(seal, _LAYOUT.size, xxh3_64_intdigest(seal[: _LAYOUT.size]))

    def read(self, key: OffloadKey, seal: memoryview, row_bytes: int) -> "Given | SealFault":
        """Parse the seal of a row that has this length, and verify what does not depend on the row's bytes."""
        proof, magic, version, kind, sealed_row_bytes, fingerprint, key_sum, *rest = _LAYOUT.unpack_from(seal)
        if magic != MAGIC:
            return SealFault.FOREIGN
        if _SUM.unpack_from(seal, _LAYOUT.size)[0] != xxh3_64_intdigest(seal[: _LAYOUT.size]):
            return SealFault.SEAL
        if version != VERSION:
            return SealFault.VERSION
        if key_sum != xxh3_128_digest(key):
            return SealFault.SWAPPED
        if fingerprint != self._fingerprint:
            return SealFault.NAMESPACE
        if sealed_row_bytes != row_bytes:
            return SealFault.LENGTH
        return Given(proof, *rest) if kind == self.kind_number else SealFault.KIND


class Given(NamedTuple):
    """The fields of a seal that depend on its kind."""

    proof: bytes = b""
    key_id: bytes = b""
    salt: bytes = b""
    nonce: bytes = b""


class XXH3Seal(Seal):
    """A checksum: the row is sent unchanged."""

    kind_number = 1

    def __init__(self, fingerprint: bytes, row_bytes: int) -> None:
        super().__init__(fingerprint, row_bytes, SEAL_BYTES)

    def close(self, key: OffloadKey, row: memoryview, beside: memoryview) -> list[memoryview]:
        self.write(key, beside, Given(xxh3_128_digest(row)), row.nbytes)
        return [row, beside]

    def places(self, row: memoryview, beside: memoryview) -> list[memoryview]:
        return [row, beside]

    def open(self, key: OffloadKey, row: memoryview, beside: memoryview) -> SealFault | None:
        given = self.read(key, beside, row.nbytes)
        if isinstance(given, SealFault):
            return given
        return None if given.proof == xxh3_128_digest(row) else SealFault.PAYLOAD


def of_another_version(seal: bytes) -> bool:
    """Return True for an undamaged seal, of any length, of an unknown version."""
    if len(seal) < SEAL_BYTES or seal[PROOF_BYTES : PROOF_BYTES + len(MAGIC)] != MAGIC:
        return False
    (version,) = _VERSION.unpack_from(seal, PROOF_BYTES + len(MAGIC))
    return _SUM.pack(xxh3_64_intdigest(seal[:-SUM_BYTES])) == seal[-SUM_BYTES:] and version != VERSION
