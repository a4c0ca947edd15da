"""Segments that somebody else removes while a tier has them open: what goes there is not said to be stored."""

import asyncio
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.backend.contract import Outcome, Removed, ScanDone
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.segments import losses
from kvtier_backends.fs.segments.folder import SegmentFolder
from tests.fs.conftest import segments

SLOT_BYTES = 8_192 + FOOTER_BYTES
SMALL = "1MiB"
DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(losses, "CLOSE_S", 0.01)


@pytest.fixture
def watched(monkeypatch) -> None:
    monkeypatch.setattr(losses, "LOOK_S", 0.01)


def kinds(outcomes: Sequence[Outcome]) -> list[str]:
    return [type(outcome).__name__ for outcome in outcomes]


def open_without_a_name(root: Path) -> int:
    """Return how many files of a directory this process has open that are not there any more."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        found += path.startswith(str(root)) and path.endswith(".seg (deleted)")
    return found


async def let_go(root: Path) -> None:
    """Wait until no file is open that was removed: then its room is free."""
    async with asyncio.timeout(DEADLINE_S):
        while open_without_a_name(root):
            await asyncio.sleep(0.01)


async def reopened(tier: FsBackend, open_tier, capacity_bytes: str = SMALL) -> FsBackend:
    assert await tier.aclose(DEADLINE_S) == (0,)
    return await open_tier(layout="segments", capacity_bytes=capacity_bytes)


async def test_a_root_that_is_removed_underfoot_costs_the_chunks_of_its_segments_only(open_tier, lender, root) -> None:
    tier = await open_tier(layout="segments")
    await lender.keep(tier, keys_of(2))
    shutil.rmtree(root)
    assert kinds(await tier.store(lender.writes(keys_of(2)))) == ["TransferFailed"] * 2  # Lost to the next start.
    assert list(await tier.probe(keys_of(6))) == [False] * 6
    assert await lender.recall(tier, keys_of(6)) == ["ChunkMissing"] * 6
    await tier.delete(keys_of(6))
    await lender.keep(tier, keys_of(2))  # It was made again.


async def test_a_removed_segment_gives_way_to_a_new_one(open_tier, lender, root) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(4))
    segments(root)[0].unlink()
    assert kinds(await tier.store(lender.writes(keys_of(2, start=10)))) == ["TransferFailed"] * 2
    assert tier.occupancy().chunks == 0
    await let_go(root)
    await lender.keep(tier, keys_of(2, start=20))
    assert len(segments(root)) == 1
    tier = await reopened(tier, open_tier)
    assert await lender.recall(tier, keys_of(2, start=20)) == [label(key) for key in keys_of(2, start=20)]
    assert await lender.recall(tier, keys_of(4)) == ["ChunkMissing"] * 4


async def test_a_removed_folder_of_segments_is_made_again(open_tier, lender, root) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(4))
    shutil.rmtree(segments(root)[0].parent)
    assert kinds(await tier.store(lender.writes(keys_of(2)))) == ["TransferFailed"] * 2
    await let_go(root)
    await lender.keep(tier, keys_of(2))
    tier = await reopened(tier, open_tier)
    assert await lender.recall(tier, keys_of(2)) == [label(key) for key in keys_of(2)]


async def test_a_segment_with_anothers_in_its_place_is_gone_too(open_tier, lender, root) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(4))
    (segment,) = segments(root)
    content = segment.read_bytes()
    segment.unlink()
    segment.write_bytes(content)
    assert kinds(await tier.store(lender.writes(keys_of(2)))) == ["TransferFailed"] * 2
    await let_go(root)
    await lender.keep(tier, keys_of(2), version=1)
    assert segment.read_bytes() == content, "nothing was written to it"


async def test_only_what_lies_in_the_removed_segment_is_lost(open_tier, lender, root) -> None:
    first = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(first, keys_of(60))
    await first.aclose(DEADLINE_S)
    tier = await open_tier(layout="segments", capacity_bytes="2MiB")
    await lender.keep(tier, keys_of(60, start=100))
    assert len(segments(root)) == 2
    segments(root)[0].unlink()
    outcomes = await tier.store(lender.writes(keys_of(100, start=200)))  # There is not so much room in one of them.
    assert set(kinds(outcomes)) == {"NoneType", "TransferFailed"}
    assert tier.occupancy().chunks > outcomes.count(None)
    there = await tier.probe(keys_of(60))
    assert not any(there)
    kept = [key for key, is_there in zip(keys_of(300), await tier.probe(keys_of(300)), strict=True) if is_there]
    tier = await reopened(tier, open_tier, "2MiB")
    assert await lender.recall(tier, kept) == [label(key) for key in kept]


async def test_a_removed_segment_is_noticed_though_nobody_stores(open_tier, lender, root, watched) -> None:
    """And what it took of the disk is free then: most likely that was why it was removed."""
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(4))
    told = tier.watch()
    async with asyncio.timeout(DEADLINE_S):
        while not isinstance(await anext(told), ScanDone):
            pass
        segments(root)[0].unlink()
        event = await anext(told)
        assert isinstance(event, Removed)
        assert set(event.keys) == set(keys_of(4))
        await let_go(root)
    await told.aclose()
    assert tier.counters().segments_lost == 1
    await lender.keep(tier, [key_of(1)])


async def test_a_load_of_what_was_removed_still_gives_the_chunk_until_that_is_noticed(open_tier, lender, root) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(4))
    segments(root)[0].unlink()
    assert await lender.recall(tier, keys_of(4)) == [label(key) for key in keys_of(4)]


async def test_a_load_that_hangs_keeps_a_removed_segment_open(open_tier, lender, root, system_call, watched) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(4))
    stuck = system_call("preadv", sticks=True)
    load = asyncio.create_task(lender.recall(tier, keys_of(1)))
    await stuck.wait_entered()
    segments(root)[0].unlink()
    async with asyncio.timeout(DEADLINE_S):
        while tier.occupancy().chunks > 1:
            await asyncio.sleep(0.01)
        assert open_without_a_name(root) == 1
        stuck.let_go()
        assert await load == [label(key_of(0))]
        await let_go(root)
    assert list(await tier.probe(keys_of(1))) == [False]


async def test_a_name_that_cannot_be_asked_for_fails_the_store_and_loses_nothing(
    open_tier, lender, system_call
) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(4))
    refused = system_call("open", error=errno.EIO, only=lambda name, *args, **how: str(name).endswith(".seg"))
    assert kinds(await tier.store(lender.writes(keys_of(2), version=1))) == ["TransferFailed"] * 2
    refused.let_go()
    assert await lender.recall(tier, keys_of(4)) == [label(key) for key in keys_of(4)]
    assert tier.counters().segments_lost == 0
    await lender.keep(tier, keys_of(2), version=1)


def test_what_has_taken_a_segments_name_is_not_removed_for_it(open_folder, root) -> None:
    folder = SegmentFolder(
        open_folder(layout="segments", io="buffered"), row_bytes=8_192, fingerprint=bytes(32), fsync=False
    )
    segment = folder.create(4)
    (path,) = segments(root)
    assert folder.has(segment)
    path.unlink()
    assert not folder.has(segment)
    path.write_bytes(b"another")
    folder.remove(segment)
    assert path.read_bytes() == b"another"
    assert segment.closed
