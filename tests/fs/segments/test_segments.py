"""Chunks in segments: writes that fail, deletions, locks, and segments that somebody else removes or prunes."""

import asyncio
import errno
import fcntl
import os
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend import Kind, Removed, ScanDone
from kvtier.errors import BackendClosed, BackendUnavailable, cause_of
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs.directory import FilesDirectory, SegmentsDirectory
from kvtier_backends.fs.disk.capacity import Disk
from kvtier_backends.fs.disk.owner import OWNER
from kvtier_backends.fs.segments import room
from kvtier_backends.fs.segments.mover import RUN_SLOTS_MAX
from kvtier_backends.fs.segments.segment import HEADER_BYTES, Header, read_header
from tests.fs.conftest import DEADLINE_S, SLOT_BYTES, kinds, scanned, segments, taken_bytes, until, whole
from tests.own import open_without_a_name

KEY = key_of(1)
SEGMENTS = {"layout": "segments"}


@pytest.fixture
async def tier(open_tier):
    return await open_tier(**SEGMENTS)


@pytest.fixture
def three_segments(stored, root):
    async def three_segments():
        for number in range(3):
            await stored(keys_of(60, start=100 * number), **SEGMENTS, capacity_bytes=(number + 1) << 20)
        assert len(segments(root)) == 3

    return three_segments


@given(st.integers(1, 1_000), st.integers(1, 2_000), st.binary(min_size=32, max_size=32))
def test_a_header_is_read_as_it_was_written(pages, slots, fingerprint):
    header = Header(4_096 * pages, slots, fingerprint)
    page = header.written()
    assert read_header(page) == header
    assert read_header(page[:-1]) is None
    assert read_header(bytes([page[0] ^ 1]) + page[1:]) is None


def test_a_segments_first_page_is_what_was_published():
    page = Header(8_192, 3, bytes(range(32))).written()
    numbers = (1).to_bytes(8, "little") + (8_192).to_bytes(8, "little") + (3).to_bytes(8, "little")
    assert page[:40] == b"\x89kvtseg\n" + numbers + bytes(range(8))
    assert Header(8_192, 3, bytes(32)).offset(2) == 4_096 + 2 * 12_288


async def test_two_tiers_on_one_directory_write_to_segments_of_their_own(open_tier, lender, root):
    """Each reads what the other had stored when it started, and takes none of the other's slots.

    So does a runner that is started in the place of one that hangs. Here the owner's file is removed: nobody guards.
    """
    first = await open_tier(**SEGMENTS, holds=keys_of(4))
    (root / OWNER).unlink()
    second = await open_tier(**SEGMENTS, capacity_bytes="4MiB")
    assert await scanned(second) == set(keys_of(4))
    assert await lender.recall(second, keys_of(4)) == whole(keys_of(4))
    await lender.keep(second, keys_of(4, start=10))
    await lender.keep(second, [KEY], version=1)
    assert (len(segments(root)), await lender.recall(second, [KEY])) == (2, [label(KEY, 1)])
    assert await lender.recall(first, [KEY]) == [label(KEY)]
    await first.delete(keys_of(4))
    await lender.keep(first, keys_of(80, start=200))  # What was read of the first one's slots is no more.
    expected = ["ChunkMissing", label(KEY, 1), label(key_of(10))]
    assert await lender.recall(second, [key_of(0), KEY, key_of(10)]) == expected
    assert second.counters().corrupt == {}


async def test_a_batch_lies_together_and_is_one_call_a_lane(open_tier, lender, system_call):
    tier = await open_tier(**SEGMENTS, load_lanes=1, store_lanes=1, capacity_bytes="4MiB", holds=keys_of(2, start=50))
    moved = []
    for name in ("pwritev", "preadv"):
        system_call(name, only=lambda fd, buffers, at, name=name: moved.append((name, len(buffers))))
    await lender.keep(tier, keys_of(24))
    await lender.recall(tier, random.Random(1).sample(keys_of(24), 24))
    assert moved == [("pwritev", 48), ("preadv", 48)]
    assert os.sysconf("SC_IOV_MAX") >= RUN_SLOTS_MAX * 2


async def test_one_place_that_cannot_be_written_costs_its_own_chunk_only(tier, lender, system_call):
    await lender.keep(tier, keys_of(6))
    bad = HEADER_BYTES + 8 * SLOT_BYTES
    system_call("pwritev", error=errno.EIO, only=lambda fd, buffers, at: at <= bad < at + sum(map(len, buffers)))
    outcomes = kinds(await tier.store(lender.writes(keys_of(6), version=1)))
    assert outcomes.count("TransferFailed") == 1
    expected = [label(key, int(outcome == "NoneType")) for key, outcome in zip(keys_of(6), outcomes, strict=True)]
    assert await lender.recall(tier, keys_of(6)) == expected, "what was there before has stayed"


async def test_one_place_that_cannot_be_read_costs_its_own_chunk_only(open_tier, lender, system_call):
    tier = await open_tier(**SEGMENTS, load_lanes=1, holds=keys_of(6))
    bad = HEADER_BYTES + 2 * SLOT_BYTES
    failing = system_call(
        "preadv", error=errno.EIO, only=lambda fd, buffers, at: at <= bad < at + sum(map(len, buffers))
    )
    told = await lender.recall(tier, keys_of(6))
    assert told.count("TransferFailed") == 1
    assert sum(each == label(key) for each, key in zip(told, keys_of(6), strict=True)) == 5
    failing.let_go()
    assert await lender.recall(tier, keys_of(6)) == whole(keys_of(6))
    assert tier.counters().corrupt == {}


async def test_a_chunk_that_moved_while_it_could_not_be_read_is_read_where_it_is(tier, lender, system_call):
    await lender.keep(tier, [KEY])
    stuck = system_call("preadv", sticks=True, error=errno.EBADF)
    recall = await stuck.met_by(lender.recall(tier, [KEY]))
    await lender.keep(tier, [KEY], version=1)
    stuck.let_go()
    assert await recall == [label(KEY, 1)]


async def test_a_delete_whose_footer_cannot_be_wiped_says_so(tier, lender, system_call):
    await lender.keep(tier, keys_of(2))
    refused = system_call("pwritev", error=errno.EIO)
    with pytest.raises(BackendUnavailable, match="could not be wiped") as failed:
        await tier.delete([KEY])
    assert cause_of(failed.value) == "EIO"
    refused.let_go()
    await tier.delete([KEY])
    assert await lender.recall(tier, keys_of(2)) == [label(key_of(0)), "ChunkMissing"]


async def test_a_delete_says_so_when_a_failed_store_has_left_its_chunk(open_tier, lender, system_call):
    tier = await open_tier(**SEGMENTS, fsync=True, holds=[key_of(0)])
    refused = system_call("fdatasync", error=errno.EIO)
    assert kinds(await tier.store(lender.writes([KEY]))) == ["TransferFailed"]
    with pytest.raises(BackendUnavailable, match="could not be wiped"):
        await tier.delete([KEY])
    refused.let_go()
    await tier.delete([KEY])


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_delete_is_done_when_its_tier_has_closed_or_fails(tier, open_tier, lender, system_call, hangs):
    await lender.keep(tier, keys_of(2))
    stuck = system_call("pwritev", sticks=True)
    delete = await stuck.met_by(tier.delete([KEY]))
    closing = asyncio.create_task(tier.aclose(0.1 if hangs else DEADLINE_S))
    for _ in range(100):  # Until it waits for the wipe.
        await asyncio.sleep(0)
    if hangs:
        assert await closing == (0,)
        with pytest.raises(BackendClosed):
            await delete
    stuck.let_go()
    if not hangs:
        assert await closing == (0,)
        await delete
        assert tier.counters().evictions_failed == 0
        assert await lender.recall(await open_tier(**SEGMENTS), keys_of(2)) == [label(key_of(0)), "ChunkMissing"]
    assert await tier.aclose(DEADLINE_S) == (0,)


async def test_a_delete_ends_with_the_cancelled_store_that_has_its_chunks_slot(open_tier, lender, system_call):
    """The chunk has gone for room, and what is stored in its place is written though nobody waits for it any more."""
    tier, number = await open_tier(**SEGMENTS, capacity_bytes=2 * SLOT_BYTES + 65_536, store_lanes=1), 0
    while not tier.counters().evicted:
        await lender.keep(tier, [key_of(number)])
        number += 1
    stuck = system_call("pwritev", sticks=True, only=lambda fd, buffers, at: len(buffers) == 2)
    store = await stuck.met_by(tier.store(lender.writes([key_of(number)])))
    assert list(await tier.probe([KEY])) == [False]
    delete = asyncio.create_task(tier.delete([KEY]))
    for _ in range(5):
        await asyncio.sleep(0)
    store.cancel()
    stuck.let_go()
    with pytest.raises(asyncio.CancelledError):
        await store
    async with asyncio.timeout(DEADLINE_S):
        await delete


async def test_a_segment_removed_before_it_was_locked_is_gone(open_tier, stored, lender, root, monkeypatch):
    """Chunks that are stored in a file without a name are lost, though they were said to be stored."""
    await stored([KEY], **SEGMENTS)
    (old,) = segments(root)
    lock = fcntl.flock

    def too_late(fd, how):
        old.unlink(missing_ok=True)
        lock(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", too_late)
        second = await open_tier(**SEGMENTS)
        assert await scanned(second) == set()
    await lender.keep(second, [key_of(2)])
    await second.aclose(DEADLINE_S)
    assert await lender.recall(await open_tier(**SEGMENTS), [key_of(2)]) == [label(key_of(2))]


async def test_no_more_segments_go_for_others_than_are_needed(open_tier, three_segments, root, monkeypatch):
    await three_segments()
    taken = sum(path.stat().st_blocks for path in segments(root)) * 512
    look = os.fstatvfs

    def nearly_full(fd):
        found = look(fd)
        free_bytes = taken + (2 << 20) - sum(path.stat().st_blocks for path in segments(root)) * 512
        names = "f_frsize", "f_blocks", "f_bfree"
        return SimpleNamespace(f_bavail=free_bytes // found.f_frsize, **{name: getattr(found, name) for name in names})

    monkeypatch.setattr(os, "fstatvfs", nearly_full)
    tier = await open_tier(**SEGMENTS, capacity_bytes=None, min_free_bytes=(2 << 20) + 4_096)
    await tier.delete([key_of(999)])  # Waits for all that a start does.
    assert len(segments(root)) == 2


async def test_where_no_segment_can_be_removed_no_more_are_given_up(open_tier, three_segments, system_call):
    await three_segments()
    system_call("unlink", error=errno.EROFS, only=lambda name, **_: name.endswith(".seg"))
    tier = await open_tier(**SEGMENTS)
    await tier.delete([key_of(999)])  # Waits for all that a start does.
    keys = [key for number in range(3) for key in keys_of(60, start=100 * number)]
    assert sum(await tier.probe(keys)) > 90, "a segment has some 80 of these 180"
    assert tier.counters().evictions_failed == 1


@pytest.mark.promise("Segments: a segment's first page is damaged, or it cannot be opened")
@pytest.mark.parametrize("checkpoint_s", [0, 1_800])
async def test_an_unreadable_segment_takes_its_room(open_tier, stored, lender, root, system_call, checkpoint_s):
    await stored([KEY], **SEGMENTS)
    refused = system_call("open", error=errno.EMFILE, only=lambda path, *_, **__: str(path).endswith(".seg"))
    tier = await open_tier(**SEGMENTS, checkpoint_s=checkpoint_s)
    assert await lender.recall(tier, [KEY]) == ["ChunkMissing"]
    refused.let_go()
    outcomes = kinds(await tier.store(lender.writes(keys_of(4))))  # One may fit where folders take no blocks.
    assert outcomes[1:] == ["NoSpace"] * 3
    assert taken_bytes(root) <= 1 << 20


async def test_chunks_in_a_segment_taken_for_unusable_do_not_go_for_room(open_tier, stored, lender, root):
    """It was looked at as its maker was giving it its name; by the time that room is wanted, its maker has gone."""
    await stored(keys_of(4), **SEGMENTS)
    (segment,) = segments(root)
    content = segment.read_bytes()
    segment.write_bytes(b"")
    second = await open_tier(**SEGMENTS)
    assert await scanned(second) == set()
    segment.write_bytes(content)
    for start in range(100, 220, 40):
        await lender.keep(second, keys_of(40, start=start))
    await second.aclose(DEADLINE_S)
    assert await lender.recall(await open_tier(**SEGMENTS, capacity_bytes="8MiB"), keys_of(4)) == whole(keys_of(4))


async def test_a_closed_tiers_segments_are_free_though_a_fork_has_them(open_tier, tier, lender, root):
    await lender.keep(tier, [KEY])
    copies = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{fd}") == str(segments(root)[0]):
                copies.append(os.dup(int(fd)))
    assert copies
    await tier.aclose(DEADLINE_S)
    await lender.keep(await open_tier(**SEGMENTS), [key_of(2)])
    assert len(segments(root)) == 1
    for copy in copies:
        os.close(copy)


async def test_a_pruned_slots_segment_may_be_another_one_by_then(stored, root, monkeypatch):
    await stored([KEY], **SEGMENTS)
    (segment,) = segments(root)
    content, lock = segment.read_bytes(), fcntl.flock

    def too_late(fd, how):
        segment.unlink()
        segment.write_bytes(content)
        lock(fd, how)

    root_fd = os.open(root, os.O_RDONLY)
    contents = SegmentsDirectory(root_fd, time.time_ns(), Disk(root_fd).taken_bytes)
    (chunk,) = [file for file in contents.files(str(segment.relative_to(root))) if file.kind is not Kind.BESIDE]
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", too_late)
        assert not contents.remove(chunk)
    assert segment.read_bytes() == content
    assert contents.remove(chunk)
    assert not segment.exists()
    contents.close()
    os.close(root_fd)


async def test_pruned_slots_are_stored_to_again_and_refused_on_a_full_disk(open_tier, stored, lender, mount):
    root = mount("tmpfs", "size=32m")
    options = {**SEGMENTS, "root": str(root / "tier"), "capacity_bytes": 17 << 20}
    await stored(keys_of(40), **options)
    contents = FilesDirectory.open(str(root / "tier"))
    (place,) = contents.places()
    files = [file for part in contents.parts(place) for file in contents.files(place, part)]
    gone = [file for file in files if file.key in keys_of(20)]
    assert sum(contents.remove(file) or 0 for file in gone) == sum(file.allocated_bytes for file in gone)
    contents.close()
    with (root / "full").open("wb") as full, suppress(OSError):
        while True:
            full.write(bytes(1 << 16))
            full.flush()
    tier = await open_tier(**options, checkpoint_s=0)
    assert await lender.recall(tier, keys_of(40)) == ["ChunkMissing"] * 20 + whole(keys_of(20, 20))
    outcomes = set[str]()
    for start in range(40, 5_000, 40):
        outcomes.update(kinds(await tier.store(lender.writes(keys_of(40, start)))))
    assert outcomes == {"NoneType", "NoSpace"}
    (root / "full").unlink()
    await lender.keep(tier, keys_of(20))
    assert await lender.recall(tier, keys_of(20)) == whole(keys_of(20))


# Somebody removes segments while a tier has them open: what goes there is not said to be stored.


@pytest.fixture(autouse=True)
def closing(monkeypatch):
    monkeypatch.setattr(room, "CLOSE_S", 0.01)


@pytest.fixture
def looking(monkeypatch):
    monkeypatch.setattr(room, "LOOK_S", 0.01)


def put_another_in_its_place(segment):
    content = segment.read_bytes()
    segment.unlink()
    segment.write_bytes(content)


REMOVALS = {
    "the segment": Path.unlink,
    "its folder": lambda segment: shutil.rmtree(segment.parent),
    "the segment, for another's": put_another_in_its_place,
}


@pytest.mark.promise("Segments: a segment's file is removed while it is open")
@pytest.mark.parametrize("removed", REMOVALS)
async def test_a_removed_segment_gives_way_to_a_new_one(tier, open_tier, lender, root, removed):
    await lender.keep(tier, keys_of(4))
    (segment,) = segments(root)
    REMOVALS[removed](segment)
    another = segment.read_bytes() if segment.exists() else None
    assert await lender.recall(tier, keys_of(4)) == whole(keys_of(4))
    assert kinds(await tier.store(lender.writes(keys_of(2, start=10)))) == ["TransferFailed"] * 2
    assert (list(await tier.probe(keys_of(4))), tier.occupancy().chunks) == ([False] * 4, 0)
    await until(lambda: not open_without_a_name(root))  # Then its room is free.
    if another is None:
        await lender.keep(tier, keys_of(2, start=20))
        await tier.aclose(DEADLINE_S)
        tier = await open_tier(**SEGMENTS)
        assert await lender.recall(tier, keys_of(2, start=20)) == whole(keys_of(2, start=20))
        assert await lender.recall(tier, keys_of(4)) == ["ChunkMissing"] * 4
    else:
        await tier.store(lender.writes(keys_of(2)))
        assert segment.read_bytes() == another, "nothing was written to it"


@pytest.mark.promise("Chunk files are deleted under a running engine")
async def test_only_what_lies_in_the_removed_segment_is_lost(open_tier, stored, lender, root):
    await stored(keys_of(60), **SEGMENTS)
    tier = await open_tier(**SEGMENTS, capacity_bytes="2MiB", holds=keys_of(60, start=100))
    assert len(segments(root)) == 2
    segments(root)[0].unlink()
    outcomes = await tier.store(lender.writes(keys_of(100, start=200)))  # There is not so much room in one of them.
    assert set(kinds(outcomes)) == {"NoneType", "TransferFailed"}
    assert tier.occupancy().chunks > outcomes.count(None)
    assert not any(await tier.probe(keys_of(60)))
    kept = [key for key, is_there in zip(keys_of(300), await tier.probe(keys_of(300)), strict=True) if is_there]
    assert await tier.aclose(DEADLINE_S) == (0,)
    assert await lender.recall(await open_tier(**SEGMENTS, capacity_bytes="2MiB"), kept) == whole(kept)


@pytest.mark.promise("Segments: a segment's file is removed while it is open")
async def test_a_removed_segment_is_noticed_though_nobody_stores(looking, tier, lender, root):
    await lender.keep(tier, keys_of(4))
    told = tier.watch()
    async with asyncio.timeout(DEADLINE_S):
        while not isinstance(await anext(told), ScanDone):
            pass
        segments(root)[0].unlink()
        event = await anext(told)
        assert isinstance(event, Removed)
        assert set(event.keys) == set(keys_of(4))
    await until(lambda: not open_without_a_name(root))
    await told.aclose()
    assert tier.counters().segments_lost == 1
    await lender.keep(tier, [KEY])


async def test_a_hung_load_keeps_a_removed_segment_open(looking, tier, lender, root, system_call):
    await lender.keep(tier, keys_of(4))
    stuck = system_call("preadv", sticks=True)
    load = await stuck.met_by(lender.recall(tier, keys_of(1)))
    segments(root)[0].unlink()
    await until(lambda: tier.occupancy().chunks <= 1)
    assert open_without_a_name(root) == 1
    stuck.let_go()
    assert await load == whole(keys_of(1))
    await until(lambda: not open_without_a_name(root))
    assert list(await tier.probe(keys_of(1))) == [False]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOENT])
async def test_a_segment_reported_missing_fails_the_store_and_stays(tier, lender, root, system_call, error):
    await lender.keep(tier, keys_of(4))
    missing = system_call("open", error=error, only=lambda name, *_, **__: str(name).endswith(".seg"))
    assert kinds(await tier.store(lender.writes(keys_of(2), version=1))) == ["TransferFailed"] * 2
    missing.let_go()
    assert await lender.recall(tier, keys_of(4)) == whole(keys_of(4))
    assert tier.counters().segments_lost == 0
    await lender.keep(tier, keys_of(2), version=1)
    assert taken_bytes(root) <= 1 << 20
