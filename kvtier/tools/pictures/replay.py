"""Pictures of replays: hits by tier and bytes moved over time, and latencies."""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from kvtier.config import PRIMARY_NAME
from kvtier.tools.outputs import counted
from kvtier.tools.pictures.drawing import (
    bytes_per_s,
    colour,
    finish,
    milliseconds,
    new_figure,
    put_legend_above,
    save,
    short,
)
from kvtier.tools.replay.report import BINS_PER_DECADE, Distribution, Report, Slice, TierSlice

DASH = 3.0  # In line widths.
SHORTEST_MS = 1e-3  # What took less is drawn at the left edge: a microsecond is no time here.
NO_SLICE = Slice(until_s=1.0, requests=0, chunk_references=0, tiers={})
_NOTHING = TierSlice(hits=0, bytes_loaded=0, bytes_stored=0, dropped=0, failed=0)

Numbers = npt.NDArray[np.float64]


class Course:
    """A replay's slices as columns of numbers."""

    def __init__(self, report: Report) -> None:
        self._slices = report.over_time or [NO_SLICE]
        self.names = list(report.tiers) or [PRIMARY_NAME]
        self.is_virtual = report.ttft_s is not None
        self.edges: Numbers = np.array([0.0, *(each.until_s for each in self._slices)])
        self.references: Numbers = np.array([each.chunk_references for each in self._slices], float)

    def tier(self, name: str, value: Callable[[TierSlice], int]) -> Numbers:
        return np.array([value(each.tiers.get(name, _NOTHING)) for each in self._slices], float)

    def per_s(self, grown: Numbers) -> Numbers:
        rates: Numbers = grown / np.maximum(np.diff(self.edges), 1e-9)
        return rates

    def so_far(self) -> Numbers:
        """Return the share of the chunk references that were hits, from the beginning to the end of each slice."""
        hits = sum((self.tier(name, lambda tier: tier.hits) for name in self.names), np.zeros(len(self._slices)))
        shares: Numbers = np.cumsum(hits) / np.maximum(np.cumsum(self.references), 1.0)
        return shares


def write_replay_picture(path: str, report: Report) -> None:
    """Draw the share of each tier's hits and each tier's traffic over the time of the replay, and the latencies."""
    figure = new_figure(8.6, 9.6)
    figure.suptitle(
        f"{short(report.trace)}: hit ratio {report.hit_ratio:.4f} over {counted(report.requests, 'request')}",
        parse_math=False,  # A file's name may have dollar signs.
    )
    hits, traffic, latencies = figure.subplots(3, 1)
    course = Course(report)
    _draw_hits(hits, course)
    _draw_traffic(traffic, course)
    _draw_distributions(latencies, report.latency_s)
    save(figure, path)


def _draw_hits(axes: Axes, course: Course) -> None:
    """Draw each tier's share of the chunk references, and the share of all tiers so far as a line."""
    references = np.maximum(course.references, 1.0)
    below = np.zeros(len(references))
    for index, name in enumerate(course.names):
        share = course.tier(name, lambda tier: tier.hits) / references
        axes.stairs(below + share, course.edges, baseline=below, fill=True, color=colour(index), label=short(name))
        below = below + share
    axes.plot(course.edges[1:], course.so_far(), color="black", label="all tiers, so far")
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("hits / chunk references")
    _over_time(axes, course)


def _draw_traffic(axes: Axes, course: Course) -> None:
    """Draw bytes a second, in each tier's colour: reads solid, writes dashed."""
    for index, name in enumerate(course.names):
        ways = (
            ("read", "solid", course.tier(name, lambda tier: tier.bytes_loaded)),
            ("written", (DASH * index, (DASH, DASH)), course.tier(name, lambda tier: tier.bytes_stored)),
        )  # Dashes are shifted: a tier below often gets just what its primary does.
        for way, line, moved in ways:
            if moved.any():
                axes.stairs(
                    course.per_s(moved),
                    course.edges,
                    baseline=None,
                    color=colour(index),
                    linestyle=line,
                    label=f"{short(name)}, {way}",
                )
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("bytes moved a second")
    bytes_per_s(axes)
    _over_time(axes, course)


def _over_time(axes: Axes, course: Course) -> None:
    axes.set_xlim(0.0, float(course.edges[-1]) or 1.0)
    axes.set_xlabel("time since the replay began, s" + (" of virtual time" if course.is_virtual else ""))
    finish(axes)
    put_legend_above(axes)


def _draw_distributions(axes: Axes, taken: Mapping[str, Distribution | None]) -> None:
    """Draw which share of the calls took no longer than so many milliseconds, a line for each name that has some."""
    for index, (name, distribution) in enumerate(taken.items()):
        if distribution is not None and distribution.samples:
            at_most_ms, share = cumulated(distribution)
            axes.plot(at_most_ms, share, color=colour(index), label=short(name))
    for level, name in ((0.5, "p50"), (0.99, "p99")):
        axes.axhline(level, color="grey", linestyle=":", linewidth=0.8)
        axes.annotate(name, (1.0, level), xycoords=("axes fraction", "data"), fontsize=7, color="grey", va="bottom")
    axes.set_ylim(0.0, 1.05)
    axes.set_ylabel("share that took no longer")
    axes.set_xlabel("ms, logarithmic")
    milliseconds(axes)
    finish(axes)
    put_legend_above(axes)


def cumulated(distribution: Distribution) -> tuple[Sequence[float], Sequence[float]]:
    """Return the bounds of the bins in milliseconds, and which share took no longer than each."""
    at_most_ms, share = list[float](), list[float]()
    reached = 0
    for found in distribution.bins:
        upper_ms = 1e3 * found.at_most_s
        lower_ms = upper_ms / 10 ** (1 / BINS_PER_DECADE)
        at_most_ms += [max(SHORTEST_MS, lower_ms), max(SHORTEST_MS, upper_ms)]
        share.append(reached / distribution.samples)
        reached += found.samples
        share.append(reached / distribution.samples)
    return at_most_ms, share
