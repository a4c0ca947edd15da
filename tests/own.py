"""Tells processes and shared memory of this test run from those of other programs that use kvtier.

The environment carries the run's name to every process that it starts, so orphans are recognised, too.
"""

import itertools
import os
import uuid
from contextlib import suppress

WORKER = uuid.uuid4().hex  # One per process: each worker of a parallel run imports this module itself.
RUN = f"KVTIER_TEST_RUN={WORKER}"
os.environ.update([RUN.split("=")])

_numbers = itertools.count()


def is_ours(pid):
    """Return True if the id is that of this process or of a descendant that is still running."""
    if pid == os.getpid():
        return True
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if RUN.encode() in file.read().split(b"\0"):
                return True
        parent = int(stat_of(pid)[1])  # A forked process still has the environment that its parent was started with.
    except OSError:
        return False
    return parent > 1 and is_ours(parent)


def stat_of(pid):
    """Return the fields of `/proc/PID/stat` from the state on; OSError if it has ended."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def new_shared_memory():
    """Return the path of a new file in shared memory. It has the worker's name, so no other worker counts it."""
    return f"/dev/shm/kvtier-test-{WORKER}-{next(_numbers)}"


def shared_memory(*words):
    """Return the files in shared memory with one of these words in their names, except those that other runs mapped."""
    named = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if any(word in name for word in words)}
    return named - _mapped_by_others() if named else set()


def _mapped_by_others():
    found = set()
    for pid in processes():
        try:
            with open(f"/proc/{pid}/maps") as file:
                mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/dev/shm/" in line}
        except OSError:  # It ended meanwhile, or belongs to another user.
            continue
        if mapped and not is_ours(pid):
            found |= mapped
    return found


def open_without_a_name(folder, *others):
    """Count the removed files of a folder that this process, or one of the others, still has open."""
    found = 0
    for pid in {os.getpid(), *others}:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                path = os.readlink(f"/proc/{pid}/fd/{fd}")
                found += path.startswith(str(folder)) and path.endswith("(deleted)")
    return found


def until_end(request, made, end):
    """Return what a fixture has made for a test, and end it with that fixture."""
    request.addfinalizer(end)
    return made
