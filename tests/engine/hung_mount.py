"""A tier on a file system whose threads can be made to hang in the kernel, whatever process they are in.

While there is a FIFO named after an operation in `gates`, each call of that operation first opens it for reading: its
thread sleeps in open(2) until the other end is opened, as it would on a mount that is away.
"""

import os
from contextlib import contextmanager, suppress
from typing import Annotated

import msgspec

from kvtier.backend import Abandoned, Lanes, in_thread
from kvtier_backends.fs import FsBackend, FsOptions

THREADS = 16


class HungMountOptions(FsOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    gates: Annotated[str, msgspec.Meta(min_length=1)]


class HungMount(FsBackend):
    options_type = HungMountOptions

    @classmethod
    async def open(cls, options, context):
        inner = FsOptions(root=options.root, layout="files")
        tier = await super().open(inner, context)
        tier.gates = options.gates
        tier.threads = Lanes(THREADS, "hung-mount")
        return tier

    async def load(self, reads):
        await in_thread(self.threads, pass_gate, f"{self.gates}/load")
        return await super().load(reads)

    async def store(self, writes):
        await in_thread(self.threads, pass_gate, f"{self.gates}/store")
        return await super().store(writes)

    async def aclose(self, deadline_s):
        hung = await self.threads.aclose(deadline_s)
        inner = await super().aclose(deadline_s)
        return Abandoned(max(hung, inner.transfers))


def pass_gate(path):
    with suppress(FileNotFoundError):
        os.close(os.open(path, os.O_RDONLY))


@contextmanager
def shut(gates, operation):
    """Let an operation hang during the block; hung calls continue at its end."""
    path = f"{gates}/{operation}"
    os.mkfifo(path)
    try:
        yield
    finally:
        release(gates, operation)


def release(gates, operation):
    """Let what hangs go on; harmless if nothing does."""
    path = f"{gates}/{operation}"
    try:
        writer = os.open(path, os.O_RDWR)  # Wakes whoever sleeps in open(2).
    except FileNotFoundError:
        return
    os.unlink(path)  # Only now: who comes later finds no gate.
    os.close(writer)
