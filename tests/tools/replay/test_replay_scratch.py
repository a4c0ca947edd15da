"""A temporary directory that is removed however its process ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.tools.outputs import Scratch

pytestmark = pytest.mark.usefixtures("outside")

MADE_AND_WAITING = """
import sys
from kvtier.tools.outputs import Scratch
scratch = Scratch()
open(scratch.path + "/chunk", "w").close()
print(scratch.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Place temporary directories here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def wait_until_gone(path: str) -> None:
    deadline = time.monotonic() + 60
    while os.path.lexists(path):
        assert time.monotonic() < deadline, f"{path} is still there"
        time.sleep(0.01)


def test_it_is_there_while_it_is_used_and_gone_afterwards(temporary: Path) -> None:
    with Scratch() as scratch:
        assert os.listdir(scratch.path) == []
        os.makedirs(f"{scratch.path}/deep/er")
        (Path(scratch.path) / "deep" / "chunk").write_bytes(b"x")
    assert os.listdir(temporary) == []


def test_it_is_gone_after_an_error_too(temporary: Path) -> None:
    with pytest.raises(RuntimeError, match="ours"), Scratch() as scratch:
        raise RuntimeError("ours")
    assert scratch.remove(None)  # However busy the disk: it waits until its guard has done it.
    assert os.listdir(temporary) == []


def test_removing_it_may_be_asked_for_again(temporary: Path) -> None:
    with Scratch() as scratch:
        assert scratch.remove(None)
        assert not os.path.lexists(scratch.path)
    assert os.listdir(temporary) == []


def test_it_is_gone_after_its_owner_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MADE_AND_WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        assert os.listdir(path) == ["chunk"]
        process.send_signal(signal.SIGKILL)
    wait_until_gone(path)


def test_nothing_is_left_where_its_guard_cannot_be_started(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(temporary / "no-python"))
    with pytest.raises(FileNotFoundError):
        Scratch()
    assert os.listdir(temporary) == []
