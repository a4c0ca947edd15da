"""Only the chunk that was asked for, bit for bit, is that chunk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend.keys import make_offload_key
from kvtier_backends.fs.disk.footer import (
    FOOTER_BYTES,
    ChunkFault,
    Footer,
    Whole,
    judge_chunk,
    judge_length,
    payload_checksum,
    write_footer,
)

ROW_BYTES = 8_192
KEY = make_offload_key(b"k" * 32)
FINGERPRINT = b"f" * 32


def stored(payload: memoryview) -> memoryview:
    page = memoryview(bytearray(FOOTER_BYTES))
    write_footer(page, Footer(KEY, len(payload), payload_checksum(payload), FINGERPRINT))
    return page


@pytest.mark.parametrize(
    ("file_bytes", "verdict"),
    [
        (0, ChunkFault.TRUNCATED),
        (1, ChunkFault.TRUNCATED),
        (ROW_BYTES - 1, ChunkFault.TRUNCATED),
        (ROW_BYTES, Whole.BARE),
        (ROW_BYTES + 1, ChunkFault.TRUNCATED),
        (ROW_BYTES + FOOTER_BYTES - 1, ChunkFault.TRUNCATED),
        (ROW_BYTES + FOOTER_BYTES, Whole.FOOTED),
        (ROW_BYTES + FOOTER_BYTES + 1, ChunkFault.OVERLONG),
        (1 << 40, ChunkFault.OVERLONG),
    ],
)
def test_lengths_tell_what_a_file_can_be(file_bytes: int, verdict: Whole | ChunkFault) -> None:
    assert judge_length(file_bytes, ROW_BYTES) is verdict


@given(st.binary(min_size=1, max_size=64))
def test_what_was_stored_is_recognised(pattern: bytes) -> None:
    payload = (pattern * ROW_BYTES)[:ROW_BYTES]
    assert judge_chunk(memoryview(payload), stored(memoryview(payload)), KEY, FINGERPRINT) is None


@given(st.integers(0, 8 * ROW_BYTES - 1))
def test_every_flipped_bit_of_the_payload_is_seen(bit: int) -> None:
    payload = memoryview(bytearray(bytes(range(256)) * (ROW_BYTES // 256)))
    page = stored(payload)
    payload[bit // 8] ^= 1 << bit % 8
    assert judge_chunk(payload, page, KEY, FINGERPRINT) is ChunkFault.PAYLOAD


def test_another_chunk_is_told_by_its_key() -> None:
    payload = memoryview(bytes(ROW_BYTES))
    assert judge_chunk(payload, stored(payload), make_offload_key(b"k" * 32, 1), FINGERPRINT) is ChunkFault.SWAPPED


def test_another_namespace_is_told_by_its_fingerprint() -> None:
    payload = memoryview(bytes(ROW_BYTES))
    assert judge_chunk(payload, stored(payload), KEY, b"g" * 32) is ChunkFault.NAMESPACE


def test_a_footer_for_another_length_is_another_namespaces() -> None:
    payload = memoryview(bytes(ROW_BYTES))
    page = memoryview(bytearray(FOOTER_BYTES))
    write_footer(page, Footer(KEY, ROW_BYTES + 4_096, payload_checksum(payload), FINGERPRINT))
    assert judge_chunk(payload, page, KEY, FINGERPRINT) is ChunkFault.NAMESPACE
