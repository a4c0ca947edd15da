"""What a disk does to segments: damaged first pages, places that cannot be read, and others that write there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.segments.segment import HEADER_BYTES
from tests.fs.conftest import segments

SLOT_BYTES = 8_192 + FOOTER_BYTES
SMALL = "1MiB"
DEADLINE_S = 20.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda page: page[:40] + bytes([page[40] ^ 1]) + page[41:],
        lambda page: bytes(HEADER_BYTES),
        lambda page: page[:8] + (2).to_bytes(4, "little") + page[12:],  # A later format: its checksum is wrong here.
    ],
    ids=["a flipped bit", "zeros", "another version"],
)
async def test_a_segment_with_a_damaged_first_page_holds_nothing_and_goes_first(
    open_tier, lender: Lender, root: Path, taken_bytes, damage: Callable[[bytes], bytes], caplog
) -> None:
    capacity_bytes = 1 << 20
    first = await open_tier(layout="segments", capacity_bytes=capacity_bytes)
    await lender.keep(first, keys_of(4))
    await first.aclose(DEADLINE_S)
    (old,) = segments(root)
    content = old.read_bytes()
    old.write_bytes(damage(content[:HEADER_BYTES]) + content[HEADER_BYTES:])
    tier = await open_tier(layout="segments", capacity_bytes=capacity_bytes)
    assert await lender.recall(tier, keys_of(4)) == ["ChunkMissing"] * 4
    assert tier.counters().scan_skipped == 1
    assert tier.counters().corrupt == {}
    (said,) = (record.getMessage() for record in caplog.records if "hold nothing for this tier" in record.message)
    assert old.name in said
    await lender.keep(tier, keys_of(4), version=1)
    assert await lender.recall(tier, keys_of(4)) == [label(key, 1) for key in keys_of(4)]
    assert len(segments(root)) == 1, "the damaged one has gone for the new one's room"
    assert taken_bytes(root) <= capacity_bytes


async def test_one_place_that_cannot_be_read_costs_its_own_chunk_only(
    open_tier, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL, load_lanes=1)
    await lender.keep(tier, keys_of(6))
    read = os.preadv
    bad = HEADER_BYTES + 2 * SLOT_BYTES

    def refuse(fd: int, buffers: list[memoryview], at: int) -> int:
        if at <= bad < at + sum(map(len, buffers)):
            raise OSError(5, "Input/output error")
        return read(fd, buffers, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        told = await lender.recall(tier, keys_of(6))
    assert told.count("TransferFailed") == 1
    assert sum(each == label(key) for each, key in zip(told, keys_of(6), strict=True)) == 5
    assert await lender.recall(tier, keys_of(6)) == [label(key) for key in keys_of(6)]
    assert tier.counters().corrupt == {}
