"""The fs tier's segments beside its files, and beside raw direct I/O of the same bytes: stores, loads, and syncs.

    .venv/bin/python tests/benchmarks/segments.py [DIR] [ROUNDS]

Rounds in turn, so that a neighbour's load falls on all alike; medians, with the spread from the lower to the upper
quartile. The limit is raw: as many threads as the tier has lanes, each with vectored O_DIRECT calls of as many rows as
a lane moves, over the same place of a file that was written before. What segments store replaces what was there: room
is for one round, so that every slot is written again. Files of the round before are removed outside of the time.
"""

import asyncio
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvtier.backend.contract import Read, TierContext, Write
from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.memory.region import Region
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.disk.lanes import share_chunks

MOVED_BYTES = 256 << 20
CHUNK_SIZES = (128 << 10, 256 << 10)
ROUNDS = 7
LANES = 4
BATCH_CHUNKS = 64  # Of one call, as of one request,
CALLS = 6  # so many of which are under way at once.


FOOTER = memoryview(mmap.mmap(-1, FOOTER_BYTES))


class Case(NamedTuple):
    """One chunk size, its rows in memory, and the tiers that are compared."""

    chunk_bytes: int
    rows: list[memoryview]
    tiers: dict[str, FsBackend]
    raw_fd: int
    threads: ThreadPoolExecutor

    @property
    def chunks(self) -> int:
        return len(self.rows)


def keys_of(number: int, count: int) -> list[OffloadKey]:
    return [make_offload_key((number * 1_000_000 + index).to_bytes(32, "big")) for index in range(count)]


async def in_batches(rows: Sequence[object], work: Callable[[int], Awaitable[Sequence[object]]]) -> None:
    starts = iter(range(0, len(rows), BATCH_CHUNKS))

    async def caller() -> None:
        for start in starts:
            assert not any(await work(start))

    await asyncio.gather(*(caller() for _ in range(CALLS)))


async def store(case: Case, tier: FsBackend, keys: Sequence[OffloadKey]) -> None:
    writes = list(map(Write, keys, case.rows))
    await in_batches(writes, lambda start: tier.store(writes[start : start + BATCH_CHUNKS]))


async def load(case: Case, tier: FsBackend, keys: Sequence[OffloadKey]) -> None:
    reads = list(map(Read, keys, case.rows))
    await in_batches(reads, lambda start: tier.load(reads[start : start + BATCH_CHUNKS]))


def raw(case: Case, call: Callable[[int, Sequence[memoryview], int], int], *footers: memoryview) -> None:
    """Move all rows, each with a page behind it if one is given."""
    size, slot_bytes = share_chunks(case.chunk_bytes), case.chunk_bytes + sum(map(len, footers))

    def move(start: int) -> None:
        rows = [part for row in case.rows[start : start + size] for part in (row, *footers)]
        assert call(case.raw_fd, rows, start * slot_bytes) == sum(map(len, rows))

    list(case.threads.map(move, range(0, case.chunks, size)))


async def round_of(case: Case, number: int, rates: dict[str, list[float]]) -> None:
    keys, old = keys_of(number, case.chunks), keys_of(number - 1, case.chunks)

    async def timed(name: str, work: Awaitable[None]) -> None:
        began = time.perf_counter()
        await work
        rates[name].append(case.chunks * case.chunk_bytes / (time.perf_counter() - began))

    await timed("raw store", asyncio.to_thread(raw, case, os.pwritev))
    await timed("raw, footers, store", asyncio.to_thread(raw, case, os.pwritev, FOOTER))
    for name, tier in case.tiers.items():
        if not name.startswith("segments"):
            await tier.delete(old)
        await timed(f"{name} store", store(case, tier, keys))
    await timed("raw load", asyncio.to_thread(raw, case, os.preadv))
    await timed("raw, footers, load", asyncio.to_thread(raw, case, os.preadv, FOOTER))
    for name, tier in case.tiers.items():
        await timed(f"{name} load", load(case, tier, keys))


async def measure(folder: str, chunk_bytes: int, rounds: int) -> dict[str, list[float]]:
    chunks = MOVED_BYTES // chunk_bytes
    mapper = FileMapper(Namespace(model_name="benchmark"))
    capacity_bytes = int(chunks * (chunk_bytes + 4_096) * 1.05) + (1 << 20)
    given = {
        "segments": {"layout": "segments", "capacity_bytes": capacity_bytes},
        "segments, synced": {"layout": "segments", "capacity_bytes": capacity_bytes, "fsync": True},
        "files": {"naming": "flat"},
        "files, synced": {"naming": "flat", "fsync": True},
    }
    tiers: dict[str, FsBackend] = {}
    for number, (name, options) in enumerate(given.items()):
        root = os.path.join(folder, str(number))
        lanes = {"load_lanes": LANES, "store_lanes": LANES}
        options = FsOptions(root=root, **options, **lanes)  # type: ignore[arg-type]
        tiers[name] = await FsBackend.open(options, TierContext(f"0:{name}", mapper, chunk_bytes))
    raw_path = os.path.join(folder, "raw")
    raw_fd = os.open(raw_path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
    os.posix_fallocate(raw_fd, 0, chunks * (chunk_bytes + FOOTER_BYTES))
    rates: dict[str, list[float]] = defaultdict(list)
    with Region.private(chunks, chunk_bytes) as region, ThreadPoolExecutor(LANES) as threads:
        rows = [region.row(index) for index in range(chunks)]
        for index, row in enumerate(rows):
            row[:] = index.to_bytes(4, "big") * (chunk_bytes // 4)
        case = Case(chunk_bytes, rows, tiers, raw_fd, threads)
        for number in range(1, rounds + 2):
            await round_of(case, number, rates if number > 1 else defaultdict(list))  # The first one makes the files.
        for tier in tiers.values():
            assert await tier.aclose(30) == (0,)
        rows.clear()
    os.close(raw_fd)
    os.unlink(raw_path)
    return rates


def show(chunk_bytes: int, rates: dict[str, list[float]]) -> None:
    print(f"\n{chunk_bytes >> 10} KiB chunks, {MOVED_BYTES >> 20} MiB a round, {len(rates['raw store'])} rounds")
    print(f"{'':24}{'MB/s':>8}{'quartiles':>18}{'of raw':>8}{'of files':>10}")
    for name, found in rates.items():
        way = name.split()[-1]
        median = statistics.median(found)
        low, _, high = statistics.quantiles(found, n=4)
        of_raw = statistics.median(map(float.__truediv__, found, rates[f"raw {way}"]))
        of_files = statistics.median(map(float.__truediv__, found, rates[f"files {way}"]))
        print(f"{name:24}{median / 1e6:8.0f}{low / 1e6:9.0f}{high / 1e6:9.0f}{of_raw:8.2f}{of_files:10.2f}")
    synced = map(float.__truediv__, rates["segments, synced store"], rates["segments store"])
    print(f"segments synced, of unsynced: {statistics.median(synced):.2f}")


def main(folder: str | None = None, rounds: str = str(ROUNDS)) -> None:
    print(f"load of the machine: {os.getloadavg()[0]:.1f}; {os.cpu_count()} cores")
    for chunk_bytes in CHUNK_SIZES:
        with tempfile.TemporaryDirectory(dir=folder) as root:
            show(chunk_bytes, asyncio.run(measure(root, chunk_bytes, int(rounds))))


if __name__ == "__main__":
    main(*sys.argv[1:])
