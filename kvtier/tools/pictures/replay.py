"""Pictures of replays: whose hits they were over time, what moved, and how long things took."""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
WIDTH, HEIGHT = 5.6, 3.3  # Of one panel, in inches.
NO_SLICE = Slice(until_s=1.0, requests=0, chunk_references=0, tiers={})
_NOTHING = TierSlice(hits=0, bytes_loaded=0, bytes_stored=0, dropped=0, failed=0)

Numbers = npt.NDArray[np.float64]


class Course:
    """A replay's slices as columns of numbers."""

    def __init__(self, report: Report) -> None:
        self._slices = report.over_time or [NO_SLICE]
        self.names = list(report.tiers) or [PRIMARY_NAME]
        self.edges: Numbers = np.array([0.0, *(each.until_s for each in self._slices)])
        self.requests: Numbers = np.array([each.requests for each in self._slices], float)
        self.references: Numbers = np.array([each.chunk_references for each in self._slices], float)

    def tier(self, name: str, value: Callable[[TierSlice], int]) -> Numbers:
        return np.array([value(each.tiers.get(name, _NOTHING)) for each in self._slices], float)

    def per_s(self, grown: Numbers) -> Numbers:
        return grown / np.maximum(np.diff(self.edges), 1e-9)

    def so_far(self) -> Numbers:
        """Return the share of the chunk references that were hits, from the beginning to the end of each slice."""
        hits = sum((self.tier(name, lambda tier: tier.hits) for name in self.names), np.zeros(len(self._slices)))
        return np.cumsum(hits) / np.maximum(np.cumsum(self.references), 1.0)


def write_replay_picture(path: str, report: Report) -> None:
    """Draw the share of each tier's hits and each tier's traffic over the time of the replay, and the latencies."""
    figure = new_figure(8.6, 9.6)
    figure.suptitle(
        f"{short(report.trace)}: hit ratio {report.hit_ratio:.4f} over {counted(report.requests, 'request')}",
        parse_math=False,  # A file's name may have dollar signs.
    )
    hits, traffic, latencies = figure.subplots(3, 1)
    draw_hits(hits, report)
    draw_traffic(traffic, report)
    draw_distributions(latencies, report.latency_s)
    save(figure, path)


def one_panel(draw: Callable[[Axes], None]) -> Figure:
    """Return a picture that has one panel."""
    figure = new_figure(WIDTH, HEIGHT)
    draw(figure.subplots())
    return figure


def draw_hits(axes: Axes, report: Report, tiers: Sequence[str] = ()) -> None:
    """Draw which share of the chunk references each tier's hits were, and all of them so far as a line.

    `tiers`: of all runs, where there are several, so that each keeps its colour.
    """
    course = Course(report)
    references = np.maximum(course.references, 1.0)
    below = np.zeros(len(references))
    for name, ink in _inks(tiers or course.names, course):
        share = course.tier(name, lambda tier: tier.hits) / references
        axes.stairs(below + share, course.edges, baseline=below, fill=True, color=ink, label=short(name))
        below = below + share
    axes.plot(course.edges[1:], course.so_far(), color="black", label="all tiers, so far")
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("hits / chunk references")
    _over_time(axes, course, report)


def draw_hit_ratios(axes: Axes, reports: Mapping[str, Report]) -> None:
    """Draw each run's share of hits so far over the requests that it has replayed."""
    for index, (name, report) in enumerate(reports.items()):
        course = Course(report)
        axes.plot(np.cumsum(course.requests), course.so_far(), color=colour(index), label=short(name))
    axes.set_ylim(0.0, 1.0)
    axes.set_xlim(left=0.0)
    axes.set_ylabel("hits / chunk references, so far")
    axes.set_xlabel("requests replayed")
    finish(axes)
    put_legend_above(axes)


def _inks(tiers: Sequence[str], course: Course) -> list[tuple[str, str]]:
    """Return the tiers of a run with their colours among all tiers."""
    return [(name, colour(index)) for index, name in enumerate(tiers) if name in course.names]


def draw_traffic(axes: Axes, report: Report, tiers: Sequence[str] = ()) -> None:
    """Draw what moved: a colour a tier, as for hits; what came out of it solid, what went in dashed."""
    course = Course(report)
    for index, (name, ink) in enumerate(_inks(tiers or course.names, course)):
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
                    color=ink,
                    linestyle=line,
                    label=f"{short(name)}, {way}",
                )
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("bytes moved a second")
    bytes_per_s(axes)
    _over_time(axes, course, report)


def _over_time(axes: Axes, course: Course, report: Report) -> None:
    axes.set_xlim(0.0, float(course.edges[-1]) or 1.0)
    axes.set_xlabel("time since the replay began, s" + (" of virtual time" if report.ttft_s is not None else ""))
    finish(axes)
    put_legend_above(axes)


def draw_distributions(axes: Axes, taken: Mapping[str, Distribution | None]) -> None:
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
