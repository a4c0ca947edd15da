"""Checkpoints of both layouts: what is in the file, byte for byte, and how long it may be."""

import hashlib
import os
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvtier.backend import TierContext
from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.backend.namespace import FileMapper
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsOptions
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.capacity import Capacity, Disk
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.files import checkpoint as files_checkpoint
from kvtier_backends.fs.files import index
from kvtier_backends.fs.files.recency import Idle
from kvtier_backends.fs.segments import checkpoint as segments_checkpoint
from kvtier_backends.fs.segments import slots
from tests.fs.conftest import OpenTier

ROW_BYTES = 8_192
KEYS = make_offload_key(b"abc", 1), make_offload_key(b"longer", 2)
USED_AT_NS = 1_700_000_000_000_000_001, 1_700_000_000_000_000_000
BOOT = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).digest()

# Checkpoints as they lie on the disk, except the checksum and the boot of the machine.
FILES = (
    b"\x89kvtidx\n" + bytes.fromhex("01000000 0a000000 0020000000000000")
    + bytes.fromhex("f59a25c515236b159b8c17814dd8fb4217954f27161c9405304b29c1d7fcba2b")
    + b"\x07abc\0\0\0\1\0\0\0" + bytes.fromhex("01000000 01002a36fe9c9717")
    + b"\x0alonger\0\0\0\2" + bytes.fromhex("08000000 00002a36fe9c9717")
)  # fmt: skip
SEGMENTS = (
    b"\x89kvtsix\n" + bytes.fromhex("01000000 0a000000 0020000000000000")
    + bytes.fromhex("f59a25c515236b159b8c17814dd8fb4217954f27161c9405304b29c1d7fcba2b")
    + BOOT + bytes.fromhex("0200000000000000")
    + b"\x0e\0x/00000001.seg" + bytes.fromhex("0000000000000000 0200000000000000 00368ffafd9c9717")
    + b"\x0e\0x/00000002.seg" + bytes.fromhex("0200000000000000 0100000000000000 0000000000000000")
    + b"\x07abc\0\0\0\1\0\0\0" + bytes.fromhex("0000000000000000 0700000000000000 01002a36fe9c9717")
    + b"\x0alonger\0\0\0\2" + bytes.fromhex("0200000000000000 0900000000000000 00002a36fe9c9717")
)  # fmt: skip

OpenLayout = Callable[[str], Folder]


@pytest.fixture
def open_layout(root: Path, mapper: FileMapper):
    opened: list[Folder] = []

    def open_layout(layout: str) -> Folder:
        options = FsOptions(root=str(root), layout=layout).chosen()  # type: ignore[arg-type]
        opened.append(Folder(options, TierContext("0:fs", mapper, ROW_BYTES)))
        opened[-1].open()
        return opened[-1]

    yield open_layout
    for folder in opened:
        folder.close()


def with_checksum(content: bytes) -> bytes:
    return content + xxh3_64_intdigest(content).to_bytes(8, "little")


def test_a_checkpoint_of_files_is_what_version_0_1_0_wrote(
    open_layout: OpenLayout, root: Path, mapper: FileMapper
) -> None:
    checkpoint = files_checkpoint.Checkpoint(open_layout("files"), mapper, Counters(), ROW_BYTES)
    path = root / mapper.folder / "index_r0"
    path.write_bytes(with_checksum(FILES))
    (held,) = checkpoint.read()
    assert held == [index.Held(KEYS[0], 512, USED_AT_NS[0]), index.Held(KEYS[1], 4_096, USED_AT_NS[1])]
    idle = Idle()
    idle.add((chunk.used_at_ns, chunk.key) for chunk in held)
    path.unlink()
    checkpoint.write(index.Snapshot(list(KEYS), [1, 8], idle, {}), 0)
    assert path.read_bytes() == with_checksum(FILES)


def test_a_checkpoint_of_segments_is_what_version_0_1_0_wrote(
    open_layout: OpenLayout, root: Path, mapper: FileMapper
) -> None:
    checkpoint = segments_checkpoint.SlotCheckpoint(open_layout("segments"), mapper, Counters(), ROW_BYTES)
    path = root / mapper.folder / "index_r0_segments"
    path.write_bytes(with_checksum(SEGMENTS))
    same_boot, segments, chunks = checkpoint.read()
    assert same_boot
    assert segments == [("x/00000001.seg", 0, 2, 1_699_999_999_000_000_000), ("x/00000002.seg", 2, 1, 0)]
    assert chunks.keys(np.arange(2)) == list(KEYS)
    assert [column.tolist() for column in chunks[:3]] == [[0, 2], [7, 9], list(USED_AT_NS)]
    keys: list[OffloadKey | None] = [KEYS[0], None, KEYS[1]]
    path.unlink()
    snapshot = slots.Snapshot(keys, array("Q", [7, 0, 9]), array("q", [USED_AT_NS[0], 0, USED_AT_NS[1]]), frozenset())
    checkpoint.write(segments, snapshot)
    assert path.read_bytes() == with_checksum(SEGMENTS)


async def test_what_a_checkpoint_of_segments_has_no_room_for_is_looked_for(
    open_tier: OpenTier, lender: Lender, root: Path, monkeypatch: pytest.MonkeyPatch, scanned
) -> None:
    """Nor is it longer than the next start reads."""
    monkeypatch.setattr(segments_checkpoint, "BYTES_MAX", 2_000)
    first = await open_tier(layout="segments", capacity_bytes="1MiB")
    await lender.keep(first, keys_of(40))
    await first.aclose(20)
    (path,) = root.glob("*/index_r0_segments")
    assert 1_000 < path.stat().st_size <= 2_000
    tier = await open_tier(layout="segments", capacity_bytes="1MiB")
    await scanned(tier)
    assert 10 < tier.counters().checkpoint_chunks < 40
    assert await lender.recall(tier, keys_of(40)) == [label(key) for key in keys_of(40)]


@pytest.mark.parametrize("kept_bytes", [0, 60, 100, 140])
def test_room_for_a_checkpoint_beyond_what_is_kept_for_it_is_not_free_for_chunks(
    tmp_path: Path, kept_bytes: int
) -> None:
    root_fd = os.open(tmp_path, os.O_RDONLY)
    capacity = Capacity(Disk(root_fd), limit_bytes=1_000, low_water=1.0, min_free_bytes=0)
    capacity.keep_free(kept_bytes)
    os.close(root_fd)
    capacity.unseen_bytes = 0
    assert capacity.free_bytes() == 1_000 - kept_bytes
    assert capacity.reserve_kept(100)
    assert capacity.free_bytes() == 1_000 - max(100, kept_bytes)
    capacity.release_kept(100)
    assert capacity.free_bytes() == 1_000 - kept_bytes
    assert not capacity.reserve_kept(1_001)
