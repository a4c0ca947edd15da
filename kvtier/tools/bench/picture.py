"""The picture of a benchmark: its rows as bars beside their limit. Needs matplotlib; imported when asked for."""

# matplotlib leaves the types of its keyword arguments out:
# pyright: reportUnknownMemberType=false

from matplotlib.figure import Figure

from kvtier.tools.bench.figures import Figures
from kvtier.tools.bench.screen import label_of
from kvtier.tools.replay.outputs import picture_format, replacing

HEIGHT_A_ROW = 0.32  # Inches.


def write_figures_picture(path: str, figures: Figures) -> None:
    """Draw each row's ratio, its spread as a whisker, and the limit as a line at 1."""
    rows = figures.rows[::-1]  # The first on top.
    places = range(len(rows))
    figure = Figure(figsize=(10, 1.6 + HEIGHT_A_ROW * len(rows)), layout="constrained")
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
    with replacing(path) as file:
        figure.savefig(file, format=picture_format(path), dpi=150)
