"""What all comparisons with a peer share: disk tiers as one sees them from outside, and how figures are given out."""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import uvloop

from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.memory.region import Region
from kvtier.tools.bench.figures import (
    ROUNDS,
    Figures,
    Pair,
    Row,
    Setting,
    Side,
    interleaved,
    load,
    print_figures,
    rate_of,
    row_of,
    this_machine,
)
from kvtier.tools.bench.files import FULL_SETS, LAYOUTS, OVERHEAD_BYTES, MeasuredTier, TierCase
from kvtier.tools.outputs import write_json

CALLS = 16  # Requests at once, each of whose chunks are one call.


class DiskTier(Protocol):
    """A peer's disk path. Keys and rows are the same for all."""

    def store(self, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> None: ...

    def load(self, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> None:
        """Load the chunks, into these rows if the peer can."""

    def close(self) -> None: ...


Opened = Callable[[str, Region, int], DiskTier]
"""Open a peer in a directory, for rows of a region and so many chunks a call."""


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default=tempfile.gettempdir(), help="On the disk to measure.")
    parser.add_argument("--chunk-sizes-kib", default="128,512,2048,8192")
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--lanes", default="4,16", help="kvtier's threads each way, with commas between them.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json")
    return parser.parse_args()


def give_out(command: str, given: argparse.Namespace, measure: Callable[[str], Iterator[Row]]) -> None:
    """Measure in a directory that goes away, and print what was found."""
    before, begun = load(), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="kvtier-peers-") as folder:
        rows = list(measure(folder))
    machine = this_machine(before, given.directory)
    figures = Figures(command=command, machine=machine, seconds=time.perf_counter() - begun, rows=rows)
    print_figures(figures, write_json(given.json, figures))


def compare_disks(folder: str, given: argparse.Namespace, peers: dict[str, Opened]) -> Iterator[Row]:
    """Yield rows of kvtier's rates with each peer's as the limit, for each of kvtier's layouts and each chunk size."""
    for kib in map(int, given.chunk_sizes_kib.split(",")):
        chunk_bytes = kib << 10
        chunks = max(CALLS, (given.size_mib << 20) // chunk_bytes)
        cases = [
            TierCase(layout, "vllm", "direct", lanes, fsync=False)
            for layout in LAYOUTS
            for lanes in map(int, given.lanes.split(","))
        ]
        with ExitStack() as stack:
            region = stack.enter_context(Region.private(chunks, chunk_bytes))
            runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            sides: list[Side] = []
            for case in cases:
                options = case.options(
                    new_folder(folder), capacity_bytes=2 * (given.rounds + 3) * chunks * chunk_bytes + (256 << 20)
                )
                tier = MeasuredTier(runner, options, chunk_bytes, call_chunks=-(-chunks // CALLS))
                sides += disk_sides(case.label, tier, region, stack)
            full = [TierCase(layout, "flat", "direct", lanes, fsync=False) for layout, lanes in full_tiers(given)]
            for case in full:
                capacity_bytes = FULL_SETS * chunks * (chunk_bytes + OVERHEAD_BYTES) + (64 << 20)
                options = case.options(new_folder(folder), capacity_bytes=capacity_bytes)
                tier = MeasuredTier(runner, options, chunk_bytes, call_chunks=-(-chunks // CALLS))
                sides.append(full_side(case.label, tier, region, stack))
            for name, opened in peers.items():
                sides += disk_sides(name, opened(new_folder(folder), region, -(-chunks // CALLS)), region, stack)
            measured = interleaved(sides, given.rounds)
        for case in full:
            settings: dict[str, Setting] = {
                "layout": case.layout,
                "naming": case.settings["naming"],
                "lanes": case.depth,
            }
            for name in peers:
                yield row_of(
                    Pair("store, full", chunk_bytes, settings, "MB/s", f"full {case.label}", f"store {name}", name),
                    measured,
                )
        for case in cases:
            settings = {"layout": case.layout, "lanes": case.depth}
            for name in peers:
                for way in ("load", "store"):
                    pair = Pair(way, chunk_bytes, settings, "MB/s", f"{way} {case.label}", f"{way} {name}", name)
                    yield row_of(pair, measured)


def disk_sides(name: str, tier: DiskTier, region: Region, stack: ExitStack) -> list[Side]:
    """Return loads of chunks that lie there, and stores of new ones; all of them stay until the end."""
    stack.callback(tier.close)
    rows = [region.row(index) for index in range(region.rows)]
    for number, row in enumerate(rows):
        row[:] = number.to_bytes(4, "big") * (region.row_bytes // 4)
    kept, new = new_keys(region.rows), list[OffloadKey]()
    tier.store(kept, rows)
    tier.load(kept, rows)
    for number, row in enumerate(rows):
        assert row == number.to_bytes(4, "big") * (region.row_bytes // 4), f"{name}: other bytes came back"

    def prepare() -> None:
        new[:] = new_keys(region.rows)

    moved_bytes = region.rows * region.row_bytes
    store = rate_of(lambda: tier.store(new, rows), moved_bytes)
    return [
        Side(f"load {name}", rate_of(lambda: tier.load(kept, rows), moved_bytes)),
        Side(f"store {name}", store, prepare),
    ]


def full_side(name: str, tier: DiskTier, region: Region, stack: ExitStack) -> Side:
    """Return stores into a tier that has to evict as much: what it does all its life but for the first hours."""
    stack.callback(tier.close)
    rows = [region.row(index) for index in range(region.rows)]
    new = list[OffloadKey]()

    def prepare() -> None:
        new[:] = new_keys(region.rows)

    for _ in range(FULL_SETS + 1):
        prepare()
        tier.store(new, rows)
    return Side(f"full {name}", rate_of(lambda: tier.store(new, rows), region.rows * region.row_bytes), prepare)


def full_tiers(given: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the layouts and lanes of kvtier's tiers that are full. Neither peer evicts: theirs never are."""
    return [(layout, int(given.lanes.split(",")[0])) for layout in LAYOUTS]


def new_keys(count: int) -> list[OffloadKey]:
    return [make_offload_key(os.urandom(32)) for _ in range(count)]


def new_folder(parent: str) -> str:
    return tempfile.mkdtemp(dir=parent)


@contextmanager
def changed(module: object, **values: object) -> Iterator[None]:
    """Have a module's globals be others for as long as the block lasts."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
