"""What an engine could leave behind on this machine."""

import os
import time

PATIENCE_S = 10.0  # A process that was told to end, or killed, is gone within it.


def shared_memory() -> set[str]:
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(("kvtier-vllm-", "vllm_offload_"))}


def runners() -> set[int]:
    """Return the process ids of this process's runners, and of those that nobody owns any more."""
    found: set[int] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = file.read().rpartition(b")")[2].split()[1].decode()
        except OSError:  # It ended while we looked.
            continue
        if b"kvtier.bridge.child" in command and parent in (str(os.getpid()), "1"):
            found.add(int(pid))
    return found


def leftovers() -> set[str]:
    """Name what is there now."""
    return shared_memory() | {f"runner {pid}" for pid in runners()}


def wait_until_gone(before: set[str]) -> set[str]:
    """Wait for what was not there before to go; return what did not."""
    until = time.monotonic() + PATIENCE_S
    while (left := leftovers() - before) and time.monotonic() < until:
        time.sleep(0.05)
    return left
