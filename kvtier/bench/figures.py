"""What a benchmark found: rows of a figure, the limit beside it, and their ratio; the JSON that `kvtier bench` writes.

A ratio says how near a figure is to its limit, whatever the unit: 1 is at the limit, 0.5 is half as good. It is the
median of each round's own ratio, not the ratio of two medians: what disturbs a machine for seconds disturbs both sides
of a round, and falls out.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvtier.bench.machine import Machine

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
