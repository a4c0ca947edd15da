"""Stores and deletes chunks, saying so, until it is killed. A test starts it, and kills its children.

Each line of its input is a seed: a child is forked that works by it. The child writes one line before and one after
each call: `begin <worker> <version> <keys…>` and `end <worker>`; version -1 is a delete. Forked rather than started,
because a round then costs no imports. Arguments: root, row length, keys, the share of deletes, and the tier's options
as JSON. It writes checkpoints all the time.
"""

import asyncio
import json
import os
import random
import sys
from typing import Any

from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.segments import checkpoint

WORKERS = 3  # Calls at once; each has keys of its own, so that the order of what is done to a key is known.
BATCH_CHUNKS_MAX = 12


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # Shorter than a pipe's buffer: wholly or not at all.


async def work(tier: FsBackend, row_bytes: int, keys: range, worker: int, seed: int, deletes: float) -> None:
    dice = random.Random(f"{seed}/{worker}")
    for call in range(1_000_000):
        lender = Lender(row_bytes)
        numbers = dice.sample(keys, dice.randint(1, BATCH_CHUNKS_MAX))
        version = -1 if dice.random() < deletes else seed * 1_000_000 + call
        batch = [key_of(number) for number in numbers]
        say("begin", worker, version, *numbers)
        if version == -1:
            await tier.delete(batch)
        else:
            assert list(await tier.store(lender.writes(batch, version))) == [None] * len(batch)
        say("end", worker)


async def child(root: str, row_bytes: int, keys: int, seed: int, deletes: float, options: dict[str, Any]) -> None:
    mapper = FileMapper(Namespace(model_name="org/model"))
    checkpoint.CHECKPOINT_S = 0.01
    given = FsOptions(root=root, **options)
    tier = await FsBackend.open(given, TierContext("0:fs", mapper, row_bytes))
    async with asyncio.TaskGroup() as group:
        for worker in range(WORKERS):
            group.create_task(work(tier, row_bytes, range(worker, keys, WORKERS), worker, seed, deletes))


def main(root: str, row_bytes: int, keys: int, deletes: float, options: dict[str, Any]) -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            say("child", os.getpid())
            asyncio.run(child(root, row_bytes, keys, int(line), deletes, options))
        os.waitpid(pid, 0)
        say("dead")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), json.loads(sys.argv[5]))
