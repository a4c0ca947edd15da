"""What engines on a host pay and gain by sharing a tier: `python -m tests.benchmarks.shared DIR`.

Each engine is a process with two tiers of one kind, a private one and one that all share; the shared capacity is the
sum of the private ones. Rounds go through sides in a random order, so that what the machine does to one it does to the
other; engines of one round begin together. A figure is the median over rounds of private time by shared time: above 1,
sharing is faster. The light engine loads one chunk at a time beside the others' batches.
"""

import argparse
import asyncio
import itertools
import mmap
import os
import random
import statistics
import time
from collections import Counter
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import uvloop

from kvtier.backend import FileMapper, Namespace, Read, ScanDone, TierContext, Write
from kvtier.testing.conformance import Lender, key_of, keys_of
from kvtier_backends.fs import FsBackend, FsOptions, MemoryBackend, MemoryOptions
from kvtier_backends.fs.host import meeting

BATCH_BYTES = 16 << 20
SIDES = ("private", "shared")
START_S = 120


async def opened(kind, folder, engine, engines, row_bytes, side, room_bytes=64 << 20):
    context = TierContext(f"{engine}:{kind}", FileMapper(Namespace(model_name="m")), row_bytes)
    meeting.LINGER_S, capacity_bytes = 5.0, room_bytes * (engines if side == "shared" else 1)
    if kind == "memory":
        options = MemoryOptions(
            capacity_bytes=capacity_bytes, shared=side == "shared", pool=f"bench-{row_bytes}-{engines}"
        )
        return await MemoryBackend.open(options, context)
    root = f"{folder}/{side}-{row_bytes}-{engines}" + ("" if side == "shared" else f"-{engine}")
    options = FsOptions(root=root, layout="segments", capacity_bytes=capacity_bytes, shared=side == "shared" or None)
    return await FsBackend.open(options, context)


async def engine_main(kind, folder, engines, row_bytes, engine, pipe, barrier):
    tiers = {side: await opened(kind, folder, engine, engines, row_bytes, side) for side in SIDES}
    count = max(2, BATCH_BYTES // row_bytes)
    keys = keys_of(count, start=engine * 1_000_000)
    memory = memoryview(mmap.mmap(-1, count * row_bytes))
    rows = [memory[start : start + row_bytes] for start in range(0, len(memory), row_bytes)]
    memory[:] = os.urandom(len(memory))
    new = itertools.count(engine * 1_000_000 + count)
    for tier in tiers.values():
        await tier.store([Write(key, row) for key, row in zip(keys, rows, strict=True)])
    reads = [Read(key, row) for key, row in zip(keys, rows, strict=True)]
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        side, what, batches = asked
        tier, seconds = tiers[side], []
        barrier.wait(START_S)
        begun = time.perf_counter()
        for _ in range(batches):
            writes = [Write(key_of(next(new)), row) for row in rows] if what == "stores" else []
            start = time.perf_counter()
            outcomes = await (tier.store(writes) if writes else tier.load(reads if what == "loads" else reads[:1]))
            seconds.append(time.perf_counter() - start)
            assert not any(outcomes), outcomes
        pipe.send((time.perf_counter() - begun, seconds))
        if what == "stores":  # Fill the tier for loads again.
            await tier.store([Write(key, row) for key, row in zip(keys, rows, strict=True)])
    for tier in tiers.values():
        await tier.aclose(10)


def engine_process(*args):
    uvloop.run(engine_main(*args))


class Engines:
    def __init__(self, engines, main, *arguments):
        context = get_context("spawn")
        self.barrier = context.Barrier(engines)
        pairs = [context.Pipe() for _ in range(engines)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=main, args=(*arguments, n, theirs, self.barrier))
            for n, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # The end of an engine is then the end of its pipe.
        assert [pipe.recv() for pipe in self.pipes] == ["ready"] * engines

    def round(self, asked):
        for pipe, each in zip(self.pipes, asked, strict=True):
            pipe.send(each)
        return [pipe.recv() for pipe in self.pipes]

    def end(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


def keepers_ns(folder):
    """Return the processor time of each keeper by now; one that is no longer wanted may end meanwhile."""
    spent_ns = Counter()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"host.keeper" in (command := (process / "cmdline").read_bytes()) and bytes(folder) in command:
                spent_ns[process] = sum(int(each.read_text().split()[0]) for each in process.glob("task/*/schedstat"))
    return spent_ns


def rates(kind, folder, engines, row_bytes, rounds, chance):
    group = Engines(engines, engine_process, kind, folder, engines, row_bytes)
    count, batches = max(2, BATCH_BYTES // row_bytes), max(1, 8 // engines)
    for what in ("loads", "stores"):
        seconds = {side: [] for side in SIDES}
        spent_ns = Counter()
        for _ in range(rounds):
            for side in chance.sample(SIDES, 2):
                before = keepers_ns(folder)
                wall = max(each for each, _ in group.round([(side, what, batches)] * engines))
                spent_ns += keepers_ns(folder) - before if side == "shared" else Counter()
                seconds[side].append(wall)
        ratio = statistics.median(a / b for a, b in zip(seconds["private"], seconds["shared"], strict=True))
        rate = engines * batches * count * row_bytes / statistics.median(seconds["shared"]) / 1e9
        keeper_us = spent_ns.total() / (rounds * engines * batches * count) / 1e3
        print(f"{kind} {row_bytes >> 10:5} KiB {engines} engines {what:6}: {ratio:.2f} of private, {rate:.2f} GB/s, "
              f"keeper {keeper_us:.1f} us a chunk", flush=True)  # fmt: skip
    group.end()


def fairness(kind, folder, engines, row_bytes, rounds, chance):
    """A light engine beside heavy ones: its p99, shared by private."""
    group = Engines(engines, engine_process, kind, folder, engines, row_bytes)
    tails = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in chance.sample(SIDES, 2):
            light, *_ = group.round([(side, "light", 200)] + [(side, "loads", 24)] * (engines - 1))
            tails[side].append(statistics.quantiles(light[1], n=100)[98])
    group.end()
    ratio = statistics.median(b / a for a, b in zip(tails["private"], tails["shared"], strict=True))
    shown = ", ".join(f"{side} {statistics.median(tails[side]) * 1e3:.1f} ms" for side in SIDES)
    print(f"{kind} {row_bytes >> 10:5} KiB light beside {engines - 1}: p99 {shown}: {ratio:.2f}", flush=True)


async def attach(kind, folder, chunks):
    first = await opened(kind, folder, 0, 1, 4_096, "shared", chunks * 8_192 * 2)
    lender = Lender(4_096)
    for start in range(0, chunks, 1_000):
        await lender.keep(first, keys_of(1_000, start=start))
        lender.take_back()
    begun = time.perf_counter()
    second = await opened(kind, folder, 1, 1, 4_096, "shared", chunks * 8_192 * 2)
    attached, known = time.perf_counter(), 0
    async for event in second.watch():
        if isinstance(event, ScanDone):
            break
        known += len(event.keys)
    print(f"{kind}: attached in {(attached - begun) * 1e3:.0f} ms, {known:,} chunks known "
          f"in {(time.perf_counter() - begun) * 1e3:.0f} ms", flush=True)  # fmt: skip
    await second.aclose(10)
    await first.aclose(10)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="an empty directory for roots and sockets")
    parser.add_argument("--kinds", default="memory,segments")
    parser.add_argument("--chunk-sizes-kib", default="128,512,2048")
    parser.add_argument("--engines", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunks", type=int, default=50_000, help="known to a further engine")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ["XDG_RUNTIME_DIR"] = str(given.folder)
    chance = random.Random(given.seed)
    for kind in given.kinds.split(","):
        for size_kib, engines in itertools.product(
            map(int, given.chunk_sizes_kib.split(",")), map(int, given.engines.split(","))
        ):
            rates(kind, given.folder, engines, size_kib << 10, given.rounds, chance)
        fairness(kind, given.folder, 8, 128 << 10, given.rounds, chance)
        asyncio.run(attach(kind, given.folder, given.chunks))


if __name__ == "__main__":
    main()
