"""The footer: a page behind a chunk's bytes on the disk, so that nothing else can be taken for the chunk.

It is a footer and no header, because vLLM's own file tier knows only the row's length. It reads the bytes from the
start, and never sees the footer. The footer is always one page, so row and footer go to the disk in one direct write.

Little-endian: magic 8, version u32, key length u32, payload length u64, payload checksum u64, namespace fingerprint 32,
key, zeros up to byte 4,080, sequence number u64, checksum u64 of all bytes before it. The sequence number is zero in a
file, and orders what was stored under one key where there are no names to replace. Version 2 is for encrypted rows: the
seal (`kvtier.backend.seal`) takes the last 128 of the zeros, and the payload is the ciphertext. Checksums are XXH3-64
with seed 0 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). Magic, version and the last checksum keep
their places in every version.
"""

import errno
import struct
from enum import Enum, StrEnum
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_intdigest

from kvtier.backend import SEAL_BYTES, OffloadKey, Seal, SealFault, SealOptions, TierContext
from kvtier.errors import ChunkError, NoSpace, TransferFailed
from kvtier.memory import PAGE_BYTES

FOOTER_BYTES = PAGE_BYTES
MAGIC = b"\x89kvtier\n"  # Not text, and damaged by whatever rewrites line ends.
VERSION = 1
SEALED_VERSION = 2  # To programs that do not know it a later format: none takes what is encrypted for KV.

SLICE_BYTES = 64 << 10  # Below the 100 kB from which xxhash lets go of the GIL: getting it back from a busy main
# thread takes up to 5 ms a chunk, and a slice is summed in 3 µs.

_HEAD = struct.Struct("<8sIIQQ32s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = FOOTER_BYTES - _CHECKSUM.size
_SEQUENCE = struct.Struct("<Q")
_TAIL = struct.Struct("<QQ")  # The sequence number and the checksum.
_SEQUENCE_AT = _CHECKSUM_AT - _SEQUENCE.size
_SEAL_AT = _SEQUENCE_AT - SEAL_BYTES
KEY_BYTES_MAX = _SEQUENCE_AT - _HEAD.size
SEALED_KEY_BYTES_MAX = _SEAL_AT - _HEAD.size

FULL = {errno.ENOSPC, errno.EDQUOT}
GONE = {errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH}
"""The whole file system is away."""


class ChunkFault(StrEnum):
    """A way in which a file is not the chunk that its name promises, as it is counted and shown."""

    TRUNCATED = "truncated"  # Shorter than a row, or than a row and its footer.
    OVERLONG = "overlong"
    ZEROED = "zeroed"  # No footer but zeros: a power cut between a file's length and its bytes.
    FOREIGN = "foreign"  # No footer of ours.
    FOOTER = "footer"  # A footer of ours, damaged.
    VERSION = "version"  # A footer of a format that this version does not know: not corrupt, and left alone.
    SWAPPED = "swapped"  # Another key's chunk.
    NAMESPACE = "namespace"  # The key's chunk of another model, layout or row length.
    PAYLOAD = "payload"  # The bytes are not those that were stored.
    KIND = "kind"  # Encrypted where the tier is told not to, or the other way round: left alone.
    KEY = "key"  # Encrypted with a key that the tier was not given: left alone.


LEFT_ALONE = {
    ChunkFault.VERSION: ("other_version", "of a later format"),
    ChunkFault.KIND: ("sealed_kind", "sealed otherwise than this tier's option `seal` says"),
    ChunkFault.KEY: ("sealed_key", "sealed with a key that this tier was not given"),
}
"""Faults that are no corruption, each with its counter: the chunk may be right for another kvtier engine."""


def failure(key: OffloadKey, error: OSError) -> ChunkError:
    """Return a chunk's outcome, with its cause: both without a traceback, which would keep frames, and lent buffers."""
    outcome = (NoSpace if error.errno in FULL else TransferFailed)(f"{key.hex()}: {error.strerror or error}")
    outcome.__cause__ = frameless(error)
    return outcome


def frameless(error: OSError) -> OSError:
    """Return a copy of an error that keeps nothing of where it was raised."""
    return OSError(error.errno, error.strerror)


class Footer(NamedTuple):
    key: OffloadKey
    payload_bytes: int
    payload_checksum: int
    fingerprint: bytes  # 32 bytes.
    sequence: int = 0  # Of two chunks of one key, the one with the greater was stored later.
    seal: bytes = b""  # Of an encrypted row, `SEAL_BYTES`.


def write_footer(page: memoryview, footer: Footer) -> None:
    """Fill a page of `FOOTER_BYTES` with a footer; ValueError for a key that is too long for it."""
    key, payload_bytes, payload_checksum, fingerprint, sequence, seal = footer
    version, key_bytes_max = (SEALED_VERSION, SEALED_KEY_BYTES_MAX) if seal else (VERSION, KEY_BYTES_MAX)
    if len(key) > key_bytes_max:
        raise ValueError(f"a key of {len(key)} bytes; a footer holds {key_bytes_max}")
    head = _HEAD.pack(MAGIC, version, len(key), payload_bytes, payload_checksum, fingerprint) + key
    page[:_SEQUENCE_AT] = head.ljust(_SEQUENCE_AT - len(seal), b"\0") + seal
    _SEQUENCE.pack_into(page, _SEQUENCE_AT, sequence)
    _CHECKSUM.pack_into(page, _CHECKSUM_AT, xxh3_64_intdigest(page[:_CHECKSUM_AT]))


def read_footer(page: memoryview) -> Footer | ChunkFault:
    """Read a footer from a page of `FOOTER_BYTES`, or say why there is no footer."""
    magic, version, key_bytes, payload_bytes, payload_checksum, fingerprint = _HEAD.unpack_from(page)
    if magic != MAGIC:
        return ChunkFault.FOREIGN if any(page) else ChunkFault.ZEROED
    sequence, checksum = _TAIL.unpack_from(page, _SEQUENCE_AT)
    if checksum != xxh3_64_intdigest(page[:_CHECKSUM_AT]):
        return ChunkFault.FOOTER
    if version not in (VERSION, SEALED_VERSION):
        return ChunkFault.VERSION
    seal = bytes(page[_SEAL_AT:_SEQUENCE_AT]) if version == SEALED_VERSION else b""
    if key_bytes > (SEALED_KEY_BYTES_MAX if seal else KEY_BYTES_MAX):
        return ChunkFault.FOOTER
    key = OffloadKey(bytes(page[_HEAD.size : _HEAD.size + key_bytes]))
    return Footer(key, payload_bytes, payload_checksum, fingerprint, sequence, seal)


def signed(head: bytes) -> bytes:
    """Return a page: the head, zeros, and a checksum of all before it."""
    body = head.ljust(_CHECKSUM_AT, b"\0")
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def is_signed(page: bytes, magic: bytes, version: int) -> bool:
    begins, body = magic + version.to_bytes(4, "little"), page[:_CHECKSUM_AT]
    return page.startswith(begins) and page[_CHECKSUM_AT:] == _CHECKSUM.pack(xxh3_64_intdigest(body))


def payload_checksum(payload: memoryview) -> int:
    if len(payload) <= SLICE_BYTES:
        return xxh3_64_intdigest(payload)
    total = xxh3_64()
    for start in range(0, len(payload), SLICE_BYTES):
        total.update(payload[start : start + SLICE_BYTES])
    return total.intdigest()


class Whole(Enum):
    """The kinds of a file whose length is right."""

    FOOTED = "footed"  # A row and a footer, which is still to be compared.
    BARE = "bare"  # A row and nothing else, as vLLM writes it: nothing says whether it is right.


def judge_length(file_bytes: int, row_bytes: int) -> Whole | ChunkFault:
    if file_bytes == row_bytes + FOOTER_BYTES:
        return Whole.FOOTED
    if file_bytes == row_bytes:
        return Whole.BARE
    return ChunkFault.TRUNCATED if file_bytes < row_bytes + FOOTER_BYTES else ChunkFault.OVERLONG


_FAULTS = {SealFault.LENGTH: ChunkFault.FOOTER, SealFault.FOREIGN: ChunkFault.FOOTER, SealFault.SEAL: ChunkFault.FOOTER}
"""What is wrong with a seal in a footer whose checksum is right; the others have one name here and there."""


class Packing:
    """The bytes on the disk for a row: the row itself or its ciphertext, and a footer. For any thread.

    A row is lent, so it is encrypted into a buffer of at least `beside_bytes` that each call has beside it; both are
    aligned by a page. The footer's checksum is of the ciphertext: that needs no key.
    """

    def __init__(self, fingerprint: bytes, row_bytes: int, seal: Seal | None = None) -> None:
        """`seal`: one that has all that goes out beside the row, the seal itself at the end; None: rows as they are."""
        assert seal is None or seal.beside_bytes == row_bytes + SEAL_BYTES
        self._fingerprint = fingerprint
        self._row_bytes = row_bytes
        self._seal = seal
        self.beside_bytes = FOOTER_BYTES if seal is None else row_bytes + FOOTER_BYTES
        self.key_bytes_max = KEY_BYTES_MAX if seal is None else SEALED_KEY_BYTES_MAX
        """The longest key that a footer has room for."""

    def places(self, row: memoryview, beside: memoryview) -> list[memoryview]:
        """Return the buffers for the disk, in order, to write from or to read into: parts of the two buffers."""
        return [row, beside] if self._seal is None else [beside]

    def close(self, key: OffloadKey, row: memoryview, beside: memoryview, sequence: int = 0) -> None:
        if self._seal is None:
            write_footer(beside, Footer(key, len(row), payload_checksum(row), self._fingerprint, sequence))
            return
        self._seal.close(key, row, beside[: self._seal.beside_bytes])
        ciphertext, page = beside[: self._row_bytes], beside[self._row_bytes :]
        checksum, seal = payload_checksum(ciphertext), bytes(page[:SEAL_BYTES])
        write_footer(page, Footer(key, self._row_bytes, checksum, self._fingerprint, sequence, seal))

    def judge(self, key: OffloadKey, row: memoryview, beside: memoryview) -> ChunkFault | None:
        """Return the fault of the bytes in the places: the row is undefined; None: it is the chunk, bit for bit."""
        page = beside[self.beside_bytes - FOOTER_BYTES : self.beside_bytes]
        footer = read_footer(page)
        if isinstance(footer, ChunkFault):
            return footer
        if footer.key != key:
            return ChunkFault.SWAPPED
        if footer.fingerprint != self._fingerprint or footer.payload_bytes != self._row_bytes:
            return ChunkFault.NAMESPACE
        if bool(footer.seal) == (self._seal is None):
            return ChunkFault.KIND
        if self._seal is None:
            return None if footer.payload_checksum == payload_checksum(row) else ChunkFault.PAYLOAD
        page[:SEAL_BYTES] = footer.seal  # Right behind the ciphertext, as the cipher wants its tag.
        fault = self._seal.open(key, row, beside[: self._seal.beside_bytes])
        return None if fault is None else _FAULTS.get(fault) or ChunkFault(fault.value)


def make_packing(options: SealOptions, context: TierContext) -> Packing:
    """Return the packing that the options ask for. It reads the keys: not for the loop. Raises `ConfigError`."""
    fingerprint, row_bytes = context.mapper.fingerprint, context.row_bytes
    seal = None if options.seal == "xxh3" else options.make_seal(fingerprint, row_bytes)
    return Packing(fingerprint, row_bytes, seal)
