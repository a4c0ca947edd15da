"""What an engine could leave behind on this machine."""

import time

from tests.own import is_ours, processes, shared_memory

PATIENCE_S = 10.0  # A process that was told to end, or killed, is gone within it.


def runners():
    found: set[int] = set()
    for pid in processes():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
        except OSError:  # It ended while we looked.
            continue
        if b"kvtier.runner.detached" in command and is_ours(pid):
            found.add(pid)
    return found


def leftovers():
    return shared_memory("kvtier-vllm-", "vllm_offload_") | {f"runner {pid}" for pid in runners()}


def wait_until_gone(before):
    until = time.monotonic() + PATIENCE_S
    while (left := leftovers() - before) and time.monotonic() < until:
        time.sleep(0.05)
    return left
