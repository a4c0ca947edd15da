"""The program of a guest: it does with tiers and engines what a test says, a JSON line at a time.

Arguments: the address and port of who commands it. A command is `[number, method, arguments, more]`, an answer
`[number, result, error]`.
"""

import asyncio
import fcntl
import gc
import json
import os
import random
import struct
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from kvtier import BackendUnavailable, TieringOffloadingManager
from kvtier.testing.conformance import Lender, key_of, keys_of, label, tier_context
from kvtier_backends.fs import FsBackend, FsOptions
from tests.engine.kit import at_rest, describe, found, ledger_in, put

FOLDER = "/dev/shm"  # The guest's own memory.
NOBODY = "02:00:00:00:00:99"
WORKERS = 4
BATCH_CHUNKS_MAX = 12
KNOWN_MAX = 8  # Of what it has stored, a worker asks for the last.
PAGE_LOCK = 4_096  # The byte of the shared page's file that is locked for a change.
PAUSE_S = 0.2  # After a call that found nobody to answer.


def mounted_at(name):
    return f"{FOLDER}/{name}"


def kind(outcome):
    return "whole" if outcome is None else type(outcome).__name__


class Host:
    def __init__(self):
        self._tiers, self._lenders, self._engines = {}, {}, {}
        self._held = []

    async def mount(self, name, source, options):
        Path(mounted_at(name)).mkdir(exist_ok=True)
        command = ["mount.nfs4", source, mounted_at(name), "-o", options]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    async def unmount(self, name):
        await asyncio.to_thread(subprocess.run, ["umount", "-f", "-l", mounted_at(name)], check=False)

    async def cut_off(self, address, *, cut):
        """Have what is sent to an address go nowhere, or go there again."""
        away = ["replace", address, "lladdr", NOBODY, "nud", "permanent"] if cut else ["del", address]
        await asyncio.to_thread(subprocess.run, ["ip", "neigh", *away, "dev", "vec0"], check=True)

    async def open(self, name, mount, folder, row_bytes, **options):
        root = f"{mounted_at(mount)}/{folder}"
        self._tiers[name] = await FsBackend.open(FsOptions(root=root, **options), tier_context(row_bytes))
        self._lenders[name] = Lender(row_bytes)

    async def close(self, name, deadline_s=20.0):
        self._lenders.pop(name)
        return (await self._tiers.pop(name).aclose(deadline_s)).transfers

    async def store(self, name, first, count):
        writes = self._lender(name).writes(keys_of(count, first))
        return Counter(map(kind, await self._tiers[name].store(writes)))

    async def load(self, name, first, count):
        lender, keys = self._lender(name), keys_of(count, first)
        return await self._load(self._tiers[name], lender, keys)

    async def probe(self, name, first, count):
        return sum(await self._tiers[name].probe(keys_of(count, first)))

    async def counters(self, name):
        return self._tiers[name].counts()

    async def page(self, name):
        return await asyncio.to_thread(self._tiers[name]._lives.now.layout._tier.root.shared_page.taken)

    async def write_uses(self, name):
        """Have the times of chunks that were used be written down, as is done every ten seconds."""
        await self._tiers[name]._layout._eviction.stamps.write()

    async def hold_page(self, mount, path):
        self._held.append(os.open(f"{mounted_at(mount)}/{path}", os.O_RDWR))
        wanted = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, PAGE_LOCK, 1, 0)
        await asyncio.to_thread(fcntl.fcntl, self._held[-1], fcntl.F_OFD_SETLKW, wanted)

    async def work(self, name, seconds, keys, seed):
        done = Counter[str]()
        async with asyncio.TaskGroup() as group:
            for worker in range(WORKERS):
                group.create_task(self._work(name, seconds, keys, random.Random(f"{seed}/{worker}"), done))
        return done

    async def _work(self, name, seconds, keys, dice, done):
        tier, ends_at, stored = self._tiers[name], time.monotonic() + seconds, list[int]()
        while (begun := time.monotonic()) < ends_at:
            first, action = dice.randrange(keys), dice.random()
            what = "store" if action < 0.5 else "load" if action < 0.95 else "delete"
            if what == "store":
                stored = [*stored[-KNOWN_MAX:], first]
            elif what == "load" and stored and dice.random() < 0.5:  # On a busy machine, chance alone finds nothing.
                first = dice.choice(stored)
            batch = [key_of((first + place) % keys) for place in range(dice.randint(1, BATCH_CHUNKS_MAX))]
            lender = Lender(self._lenders[name].chunk_bytes)
            try:
                if what == "store":
                    counted = Counter(map(kind, await tier.store(lender.writes(batch))))
                elif what == "load":
                    counted = await self._load(tier, lender, batch)
                else:
                    counted = Counter({"calls": 1})
                    await tier.delete(batch[:2])
            except BackendUnavailable as error:
                counted = Counter({"away": 1})
                done[f"{what}: {error}"] += 1
                await asyncio.sleep(PAUSE_S)
            done.update({f"{what}_{each}": times for each, times in counted.items()})
            done[f"{what}_ms"] = max(done[f"{what}_ms"], int((time.monotonic() - begun) * 1_000))

    async def _load(self, tier, lender, keys):
        for key in keys:
            lender.chunk(key)
        reads = lender.reads(keys)
        told = lender.told(reads, await tier.load(reads))
        return Counter(
            "whole" if one == label(key) else "wrong" if " " in one else one
            for key, one in zip(keys, told, strict=True)
        )

    async def open_engine(self, name, mount, folder, rows, *, runner, **fields):
        tier = {"type": "fs", "root": f"{mounted_at(mount)}/{folder}", **fields.pop("tier")}
        self._engines[name] = await TieringOffloadingManager.open(describe(rows, tier, runner=runner, **fields))

    async def put(self, name, first, count):
        return await put(self._engines[name], range(first, first + count))

    async def found(self, name, first, count):
        return await found(self._engines[name], range(first, first + count))

    async def is_at_rest(self, name):
        return await at_rest(self._engines[name])

    async def reset(self, name):
        return await self._engines[name].reset()

    async def state(self, name):
        """Say how many rows are quarantined, how the breaker is, and how often the runner was replaced."""
        engine = self._engines[name]
        engine.steps.end_step()
        ledger = ledger_in(engine)
        return {
            "quarantined": len(ledger.primary.quarantined),
            "breaker": ledger.tiers[0].breaker.state.name,
            "runners_lost": engine.steps.stats().runners_lost,
        }

    async def close_engine(self, name, deadline_s=20.0):
        return await self._engines.pop(name).aclose(deadline_s)

    def _lender(self, name):
        gc.collect()
        self._lenders[name].take_back()
        return self._lenders[name]


async def answer(host, line, writer):
    number, method, arguments, more = json.loads(line)
    try:
        told = number, await getattr(host, method)(*arguments, **more), None
    except Exception:  # noqa: BLE001  # The test that has called is to see it.
        told = number, None, traceback.format_exc()
    writer.write(json.dumps(told).encode() + b"\n")


async def main(address, port):
    reader, writer = await asyncio.open_connection(address, int(port))
    host, tasks = Host(), set[asyncio.Task[None]]()
    while line := await reader.readline():
        task = asyncio.create_task(answer(host, line, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
