"""Real processes beside the test's own, real descriptors counted, and a name in real shared memory."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import kvtier
from tests.own import new_shared_memory


@pytest.fixture
def spawn(outside):
    """Start `python -c script *args` with pipes, `pass_fds` kept open; whatever still runs at the end is killed."""
    environment = os.environ | {"PYTHONPATH": str(Path(kvtier.__file__).parents[1])}

    def start(script, *args, pass_fds=()):
        command = [sys.executable, "-c", script, *map(str, args)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment, pass_fds=pass_fds, **pipes)
        at_end.callback(_end, process)
        return process

    with ExitStack() as at_end:
        yield start


def _end(process):
    with closing(process.stdin), closing(process.stdout):
        process.kill()
        process.wait()


@pytest.fixture
def shm_path():
    """A path in a directory of the test's own in /dev/shm. What a test leaves there is removed, and fails the test."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no /dev/shm")
    directory = new_shared_memory()
    os.mkdir(directory)
    yield f"{directory}/region"
    left = os.listdir(directory)
    shutil.rmtree(directory)
    assert not left


@pytest.fixture
def small_tmpfs(outside, tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.fixture
def no_descriptor_left():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before
