"""The raw limit: plain threads on one file."""

import errno
import mmap
import threading
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.tools.bench.raw import RawFile, seconds_on, takes_direct

CHUNK_BYTES = 8_192


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


def test_the_look_for_direct_io_leaves_no_file(tmp_path: Path) -> None:
    assert takes_direct(str(tmp_path)) in (True, False)
    assert not takes_direct(str(tmp_path / "absent"))
    assert not list(tmp_path.iterdir())


def test_an_error_of_a_thread_is_raised() -> None:
    def work(part: Iterable[int]) -> None:
        for index in part:
            if index == 5:
                raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        seconds_on(4, 8, work)


def test_an_interrupted_measurement_waits_until_no_thread_uses_a_file() -> None:
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
