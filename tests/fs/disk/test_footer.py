"""A footer says what stands before it, and nothing else reads as one."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.backend import SEAL_BYTES, OffloadKey, make_offload_key
from kvtier_backends.fs.disk.footer import (
    FOOTER_BYTES,
    KEY_BYTES_MAX,
    SLICE_BYTES,
    ChunkFault,
    Footer,
    payload_checksum,
    read_footer,
    write_footer,
)

FOOTER = Footer(make_offload_key(bytes(range(32)), 7), 2_097_152, 0x0123456789ABCDEF, bytes(range(100, 132)))


def page_of(footer, before=b"\xee"):
    page = memoryview(bytearray(before * FOOTER_BYTES))
    write_footer(page, footer)
    return page


@given(
    st.builds(
        Footer,
        st.binary(max_size=300).map(OffloadKey),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1),
        st.binary(min_size=32, max_size=32),
        st.integers(0, 2**64 - 1),
        st.just(b"") | st.binary(min_size=SEAL_BYTES, max_size=SEAL_BYTES),
    )
)
def test_what_was_written_is_read(footer):
    assert read_footer(page_of(footer)) == footer


@given(st.integers(0, 8 * FOOTER_BYTES - 1))
def test_every_flipped_bit_is_seen(bit):
    page = page_of(FOOTER)
    page[bit // 8] ^= 1 << bit % 8
    assert read_footer(page) in (ChunkFault.FOREIGN, ChunkFault.FOOTER)


def test_the_format_is_what_was_published():
    """Files outlive programs: a change of format is a change of version, never of this test."""
    page = bytes(page_of(FOOTER))
    assert page == bytes(page_of(FOOTER, b"\0")), "nothing of the page before stays"
    assert page[:8] == b"\x89kvtier\n"
    assert page[8:16] == (1).to_bytes(4, "little") + (36).to_bytes(4, "little")
    assert page[16:24] == (2_097_152).to_bytes(8, "little")
    assert (page[24:32], page[32:64]) == (bytes.fromhex("efcdab8967452301"), bytes(range(100, 132)))
    assert (page[64:100], page[100:4_088]) == (bytes(range(32)) + b"\0\0\0\x07", bytes(3_988))
    assert page[4_088:] == bytes.fromhex("87417f936c3dae22")


def test_the_format_of_what_is_encrypted_is_another_version_with_the_seal_behind_the_key():
    plain, sealed = bytes(page_of(FOOTER)), bytes(page_of(FOOTER._replace(seal=bytes(range(SEAL_BYTES)))))
    assert sealed[8:12] == (2).to_bytes(4, "little")
    assert sealed[3_952:4_080] == bytes(range(SEAL_BYTES))
    assert (sealed[:8], sealed[12:3_952], sealed[4_080:4_088]) == (plain[:8], plain[12:3_952], plain[4_080:4_088])


def test_a_key_that_cannot_be_in_there_is_a_fault():
    page = page_of(FOOTER)
    struct.pack_into("<I", page, 12, KEY_BYTES_MAX + 1)
    struct.pack_into("<Q", page, FOOTER_BYTES - 8, xxh3_64_intdigest(page[:-8]))  # Its own checksum is right.
    assert read_footer(page) is ChunkFault.FOOTER


@pytest.mark.parametrize("size", [0, 1, 4_096, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES + 17])
def test_a_checksum_in_slices_is_the_checksum_of_the_whole(size):
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    assert payload_checksum(memoryview(payload)) == xxh3_64_intdigest(payload)
