"""Checkpoints: the file byte for byte, its limits, and starts over one that is damaged, old or not ours."""

import asyncio
import errno
import hashlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.backend import FileMapper, Namespace, OffloadKey, TierContext, make_offload_key
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.layout import Counters
from kvtier_backends.fs.segments import checkpoint as checkpoint_module
from kvtier_backends.fs.segments.catalog import Snapshot
from kvtier_backends.fs.segments.checkpoint import KEY_BYTES_MAX, SlotCheckpoint
from tests.fs.conftest import ROW_BYTES, scanned

DEADLINE_S = 20.0
KEYS = make_offload_key(b"abc", 1), make_offload_key(b"longer", 2)
USED_AT_NS = 1_700_000_000_000_000_001, 1_700_000_000_000_000_000
BOOT = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).digest()
SMALL = {"layout": "segments", "capacity_bytes": "1MiB"}

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
def folder(open_folder) -> Folder:
    return open_folder(layout="segments")


@pytest.fixture
def checkpoint(folder, mapper) -> SlotCheckpoint:
    return SlotCheckpoint(folder, mapper, Counters(), ROW_BYTES)


@pytest.fixture
def path(root, mapper) -> Path:
    return root / mapper.folder / "index_r0_segments"


def snapshot(keys: Iterable[OffloadKey]) -> Snapshot:
    named = list(keys)
    numbers = range(1, len(named) + 1)
    return Snapshot([*named], array("Q", numbers), array("q", numbers), frozenset())


def keys_in(checkpoint: SlotCheckpoint) -> list[OffloadKey] | None:
    memory = checkpoint.read()
    return memory and memory.chunks.keys(np.arange(len(memory.chunks.slots)))


def with_checksum(content: bytes) -> bytes:
    return content + xxh3_64_intdigest(content).to_bytes(8, "little")


def test_a_checkpoint_is_what_was_published(checkpoint, path) -> None:
    path.write_bytes(with_checksum(PUBLISHED))
    memory = checkpoint.read()
    assert memory is not None
    assert memory.same_boot
    assert memory.segments == [("x/00000001.seg", 0, 2, 1_699_999_999_000_000_000), ("x/00000002.seg", 2, 1, 0)]
    assert keys_in(checkpoint) == list(KEYS)
    assert [column.tolist() for column in memory.chunks[:3]] == [[0, 2], [7, 9], list(USED_AT_NS)]
    path.unlink()
    keys: list[OffloadKey | None] = [KEYS[0], None, KEYS[1]]
    times = array("q", [USED_AT_NS[0], 0, USED_AT_NS[1]])
    checkpoint.write(memory.segments, Snapshot(keys, array("Q", [7, 0, 9]), times, frozenset()))
    assert path.read_bytes() == with_checksum(PUBLISHED)


def test_a_chunk_with_a_long_key_is_left_to_the_scan_and_no_segment_is_trusted(checkpoint) -> None:
    keys = [OffloadKey(bytes(length)) for length in (KEY_BYTES_MAX + 1, KEY_BYTES_MAX)]
    checkpoint.write([checkpoint_module.Remembered("x/00000001.seg", 0, 2, 5)], snapshot(keys))
    memory = checkpoint.read()
    assert memory is not None
    assert keys_in(checkpoint) == keys[1:]
    assert memory.segments[0].written_at_ns == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_checkpoint_is_ignored(checkpoint, path, data) -> None:
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


def test_a_checkpoint_of_another_version_layout_or_row_length_is_ignored(folder, checkpoint, mapper, path) -> None:
    checkpoint.write([], snapshot(keys_of(1)))
    other, counters = FileMapper(Namespace(model_name="org/model", layout="LBHNC")), Counters()
    assert SlotCheckpoint(folder, other, counters, ROW_BYTES).read() is None
    assert SlotCheckpoint(folder, mapper, counters, 2 * ROW_BYTES).read() is None
    assert counters.totals().checkpoints_ignored == 2
    assert keys_in(checkpoint) == keys_of(1)
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 8, 2)
    path.write_bytes(with_checksum(bytes(content[:-8])))
    assert checkpoint.read() is None


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_checkpoint_that_cannot_be_written_leaves_the_last(folder, mapper, error, monkeypatch) -> None:
    counters = Counters()
    checkpoint = SlotCheckpoint(folder, mapper, counters, ROW_BYTES)
    checkpoint.write([], snapshot(keys_of(1)))

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        checkpoint.write([], snapshot([]))
    assert keys_in(checkpoint) == keys_of(1)
    assert (counters.totals().checkpoints_written, counters.totals().checkpoints_failed) == (1, 1)


async def test_chunks_beyond_the_limit_of_a_checkpoint_are_found_by_the_scan(
    open_tier, lender, path, monkeypatch
) -> None:
    """Nor is it longer than the next start reads."""
    monkeypatch.setattr(checkpoint_module, "BYTES_MAX", 2_000)
    first = await open_tier(**SMALL)
    await lender.keep(first, keys_of(40))
    await first.aclose(DEADLINE_S)
    assert 1_000 < path.stat().st_size <= 2_000
    tier = await open_tier(**SMALL)
    await scanned(tier)
    assert 10 < tier.counters().checkpoint_chunks < 40
    assert await lender.recall(tier, keys_of(40)) == [label(key) for key in keys_of(40)]


async def test_a_checkpoint_is_written_every_so_often(open_tier, lender, root, monkeypatch) -> None:
    publish, published = Folder.publish, threading.Semaphore(0)

    def publish_and_say(folder: Folder, name: str, pieces: Iterable[bytes]) -> None:
        publish(folder, name, pieces)
        published.release()

    tier = await open_tier(**SMALL, checkpoint_s=0.01)
    await scanned(tier)
    await lender.keep(tier, keys_of(3))
    monkeypatch.setattr(Folder, "publish", publish_and_say)
    for _ in range(2):  # The first may have begun before the chunks were stored.
        assert await asyncio.to_thread(published.acquire, timeout=DEADLINE_S)
    copy = shutil.copytree(root, root.with_name("copy"))  # As after a kill: the first has not closed.
    another = await open_tier(**SMALL | {"root": str(copy)})
    await scanned(another)
    assert another.counters().checkpoint_chunks == 3


async def test_closing_in_no_time_leaves_the_last_checkpoint(open_tier, lender, path) -> None:
    before = await open_tier(**SMALL)
    await lender.keep(before, keys_of(2))
    await before.aclose(DEADLINE_S)
    content = path.read_bytes()
    tier = await open_tier(**SMALL)
    await scanned(tier)
    await tier.delete(keys_of(2))
    await tier.aclose(0)
    assert await tier.aclose(DEADLINE_S) == (0,)
    assert path.read_bytes() == content


async def test_two_ranks_have_checkpoints_of_their_own(root, lender) -> None:
    for rank in (0, 1):
        mapper = FileMapper(Namespace(model_name="org/model", rank=rank))
        for _ in range(2):
            tier = await FsBackend.open(FsOptions(root=str(root)), TierContext("0:fs", mapper, ROW_BYTES))
            await scanned(tier)
            await lender.keep(tier, [key_of(rank)])
            await tier.aclose(DEADLINE_S)
        assert tier.counters().checkpoint_chunks == 1
    assert {path.name for path in root.glob("*/index*")} == {"index_r0_segments", "index_r1_segments"}


@pytest.mark.usefixtures("outside")
async def test_a_writer_that_is_killed_while_it_checkpoints_leaves_a_whole_one(open_tier, lender, root) -> None:
    before = await open_tier(**SMALL)
    await lender.keep(before, keys_of(3))
    await before.aclose(DEADLINE_S)
    program = f"""
import os, signal, sys
from array import array
from kvtier.backend import FileMapper, Namespace, TierContext
from kvtier_backends.fs import FsOptions
from kvtier_backends.fs.layout import Counters
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.segments.checkpoint import SlotCheckpoint
from kvtier_backends.fs.segments.catalog import Snapshot
mapper = FileMapper(Namespace(model_name="org/model"))
folder = Folder(FsOptions(root=sys.argv[1]), TierContext("0:fs", mapper, {ROW_BYTES}))
folder.open()
os.rename = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
SlotCheckpoint(folder, mapper, Counters(), {ROW_BYTES}).write([], Snapshot([], array("Q"), array("q"), frozenset()))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program, str(root)], env=environment, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    tier = await open_tier(**SMALL)
    await scanned(tier)
    assert list(await tier.probe(keys_of(3))) == [True] * 3
    assert (tier.counters().checkpoint_chunks, tier.counters().scan_swept) == (3, 1)
