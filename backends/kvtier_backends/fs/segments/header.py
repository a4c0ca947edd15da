"""A segment's first page: how long its slots are, how many it has, and what their bytes mean.

Little-endian: magic 8, version u32, zero u32, row length u64, slots u64, namespace fingerprint 32, zeros up to byte
4,088, XXH3-64 of all bytes before it. Slots follow, each a row and its footer.
"""

import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvtier_backends.fs.footer import FOOTER_BYTES

HEADER_BYTES = 4_096
MAGIC = b"\x89kvtseg\n"
VERSION = 1

_HEAD = struct.Struct("<8sIIQQ32s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_AT = HEADER_BYTES - _CHECKSUM.size


class Header(NamedTuple):
    """What a segment is."""

    row_bytes: int
    slots: int
    fingerprint: bytes  # 32 bytes.

    @property
    def slot_bytes(self) -> int:
        return self.row_bytes + FOOTER_BYTES

    @property
    def file_bytes(self) -> int:
        return self.offset(self.slots)

    def offset(self, place: int) -> int:
        """Return where in the file a slot begins."""
        return HEADER_BYTES + place * self.slot_bytes

    def footer_offset(self, place: int) -> int:
        """Return where in the file a slot's footer begins."""
        return self.offset(place) + self.row_bytes

    def written(self) -> bytes:
        """Return the page."""
        body = _HEAD.pack(MAGIC, VERSION, 0, self.row_bytes, self.slots, self.fingerprint).ljust(_CHECKSUM_AT, b"\0")
        return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def read_header(page: bytes) -> Header | None:
    """Read a segment's first page; None if it is none, damaged, or of another version."""
    if len(page) != HEADER_BYTES:
        return None
    magic, version, _, row_bytes, slots, fingerprint = _HEAD.unpack_from(page)
    (checksum,) = _CHECKSUM.unpack_from(page, _CHECKSUM_AT)
    if (magic, version) != (MAGIC, VERSION) or checksum != xxh3_64_intdigest(page[:_CHECKSUM_AT]):
        return None
    return Header(row_bytes, slots, fingerprint)
