"""Chunks in segments: damage, restarts, locks, and what a directory of them is told to be."""

import asyncio
import errno
import fcntl
import os
import random
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend import Kind
from kvtier.backend.contract import Added, Removed, ScanDone
from kvtier.backend.namespace import OffloadKey
from kvtier.errors import BackendClosed, BackendUnavailable, NoSpace, TransferFailed, cause_of
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend
from kvtier_backends.fs.directory.files import FilesDirectory
from kvtier_backends.fs.directory.slots import SegmentsDirectory
from kvtier_backends.fs.disk.capacity import Disk
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.disk.owner import OWNER
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.runs import RUN_SLOTS_MAX
from kvtier_backends.fs.segments.segment import HEADER_BYTES, Header, read_header
from kvtier_backends.fs.segments.slots import SlotEntry
from tests.fs.conftest import MakeSystemCall, SystemCall, segments, taken_bytes

ROW_BYTES = 8_192
SLOT_BYTES = ROW_BYTES + FOOTER_BYTES
KEY = key_of(1)
DEADLINE_S = 20.0
SMALL = "1MiB"  # So that a segment is read in no time.


async def scanned(tier: FsBackend) -> set[OffloadKey]:
    keys: set[OffloadKey] = set()
    async with asyncio.timeout(DEADLINE_S):
        async for event in tier.watch():
            match event:
                case Added(added):
                    keys.update(added)
                case ScanDone(complete):
                    assert complete
                    return keys
                case Removed():
                    raise AssertionError(event)
    raise AssertionError("closed")


@pytest.mark.parametrize("checkpoint_s", [0, 1_800])
async def test_a_restart_knows_every_chunk_and_no_other(open_tier, lender, checkpoint_s) -> None:
    first = await open_tier(layout="segments", checkpoint_s=checkpoint_s)
    keys = keys_of(40)
    await lender.keep(first, keys)
    await lender.keep(first, keys[:10], version=1)
    await first.delete(keys[30:])
    await first.aclose(DEADLINE_S)
    tier = await open_tier(layout="segments", checkpoint_s=checkpoint_s)
    assert await scanned(tier) == set(keys[:30])
    expected = [label(key, int(index < 10)) for index, key in enumerate(keys[:30])]
    assert await lender.recall(tier, keys) == [*expected, *["ChunkMissing"] * 10]
    assert tier.counters().checkpoint_chunks == (30 if checkpoint_s else 0)
    await lender.keep(tier, keys, version=2)
    assert await lender.recall(tier, keys) == [label(key, 2) for key in keys]


async def test_what_was_written_since_the_checkpoint_is_looked_at(open_tier, lender, root, mapper) -> None:
    """As after a kill: the checkpoint is from before."""
    first = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(first, keys_of(5))
    await first.aclose(DEADLINE_S)
    (index,) = (root / mapper.folder).glob("index_*_segments")
    old = index.read_bytes()
    second = await open_tier(layout="segments", capacity_bytes=SMALL)
    await second.delete(keys_of(2))
    await lender.keep(second, keys_of(3, start=2), version=1)
    await lender.keep(second, keys_of(3, start=10))
    await second.aclose(DEADLINE_S)
    index.write_bytes(old)
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    assert await scanned(tier) >= {*keys_of(3, start=2), *keys_of(3, start=10)}
    assert list(await tier.probe(keys_of(2))) == [False, False]
    expected = ["ChunkMissing"] * 2 + [label(key, 1) for key in keys_of(3, start=2)]
    assert await lender.recall(tier, keys_of(5)) == expected


async def test_two_tiers_on_one_directory_write_to_segments_of_their_own(open_tier, lender, root) -> None:
    """Each reads what the other had stored when it started, and takes none of the other's slots.

    So does a runner that is started in the place of one that hangs. Here the owner's file is removed: nobody guards.
    """
    first = await open_tier(layout="segments", capacity_bytes="1MiB")
    await lender.keep(first, keys_of(4))
    (root / OWNER).unlink()
    second = await open_tier(layout="segments", capacity_bytes="4MiB")
    assert await scanned(second) == set(keys_of(4))
    assert await lender.recall(second, keys_of(4)) == [label(key) for key in keys_of(4)]
    await lender.keep(second, keys_of(4, start=10))
    await lender.keep(second, [KEY], version=1)
    assert len(segments(root)) == 2
    assert await lender.recall(second, [KEY]) == [label(KEY, 1)]
    assert await lender.recall(first, [KEY]) == [label(KEY)]
    await first.delete(keys_of(4))
    await lender.keep(first, keys_of(80, start=200))  # What was read of the first one's slots is no more.
    assert await lender.recall(second, [key_of(0), KEY, key_of(10)]) == [
        "ChunkMissing",
        label(KEY, 1),
        label(key_of(10)),
    ]
    assert second.counters().corrupt == {}


async def test_a_job_lies_together_and_is_one_call_a_lane(open_tier, lender, monkeypatch) -> None:
    tier = await open_tier(layout="segments", load_lanes=1, store_lanes=1)
    await lender.keep(tier, keys_of(2, start=50))
    written: list[int] = []
    read: list[int] = []
    monkeypatch.setattr(os, "pwritev", _noting(os.pwritev, written))
    monkeypatch.setattr(os, "preadv", _noting(os.preadv, read))
    await lender.keep(tier, keys_of(24))
    assert written == [48]
    assert await lender.recall(tier, random.Random(1).sample(keys_of(24), 24)) != []
    assert read == [48]
    assert os.sysconf("SC_IOV_MAX") >= RUN_SLOTS_MAX * 2


def _noting(call, counts: list[int]):
    def noting(fd: int, buffers: list[memoryview], at: int) -> int:
        counts.append(len(buffers))
        return call(fd, buffers, at)

    return noting


async def test_one_place_that_cannot_be_written_costs_its_own_chunk_only(open_tier, lender, system_call) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(6))
    bad = HEADER_BYTES + 8 * SLOT_BYTES
    system_call("pwritev", error=errno.EIO, only=lambda fd, buffers, at: at <= bad < at + sum(map(len, buffers)))
    outcomes = await tier.store(lender.writes(keys_of(6), version=1))
    assert [type(outcome) for outcome in outcomes].count(TransferFailed) == 1
    failed = next(index for index, outcome in enumerate(outcomes) if outcome is not None)
    expected = [label(key, int(index != failed)) for index, key in enumerate(keys_of(6))]
    assert await lender.recall(tier, keys_of(6)) == expected, "what was there before has stayed"


async def test_a_delete_whose_footer_cannot_be_wiped_says_so(open_tier, lender, system_call) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(2))
    refused = system_call("pwritev", error=errno.EIO)
    with pytest.raises(BackendUnavailable, match="could not be wiped") as failed:
        await tier.delete([KEY])
    assert cause_of(failed.value) == "EIO"
    refused.let_go()
    await tier.delete([KEY])
    assert await lender.recall(tier, keys_of(2)) == [label(key_of(0)), "ChunkMissing"]


async def test_a_delete_under_way_is_done_when_its_tier_has_closed_and_nothing_has_failed(
    open_tier, lender, system_call
) -> None:
    tier, delete, stuck = await _deleting(open_tier, lender, system_call)
    closing = asyncio.create_task(tier.aclose(DEADLINE_S))
    for _ in range(100):  # Until it waits for the wipe.
        await asyncio.sleep(0)
    stuck.let_go()
    assert await closing == (0,)
    await delete
    assert tier.counters().evictions_failed == 0
    again = await open_tier(layout="segments", capacity_bytes=SMALL)
    assert await lender.recall(again, keys_of(2)) == [label(key_of(0)), "ChunkMissing"]


async def test_a_delete_whose_wipe_hangs_beyond_the_end_is_told_that_its_tier_has_closed(
    open_tier, lender, system_call
) -> None:
    tier, delete, stuck = await _deleting(open_tier, lender, system_call)
    assert await tier.aclose(0.1) == (0,)
    with pytest.raises(BackendClosed):
        await delete
    stuck.let_go()
    assert await tier.aclose(DEADLINE_S) == (0,)


async def _deleting(
    open_tier, lender: Lender, system_call: MakeSystemCall
) -> tuple[FsBackend, asyncio.Task[None], SystemCall]:
    """Return a tier of two chunks, and the deletion of one of them, whose wipe hangs."""
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, keys_of(2))
    stuck = system_call("pwritev", sticks=True)
    delete = asyncio.create_task(tier.delete([KEY]))
    await stuck.wait_entered()
    return tier, delete, stuck


@given(st.integers(1, 1_000), st.integers(1, 2_000), st.binary(min_size=32, max_size=32))
def test_a_header_is_read_as_it_was_written(pages, slots, fingerprint) -> None:
    header = Header(4_096 * pages, slots, fingerprint)
    page = header.written()
    assert read_header(page) == header
    assert read_header(page[:-1]) is None
    assert read_header(bytes([page[0] ^ 1]) + page[1:]) is None


def test_a_segments_first_page_is_what_was_published() -> None:
    page = Header(8_192, 3, bytes(range(32))).written()
    assert page[:40] == b"\x89kvtseg\n" + bytes([1, 0, 0, 0] + [0] * 4) + (8_192).to_bytes(8, "little") + (3).to_bytes(
        8, "little"
    ) + bytes(range(8))
    assert Header(8_192, 3, bytes(32)).offset(2) == 4_096 + 2 * 12_288


@pytest.mark.usefixtures("thorough")
def test_a_chunk_takes_less_than_200_bytes_of_memory() -> None:
    chunks = 90_000  # Just behind the growth of a dictionary, where it takes most.
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        catalog = Catalog(None)
        catalog.add(chunks)
        for slot in range(chunks):
            catalog.found(SlotEntry(key_of(slot), slot, slot + 1, slot + 1))
        catalog.scan_ended(complete=True)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(catalog) == chunks
    assert (after - before) / chunks <= 200


async def test_a_delete_ends_with_the_cancelled_store_that_has_its_chunks_slot(open_tier, lender, system_call) -> None:
    """The chunk has gone for room, and what is stored in its place is written though nobody waits for it any more."""
    tier = await open_tier(layout="segments", capacity_bytes=2 * SLOT_BYTES + 65_536, store_lanes=1)
    number = 0
    while not tier.counters().evicted:
        await lender.keep(tier, [key_of(number)])
        number += 1
    victim = key_of(1)
    stuck = system_call("pwritev", sticks=True, only=lambda fd, buffers, at: len(buffers) == 2)
    store = asyncio.create_task(tier.store(lender.writes([key_of(number)])))
    await stuck.wait_entered()
    assert list(await tier.probe([victim])) == [False]
    delete = asyncio.create_task(tier.delete([victim]))
    for _ in range(5):
        await asyncio.sleep(0)
    store.cancel()
    stuck.let_go()
    with pytest.raises(asyncio.CancelledError):
        await store
    async with asyncio.timeout(DEADLINE_S):
        await delete


async def test_a_segment_that_was_removed_before_it_was_locked_is_not_there(
    open_tier, lender, root, monkeypatch
) -> None:
    """Chunks that are stored in a file without a name are lost, though they were said to be stored."""
    first = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(first, [KEY])
    await first.aclose(DEADLINE_S)
    (old,) = segments(root)
    lock = fcntl.flock

    def too_late(fd: int, how: int) -> None:
        old.unlink(missing_ok=True)
        lock(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", too_late)
        second = await open_tier(layout="segments", capacity_bytes=SMALL)
        assert await scanned(second) == set()
    await lender.keep(second, [key_of(2)])
    await second.aclose(DEADLINE_S)
    third = await open_tier(layout="segments", capacity_bytes=SMALL)
    assert await lender.recall(third, [key_of(2)]) == [label(key_of(2))]


async def test_no_more_segments_go_for_others_than_are_needed(open_tier, lender, root, monkeypatch) -> None:
    for number in range(3):
        before = await open_tier(layout="segments", capacity_bytes=(number + 1) << 20)
        await lender.keep(before, keys_of(60, start=100 * number))
        await before.aclose(DEADLINE_S)
    assert len(segments(root)) == 3
    taken = sum(path.stat().st_blocks for path in segments(root)) * 512
    look = os.fstatvfs

    def nearly_full(fd: int) -> SimpleNamespace:
        found = look(fd)
        free_bytes = taken + (2 << 20) - sum(path.stat().st_blocks for path in segments(root)) * 512
        names = "f_frsize", "f_blocks", "f_bfree"
        return SimpleNamespace(f_bavail=free_bytes // found.f_frsize, **{name: getattr(found, name) for name in names})

    monkeypatch.setattr(os, "fstatvfs", nearly_full)
    tier = await open_tier(layout="segments", capacity_bytes=None, min_free_bytes=(2 << 20) + 4_096)
    await tier.delete([key_of(999)])  # Waits for all that a start does.
    assert len(segments(root)) == 2


@pytest.mark.parametrize("checkpoint_s", [0, 1_800])
async def test_a_segment_that_cannot_be_opened_takes_its_room(
    open_tier, lender, root, system_call, checkpoint_s
) -> None:
    capacity_bytes = 1 << 20
    before = await open_tier(layout="segments", capacity_bytes=capacity_bytes)
    await lender.keep(before, [KEY])
    await before.aclose(DEADLINE_S)
    refused = system_call("open", error=errno.EMFILE, only=lambda path, *args, **kwargs: str(path).endswith(".seg"))
    tier = await open_tier(layout="segments", capacity_bytes=capacity_bytes, checkpoint_s=checkpoint_s)
    assert await lender.recall(tier, [KEY]) == ["ChunkMissing"]
    refused.let_go()
    outcomes = await tier.store(lender.writes(keys_of(4)))  # One may fit where folders take no blocks.
    assert [type(outcome) for outcome in outcomes][1:] == [NoSpace] * 3
    assert taken_bytes(root) <= capacity_bytes


async def test_a_delete_says_so_when_a_failed_store_has_left_its_chunk(open_tier, lender, system_call) -> None:
    """Its sync failed, but not its write: without a wipe it is there after a restart."""
    tier = await open_tier(layout="segments", fsync=True, capacity_bytes=SMALL)
    await lender.keep(tier, [key_of(0)])
    refused = system_call("fdatasync", error=errno.EIO)
    (outcome,) = await tier.store(lender.writes([KEY]))
    assert isinstance(outcome, TransferFailed)
    with pytest.raises(BackendUnavailable, match="could not be wiped") as failed:
        await tier.delete([KEY])
    refused.let_go()
    assert cause_of(failed.value) == "EIO"
    await tier.delete([KEY])


async def test_chunks_in_a_segment_that_was_taken_for_nothing_do_not_go_for_room(open_tier, lender, root) -> None:
    """It was looked at as its maker was giving it its name; by the time that room is wanted, its maker has gone."""
    first = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(first, keys_of(4))
    await first.aclose(DEADLINE_S)
    (segment,) = segments(root)
    content = segment.read_bytes()
    segment.write_bytes(b"")
    second = await open_tier(layout="segments", capacity_bytes=SMALL)
    assert await scanned(second) == set()
    segment.write_bytes(content)
    for start in range(100, 220, 40):
        await lender.keep(second, keys_of(40, start=start))
    await second.aclose(DEADLINE_S)
    third = await open_tier(layout="segments", capacity_bytes="8MiB")
    assert await lender.recall(third, keys_of(4)) == [label(key) for key in keys_of(4)]


async def test_a_closed_tiers_segments_are_free_though_a_fork_has_them(open_tier, lender, root) -> None:
    first = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(first, [KEY])
    copies = [os.dup(int(fd)) for fd in os.listdir("/proc/self/fd") if _leads_to(fd, segments(root)[0])]
    assert copies
    await first.aclose(DEADLINE_S)
    second = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(second, [key_of(2)])
    assert len(segments(root)) == 1
    for copy in copies:
        os.close(copy)


def _leads_to(fd: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except FileNotFoundError:
        return False


async def test_a_pruned_slots_segment_may_be_another_one_by_then(open_tier, lender, root, monkeypatch) -> None:
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, [KEY])
    await tier.aclose(DEADLINE_S)
    (segment,) = segments(root)
    content, lock = segment.read_bytes(), fcntl.flock

    def too_late(fd: int, how: int) -> None:
        segment.unlink()
        segment.write_bytes(content)
        lock(fd, how)

    root_fd = os.open(root, os.O_RDONLY)
    contents = SegmentsDirectory(root_fd, time.time_ns(), Disk(root_fd).taken_bytes)
    files = contents.files(str(segment.relative_to(root)))
    (chunk,) = [file for file in files if file.kind is not Kind.BESIDE]
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", too_late)
        assert not contents.remove(chunk)
    assert segment.read_bytes() == content
    assert contents.remove(chunk)
    assert not segment.exists()
    contents.close()
    os.close(root_fd)


async def test_a_chunk_that_moved_while_it_could_not_be_read_is_read_where_it_is(
    open_tier, lender, system_call
) -> None:
    """Its old slot's segment may have been removed."""
    tier = await open_tier(layout="segments", capacity_bytes=SMALL)
    await lender.keep(tier, [KEY])
    stuck = system_call("preadv", sticks=True, error=errno.EBADF)
    recall = asyncio.create_task(lender.recall(tier, [KEY]))
    await stuck.wait_entered()
    await lender.keep(tier, [KEY], version=1)
    stuck.let_go()
    assert await recall == [label(KEY, 1)]


async def test_where_no_segment_can_be_removed_no_more_are_given_up(open_tier, lender, root, monkeypatch) -> None:
    for number in range(3):
        before = await open_tier(layout="segments", capacity_bytes=(number + 1) << 20)
        await lender.keep(before, keys_of(60, start=100 * number))
        await before.aclose(DEADLINE_S)

    unlink = os.unlink

    def refuse(name: str, **kwargs: int | None) -> None:
        if name.endswith(".seg"):
            raise OSError(30, "Read-only file system")
        unlink(name, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        tier = await open_tier(layout="segments", capacity_bytes="1MiB")
        await tier.delete([key_of(999)])  # Waits for all that a start does.
        keys = [key for number in range(3) for key in keys_of(60, start=100 * number)]
        assert sum(await tier.probe(keys)) > 90, "a segment has some 80 of these 180"
    assert tier.counters().evictions_failed == 1


async def test_slots_that_were_pruned_are_stored_to_again_and_on_a_full_disk_refused(open_tier, lender, mount) -> None:
    root = mount("tmpfs", "size=32m")
    options = {"layout": "segments", "root": str(root / "tier"), "capacity_bytes": 17 << 20}
    before = await open_tier(**options)
    await lender.keep(before, keys_of(40))
    await before.aclose(DEADLINE_S)
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
    assert await lender.recall(tier, keys_of(40)) == ["ChunkMissing"] * 20 + [label(key) for key in keys_of(40)[20:]]
    outcomes = [
        outcome for start in range(40, 5_000, 40) for outcome in await tier.store(lender.writes(keys_of(40, start)))
    ]
    assert NoSpace in set(map(type, outcomes)) <= {type(None), NoSpace}
    (root / "full").unlink()
    await lender.keep(tier, keys_of(20))
    assert await lender.recall(tier, keys_of(20)) == [label(key) for key in keys_of(20)]
