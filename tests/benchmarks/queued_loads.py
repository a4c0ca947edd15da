"""Loads of the fs tier with several reads under way in a lane, beside one at a time, and beside plain threads.

    .venv/bin/python tests/benchmarks/queued_loads.py [DIR] [ROUNDS] [CHUNK_KIB ...]

Of segments, chunks whose slots lie together and chunks from all over the tier; beside an idle main thread, and beside
one that is busy in Python, whose interpreter's lock lanes have to wait for. Rounds in turn; medians of rates, and of
the rounds' own ratios with their quartiles.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import uvloop

from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.errors import ChunkMissing
from kvtier.memory.region import Region
from kvtier.tools.bench.figures import Side, interleaved
from kvtier.tools.bench.files import MeasuredTier, TierCase
from kvtier.tools.bench.raw import RawFile

MOVED_BYTES = 128 << 20
CHUNKS_KIB = (128, 256, 512, 2_048, 8_192)
ROUNDS = 9
HELD = 4  # Times as many chunks as are loaded, of which those from all over are.
SCAN_S = 60.0
RAW = "plain threads"


def busy(measure: Callable[[], float]) -> Callable[[], float]:
    """Have another thread measure, beside this one in Python."""

    def beside() -> float:
        rates: list[float] = []
        thread = threading.Thread(target=lambda: rates.append(measure()))
        thread.start()
        turns = 0
        while thread.is_alive():
            for _ in range(1_000):
                turns += 1
        return rates[0]

    return beside


def until_found(load: Callable[[], None]) -> None:
    """Wait for a tier to have looked at what its directory holds."""
    ends_at = time.monotonic() + SCAN_S
    while time.monotonic() < ends_at:
        with suppress(ChunkMissing):
            return load()
    return load()


class Loads:
    """The sides of one chunk size."""

    def __init__(self, root: str, chunk_bytes: int, stack: ExitStack) -> None:
        count = MOVED_BYTES // chunk_bytes
        self.sides: list[Side] = []
        self._root, self._chunk_bytes, self._stack = root, chunk_bytes, stack
        self._runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        region = stack.enter_context(Region.private(count, chunk_bytes))
        self._rows = [region.row(index) for index in range(count)]
        keys = [make_offload_key(index.to_bytes(32, "big")) for index in range(HELD * count)]
        self._places = {"together": keys[:count], "all over": sorted(random.Random(0).sample(keys, count))}
        raw = RawFile(f"{root}/raw", self._rows, direct=True)
        stack.callback(raw.close)
        self.sides.append(Side(RAW, lambda: raw.read(4)))
        for layout, places in (("files", ("together",)), ("segments", ("together", "all over"))):
            self._fill(layout, keys if "all over" in places else keys[:count])
            for queue_bytes in (8 << 20, 0):
                tier = self._open(layout, queue_bytes)
                stack.callback(tier.close)
                for place in places:
                    self._add(f"{layout}, {place}, {'queued' if queue_bytes else 'one at a time'}", tier, place)
        for row in self._rows:
            stack.callback(row.release)

    def _fill(self, layout: str, keys: Sequence[OffloadKey]) -> None:
        """Have both tiers of a layout hold the same chunks in the same places."""
        tier = self._open(layout, 0)
        for start in range(0, len(keys), len(self._rows)):
            tier.store(keys[start : start + len(self._rows)], self._rows)
        tier.close()

    def _open(self, layout: str, queue_bytes: int) -> MeasuredTier:
        case = TierCase(layout, "vllm", "direct", 4, fsync=False)
        options = case.options(f"{self._root}/{layout}", load_queue_bytes=queue_bytes)
        return MeasuredTier(self._runner, options, self._chunk_bytes)

    def _add(self, name: str, tier: MeasuredTier, place: str) -> None:
        keys = self._places[place]
        until_found(lambda: tier.load(keys, self._rows))

        def rate() -> float:
            begun = time.perf_counter()
            tier.load(keys, self._rows)
            return MOVED_BYTES / (time.perf_counter() - begun)

        self.sides += [Side(name, rate), Side(f"{name}, busy", busy(rate))]


@contextmanager
def loads_of(directory: str, chunk_bytes: int) -> Iterator[list[Side]]:
    with tempfile.TemporaryDirectory(dir=directory) as root, ExitStack() as stack:
        yield Loads(root, chunk_bytes, stack).sides


def spread(ratios: Sequence[float]) -> str:
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({lower:.2f} to {upper:.2f})"


def main(directory: str, rounds: int, chunks_kib: Sequence[int]) -> None:
    for chunk_kib in chunks_kib:
        with loads_of(directory, chunk_kib << 10) as sides:
            rates = interleaved(sides, rounds)
        print(f"{chunk_kib} KiB, load of the machine {os.getloadavg()[0]:.1f}")
        for name, each in rates.items():
            of_raw = [rate / limit for rate, limit in zip(each, rates[RAW], strict=True)]
            line = f"  {name:45s} {statistics.median(each) / 1e6:6.0f} MB/s   of {RAW} {spread(of_raw)}"
            if "queued" in name:
                beside = rates[name.replace("queued", "one at a time")]
                line += f"   of one at a time {spread([a / b for a, b in zip(each, beside, strict=True)])}"
            print(line, flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        given[0] if given else tempfile.gettempdir(),
        int(given[1]) if len(given) > 1 else ROUNDS,
        [int(kib) for kib in given[2:]] or CHUNKS_KIB,
    )
