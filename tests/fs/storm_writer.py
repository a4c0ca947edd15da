"""Stores, loads and deletes on a disk that fails, until it is told to rest; a test starts it and looks on.

Argument: what to do as JSON. Lines on its standard input: `work`; `rest` ends the calls; `used` asks for the
used bytes by the tier's accounts; `again` closes the tier and opens it until that succeeds; `store` stores four chunks
and loads them. Each is answered with a line when it is done. A chunk that loads with wrong bytes ends the process.
"""

import asyncio
import json
import os
import random
import sys
from contextlib import suppress
from typing import Any

from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend, FsOptions

WORKERS = 4
BATCH_CHUNKS_MAX = 12


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Storm:
    def __init__(self, asked: dict[str, Any]) -> None:
        self._row_bytes, self._keys, self._seed = asked["row_bytes"], asked["keys"], asked["seed"]
        self._options = FsOptions(**asked["options"])
        self._tier: FsBackend | None = None
        self._working: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        context = TierContext("0:fs", FileMapper(Namespace(model_name="org/model")), self._row_bytes)
        while True:
            with suppress(BackendUnavailable, ConfigError, OSError):
                self._tier = await FsBackend.open(self._options, context)
                return

    async def work(self) -> None:
        self._working = [asyncio.create_task(self._work(worker)) for worker in range(WORKERS)]

    async def rest(self) -> None:
        for task in self._working:
            task.cancel()
        for outcome in await asyncio.gather(*self._working, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise AssertionError(outcome) from outcome

    async def again(self) -> None:
        assert self._tier is not None
        await self._tier.aclose(20)
        await self.open()

    async def used(self) -> int:
        assert self._tier is not None
        tier = self._tier._lives.now.tier
        page = tier.root.shared_page
        if page is None:
            return tier.capacity.used_bytes
        taken = await asyncio.to_thread(page.taken)
        return taken[0] if taken else 0

    async def store(self) -> int:
        assert self._tier is not None
        keys, lender = keys_of(4, 90_000), Lender(self._row_bytes)
        if list(await self._tier.store(lender.writes(keys))) != [None] * 4:
            return 0
        return sum(told == label(key) for key, told in zip(keys, await lender.recall(self._tier, keys), strict=True))

    async def _work(self, worker: int) -> None:
        dice = random.Random(f"{self._seed}/{worker}")
        assert self._tier is not None
        while True:
            first = dice.randrange(self._keys)
            batch = [key_of((first + place) % self._keys) for place in range(dice.randint(1, BATCH_CHUNKS_MAX))]
            lender, action = Lender(self._row_bytes), dice.random()
            with suppress(BackendUnavailable):
                if action < 0.6:
                    await self._tier.store(lender.writes(batch))
                elif action < 0.9:
                    for key in batch:
                        lender.chunk(key)  # So that the lender knows it.
                    for key, told in zip(batch, await lender.recall(self._tier, batch), strict=True):
                        assert told in (label(key), "ChunkMissing", "TransferFailed", "ChunkCorrupt", "NoSpace"), (
                            key,
                            told,
                        )
                else:
                    await self._tier.delete(batch[:2])
            await asyncio.sleep(0)


async def main(given: str) -> None:
    storm, loop = Storm(json.loads(given)), asyncio.get_running_loop()
    await storm.open()
    say("ready")
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        answer = await getattr(storm, line)()
        say(line, answer or 0)


asyncio.run(main(sys.argv[1]))
