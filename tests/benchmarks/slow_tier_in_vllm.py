"""The time to first token of the real vLLM over a tier that becomes slow, and fast again.

    .venv-vllm/bin/python -m tests.benchmarks.slow_tier_in_vllm [--requests 200] [--speeds 2MB,20MB] [--json FILE]

Three engines side by side, each in a process of its own: without tiers; with kvtier that loads whatever its tier has;
with kvtier that weighs loads by what it measures of vLLM's steps. Each gets the same prompt of 1,000 tokens in turn,
one at a time, so that whatever else the machine does meets all three. No prompt is in the GPU's cache or in the primary
when it comes again: it comes from the tier, or is computed.

Prints for each phase the times to first token, as shares of those without tiers at the same percentile. Runs after
`make test-vllm` has made the environment.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    | os.environ  # Its test runs where they are set.
)

from rich.console import Console
from rich.table import Table

from kvtier.settings.units import parse_size
from tests.slow_tier import slow_fs
from tests.vllm.engines import PROMPT_TOKENS, Prompt, kvtier, prompts
from tests.vllm.models import llama
from tests.vllm.peer import Peer

PROMPTS = 24  # Ten times what the primary holds.
PRIMARY = "5MiB"
WARM_UPS = 2  # Rounds of all prompts: the first fills the tiers, in the second they show how fast they are.
SIDES = ("without", "always", "weighed")


class Asked(NamedTuple):
    """One request on one side."""

    seconds: float
    cached: int


Phase = dict[str, list[Asked]]


class Sides:
    """The engines, by name, over tiers whose speed they share."""

    def __init__(self, engines: Mapping[str, Peer], speed: Path) -> None:
        self._engines = engines
        self._speed = speed

    def phase(self, given: Sequence[Prompt], bytes_per_s: int | None) -> Phase:
        """Ask every side for every prompt, one after the other, with tiers of this speed; None: as fast as they are."""
        if bytes_per_s is None:
            self._speed.unlink(missing_ok=True)
        else:
            self._speed.write_text(str(bytes_per_s))
        found: Phase = {side: [] for side in self._engines}
        for index, prompt in enumerate(given):
            sides = list(self._engines)
            for side in sides[index % len(sides) :] + sides[: index % len(sides)]:
                begun = time.perf_counter()
                (answer,) = self._engines[side].answer([prompt], 1)
                found[side].append(Asked(time.perf_counter() - begun, answer.cached))
        return found


@contextmanager
def opened(model: str, folder: Path) -> Iterator[Sides]:
    """Open an engine for each side."""
    speed = folder / "speed"
    with ExitStack() as stack:
        engines: dict[str, Peer] = {}
        for side in SIDES:
            peer = Peer()
            stack.callback(peer.end)
            extra = kvtier(cpu_bytes_to_use=PRIMARY, secondary_tiers=[slow_fs(folder / side, speed)])
            offloading = None if side == "without" else extra
            engines[side] = stack.enter_context(peer.engine(model, offloading, measured=side == "weighed"))
        yield Sides(engines, speed)


def rounds(given: Sequence[Prompt], requests: int, dice: random.Random) -> list[Prompt]:
    """Return so many requests: rounds of all prompts, each in an order of its own."""
    asked: list[Prompt] = []
    while len(asked) < requests:
        asked += dice.sample(given, len(given))
    return asked[:requests]


def percentile(phase: Sequence[Asked], share: float) -> float:
    times = sorted(each.seconds for each in phase)
    return times[min(len(times) - 1, int(share * len(times)))]


def figures(phase: Phase) -> dict[str, dict[str, float]]:
    """Return for each side its times, as shares of those without tiers, and how much of its prompts was cached."""
    without = phase["without"]
    mean = statistics.fmean(each.seconds for each in without)
    return {
        side: {
            "p50_ms": percentile(asked, 0.5) * 1e3,
            "p99_ms": percentile(asked, 0.99) * 1e3,
            "p50_share": percentile(asked, 0.5) / percentile(without, 0.5),
            "p99_share": percentile(asked, 0.99) / percentile(without, 0.99),
            "saved_share": 1 - statistics.fmean(each.seconds for each in asked) / mean,
            "cached_share": statistics.fmean(each.cached for each in asked) / PROMPT_TOKENS,
        }
        for side, asked in phase.items()
    }


def run(model: str, folder: Path, requests: int, speeds: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of each phase: at full speed, at each of these speeds, and at full speed again."""
    dice, given = random.Random(0), prompts(PROMPTS)
    with opened(model, folder) as sides:
        sides.phase(rounds(given, WARM_UPS * PROMPTS, dice), None)
        phases: dict[str, int | None] = {"fast": None}
        phases |= {f"{speed / 1e6:g} MB/s": speed for speed in speeds}
        phases |= {"fast again": None}
        return {name: figures(sides.phase(rounds(given, requests, dice), speed)) for name, speed in phases.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="of each side in each phase")
    parser.add_argument("--speeds", default="2MB,20MB", help="of the slowed tier, a second")
    parser.add_argument("--json", help="a file for the figures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        speeds = [parse_size(speed) for speed in given.speeds.split(",")]
        found = run(llama(Path(folder)), Path(folder), given.requests, speeds)
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))
    table = Table("tier", "side", *next(iter(found["fast"].values())))
    for phase, by_side in found.items():
        for side, row in by_side.items():
            table.add_row(phase, side, *(f"{value:.3f}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
