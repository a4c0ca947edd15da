"""Stores, loads and deletes twenty times what there is room for, until it is killed; a test starts it and looks on.

Arguments: what to do as JSON. Each line of its output is what it has done so far, or something that must not be:
`wrong <key> <what came>`, or `refused <why>` by a tier that is not opened.
"""

import asyncio
import json
import os
import random
import signal
import sys
from typing import Any

from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.errors import ChunkMissing, ConfigError, NoSpace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, label
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk import owner

owner.PATIENCE_S = 1.0  # Those that are refused say so soon.
WORKERS = 4
BATCH_CHUNKS_MAX = 12


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def work(tier: FsBackend, row_bytes: int, keys: int, seed: str, done: dict[str, int]) -> None:
    dice = random.Random(seed)
    lender = Lender(row_bytes)
    while True:
        first = dice.randrange(keys)
        batch = [key_of((first + place) % keys) for place in range(dice.randint(1, BATCH_CHUNKS_MAX))]
        action = dice.random()
        if action < 0.5:
            for outcome in await tier.store(lender.writes(batch)):
                assert outcome is None or isinstance(outcome, NoSpace), outcome
                done["stored" if outcome is None else "refused"] += 1
        elif action < 0.95:
            for key in batch:
                lender.chunk(key)
            reads = lender.reads(batch)
            outcomes = await tier.load(reads)
            for key, outcome, told in zip(batch, outcomes, lender.told(reads, outcomes), strict=True):
                if outcome is None and told != label(key):
                    say("wrong", key.hex(), told)
                if outcome is not None and not isinstance(outcome, ChunkMissing):
                    say("wrong", key.hex(), repr(outcome))
                done["hits" if outcome is None else "misses"] += 1
            del reads
        else:
            await tier.delete(batch[:2])
        lender = Lender(row_bytes)


async def child(row_bytes: int, keys: int, seed: str, options: dict[str, Any]) -> None:
    context = TierContext("0:fs", FileMapper(Namespace(model_name="org/model")), row_bytes)
    try:
        tier = await FsBackend.open(FsOptions(**{"layout": "files", **options}), context)
    except ConfigError as error:
        say("refused", error)
        signal.pause()
        raise
    done = dict.fromkeys(("stored", "refused", "hits", "misses"), 0)
    async with asyncio.TaskGroup() as group:
        for worker in range(WORKERS):
            group.create_task(work(tier, row_bytes, keys, f"{seed}/{worker}", done))
        while True:
            await asyncio.sleep(0.05)  # How often it says so, not what it waits for.
            say(*done.values())


def main(given: str) -> None:
    asked = json.loads(given)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            say("child", os.getpid())
            asyncio.run(child(asked["row_bytes"], asked["keys"], line.strip(), asked["options"]))
        while not os.WIFSIGNALED(os.waitpid(pid, os.WUNTRACED)[1]):
            say("stopped")  # What it does has come to rest: it can be looked at.
        say("dead")


main(sys.argv[1])
