"""Disk tiers side by side: kvtier's fs tier, and peers that store and load the same keys and rows.

    python -m tests.benchmarks.peers.side_by_side [DIR] --lanes 4

compares the tier with the raw limit: plain threads that read and write one file, without names or checksums.
"""

import argparse
import asyncio
import os
import tempfile
from contextlib import ExitStack

import uvloop

from kvtier.backend import FileMapper, Namespace, OffloadKey, Read, TierContext, Write, backend_class, make_offload_key
from kvtier.memory import Region
from kvtier.settings import decode
from kvtier.tools.bench import RawFile
from kvtier.tools.figures import ROUNDS, Side, interleaved, rate_of, row_of, run_bench

CALLS = 16  # Requests at once; the chunks of each are one call.
LAYOUTS = ("files", "segments")
FULL_SETS = 4  # Capacity of a full tier, in what one measurement moves.
OVERHEAD_BYTES = 12 << 10  # Of a chunk's file: a footer, and the folders that nearly each file has to itself.
CLOSE_S = 60.0
RAW_THREADS = 4


class FsTier:
    def __init__(self, runner, options, chunk_bytes, call_chunks):
        self._runner, self._call_chunks = runner, call_chunks
        kind = backend_class("fs")
        context = TierContext("bench", FileMapper(Namespace(model_name="bench")), chunk_bytes)
        self._tier = runner.run(kind.open(decode(kind.options_type, options), context))

    def store(self, keys, rows):
        writes = [Write(key, row) for key, row in zip(keys, rows, strict=True)]
        self._runner.run(self._all([self._tier.store(writes[part]) for part in self._parts(len(writes))]))

    def load(self, keys, rows):
        reads = [Read(key, row) for key, row in zip(keys, rows, strict=True)]
        self._runner.run(self._all([self._tier.load(reads[part]) for part in self._parts(len(reads))]))

    def close(self):
        self._runner.run(self._tier.aclose(CLOSE_S))

    def _parts(self, count):
        return [slice(start, start + self._call_chunks) for start in range(0, count, self._call_chunks)]

    async def _all(self, calls):
        for outcomes in await asyncio.gather(*calls):
            assert set(outcomes) == {None}, outcomes


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default=tempfile.gettempdir(), help="On the disk to measure.")
    parser.add_argument("--chunk-sizes-kib", default="128,512,2048,8192")
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--lanes", default="4,16", help="kvtier's threads each way, comma-separated.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json")
    return parser.parse_args()


def give_out(command, given, measure):
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="kvtier-peers-") as folder:
        run_bench(command, lambda: measure(folder), given.json)


def compare_disks(folder, given, peers):
    """Yield rows of kvtier's rates with each peer's as the limit, for each layout and chunk size."""
    for kib in map(int, given.chunk_sizes_kib.split(",")):
        chunk_bytes = kib << 10
        chunks = max(CALLS, (given.size_mib << 20) // chunk_bytes)
        call_chunks = -(-chunks // CALLS)
        cases = [(layout, lanes) for layout in LAYOUTS for lanes in map(int, given.lanes.split(","))]
        with ExitStack() as stack:
            region = stack.enter_context(Region.private(chunks, chunk_bytes))
            runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))

            def opened(layout, lanes, capacity_bytes):
                options = {
                    "root": new_folder(folder),
                    "layout": layout,
                    "io": "direct",
                    "capacity_bytes": capacity_bytes,
                }
                lanes_each_way = {"load_lanes": lanes, "store_lanes": lanes}
                return FsTier(runner, options | lanes_each_way, chunk_bytes, call_chunks)  # noqa: B023

            with_room = 2 * (given.rounds + 3) * chunks * chunk_bytes + (256 << 20)
            full = FULL_SETS * chunks * (chunk_bytes + OVERHEAD_BYTES) + (64 << 20)
            sides = []
            for layout, lanes in cases:
                sides += disk_sides(f"{layout} {lanes}", opened(layout, lanes, with_room), region, stack)
                full_tier = opened(layout, lanes, full)
                sides.append(store_side(f"store, full {layout} {lanes}", full_tier, region, stack, sets=FULL_SETS + 1))
            for name, open_peer in peers.items():
                sides += disk_sides(name, open_peer(new_folder(folder), region, call_chunks), region, stack)
            measured = interleaved(sides, given.rounds)
        for layout, lanes in cases:
            for name in peers:
                for way, limit in (("load", "load"), ("store", "store"), ("store, full", "store")):
                    ours, theirs = measured[f"{way} {layout} {lanes}"], measured[f"{limit} {name}"]
                    yield row_of(way, ours, theirs, name, {"layout": layout, "lanes": lanes}, chunk_bytes=chunk_bytes)


def disk_sides(name, tier, region, stack):
    kept, rows = new_keys(region.rows), [region.row(index) for index in range(region.rows)]
    for number, row in enumerate(rows):
        row[:] = number.to_bytes(4, "big") * (region.row_bytes // 4)
    tier.store(kept, rows)
    tier.load(kept, rows)
    for number, row in enumerate(rows):
        assert row == number.to_bytes(4, "big") * (region.row_bytes // 4), f"{name}: other bytes came back"
    load = rate_of(lambda: tier.load(kept, rows), region.rows * region.row_bytes)
    return [Side(f"load {name}", load), store_side(f"store {name}", tier, region, stack)]


def store_side(name, tier, region, stack, *, sets=0):
    """Return stores of new chunks; into a full tier, which evicts as much as it stores, after so many sets."""
    stack.callback(tier.close)
    rows, new = [region.row(index) for index in range(region.rows)], list[OffloadKey]()

    def prepare():
        new[:] = new_keys(region.rows)

    for _ in range(sets):
        prepare()
        tier.store(new, rows)
    return Side(name, rate_of(lambda: tier.store(new, rows), region.rows * region.row_bytes), prepare)


def new_keys(count):
    return [make_offload_key(os.urandom(32)) for _ in range(count)]


def new_folder(parent):
    return tempfile.mkdtemp(dir=parent)


class RawThreads:
    def __init__(self, folder, region, _):
        self._file = RawFile(f"{folder}/raw", [region.row(index) for index in range(region.rows)], direct=True)
        self.close = self._file.close

    def store(self, keys, rows):
        self._file.write(RAW_THREADS, sync=False)

    def load(self, keys, rows):
        self._file.read(RAW_THREADS)


if __name__ == "__main__":
    given = arguments(__doc__)
    give_out("peers raw", given, lambda folder: compare_disks(folder, given, {"the raw limit": RawThreads}))
