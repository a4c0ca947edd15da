"""Pictures of benchmarks: one panel for each limit, in which bars say how near to it every operation comes."""

# pyright: reportUnknownMemberType=false

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from kvtier.tools.bench.figures import Figures, Row, beside_each_other, common_settings, shown
from kvtier.tools.pictures.drawing import colour, finish, new_figure, put_legend_above, save, short, shown_text

BARS_MAX = 48  # Of one panel: more are a wall. The tables have all.
TICK_CHARACTERS_MAX = 56
INCHES_A_BAR = 0.24
INCHES_A_PANEL = 1.1  # For its title, its axis and the room between.
WIDTH = 8.6
ROOM = 4.0  # Beside the bars, for what is written there: the axis goes so many times further than the longest.


class Bar(NamedTuple):
    """A row of some run."""

    run: int
    row: Row


def write_figures_picture(path: str, figures: Figures) -> None:
    """Draw each row's part of its limit, its spread as a whisker, and the figure itself beside it."""
    machine = figures.machine
    panels = panels_of({"": figures})
    bars = [sum(map(len, groups.values())) for groups in panels.values()]
    heights = [INCHES_A_PANEL + INCHES_A_BAR * count for count in bars]
    figure = new_figure(WIDTH, 0.7 + sum(heights))
    figure.suptitle(
        f"{figures.command}: {machine.processor}, {machine.processors} processors, "
        f"load {machine.load_before[0]:.2f} to {machine.load_after[0]:.2f}\n"
        f"{', '.join(common_settings(figures.rows).values())}".rstrip(),
        fontsize=9,
        parse_math=False,
    )
    if panels:
        every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (limit, groups) in zip(every, panels.items(), strict=True):
            _draw_panel(axes, groups, [""])
            axes.set_title(f"beside {limit}", fontsize=10, loc="left", parse_math=False)
    save(figure, path)


def limit_panels(runs: Mapping[str, Figures]) -> Iterator[tuple[str, Figure]]:
    """Yield a picture for each limit, with its name: the bars of several runs stand beside each other."""
    for limit, groups in panels_of(runs).items():
        bars = sum(map(len, groups.values()))
        figure = new_figure(WIDTH, INCHES_A_PANEL + 0.25 * (len(runs) > 1) + INCHES_A_BAR * bars)
        _draw_panel(figure.subplots(), groups, list(runs))
        yield limit, figure


def panels_of(runs: Mapping[str, Figures]) -> dict[str, dict[str, list[Bar]]]:
    """Return bars by limit and label: for each label one of each run that has it."""
    numbers = {name: number for number, name in enumerate(runs)}
    return {
        limit: {
            label: [Bar(numbers[name], row) for name, row in rows.items()]
            for label, rows in list(lines.items())[: max(1, BARS_MAX // len(runs))]
        }
        for limit, lines in beside_each_other(runs).items()
    }


def _draw_panel(axes: Axes, groups: Mapping[str, Sequence[Bar]], runs: Sequence[str]) -> None:
    place, ticks = 0, list[float]()
    for bars in groups.values():
        for bar in bars:
            _draw_bar(axes, place, bar)
            place += 1
        ticks.append(place - (len(bars) + 1) / 2)
    for number, name in enumerate(runs):
        if len(runs) > 1:
            axes.barh([0], [0], left=1.0, color=colour(number), label=short(name))
    axes.axvline(1.0, color="black", linewidth=1.0)
    axes.set_xscale("log")
    ratios = [each for bars in groups.values() for bar in bars for each in bar.row.spread if each > 0]
    axes.set_xlim(min([0.5, *ratios]) / ROOM, max([2.0, *ratios]) * ROOM)
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(ticks, list(map(_tick, groups)), fontsize=8, parse_math=False)
    axes.set_ylim(place - 0.4, -0.6)
    axes.set_xlabel("part of the limit, logarithmic: 1 is at the limit, right of it is better", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    finish(axes)
    put_legend_above(axes)


def _tick(label: str) -> str:
    """Cut a label in its middle: at its end is the chunk size."""
    if len(label) > TICK_CHARACTERS_MAX:
        label = f"{label[: TICK_CHARACTERS_MAX // 2]}…{label[1 - TICK_CHARACTERS_MAX // 2 :]}"
    return shown_text(label)


def _draw_bar(axes: Axes, place: int, bar: Bar) -> None:
    """Draw a bar from the limit to the ratio: rightwards where it is better, with its figure behind it."""
    row = bar.row
    if row.ratio <= 0:
        return
    axes.barh([place], [row.ratio - 1.0], left=1.0, height=0.72, color=colour(bar.run), alpha=0.85)
    low, high = (max(each, 1e-6) for each in row.spread)
    axes.plot([low, high], [place, place], color="0.5", linewidth=1.2, marker="|", markersize=5)
    better = row.ratio >= 1.0
    axes.annotate(
        f"{shown(row.figure)} {row.unit}",
        (max(1.0, high) if better else min(1.0, low), place),
        xytext=(5 if better else -5, 0),
        textcoords="offset points",
        ha="left" if better else "right",
        va="center",
        fontsize=7.5,
    )
