"""Bytes reach a file wholly, under a name of their own until they have, whatever the system calls do."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from kvtier.backend.namespace import make_offload_key
from kvtier_backends.fs.disk.lanes import LoadsFirst
from kvtier_backends.fs.disk.reads import ONE_BY_ONE
from kvtier_backends.fs.disk.temporaries import Writer, temporary_name, writer_of
from kvtier_backends.fs.files.chunk_files import ChunkFiles, OpenChunk

KEY = make_offload_key(b"k" * 32)
ROW_BYTES = 16_384


class Looks(LoadsFirst):
    """Gives way to nobody, and counts how often it was asked to."""

    def __init__(self, slice_bytes: int) -> None:
        super().__init__()
        self._slice_bytes = slice_bytes
        self.taken = 0

    @property
    def slice_bytes(self) -> int:
        return self._slice_bytes

    def give_way(self) -> None:
        self.taken += 1


@pytest.fixture
def files(open_folder, mapper) -> ChunkFiles:
    return ChunkFiles(open_folder(), mapper, LoadsFirst(), fsync=False)


@pytest.fixture
def path(path_of) -> Path:
    return path_of(KEY)


@pytest.fixture
def buffers() -> list[memoryview]:
    row, page = memoryview(mmap.mmap(-1, ROW_BYTES)), memoryview(mmap.mmap(-1, 4_096))
    row[:] = bytes(range(256)) * (ROW_BYTES // 256)
    page[:] = b"footer.." * 512
    return [row, page]


def content(buffers: list[memoryview]) -> bytes:
    return b"".join(buffers)


def everything_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_file_holds_the_buffers_one_after_the_other(files, path, buffers) -> None:
    allocated_bytes = files.write(KEY, buffers, 0)
    assert path.read_bytes() == content(buffers)
    assert allocated_bytes == path.stat().st_blocks * 512 > 0
    assert files.length(KEY) == ROW_BYTES + 4_096


@pytest.mark.parametrize(("slice_bytes", "pauses"), [(4_096, 4), (8_192, 1), (ROW_BYTES, 0)])
def test_a_chunk_is_written_in_slices_between_which_others_go_first(
    slice_bytes, pauses, open_folder, mapper, path, buffers
) -> None:
    looks = Looks(slice_bytes)
    ChunkFiles(open_folder(), mapper, looks, fsync=False).write(KEY, buffers, 0)
    assert path.read_bytes() == content(buffers)
    assert looks.taken == pauses


def test_writing_again_replaces(files, path, buffers) -> None:
    files.write(KEY, buffers, 0)
    buffers[0][:] = b"2" * ROW_BYTES
    files.write(KEY, buffers, 0)
    assert path.read_bytes() == content(buffers)


def test_removing_what_is_not_there_is_nothing(files, path, buffers) -> None:
    files.remove(KEY)
    files.write(KEY, buffers, 0)
    files.remove(KEY)
    files.remove(KEY)
    assert files.length(KEY) is None
    assert not path.exists()


@pytest.mark.parametrize("step", [1, 4_096, 12_288, ROW_BYTES])
def test_short_writes_are_gone_on_with(open_folder, mapper, path, buffers, step, monkeypatch) -> None:
    files = ChunkFiles(open_folder(io="buffered"), mapper, LoadsFirst(), fsync=False)
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, rest, at: write(fd, [rest[0][:step]], at))
    files.write(KEY, buffers, 0)
    assert path.read_bytes() == content(buffers)


def read(chunk: OpenChunk, into: list[memoryview]) -> int:
    """Read a file as a lane does, and return how many bytes came."""
    came: list[int | OSError] = []
    ONE_BY_ONE([chunk.wanted(into, came.append)])
    assert isinstance(came[0], int)
    return chunk.read_on(into, came[0], ROW_BYTES + 4_096)


@pytest.mark.parametrize("step", [1_000, 4_096, 12_288, ROW_BYTES])
def test_short_reads_are_gone_on_with(open_folder, mapper, buffers, step, monkeypatch) -> None:
    files = ChunkFiles(open_folder(io="buffered"), mapper, LoadsFirst(), fsync=False)
    files.write(KEY, buffers, 0)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, rest, at: preadv(fd, [rest[0][:step]], at))
    into = [memoryview(bytearray(ROW_BYTES)), memoryview(bytearray(8_192))]
    with files.open(KEY) as chunk:
        assert read(chunk, into) == ROW_BYTES + 4_096
    assert content(into)[: ROW_BYTES + 4_096] == content(buffers)


@pytest.mark.parametrize("file_bytes", [0, 5, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 5_000, ROW_BYTES + 50_000])
def test_the_end_of_a_file_is_found_wherever_it_is(files, path, file_bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * file_bytes)
    into = [memoryview(mmap.mmap(-1, ROW_BYTES)), memoryview(mmap.mmap(-1, 8_192))]
    with files.open(KEY) as chunk:
        assert read(chunk, into) == min(file_bytes, ROW_BYTES + 8_192)


def test_a_device_that_takes_no_more_is_an_error(files, path, buffers, monkeypatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, rest, at: 0)
    with pytest.raises(OSError, match="wrote 0 of 20480 bytes"):
        files.write(KEY, buffers, 0)
    assert not path.exists()


@pytest.mark.parametrize("call", ["pwritev", "fstat", "rename"])
@pytest.mark.parametrize("there", [False, True])
def test_a_failed_write_leaves_what_was_there_and_nothing_else(
    files, root, path, buffers, call, there, monkeypatch
) -> None:
    before = content(buffers)
    if there:
        files.write(KEY, buffers, 0)
    kept = everything_in(root)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        buffers[0][:] = b"2" * ROW_BYTES
        with pytest.raises(OSError, match="full"):
            files.write(KEY, buffers, 0)
    assert everything_in(root) == kept
    assert not there or path.read_bytes() == before


def test_readers_see_the_old_file_until_the_new_one_is_whole(files, path, buffers, monkeypatch) -> None:
    files.write(KEY, buffers, 0)
    before, rename = content(buffers), os.rename
    seen: list[bytes] = []

    def look_and_rename(*args: str, **kwargs: int) -> None:
        seen.append(path.read_bytes())
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "rename", look_and_rename)
    buffers[0][:] = b"2" * ROW_BYTES
    files.write(KEY, buffers, 0)
    assert seen == [before]


def test_folders_are_made_only_when_they_are_missing(files, buffers, monkeypatch) -> None:
    made: list[str] = []
    mkdir = os.mkdir

    def count(name: str, *args: int, **kwargs: int) -> None:
        made.append(name)
        mkdir(name, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", count)
    files.write(KEY, buffers, 0)
    assert made
    made.clear()
    files.write(KEY, buffers, 0)
    assert made == []


def test_a_folder_that_vanishes_is_made_again(files, path, buffers, monkeypatch) -> None:
    mkdir, left = os.mkdir, [3]

    def make_and_lose(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if name == path.parent.name and left[0]:
            left[0] -= 1
            os.rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", make_and_lose)
    files.write(KEY, buffers, 0)
    assert path.read_bytes() == content(buffers)


def test_folders_that_vanish_for_ever_are_an_error(files, path, buffers, monkeypatch) -> None:
    mkdir = os.mkdir

    def make_and_lose(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        if name == path.parent.name:
            os.rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", make_and_lose)
    with pytest.raises(OSError, match="vanish"):
        files.write(KEY, buffers, 0)


def test_a_temporary_name_that_is_taken_is_left_to_its_owner(files, path, buffers, monkeypatch) -> None:
    names = iter([".1.tmp", ".1.tmp", ".2.tmp"])
    monkeypatch.setattr("kvtier_backends.fs.files.chunk_files.temporary_name", lambda writer: next(names))
    path.parent.mkdir(parents=True)
    other = path.with_name(".1.tmp")
    other.write_bytes(b"another's")
    files.write(KEY, buffers, 0)
    assert path.read_bytes() == content(buffers)
    assert other.read_bytes() == b"another's"


def test_with_fsync_the_file_its_folder_and_new_folders_parents_are_synced(
    open_folder, mapper, buffers, monkeypatch
) -> None:
    files = ChunkFiles(open_folder(), mapper, LoadsFirst(), fsync=True)
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    files.write(KEY, buffers, 0)
    kinds = [("tmp" if name.endswith(".tmp") else Path(name).name) for name in synced]
    assert kinds == [mapper.name(KEY).split("/")[0], "6b6", "tmp", "b6_g0"]


def test_temporaries_have_names_of_their_own_that_say_whose_they_are() -> None:
    writer = Writer.this_process()
    assert writer.pid == os.getpid()
    assert writer == Writer.this_process()
    names = [temporary_name(writer) for _ in range(100)]
    assert len(set(names)) == 100
    assert all(name.startswith(f".{writer.boot}-{writer.pid}-{writer.started}-") for name in names)
    assert {writer_of(name) for name in names} == {writer}


@pytest.mark.parametrize("name", ["", ".tmp", "chunk.bin", ".0-1-2-3.tmp", "a.bin_123.tmp", ".01234567-1-2-3.tmp.bin"])
def test_other_names_are_no_temporaries(name) -> None:
    assert writer_of(name) is None


def test_an_attempt_is_never_taken_for_a_chunk(mapper) -> None:
    folder = os.path.dirname(mapper.name(KEY))
    assert mapper.key(f"{folder}/{temporary_name(Writer.this_process())}") is None
