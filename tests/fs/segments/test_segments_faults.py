"""What a disk does to segments: damaged first pages, places that cannot be read, and others that write there."""

import os

from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.segments.segment import HEADER_BYTES

SLOT_BYTES = 8_192 + FOOTER_BYTES
SMALL = "1MiB"
DEADLINE_S = 20.0


async def test_one_place_that_cannot_be_read_costs_its_own_chunk_only(open_tier, lender, monkeypatch) -> None:
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
