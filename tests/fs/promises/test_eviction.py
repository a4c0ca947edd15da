"""Which chunks go for room, in which order, after which restart; and those that must not go, or not yet."""

import asyncio
import fnmatch
import os
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvtier.backend.namespace import OffloadKey
from kvtier.errors import BackendClosed
from kvtier.policies import LRU
from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.disk.capacity import chunk_bytes_worst
from tests.fs.conftest import DEADLINE_S, SLOT_BYTES, taken_bytes, until, until_probed, whole

ROOM = 12
CAPACITY_BYTES = {"files": ROOM * (SLOT_BYTES + 8_192) + 65_536, "segments": ROOM * SLOT_BYTES + 65_536}


class NeverEvicts(LRU[OffloadKey]):
    """A policy with a bug."""

    def evict(self, count, keep, incoming=()):
        return None


@pytest.fixture
def open_small(open_tier):
    async def open_small(layout="files", **options):
        return await open_tier(**{"layout": layout, "capacity_bytes": CAPACITY_BYTES[layout], **options})

    return open_small


async def fill(tier, lender):
    for number in range(1_000, 1_000 + 2 * ROOM, 2):
        await lender.keep(tier, keys_of(2, number))


@pytest.mark.parametrize(
    ("layout", "given"), [("files", {}), ("segments", {"checkpoint_s": 0}), ("segments", {"checkpoint_s": 1_800})]
)
async def test_a_restart_keeps_the_order_of_last_use(open_small, lender, layout, given):
    """Without a checkpoint, of the order of stores: that is what footers and files' times say.

    The tail of a batch goes before its head.
    """
    first = await open_small(layout, **given, holds=keys_of(4))
    await lender.keep(first, keys_of(2, start=4))
    await lender.recall(first, keys_of(2))
    assert first.occupancy().chunks == 6
    await first.aclose(DEADLINE_S)
    tier = await open_small(layout, **given, scanned=True)
    order = [3, 2, 5, 4, 1, 0] if given.get("checkpoint_s") else [3, 2, 1, 0, 5, 4]
    new, gone = 100, set[int]()
    while len(gone) < 3:
        await lender.keep(tier, [key_of(new)])
        new += 1
        gone = {number for number, there in enumerate(await tier.probe(keys_of(6))) if not there}
        assert gone == set(order[: len(gone)]), "more than one may go at a time"


async def test_a_use_is_written_to_the_file_at_most_once_an_hour(open_small, stored, lender, path_of):
    await stored(keys_of(8))
    for key in keys_of(7):  # These were stored more than an hour ago.
        found = path_of(key).stat()
        os.utime(path_of(key), ns=(found.st_atime_ns, found.st_mtime_ns - 4 * 3_600 * 10**9))
    recent_ns = path_of(key_of(7)).stat().st_mtime_ns
    used = await open_small(scanned=True)
    await lender.recall(used, [*keys_of(3), key_of(7)])
    await used.aclose(DEADLINE_S)
    assert path_of(key_of(7)).stat().st_mtime_ns == recent_ns
    tier = await open_small(scanned=True)
    start = 1_000
    while sum(there := list(await tier.probe(keys_of(8)))) > 4:
        await lender.keep(tier, [key_of(start := start + 1)])
    assert there == [True] * 3 + [False] * 4 + [True]


async def test_a_use_until_the_end_is_written_to_the_file(open_tier, stored, lender, path_of, system_call):
    await stored(keys_of(3))
    hours_ago_ns = path_of(key_of(0)).stat().st_mtime_ns - 4 * 3_600 * 10**9
    for key in keys_of(3):
        os.utime(path_of(key), ns=(hours_ago_ns, hours_ago_ns))
    tier = await open_tier(scanned=True)
    await lender.recall(tier, keys_of(2))
    read, write = system_call("preadv", sticks=True), system_call("utime", sticks=True)
    last = await read.met_by(lender.recall(tier, [key_of(2)]))
    closing = await write.met_by(tier.aclose(DEADLINE_S))
    read.let_go()
    await last
    write.let_go()
    await closing
    assert all(path_of(key).stat().st_mtime_ns > hours_ago_ns for key in keys_of(3))


async def test_a_chunk_that_is_being_read_does_not_go(open_small, lender, system_call, layout):
    tier = await open_small(layout, load_lanes=1, queue_bytes=0, scanned=True)
    await lender.keep(tier, keys_of(1))
    stuck = system_call("preadv", sticks=True)
    loading = await stuck.met_by(lender.recall(tier, keys_of(1)))
    await fill(tier, lender)
    assert list(await tier.probe(keys_of(1))) == [True]
    stuck.let_go()
    assert await loading == whole(keys_of(1))
    assert tier.counters().evicted > 0


async def test_a_chunk_stored_while_its_old_file_goes_is_not_removed_with_it(open_small, lender, system_call):
    tier = await open_small(holds=keys_of(1))
    name = key_of(0)[:-4].hex()
    stuck = system_call("unlink", sticks=True, only=lambda path, **_: name in path)
    filling = await stuck.met_by(fill(tier, lender))
    storing = asyncio.create_task(tier.store(lender.writes(keys_of(1), version=1)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not storing.done()
    stuck.let_go()
    assert list(await storing) == [None]
    assert await lender.recall(tier, keys_of(1)) == whole(keys_of(1), 1)
    await filling


async def test_a_policy_that_never_evicts_costs_stores_and_nothing_else(open_small, lender, root):
    tier, kept = await open_small(eviction_policy=f"{__name__}:NeverEvicts"), list[OffloadKey]()
    for start in range(0, 3 * ROOM, 4):
        outcomes = await tier.store(lender.writes(keys_of(4, start)))
        kept += [key for key, outcome in zip(keys_of(4, start), outcomes, strict=True) if outcome is None]
    assert taken_bytes(root) <= CAPACITY_BYTES["files"]
    assert await lender.recall(tier, kept) == whole(kept)
    assert tier.counters().refused["capacity"] > 0


async def test_unused_chunks_expire(open_tier, lender, layout):
    tier = await open_tier(layout=layout, ttl_s=0.05, holds=keys_of(3))
    await until_probed(tier, keys_of(3), there=False)
    assert tier.counters().expired == 3
    await lender.keep(tier, keys_of(3), version=1)


async def test_what_was_not_used_for_long_before_a_start_expires(open_tier, stored, lender, path_of):
    await stored(keys_of(3))
    os.utime(path_of(key_of(0)), (1, 1))
    tier = await open_tier(ttl_s=3_600, scanned=True)
    await lender.keep(tier, [key_of(5)])
    await until(lambda: not path_of(key_of(0)).exists())
    assert list(await tier.probe([key_of(0), key_of(1), key_of(5)])) == [False, True, True]


@pytest.mark.parametrize("call", ["unlink", "scandir", "listdir"])
async def test_a_store_that_waits_for_a_hung_disk_ends_with_its_tier(
    open_tier, stored, lender, path_of, system_call, call
):
    keys, scans = keys_of(100), call != "unlink"  # More than go in one hop.
    if not scans:
        await stored(keys)
        for key in keys:
            os.utime(path_of(key), (1, 1))
        stuck = system_call(call, sticks=True, only=lambda name, **kwargs: name.endswith(".bin"))
    tier = await open_tier(layout="segments" if call == "listdir" else "files", ttl_s=3_600, scanned=not scans)
    if scans:
        stuck = system_call(call, sticks=True)  # Its scan has not begun.
    await stuck.wait_entered()
    storing = asyncio.create_task(tier.store(lender.writes(keys)))
    await asyncio.sleep(0)
    assert await tier.aclose(0) == (0,)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(BackendClosed):
            await storing


@pytest.mark.parametrize("options", [{"naming": "vllm"}, {"shared": True}], ids=["vllm", "shared"])
async def test_a_file_that_somebody_has_open_never_changes(open_small, lender, root, options):
    tier = await open_small(**options, capacity_bytes=2 * CAPACITY_BYTES["files"])
    await fill(tier, lender)
    paths = [Path(folder, name) for folder, _, names in os.walk(root) for name in fnmatch.filter(names, "*.bin")]
    with ExitStack() as stack:
        opened = []
        for path in paths:
            with suppress(FileNotFoundError):
                opened.append(stack.enter_context(path.open("rb")))
        before = [file.read() for file in opened]
        for number in range(100, 100 + 4 * ROOM):
            await lender.keep(tier, [key_of(number)])
        for file, content in zip(opened, before, strict=True):
            file.seek(0)
            assert file.read() == content
    assert opened
    assert tier.counters().evicted > 0


async def test_a_cancelled_store_to_a_full_tier_leaves_whole_chunks(open_small, lender, system_call, layout):
    tier = await open_small(layout, store_lanes=1)
    await fill(tier, lender)
    stuck = system_call("pwritev", sticks=True)
    storing = await stuck.met_by(tier.store(lender.writes(keys_of(4))))
    storing.cancel()
    stuck.let_go()
    with pytest.raises(asyncio.CancelledError):
        await storing
    everything = [*keys_of(2 * ROOM, 1_000), *keys_of(4)]
    told = await lender.recall(tier, everything)
    assert set(told) <= {"ChunkMissing", *whole(everything)}
    assert tier.occupancy().chunks == len(told) - told.count("ChunkMissing")
    assert tier.counters().corrupt == {}


async def test_a_file_that_takes_more_than_is_wanted_is_counted_until_it_is_gone(
    open_tier, stored, lender, path_of, root, system_call, monkeypatch
):
    await stored(keys_of(10), naming="flat")
    large = path_of(key_of(5))
    large.write_bytes(bytes(64 << 10))
    os.utime(large, (1, 1))
    listing = system_call("scandir", sticks=True, only=lambda folder: isinstance(folder, int))  # A descriptor's.
    tier = await open_tier(naming="flat", capacity_bytes=taken_bytes(root) + 8_192)
    unlink, seen = os.unlink, list[tuple[int, int]]()

    def look(name, **kwargs):
        if name.endswith(large.name):
            told, there = tier.occupancy(), 0
            for folder, _, names in os.walk(root):
                for chunk in fnmatch.filter(names, "*.bin"):
                    with suppress(FileNotFoundError):  # Others are removed beside it.
                        there += os.stat(os.path.join(folder, chunk)).st_blocks * 512
            seen.append((there, told.used_bytes + told.reserved_bytes))
        unlink(name, **kwargs)

    monkeypatch.setattr(os, "unlink", look)
    listing.let_go()  # The end of the scan has the first ones removed.
    await lender.keep(tier, [key_of(100)])
    await until(lambda: not large.exists())
    ((there_bytes, counted_bytes),) = seen
    assert tier.counters().evicted > 1
    assert counted_bytes >= there_bytes


# Folders of files, each of which takes a block or more: kept for ever, they would take the room of chunks.


async def test_folders_of_what_goes_go_with_it(open_small, lender, root):
    tier = await open_small()
    for _ in range(3):
        await fill(tier, lender)
        await tier.delete(keys_of(2 * ROOM, 1_000))
    assert tier.counters().evicted > 0
    assert sum(1 for _ in os.walk(root)) < 6


@pytest.mark.parametrize("shared", [False, True], ids=["its own", "shared"])
@pytest.mark.parametrize(
    "noticed", ["as it is loaded", "as corrupt", pytest.param("as it is evicted", marks=pytest.mark.outside)]
)
async def test_emptied_folders_go_when_their_chunks_are_found_missing_or_corrupt(
    open_tier, lender, root, shared, noticed
):
    tier = await open_tier(capacity_bytes=2 << 20, shared=shared, holds=keys_of(40))
    emptied = list(root.rglob("*.bin"))
    for path in emptied:
        os.truncate(path, 5) if noticed == "as corrupt" else path.unlink()
    if noticed != "as it is evicted":
        told = "ChunkCorrupt" if noticed == "as corrupt" else "ChunkMissing"
        assert await lender.recall(tier, keys_of(40)) == [told] * 40
    else:
        for start in range(100, 400, 10):
            await tier.store(lender.writes(keys_of(10, start=start)))
    assert not [path.parent for path in emptied if path.parent.exists() and not any(path.parent.iterdir())]


@pytest.mark.parametrize("times", [3, 1_000])
async def test_a_store_makes_folders_again_that_vanish_meanwhile(open_tier, lender, monkeypatch, times):
    tier = await open_tier()
    mkdir, vanished = os.mkdir, []

    def contended(path, *arguments, dir_fd=None):
        """Make a folder, but for the first times have somebody remove the one above it before."""
        if len(vanished) < times:
            with suppress(OSError):
                os.rmdir(os.readlink(f"/proc/self/fd/{dir_fd}"))
                vanished.append(path)
        mkdir(path, *arguments, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", contended)
    (outcome,) = await tier.store(lender.writes(keys_of(1)))
    if times == 3:
        assert (outcome, len(vanished)) == (None, 3)
        assert await lender.recall(tier, keys_of(1)) == whole(keys_of(1))
    else:
        assert "vanish" in str(outcome)


def test_the_worst_case_is_worse_than_what_ext4_does():
    assert chunk_bytes_worst(12_288, 4_096, 0) == 12_288 + 8_192  # New folders take nothing on XFS, and grow.
    assert chunk_bytes_worst(12_289, 4_096, 4_096) == 16_384 + 16_384
    assert chunk_bytes_worst((2 << 20) + 4_096, 4_096, 0) == (2 << 20) + 4_096 + 2 * 4_096 + 8_192
