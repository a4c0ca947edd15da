"""Checkpoints: the file byte for byte, its limits, and starts over one that is damaged, old or not ours."""

import asyncio
import errno
import hashlib
import os
import shutil
import struct
import threading
from array import array
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.backend import FileMapper, Namespace, OffloadKey, make_offload_key
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.layout import Counters
from kvtier_backends.fs.segments import checkpoint as checkpoint_module
from kvtier_backends.fs.segments.checkpoint import KEY_BYTES_MAX, SlotCheckpoint
from kvtier_backends.fs.segments.segment import Header, Segment
from kvtier_backends.fs.segments.table import Snapshot
from tests.fs.conftest import DEADLINE_S, ROW_BYTES, scanned, segments, until_probed, whole

KEYS = make_offload_key(b"abc", 1), make_offload_key(b"longer", 2)
USED_AT_NS = 1_700_000_000_000_000_001, 1_700_000_000_000_000_000
BOOT = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).digest()
SEGMENTS = {"layout": "segments", "capacity_bytes": "1MiB"}

# As it lies on the disk, except the checksum and the boot of the machine.
PUBLISHED = (
    b"\x89kvtsix\n" + bytes.fromhex("01000000 0a000000 0020000000000000")
    + bytes.fromhex("f59a25c515236b159b8c17814dd8fb4217954f27161c9405304b29c1d7fcba2b")
    + BOOT + bytes.fromhex("0200000000000000")
    + b"\x0e\0x/00000001.seg" + bytes.fromhex("0000000000000000 0200000000000000 00368ffafd9c9717")
    + b"\x0e\0x/00000002.seg" + bytes.fromhex("0200000000000000 0100000000000000 0000000000000000")
    + b"\x07abc\0\0\0\1\0\0\0" + bytes.fromhex("0000000000000000 0700000000000000 01002a36fe9c9717")
    + b"\x0alonger\0\0\0\2" + bytes.fromhex("0200000000000000 0900000000000000 00002a36fe9c9717")
)  # fmt: skip


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def folder(open_folder):
    return open_folder(layout="segments")


@pytest.fixture
def checkpoint(folder, mapper, counters):
    return SlotCheckpoint(folder, mapper, counters, ROW_BYTES)


@pytest.fixture
def path(root, mapper):
    return root / mapper.folder / "index_r0_segments"


def snapshot(keys):
    named = list(keys)
    numbers = range(1, len(named) + 1)
    return Snapshot([*named], array("Q", numbers), array("q", numbers), frozenset())


def keys_in(checkpoint):
    memory = checkpoint.read()
    return memory and checkpoint_module.keys_of(memory.chunks)


def with_checksum(content):
    return content + xxh3_64_intdigest(content).to_bytes(8, "little")


def test_a_checkpoint_is_what_was_published(checkpoint, path):
    path.write_bytes(with_checksum(PUBLISHED))
    memory = checkpoint.read()
    assert memory.same_boot
    assert memory.segments == [("x/00000001.seg", 0, 2, 1_699_999_999_000_000_000), ("x/00000002.seg", 2, 1, 0)]
    assert keys_in(checkpoint) == list(KEYS)
    columns = [memory.chunks[name].tolist() for name in ("slot", "sequence", "used_at_ns")]
    assert columns == [[0, 2], [7, 9], list(USED_AT_NS)]
    path.unlink()
    times = array("q", [USED_AT_NS[0], 0, USED_AT_NS[1]])
    checkpoint.write(memory.segments, Snapshot([KEYS[0], None, KEYS[1]], array("Q", [7, 0, 9]), times, frozenset()))
    assert path.read_bytes() == with_checksum(PUBLISHED)


def test_a_chunk_with_a_long_key_is_left_to_the_scan_and_no_segment_is_trusted(checkpoint):
    keys = [OffloadKey(bytes(length)) for length in (KEY_BYTES_MAX + 1, KEY_BYTES_MAX)]
    checkpoint.write([checkpoint_module.Remembered("x/00000001.seg", 0, 2, 5)], snapshot(keys))
    memory = checkpoint.read()
    assert (keys_in(checkpoint), memory.segments[0].written_at_ns) == (keys[1:], 0)


def test_a_checkpoint_names_the_tiers_own_open_segments_alone(tmp_path):
    with (tmp_path / "segment").open("wb") as file:
        header = Header(ROW_BYTES, 2, bytes(32))
        own, others, closed = (Segment(name, file.fileno(), header, name != "b", 0) for name in "abc")
        closed.closed = True
        named = checkpoint_module.remembered([own, others, closed], before_ns=1 << 62)
        own.closed = others.closed = True
    assert [segment.name for segment in named] == ["a"]


@pytest.mark.promise("Segments: the checkpoint is damaged")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_checkpoint_is_ignored(checkpoint, path, data):
    checkpoint.write([], snapshot(keys_of(3)))
    content = bytearray(path.read_bytes())
    match data.draw(st.sampled_from(["flip", "cut", "extend", "zero"])):
        case "flip":
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            content[bit // 8] ^= 1 << bit % 8
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "extend":
            content += data.draw(st.binary(min_size=1, max_size=200))
        case "zero":
            start = data.draw(st.integers(0, 60))
            content[start:] = bytes(len(content) - start)
    path.write_bytes(content)
    assert checkpoint.read() is None


def test_a_checkpoint_of_another_version_or_namespace_is_ignored(folder, checkpoint, mapper, path, counters):
    checkpoint.write([], snapshot(keys_of(1)))
    other = FileMapper(Namespace(model_name="org/model", layout="LBHNC"))
    assert SlotCheckpoint(folder, other, counters, ROW_BYTES).read() is None
    assert SlotCheckpoint(folder, mapper, counters, 2 * ROW_BYTES).read() is None
    assert (counters.totals().checkpoints_ignored, keys_in(checkpoint)) == (2, keys_of(1))
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 8, 2)
    path.write_bytes(with_checksum(bytes(content[:-8])))
    assert checkpoint.read() is None


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_checkpoint_that_cannot_be_written_leaves_the_last(checkpoint, counters, system_call, error):
    checkpoint.write([], snapshot(keys_of(1)))
    system_call("rename", error=error)
    checkpoint.write([], snapshot([]))
    assert keys_in(checkpoint) == keys_of(1)
    assert (counters.totals().checkpoints_written, counters.totals().checkpoints_failed) == (1, 1)


async def test_chunks_beyond_a_checkpoints_limit_are_scanned(open_tier, stored, lender, path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "BYTES_MAX", 2_000)
    await stored(keys_of(40), **SEGMENTS)
    assert 1_000 < path.stat().st_size <= 2_000
    tier = await open_tier(**SEGMENTS, scanned=True)
    assert 10 < tier.counters().checkpoint_chunks < 40
    assert await lender.recall(tier, keys_of(40)) == whole(keys_of(40))


async def test_a_checkpoint_is_written_every_so_often(open_tier, lender, root, monkeypatch):
    publish, published = Folder.publish, threading.Semaphore(0)

    def publish_and_say(folder, name, pieces):
        publish(folder, name, pieces)
        published.release()

    await lender.keep(await open_tier(**SEGMENTS, checkpoint_s=0.01, scanned=True), keys_of(3))
    monkeypatch.setattr(Folder, "publish", publish_and_say)
    for _ in range(2):  # The first may have begun before the chunks were stored.
        assert await asyncio.to_thread(published.acquire, timeout=DEADLINE_S)
    copy = shutil.copytree(root, root.with_name("copy"))  # As after a kill: the first has not closed.
    assert (await open_tier(**SEGMENTS | {"root": str(copy)}, scanned=True)).counters().checkpoint_chunks == 3


async def test_closing_in_no_time_leaves_the_last_checkpoint(open_tier, stored, path):
    await stored(keys_of(2), **SEGMENTS)
    content, tier = path.read_bytes(), await open_tier(**SEGMENTS, scanned=True)
    await tier.delete(keys_of(2))
    await tier.aclose(0)
    assert (await tier.aclose(DEADLINE_S), path.read_bytes()) == ((0,), content)


async def test_two_ranks_have_checkpoints_of_their_own(open_tier, root, lender):
    for rank in (0, 1):
        for _ in range(2):
            tier = await open_tier(**SEGMENTS, namespace=Namespace(model_name="org/model", rank=rank), scanned=True)
            await lender.keep(tier, [key_of(rank)])
            await tier.aclose(DEADLINE_S)
        assert tier.counters().checkpoint_chunks == 1
    assert {path.name for path in root.glob("*/index*")} == {"index_r0_segments", "index_r1_segments"}


# Starts over segments that somebody may have written to since the checkpoint: it is a candidate's only witness.


@pytest.fixture
def stop_the_walk(hurry, system_call):
    """Hold the next scan before the first footer; nobody waits for it."""

    def stop_the_walk(error=0):
        hurry()
        return system_call("posix_fadvise", sticks=True, error=error)

    return stop_the_walk


@pytest.fixture
def untrusted(stored, root, path):
    async def untrusted(chunks):
        await stored(keys_of(chunks), **SEGMENTS)
        touch(root)
        return path.read_bytes()

    return untrusted


def touch(root):
    for segment in segments(root):
        os.utime(segment, ns=(1, 1))


@pytest.mark.parametrize("checkpoint_s", [0, 1_800])
async def test_a_restart_knows_every_chunk_and_no_other(open_tier, lender, path, checkpoint_s):
    first, keys = await open_tier(**SEGMENTS), keys_of(40)
    await lender.keep(first, keys)
    await first.aclose(DEADLINE_S)
    old, second = path.read_bytes(), await open_tier(**SEGMENTS)
    await lender.keep(second, keys[:10], version=1)
    await second.delete(keys[30:])
    await lender.keep(second, keys_of(3, start=100))
    await second.aclose(DEADLINE_S)
    path.write_bytes(old)
    tier = await open_tier(**SEGMENTS, checkpoint_s=checkpoint_s)
    assert await scanned(tier) >= {*keys[:30], *keys_of(3, start=100)}
    assert list(await tier.probe(keys)) == [True] * 30 + [False] * 10
    expected = [*whole(keys[:10], 1), *whole(keys[10:30]), *["ChunkMissing"] * 10]
    assert await lender.recall(tier, keys) == expected
    assert tier.counters().checkpoint_chunks == (40 if checkpoint_s else 0)


async def test_a_checkpoints_chunks_are_hits_before_footers_are_read(open_tier, untrusted, lender, stop_the_walk):
    await untrusted(40)
    walk = stop_the_walk()
    tier = await open_tier(**SEGMENTS)
    assert all(await tier.probe(keys_of(40)))
    assert not any(await tier.probe(keys_of(3, start=40)))
    assert await lender.recall(tier, keys_of(40)) == whole(keys_of(40))
    await walk.wait_entered()
    walk.let_go()
    assert await scanned(tier) == set(keys_of(40))
    assert await lender.recall(tier, keys_of(40)) == whole(keys_of(40))


@pytest.mark.parametrize(
    ("at", "damage", "afterwards"),
    [
        (ROW_BYTES, bytes(FOOTER_BYTES), "ChunkMissing"),
        (ROW_BYTES + 70, b"\xff", "ChunkMissing"),
        (0, b"half of another chunk", "ChunkCorrupt"),
    ],
)
async def test_a_candidate_that_is_not_there_is_a_miss_and_no_fault(
    open_tier, untrusted, lender, root, place_of, stop_the_walk, at, damage, afterwards
):
    await untrusted(3)
    place_of(key_of(1)).overwrite(at, damage)
    touch(root)
    walk = stop_the_walk()
    tier = await open_tier(**SEGMENTS)
    assert await lender.recall(tier, keys_of(3)) == [label(key_of(0)), "ChunkMissing", label(key_of(2))]
    assert list(await tier.probe(keys_of(3))) == [True, False, True]
    assert tier.counters().corrupt == {}
    walk.let_go()
    await scanned(tier)
    assert await lender.recall(tier, keys_of(3)) == [label(key_of(0)), afterwards, label(key_of(2))]


async def test_what_was_written_over_a_candidate_is_kept(open_tier, untrusted, lender, path, stop_the_walk):
    """Neither a store of the candidate's key nor a failed load of it touches a slot that nobody has looked at."""
    old, new = await untrusted(4), keys_of(4, start=10)
    second = await open_tier(**SEGMENTS)
    await second.delete(keys_of(4))
    await lender.keep(second, new)
    await second.aclose(DEADLINE_S)
    path.write_bytes(old)
    walk = stop_the_walk()
    tier = await open_tier(**SEGMENTS | {"capacity_bytes": "4MiB"})
    assert await lender.recall(tier, keys_of(2)) == ["ChunkMissing"] * 2
    await lender.keep(tier, keys_of(3), version=1)
    walk.let_go()
    assert await scanned(tier) >= set(new)
    await until_probed(tier, [key_of(3)], there=False)
    assert await lender.recall(tier, [*keys_of(4), *new]) == [*whole(keys_of(3), 1), "ChunkMissing", *whole(new)]


async def test_a_segment_that_went_after_the_checkpoint_has_no_candidates(open_tier, untrusted, lender, root):
    await untrusted(4)
    (segment,) = segments(root)
    segment.write_bytes(b"\x89kvtseg\n" + bytes(segment.stat().st_size - 8))
    tier = await open_tier(**SEGMENTS)
    assert await lender.recall(tier, keys_of(4)) == ["ChunkMissing"] * 4
    await tier.aclose(DEADLINE_S)
    segment.unlink()
    assert not any(await (await open_tier(**SEGMENTS)).probe(keys_of(4)))


async def test_candidates_of_a_segment_that_cannot_be_read_are_taken_back(open_tier, untrusted, stop_the_walk):
    await untrusted(4)
    walk = stop_the_walk(errno.EIO)
    tier = await open_tier(**SEGMENTS)
    assert all(await tier.probe(keys_of(4)))
    await walk.wait_entered()
    walk.let_go()
    await scanned(tier, complete=False)
    await until_probed(tier, keys_of(4), there=False)
