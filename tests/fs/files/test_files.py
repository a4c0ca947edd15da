"""Bytes reach a file wholly, under a name of their own until they have, whatever the system calls do."""

import errno
import mmap
import os
import re
from pathlib import Path

import pytest

from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.disk.lanes import LoadsFirst
from kvtier_backends.fs.files.chunk_files import ChunkFiles
from tests.fs.conftest import kinds, whole

KEYS = keys_of(1)


class Looks(LoadsFirst):
    def __init__(self, slice_bytes):
        super().__init__()
        self._slice_bytes, self.taken = slice_bytes, 0

    @property
    def slice_bytes(self):
        return self._slice_bytes

    def give_way(self):
        self.taken += 1


@pytest.mark.parametrize(("slice_bytes", "pauses"), [(4_096, 4), (8_192, 1), (16_384, 0)])
def test_a_chunk_is_written_in_slices_and_others_go_first(open_folder, mapper, path_of, slice_bytes, pauses):
    looks, (row, page) = Looks(slice_bytes), (memoryview(mmap.mmap(-1, size)) for size in (16_384, 4_096))
    row[:] = bytes(range(256)) * 64
    ChunkFiles(open_folder(), mapper, looks, fsync=False).write(key_of(0), [row, page], 0)
    assert path_of(key_of(0)).read_bytes() == row[:].tobytes() + bytes(4_096)
    assert looks.taken == pauses


@pytest.mark.parametrize("step", [512, 4_096, 8_192])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
async def test_short_reads_and_writes_are_gone_on_with(open_tier, lender, monkeypatch, layout, call, step):
    tier, move = await open_tier(layout=layout, io="buffered"), getattr(os, call)
    if call == "preadv":
        await lender.keep(tier, keys_of(2))
    monkeypatch.setattr(os, call, lambda fd, rest, at: move(fd, [rest[0][:step]], at))
    if call == "pwritev":
        await lender.keep(tier, keys_of(2))
    assert await lender.recall(tier, keys_of(2)) == whole(keys_of(2))


@pytest.mark.parametrize("call", ["pwritev", "rename", "a device that takes no more"])
async def test_a_failed_write_leaves_what_was_there(open_tier, lender, root, system_call, monkeypatch, call):
    tier, files = await open_tier(holds=KEYS), {path for path in root.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        if call in ("pwritev", "rename"):
            system_call(call, error=errno.EIO)
        else:
            patch.setattr(os, "pwritev", lambda fd, rest, at: 0)
        assert kinds(await tier.store(lender.writes(keys_of(2), version=1))) == ["TransferFailed"] * 2
    monkeypatch.undo()
    assert {path for path in root.rglob("*") if path.is_file()} == files
    assert await lender.recall(tier, keys_of(2)) == [*whole(KEYS), "ChunkMissing"]


async def test_readers_see_the_old_file_until_the_new_one_is_whole(open_tier, lender, path_of, monkeypatch):
    tier, rename, seen = await open_tier(), os.rename, list[bytes]()
    await lender.keep(tier, KEYS)
    before = path_of(key_of(0)).read_bytes()

    def look_and_rename(*args, **kwargs):
        seen.append(path_of(key_of(0)).read_bytes())
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "rename", look_and_rename)
    await lender.keep(tier, KEYS, version=1)
    assert seen == [before]
    assert path_of(key_of(0)).read_bytes() != before


async def test_a_temporary_name_that_is_taken_is_left_to_its_owner(open_tier, lender, path_of, monkeypatch):
    tier, path, names = await open_tier(), path_of(key_of(0)), iter([".1.tmp", ".1.tmp", ".2.tmp"])
    monkeypatch.setattr("kvtier_backends.fs.files.chunk_files.temporary_name", lambda writer: next(names))
    path.parent.mkdir(parents=True)
    path.with_name(".1.tmp").write_bytes(b"another's")
    await lender.keep(tier, KEYS)
    assert await lender.recall(tier, KEYS) == whole(KEYS)
    assert path.with_name(".1.tmp").read_bytes() == b"another's"


async def test_with_fsync_a_file_its_folder_and_new_parents_are_synced(open_tier, lender, mapper, monkeypatch):
    tier, synced, fsync = await open_tier(fsync=True), list[str](), os.fsync

    def note(fd):
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    await lender.keep(tier, KEYS)
    chunks, outer, inner, _ = mapper.name(key_of(0)).split("/")
    assert [re.sub(r"^\..*\.tmp$", "tmp", name) for name in synced] == [chunks, outer, "tmp", inner]
