"""Pictures of curves over sizes: miss ratios of policies, and what caches of several sizes are worth."""

# pyright: reportUnknownMemberType=false

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from kvtier.tools.outputs import round_size
from kvtier.tools.pictures.drawing import (
    colour,
    finish,
    label_ends,
    new_figure,
    save,
    short,
)
from kvtier.tools.replay.size_command import SizeReport
from kvtier.tools.replay.study import Extent

HEADROOM = 1.05  # Above the highest line.
MARGIN = 0.06  # Above and below the curves, of their height.


def write_miss_ratio_curve(
    path: str,
    title: str,
    extent: Extent,
    curves: Mapping[str, Mapping[float, float]],
    asked: Iterable[float],
    block_tokens: int,
) -> None:
    """Draw one line a policy: which part of the block references misses, over the size of the cache.

    A curve has a hit ratio for each share of the unique blocks. Those that were asked for have marks.
    """
    figure = new_figure(9, 5.4)
    axes = figure.add_subplot()
    ends: list[tuple[float, float, str, str]] = []
    marks = sorted(set(asked))
    for number, (name, ratios) in enumerate(curves.items()):
        shares, ink = sorted(ratios), colour(number)
        axes.plot(shares, [1 - ratios[share] for share in shares], color=ink, linewidth=1.6)
        axes.plot(marks, [1 - ratios[share] for share in marks], "o", color=ink, markersize=4)
        ends.append((shares[-1], 1 - ratios[shares[-1]], short(name), ink))
    floor = 1 - extent.hit_ratio(extent.best_hits)
    axes.axhline(floor, color="grey", linestyle="--", linewidth=1.0)
    axes.set_xscale("log")
    axes.set_xticks(marks, labels=[f"{share:g}\n{extent.capacity(share):,}" for share in marks])
    axes.minorticks_off()
    misses = [floor, *(1 - ratio for ratios in curves.values() for ratio in ratios.values())]
    margin = MARGIN * (max(misses) - min(misses)) or MARGIN
    axes.set_ylim(min(misses) - margin, max(misses) + margin)
    axes.annotate(
        "best possible",
        (0.0, floor),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        color="grey",
        fontsize=8,
    )
    axes.set_xlabel(
        f"cache size: share of the {extent.unique_blocks:,} unique blocks, and blocks of {block_tokens} tokens"
    )
    axes.set_ylabel("misses / block references")
    axes.set_title(short(title), parse_math=False)  # A file's name may have dollar signs.
    finish(axes)
    label_ends(axes, ends)
    save(figure, path)


def write_size_picture(path: str, report: SizeReport) -> None:
    """Draw the hit ratio and the time to first token over the size of the memory, one line a size of the disk."""
    figure = new_figure(12, 4.6)
    ratios, medians, tails = figure.subplots(1, 3)
    without = report.without_tiering_ttft_s
    disks = list(dict.fromkeys(cell.disk_bytes for cell in report.sizes))
    for number, disk_bytes in enumerate(disks):
        cells = sorted((c for c in report.sizes if c.disk_bytes == disk_bytes), key=lambda cell: cell.memory_bytes)
        memory = [cell.memory_bytes for cell in cells]
        label = f"{round_size(disk_bytes)} of disk" if disk_bytes else "no disk"
        for axes, values in (
            (ratios, [cell.hit_ratio for cell in cells]),
            (medians, [1e3 * cell.ttft_s.p50 for cell in cells]),
            (tails, [1e3 * cell.ttft_s.p99 for cell in cells]),
        ):
            axes.plot(memory, values, marker="o", markersize=4, color=colour(number), label=label)
    for axes, title, unit, level in (
        (ratios, "hit ratio", "hits / chunk references", report.best_hit_ratio),
        (medians, "p50 of the time to first token", "ms", 1e3 * without.p50),
        (tails, "p99 of the time to first token", "ms", 1e3 * without.p99),
    ):
        axes.axhline(level, color="grey", linestyle="--", label="best possible hit ratio; times without tiering")
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(unit)
        _over_memory(axes, [cell.memory_bytes for cell in report.sizes])
    handles, labels = ratios.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
    figure.suptitle(short(report.trace), parse_math=False)
    save(figure, path)


def _over_memory(axes: Axes, sizes: Sequence[int]) -> None:
    """Have the x axis be of bytes, with a mark at each size; the y axis begins at 0."""
    marks = sorted(set(sizes))
    axes.set_xscale("log")
    axes.set_xticks(marks, labels=[round_size(size) for size in marks], fontsize=8)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    if len(marks) > 6:
        axes.tick_params(axis="x", rotation=60)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axes.set_ylim(0.0, HEADROOM * (axes.get_ylim()[1] or 1.0))
    axes.set_xlabel("memory, logarithmic")
    finish(axes)
