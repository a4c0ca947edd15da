"""Figures of a benchmark: rows of a figure, the limit beside it, and their ratio; the JSON that `kvtier bench` writes.

A ratio says how near a figure is to its limit, whatever the unit: 1 is at the limit, 0.5 is half as good. It is the
median of each round's own ratio, not the ratio of two medians: what disturbs a machine for seconds disturbs both sides
of a round, and falls out. So sides are measured in turn, round after round, in an order that changes. With the rows
goes what they were measured on, and how busy the machine was.
"""

import os
import platform
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvtier import __version__

Load = tuple[float, float, float]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where figures come from. Loads are the kernel's averages over 1, 5 and 15 minutes."""

    processor: str
    processors: int  # That this process may use.
    memory_bytes: int
    kernel: str
    python: str
    kvtier: str
    file_system: str | None  # Of the directory that was measured, as mounted.
    load_before: Load
    load_after: Load


def load() -> Load:
    """Return how many processes wanted a processor, on average over the last 1, 5 and 15 minutes."""
    return os.getloadavg()


def this_machine(load_before: Load, directory: str | None = None) -> Machine:
    """Describe this machine at the end of a run that began under `load_before`."""
    return Machine(
        processor=_processor(),
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        kvtier=__version__,
        file_system=None if directory is None else _file_system(directory),
        load_before=load_before,
        load_after=load(),
    )


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(directory: str) -> str:
    """Return `<type> on <device>`: the mount that is nearest above the directory."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return mounted_at(os.path.realpath(directory), lines)


def mounted_at(path: str, mountinfo: Iterable[str]) -> str:
    """Find a path's mount among the lines of /proc/self/mountinfo: proc(5) has their fields."""
    nearest, found = -1, "unknown"
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")  # Spaces are written \040.
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= nearest:
            kind, device = after.split()[:2]
            nearest, found = len(point), f"{kind} on {device}"
    return found


ROUNDS = 7
ROUNDS_MIN = 1
ROUNDS_MAX = 10_000  # The figures of all of them are kept, and one takes a tenth of a second at the least.

Measure = Callable[[], float]
"""Do the work once and return the figure: a rate, or a time."""


class Side(NamedTuple):
    """One thing to measure. `prepare` and `tidy` run before and after it, unmeasured."""

    name: str
    measure: Measure
    prepare: Callable[[], None] = lambda: None
    tidy: Callable[[], None] = lambda: None


def interleaved(
    sides: list[Side], rounds: int, *, seed: int = 0, step: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Measure each side once a round and return its figures in order of rounds.

    A first round is not counted: it touches memory, starts threads and fills caches. `step` is called after each side.
    """
    dice = random.Random(seed)
    measured: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in dice.sample(sides, len(sides)):
            side.prepare()
            try:
                figure = side.measure()
            finally:
                side.tidy()
            if number:
                measured[side.name].append(figure)
            step()
    return measured


def steps_of(sides: int, rounds: int) -> int:
    """Return how often `interleaved` calls its `step`."""
    return sides * (rounds + 1)


def joined(measured: Mapping[str, list[float]], *others: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Put measurements of several runs side by side, by their names."""
    whole = dict(measured)
    for other in others:
        assert not whole.keys() & other.keys(), whole.keys() & other.keys()
        whole.update(other)
    return whole


TIMES = frozenset({"s", "ms", "µs", "ns"})  # Units of which less is better.

Setting = str | int | bool | None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One operation: medians over the rounds, in the row's unit."""

    operation: str
    chunk_bytes: int | None
    settings: Mapping[str, Setting]
    unit: str
    figure: float
    limit: float
    limit_is: str  # What was measured as the limit.
    ratio: float
    spread: tuple[float, float]  # The lowest and the highest ratio of a round.
    figure_spread: tuple[float, float]
    limit_spread: tuple[float, float]
    rounds: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run found."""

    command: str
    machine: Machine
    seconds: float
    rows: list[Row]


class Pair(NamedTuple):
    """Which two measurements make a row."""

    operation: str
    chunk_bytes: int | None
    settings: Mapping[str, Setting]
    unit: str
    figure: str  # Names of measurements.
    limit: str
    limit_is: str


def row_of(pair: Pair, measured: Mapping[str, Sequence[float]]) -> Row:
    """Make a row of what both sides measured, round by round."""
    figures, limits = measured[pair.figure], measured[pair.limit]
    ratios = [ratio_of(figure, limit, pair.unit) for figure, limit in zip(figures, limits, strict=True)]
    return Row(
        operation=pair.operation,
        chunk_bytes=pair.chunk_bytes,
        settings=pair.settings,
        unit=pair.unit,
        figure=statistics.median(figures),
        limit=statistics.median(limits),
        limit_is=pair.limit_is,
        ratio=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        figure_spread=(min(figures), max(figures)),
        limit_spread=(min(limits), max(limits)),
        rounds=len(ratios),
    )


def ratio_of(figure: float, limit: float, unit: str) -> float:
    """Return how near a figure is to its limit: 1 is there, less is worse."""
    return limit / figure if unit in TIMES else figure / limit


def figures_json(figures: Figures) -> bytes:
    """Return the figures as indented JSON, which ends with a line's end."""
    return msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n"
