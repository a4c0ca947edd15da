"""Pictures: of a replay's course, of miss-ratio curves, of benchmarks. Needs matplotlib; imported when asked for."""

# matplotlib leaves the types of its keyword arguments out:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtier.config import PRIMARY_NAME
from kvtier.tools.bench.figures import Figures, label_of
from kvtier.tools.outputs import picture_format, replacing
from kvtier.tools.replay.replay import Sample, TierTotals
from kvtier.tools.replay.report import Report
from kvtier.tools.replay.size_command import SizeReport
from kvtier.tools.replay.study import Extent

DOTS_PER_INCH = 150
SAMPLES_PER_BIN = 5  # Fewer would show each prompt's length rather than the workload's course.
LEGEND_COLUMNS = 6
DASH = 3.0  # In line widths.
INCHES_A_ROW = 0.32
_NO_TOTALS = TierTotals(0, 0, 0)

Numbers = npt.NDArray[np.float64]


def write_miss_ratio_curve(
    path: str, title: str, extent: Extent, shares: Mapping[str, float], ratios: Mapping[str, Mapping[str, float]]
) -> None:
    """Draw one line a policy: which part of the block references misses, over the size of the cache."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    sizes = sorted(shares, key=shares.__getitem__)
    for name, row in ratios.items():
        axes.plot([shares[size] for size in sizes], [1 - row[size] for size in sizes], marker="o", label=name)
    axes.axhline(1 - extent.hit_ratio(extent.best_hits), color="grey", linestyle="--", label="best possible")
    axes.set_xscale("log")
    axes.set_xticks([shares[size] for size in sizes], labels=sizes)
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"cache size, as a share of {extent.unique_blocks:,} unique blocks")
    axes.set_ylabel("miss ratio")
    axes.set_title(title, parse_math=False)  # A file's name may have dollar signs.
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def write_size_picture(path: str, report: SizeReport) -> None:
    """Draw the hit ratio and the time to first token over the size of the memory, one line a size of the disk."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    ratios, times = figure.subplots(1, 2)
    for disk_bytes in dict.fromkeys(cell.disk_bytes for cell in report.sizes):
        cells = sorted((c for c in report.sizes if c.disk_bytes == disk_bytes), key=lambda cell: cell.memory_bytes)
        label = f"{disk_bytes / 1e12:,.3g} TB of disk" if disk_bytes else "no disk"
        memory = [cell.memory_bytes / 1e9 for cell in cells]
        ratios.plot(memory, [cell.hit_ratio for cell in cells], marker="o", label=label)
        (line,) = times.plot(memory, [cell.ttft_s.p50 for cell in cells], marker="o", label=f"{label}, p50")
        times.plot(
            memory,
            [cell.ttft_s.p99 for cell in cells],
            marker="s",
            linestyle="--",
            color=line.get_color(),
            label=f"{label}, p99",
        )
    ratios.axhline(report.best_hit_ratio, color="grey", linestyle=":", label="best possible")
    times.axhline(report.without_tiering_ttft_s.p50, color="grey", linestyle=":", label="without tiering, p50 and p99")
    times.axhline(report.without_tiering_ttft_s.p99, color="grey", linestyle=":")
    times.set_yscale("log")
    ratios.set_ylim(bottom=0.0)
    for axes, title in ((ratios, "hit ratio"), (times, "time to first token, s")):
        axes.set_xlabel("memory, GB")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(report.trace, parse_math=False)
    _save(figure, path)


class Course:
    """A replay's samples as rates over bins of equal time."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self._at = np.array([0.0, *(sample.seconds for sample in samples)])
        bins = max(1, len(samples) // SAMPLES_PER_BIN)
        self._edges = np.linspace(0.0, self._at[-1] or 1.0, bins + 1)
        self.names = list(samples[-1].tiers) if samples else [PRIMARY_NAME]
        self.middles: Numbers = (self._edges[1:] + self._edges[:-1]) / 2

    def total(self, value: Callable[[Sample], int]) -> Numbers:
        """Return how much a total grew in each bin."""
        totals = np.array([0.0, *(value(sample) for sample in self._samples)])
        return np.diff(np.interp(self._edges, self._at, totals))

    def tier(self, name: str, value: Callable[[TierTotals], int]) -> Numbers:
        return self.total(lambda sample: value(sample.tiers.get(name, _NO_TOTALS)))

    def so_far(self, part: Numbers, whole: Numbers) -> Numbers:
        """Return the share of a whole that its parts have together, from the beginning on."""
        return np.cumsum(part.sum(axis=0)) / np.cumsum(whole)

    def per_s(self, grown: Numbers) -> Numbers:
        return grown / np.diff(self._edges)


def write_replay_picture(path: str, report: Report, samples: Sequence[Sample], row_bytes: int) -> None:
    """Draw the share of each tier's hits and each tier's traffic over the time of the replay."""
    course = Course(samples)
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    hits, traffic = figure.subplots(2, 1, sharex=True)
    figure.suptitle(
        f"{report.trace}: hit ratio {report.hit_ratio:.4f} over {report.requests:,} requests",
        parse_math=False,  # A file's name may have dollar signs.
    )
    _draw_hits(hits, course)
    _draw_traffic(traffic, course, row_bytes)
    traffic.set_xlabel("time since the replay began, s")
    traffic.set_xlim(0.0, float(course.middles[-1] + course.middles[0]))
    _save(figure, path)


def _draw_hits(axes: Axes, course: Course) -> None:
    references = np.maximum(course.total(lambda sample: sample.chunk_references), 1.0)
    shares = np.array([course.tier(name, lambda totals: totals.hits) for name in course.names]) / references
    axes.stackplot(course.middles, shares, labels=course.names, alpha=0.85)
    axes.plot(course.middles, course.so_far(shares * references, references), color="black", label="all, so far")
    axes.set_ylim(0.0, 1.0)
    axes.set_ylabel("hits, share of chunk references")
    axes.grid(alpha=0.3)
    _put_legend_above(axes)


def _draw_traffic(axes: Axes, course: Course, row_bytes: int) -> None:
    """Draw what moved: a colour a tier, as above; what came out of it solid, what went in dashed."""
    scale = row_bytes / 1e6
    for index, name in enumerate(course.names):
        out = course.per_s(course.tier(name, lambda totals: totals.loaded)) * scale
        into = course.per_s(course.tier(name, lambda totals: totals.stored)) * scale
        axes.plot(course.middles, out, color=f"C{index}", label=f"{name}: read")
        dashes = (DASH * index, (DASH, DASH))  # Shifted: a tier below often gets just what its primary does.
        axes.plot(course.middles, into, color=f"C{index}", linestyle=dashes, label=f"{name}: written")
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("throughput, MB/s")
    axes.grid(alpha=0.3)
    _put_legend_above(axes)


def _put_legend_above(axes: Axes) -> None:
    """Put it where it hides no line."""
    entries = len(axes.get_legend_handles_labels()[0])
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=min(entries, LEGEND_COLUMNS), frameon=False)


def write_figures_picture(path: str, figures: Figures) -> None:
    """Draw each row's ratio, its spread as a whisker, and the limit as a line at 1."""
    rows = figures.rows[::-1]  # The first on top.
    places = range(len(rows))
    figure = Figure(figsize=(10, 1.6 + INCHES_A_ROW * len(rows)), layout="constrained")
    axes = figure.subplots()
    below = [row.ratio - row.spread[0] for row in rows]
    above = [row.spread[1] - row.ratio for row in rows]
    axes.barh(places, [row.ratio for row in rows], xerr=(below, above), alpha=0.8, ecolor="0.3", capsize=2)
    axes.axvline(1.0, color="black", linestyle="--")
    axes.set_yticks(places, [f"{label_of(row)}\nof {row.limit_is}" for row in rows], fontsize=7, parse_math=False)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("part of the limit; 1 is at the limit")
    axes.grid(alpha=0.3, axis="x")
    load = figures.machine.load_before[0], figures.machine.load_after[0]
    axes.set_title(
        f"{figures.command}: {figures.machine.processor}, {figures.machine.processors} processors, "
        f"load {load[0]:.2f} to {load[1]:.2f}",
        fontsize=9,
        parse_math=False,
    )
    _save(figure, path)


def _save(figure: Figure, path: str) -> None:
    with replacing(path) as file:
        figure.savefig(file, format=picture_format(path), dpi=DOTS_PER_INCH)
