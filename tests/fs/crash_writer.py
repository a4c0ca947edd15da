"""Stores and deletes chunks, saying so, until it is killed. A test starts it, and kills its children.

Each line of its input is a seed: a child is forked that works by it. The child writes one line before and one after
each call: `begin <worker> <version> <keys…>` and `end <worker>`; version -1 is a delete. Forked rather than started,
because a round then costs no imports. Arguments: root, row length, keys.
"""

import asyncio
import os
import random
import sys

from kvtier.backend import TierContext
from kvtier.namespace import FileMapper, Namespace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of
from kvtier_backends.fs import FsBackend, FsOptions

WORKERS = 3  # Calls at once; each has keys of its own, so that the order of what is done to a key is known.
BATCH_CHUNKS_MAX = 12


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # Shorter than a pipe's buffer: wholly or not at all.


async def work(tier: FsBackend, row_bytes: int, keys: range, worker: int, seed: int) -> None:
    dice = random.Random(f"{seed}/{worker}")
    for call in range(1_000_000):
        lender = Lender(row_bytes)
        numbers = dice.sample(keys, dice.randint(1, BATCH_CHUNKS_MAX))
        version = -1 if dice.random() < 0.1 else seed * 1_000_000 + call
        batch = [key_of(number) for number in numbers]
        say("begin", worker, version, *numbers)
        if version == -1:
            await tier.delete(batch)
        else:
            assert list(await tier.store(lender.writes(batch, version))) == [None] * len(batch)
        say("end", worker)


async def child(root: str, row_bytes: int, keys: int, seed: int) -> None:
    mapper = FileMapper(Namespace(model_name="org/model"))
    tier = await FsBackend.open(FsOptions(root=root), TierContext("0:fs", mapper, row_bytes))
    async with asyncio.TaskGroup() as group:
        for worker in range(WORKERS):
            group.create_task(work(tier, row_bytes, range(worker, keys, WORKERS), worker, seed))


def main(root: str, row_bytes: int, keys: int) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(child(root, row_bytes, keys, int(line)))
        say("child", pid)
        os.waitpid(pid, 0)
        say("dead")


main(sys.argv[1], *map(int, sys.argv[2:]))
