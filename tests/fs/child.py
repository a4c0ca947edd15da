"""Tiers in processes of their own: `child.py WORK ASKED`, the latter as JSON; `Child` in `conftest.py` talks to it.

Each line of its input is a seed: a child is forked that works by it. Forked rather than started, because a life then
costs no imports. The child says `child <pid>` first; what it says then, its work documents. Its parent says `stopped`
and `dead`. A child that sees something wrong dies of it.
"""

import asyncio
import json
import os
import random
import signal
import sys
import threading
from contextlib import nullcontext, suppress
from functools import partial

from kvtier.backend import EngineId, FileMapper, Namespace, TierContext
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.testing.conformance import Lender, key_of, keys_of, label
from kvtier_backends.fs import FsBackend, FsOptions, MemoryBackend, MemoryOptions
from kvtier_backends.fs.disk import owner
from kvtier_backends.fs.host import meeting
from kvtier_backends.fs.segments import checkpoint, kept

WORKERS = 4  # Calls at once.
BATCH_CHUNKS_MAX = 12
checkpoint.CHECKPOINT_S = 0.02  # All the time.
VERSIONS = range(3)  # Of each chunk: a mixture of two would show.


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # Shorter than a pipe's buffer: wholly or not at all.


def context_of(asked, engine=None):
    return TierContext("0:fs", FileMapper(Namespace(model_name="org/model")), asked["row_bytes"], engine=engine)


async def opened(asked):
    engine = EngineId(*asked["engine"]) if asked.get("engine") else None
    return await FsBackend.open(FsOptions(root=asked["root"], **asked["options"]), context_of(asked, engine))


async def hammer(asked, seed):
    """Store, load and delete; say `done <chunks stored>` every so often, or `refused <why>` if there is no tier."""
    owner.PATIENCE_S = 1.0
    try:
        tier = await opened(asked)
    except ConfigError as error:
        say("refused", error)
        signal.pause()
        raise
    stored = [0]
    async with asyncio.TaskGroup() as group:
        for worker in range(WORKERS):
            group.create_task(call_on(tier, asked, f"{seed}/{worker}", stored))
        while True:
            await asyncio.sleep(0.05)  # How often it says so, not what it waits for.
            say("done", stored[0])


async def call_on(tier, asked, seed, stored, errors=()):
    """Store, load and delete random chunks; `errors`: what may come of it, beside chunks, misses and a full tier."""
    dice = random.Random(seed)
    while True:
        first, lender = dice.randrange(asked["keys"]), Lender(asked["row_bytes"])
        batch = [key_of((first + place) % asked["keys"]) for place in range(dice.randint(1, BATCH_CHUNKS_MAX))]
        action = dice.random()
        with suppress(BackendUnavailable) if errors else nullcontext():
            if action < 0.5:
                outcomes = await tier.store(lender.writes(batch, dice.choice(VERSIONS)))
                assert {type(outcome).__name__ for outcome in outcomes} <= {"NoneType", "NoSpace", *errors}, outcomes
                stored[0] += outcomes.count(None)
            elif action < 0.95:
                await recall_any(tier, lender, batch, errors)
            else:
                await tier.delete(batch[:2])
        await asyncio.sleep(0)


async def journal(asked, seed):
    """Store and delete; say `begin <worker> <version> <keys…>` before a call, and `end <worker>` after it.

    Version -1 is a delete. Each worker has keys of its own, so that the order of what is done to a key is known.
    """
    tier = await opened(asked)

    async def work(worker, keys):
        dice = random.Random(f"{seed}/{worker}")
        for call in range(1_000_000):
            lender, numbers = Lender(asked["row_bytes"]), dice.sample(keys, dice.randint(1, BATCH_CHUNKS_MAX))
            version = -1 if dice.random() < asked["deletes"] else seed * 1_000_000 + call
            batch = [key_of(number) for number in numbers]
            say("begin", worker, version, *numbers)
            if version == -1:
                await tier.delete(batch)
            else:
                assert list(await tier.store(lender.writes(batch, version))) == [None] * len(batch)
            say("end", worker)

    async with asyncio.TaskGroup() as group:
        for worker in range(WORKERS - 1):
            group.create_task(work(worker, range(worker, asked["keys"], WORKERS - 1)))


async def obey(asked, seed):
    """Open a tier and say `open`; then do what each line of the input says, and answer `<word> <number>`."""
    tier, working = await opened(asked), list[asyncio.Task[None]]()
    worker = partial(call_on, tier, asked, errors=("TransferFailed", "ChunkCorrupt", "NoSpace"))

    async def work():
        working[:] = [asyncio.create_task(worker(f"{seed}/{number}", [0])) for number in range(WORKERS)]
        return 0

    async def rest():
        for task in working:
            task.cancel()
        for outcome in await asyncio.gather(*working, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise AssertionError(outcome) from outcome
        return 0

    async def used():
        page = tier._lives.now.layout._tier.root.shared_page
        if page is None:
            return tier._lives.now.layout._tier.capacity.used_bytes
        taken = await asyncio.to_thread(page.taken)
        return taken[0] if taken else 0

    async def store(count, start):
        keys, lender = keys_of(int(count), int(start)), Lender(asked["row_bytes"])
        if any(await tier.store(lender.writes(keys))):
            return 0
        return sum(told == label(key) for key, told in zip(keys, await lender.recall(tier, keys), strict=True))

    async def close():
        return (await tier.aclose(10)).transfers

    orders = {order.__name__: order for order in (work, rest, used, store, close)}
    say("open")
    while words := (await asyncio.to_thread(sys.stdin.readline)).split():
        say(words[0], await orders[words[0]](*words[1:]))


async def opened_shared(asked):
    """Open a shared tier of slots at a root, and one in a pool; while there is no keeper, again."""
    meeting.LINGER_S, kept.ANSWER_S = asked["linger_s"], asked["answer_s"]
    context, options = context_of(asked), {"shared": True, "capacity_bytes": asked["capacity_bytes"]}
    of_root = FsOptions(root=asked["root"], layout="segments", **options)
    of_pool = MemoryOptions(pool=asked["pool"], **options)
    tiers = list[FsBackend | MemoryBackend]()
    while len(tiers) < 2:
        with suppress(BackendUnavailable):
            tiers.append(await (MemoryBackend.open(of_pool, context) if tiers else FsBackend.open(of_root, context)))
    return tiers


async def share(asked, seed):
    """Store and load as one of several engines: keys of its own, and everybody's.

    Say `begin <worker> <version> <keys…>` before a store at the root, and `end <worker> <keys stored…>` after it.
    """
    engine, keys, row_bytes = asked["number"], asked["keys"], asked["row_bytes"]

    async def work(tier, worker, said):
        dice, name = random.Random(f"{seed}/{engine}/{worker}"), f"{engine}/{worker}"
        own = [number for number in range(keys) if number % (asked["engines"] * 2) == 2 * engine + worker % 2]
        while True:
            lender, version, stores = Lender(row_bytes), dice.choice(VERSIONS), dice.random() < 0.5
            numbers = dice.sample(own if stores else range(keys), dice.randint(1, BATCH_CHUNKS_MAX))
            batch, outcomes = list(map(key_of, numbers)), []
            if stores and said:
                say("begin", name, version, *numbers)
            with suppress(BackendUnavailable):
                async with asyncio.timeout(asked["hang_s"]):
                    if stores:
                        outcomes = await tier.store(lender.writes(batch, version))
                    else:
                        await recall_any(tier, lender, batch)
            assert {type(outcome).__name__ for outcome in outcomes} <= {"NoneType", "NoSpace"}, outcomes
            if stores and said:
                done = [number for number, outcome in zip(numbers, outcomes, strict=False) if outcome is None]
                say("end", name, *done)
            await asyncio.sleep(0)

    root, pool = await opened_shared(asked)
    async with asyncio.TaskGroup() as group:
        for worker in range(WORKERS):
            group.create_task(work(root if worker < 2 else pool, worker, worker < 2))


async def recall_any(tier, lender, batch, errors=()):
    for key in batch:
        for version in VERSIONS:
            lender.chunk(key, version)  # To recognise it.
    for key, told in zip(batch, await lender.recall(tier, batch), strict=True):
        assert told in ("ChunkMissing", *errors, *(label(key, version) for version in VERSIONS)), told


async def halt(asked, seed):
    """Store a batch at the root or in the pool, stop in its middle, and say `stored <how many>` or `away` after it."""
    tier = (await opened_shared(asked))[seed]
    write = os.pwritev

    def halted(*args):
        os.pwritev = write
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # Before it returns, not some moments later.
        return write(*args)

    lender, keys = Lender(asked["row_bytes"]), keys_of(BATCH_CHUNKS_MAX, asked["start"])
    os.pwritev = halted
    try:
        say("stored", list(await tier.store(lender.writes(keys))).count(None))
    except BackendUnavailable:
        say("away")
    signal.pause()


async def fork(asked, seed):
    tiers = await opened_shared(asked)
    if (pid := os.fork()) == 0:
        signal.pause()
    say("forked", pid, len(tiers), seed)
    signal.pause()


WORKS = {work.__name__: work for work in (hammer, journal, obey, share, halt, fork)}


def main(work, asked):
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            say("child", os.getpid())  # By itself: nothing that it writes may come before.
            asyncio.run(WORKS[work](json.loads(asked), int(line)))
            os._exit(0)
        while os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]):
            say("stopped")  # What it does has come to rest: it can be looked at.
        say("dead")


main(*sys.argv[1:])
