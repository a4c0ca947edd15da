"""What plain threads do to a file, and what fio says."""

import errno
import mmap
import os
import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.tools.bench.raw import Fio, NewFiles, RawFile, fio_path, rate_in, seconds_on, takes_direct

CHUNK_BYTES = 8_192
FAKE_FIO = """#!/bin/sh
echo "fio: a warning of no weight"
echo "$@" >> "$0.called"
echo '{"jobs": [{"read": {"bw_bytes": 2500000}, "write": {"bw_bytes": 1250000}}]}'
"""


def chunks(count: int) -> list[memoryview]:
    whole = memoryview(mmap.mmap(-1, count * CHUNK_BYTES))
    return [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_a_raw_file_gives_every_buffer_back_what_it_wrote(tmp_path: Path, threads: int) -> None:
    buffers = chunks(7)
    with closing(RawFile(str(tmp_path / "raw"), buffers, direct=takes_direct(str(tmp_path)))) as raw:
        for number, buffer in enumerate(buffers):
            buffer[:] = bytes([number + 1]) * CHUNK_BYTES
        assert raw.write(threads, sync=True) > 0
        for buffer in buffers:
            buffer[:] = bytes(CHUNK_BYTES)
        assert raw.read(threads) > 0
        assert [bytes(buffer) for buffer in buffers] == [bytes([number + 1]) * CHUNK_BYTES for number in range(7)]
    assert not list(tmp_path.iterdir())


def test_every_round_makes_files_of_its_own(tmp_path: Path) -> None:
    buffers = chunks(5)
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number]) * CHUNK_BYTES
    files = NewFiles(str(tmp_path / "new"), buffers, direct=takes_direct(str(tmp_path)))
    for turn in (1, 2):
        files.prepare()
        assert files.write(2, sync=turn == 2) > 0
        written = sorted(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert written == sorted(turn * [bytes(buffer) for buffer in buffers])


def test_whether_direct_io_works_is_found_out_without_a_trace(tmp_path: Path) -> None:
    assert takes_direct(str(tmp_path)) in (True, False)
    assert not takes_direct(str(tmp_path / "absent"))
    assert not list(tmp_path.iterdir())


def test_what_a_thread_fails_with_is_raised() -> None:
    def work(part: Iterable[int]) -> None:
        for index in part:
            if index == 5:
                raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        seconds_on(4, 8, work)


def test_who_is_interrupted_waits_until_no_thread_uses_a_file() -> None:
    under_way = threading.Event()
    done: list[int] = []

    class Interrupted(BaseException):
        pass

    def work(part: Iterable[int]) -> None:
        for index in part:
            if index == 0:
                under_way.set()
                while not stopping.is_set():
                    pass
            done.append(index)

    stopping = threading.Event()
    joined = threading.Thread.join

    def interrupted_join(thread: threading.Thread, timeout: float | None = None) -> None:
        if not stopping.is_set():
            under_way.wait()
            stopping.set()
            raise Interrupted
        joined(thread, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted_join)
        with pytest.raises(Interrupted):
            seconds_on(1, 1_000, work)
    assert done == [0]  # The one under way was waited for; none was begun after it.


@pytest.mark.usefixtures("outside")
def test_fio_is_asked_for_the_chunk_size_and_the_depth(tmp_path: Path) -> None:
    fake = tmp_path / "fio"
    fake.write_text(FAKE_FIO)
    fake.chmod(0o755)
    fio = Fio(str(fake), str(tmp_path), size_bytes=1 << 20, direct=True)
    assert fio.rate("read", 4_096, 8) == 2_500_000.0
    assert fio.rate("write", 8_192, 1) == 1_250_000.0
    first, second = (tmp_path / "fio.called").read_text().splitlines()
    assert {"--rw=randread", "--bs=4096", "--iodepth=8", "--direct=1", "--size=1048576"} <= set(first.split())
    assert {"--rw=randwrite", "--bs=8192", "--iodepth=1"} <= set(second.split())


@pytest.mark.usefixtures("outside")
def test_a_fio_that_fails_says_why(tmp_path: Path) -> None:
    fake = tmp_path / "fio"
    fake.write_text("#!/bin/sh\necho its reason >&2\nexit 3\n")
    fake.chmod(0o755)
    with pytest.raises(OSError, match="fio ended with status 3: its reason"):
        Fio(str(fake), str(tmp_path), size_bytes=1 << 20, direct=False).rate("read", 4_096, 1)


def test_fio_is_found_only_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fio_path() is None
    (tmp_path / "fio").write_text("#!/bin/sh\n")
    os.chmod(tmp_path / "fio", 0o755)
    assert fio_path() == str(tmp_path / "fio")


def test_a_report_is_read_behind_warnings() -> None:
    assert rate_in('note: x\n{"jobs": [{"read": {"bw_bytes": 7}}]}', "read") == 7.0
