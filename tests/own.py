"""What on this machine belongs to this test run: other programs that use kvtier may run beside it.

A run gives its name to all that it starts, by the environment; so what its processes leave to nobody is known, too.
"""

import itertools
import os
import uuid

WORKER = uuid.uuid4().hex  # Of this process: each worker of a parallel run imports this module itself.
RUN = f"KVTIER_TEST_RUN={WORKER}"
os.environ.update([RUN.split("=")])

_numbers = itertools.count()


def is_ours(pid: int) -> bool:
    """Say whether this process, or one that it started, even by others, has this id; one that has ended is nobody's."""
    if pid == os.getpid():
        return True
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return RUN.encode() in file.read().split(b"\0")
    except OSError:
        return False


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def new_shared_memory() -> str:
    """Return the path of a new file in shared memory. It carries the worker's name: no other worker counts it."""
    return f"/dev/shm/kvtier-test-{WORKER}-{next(_numbers)}"


def shared_memory(*words: str) -> set[str]:
    """Name the files in shared memory whose names hold one of these words, except what other runs have mapped."""
    named = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if any(word in name for word in words)}
    return named - _mapped_by_others() if named else set()


def _mapped_by_others() -> set[str]:
    found: set[str] = set()
    for pid in processes():
        try:
            with open(f"/proc/{pid}/maps") as file:
                mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/dev/shm/" in line}
        except OSError:  # It ended while we looked, or belongs to another user.
            continue
        if mapped and not is_ours(pid):
            found |= mapped
    return found
