"""The charts and tables of the page on performance, from its figures in docs/assets/performance.

`python -m tests.docs.charts` draws each file of figures, and `python -m tests.docs.charts tables` prints the page's
tables. Ratios are those of `kvtier bench` and of the benchmarks: the median of the rounds, the lowest and the highest.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "assets" / "performance"
INCHES = (8.6, 2.8)  # Of a line of panels.
LEGEND_INCHES = 0.9
DODGE = 0.07  # Of a column's width, from one line to the next: whiskers stand side by side.
BAR = 0.38  # Of a group's width.
MARKERS = "os^D"
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16)


INK, FAINT = "#767d86", "#9aa1ab"  # On white and on a dark page alike, as all colours here.
LINES = ("#2f86cf", "#dd7a1c", "#1f9e74", "#b760a3")  # Told apart by the colour-blind, too.
STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), FAINT),
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # Letters stay letters, in the reader's own font.
    "svg.hashsalt": "kvtier",  # The same figures are the same file.
}

Spread = tuple[float, float, float]  # The median, the lowest, the highest.
Text = Annotated[str, msgspec.Meta(min_length=1)]


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """One comparison: of what, beside what, a ratio a column."""

    what: Text
    of: Text
    beside: Text
    ratios: list[Spread]


class Ratios(msgspec.Struct, forbid_unknown_fields=True):
    """Ratios over columns, such as lengths of chunks."""

    title: Text
    command: list[Text]
    conditions: dict[str, str | int]
    axis: Text
    scale: Text
    heads: dict[str, str]  # A row's fields, as the table calls them.
    columns: list[Text]
    panel_by: list[Text]  # Rows that are alike in these fields are in one panel,
    line_by: Text  # and each has a line that is called so.
    rows: list[Row]
    drawn: dict[str, str] = {}  # Only rows with these fields are.

    def table(self) -> list[str]:
        head = [*self.heads.values(), *self.columns]
        cells = [[getattr(row, name) for name in self.heads] + [*map(shown, row.ratios)] for row in self.rows]
        return table(head, cells)

    def panels(self) -> dict[str, list[Row]]:
        panels: dict[str, list[Row]] = {}
        for row in self.rows:
            if all(getattr(row, name) == value for name, value in self.drawn.items()):
                panels.setdefault(", ".join(getattr(row, name) for name in self.panel_by), []).append(row)
        return panels

    def draw(self) -> Figure:
        panels = self.panels()
        names = list(dict.fromkeys(getattr(row, self.line_by) for rows in panels.values() for row in rows))
        figure, all_axes = panelled(titled(self), len(panels), same_scale=True)
        for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
            axes.set_title(title, fontsize=10)
            axes.axhline(1.0, color=INK, linestyle="--", linewidth=1)
            for row in rows:
                name = getattr(row, self.line_by)
                self._draw_line(axes, row, name, names.index(name))
            axes.set_xticks(range(len(self.columns)), self.columns)
            axes.set_xlabel("length of a chunk", fontsize=9)
            self._scale(axes)
            if axes.get_subplotspec().is_first_col():
                axes.set_ylabel(self.axis, fontsize=9)
        put_legend_below(figure, all_axes)
        return figure

    def _draw_line(self, axes: Axes, row: Row, name: str, number: int) -> None:
        places = [column + DODGE * (number - 1) for column in range(len(self.columns))]
        medians = [median for median, _, _ in row.ratios]
        around = [[median - low for median, low, _ in row.ratios], [high - median for median, _, high in row.ratios]]
        colour, marker = LINES[number], MARKERS[number]
        axes.errorbar(places, medians, around, color=colour, marker=marker, label=name, capsize=2, linewidth=1.5)

    def _scale(self, axes: Axes) -> None:
        axes.set_yscale(self.scale)
        if self.scale == "linear":
            axes.set_ylim(bottom=0.0)
        else:
            axes.set_yticks(TICKS)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    """The same figure of two sides."""

    mix: Text
    what: Text
    kvtier: float
    vllm: float
    better_by: Spread


class Pairs(msgspec.Struct, forbid_unknown_fields=True):
    """Figures of two sides, in groups."""

    title: Text
    command: list[Text]
    conditions: dict[str, str | int]
    sides: dict[str, str]
    drawn: list[Text]  # Which figures have a panel.
    rows: list[Pair]

    def table(self) -> list[str]:
        cells = [[row.mix, row.what, number(row.kvtier), number(row.vllm), shown(row.better_by)] for row in self.rows]
        return table(["mix", "what", *self.sides.values(), "better by"], cells)

    def draw(self) -> Figure:
        figure, all_axes = panelled(titled(self), len(self.drawn), same_scale=False)
        for axes, what in zip(all_axes, self.drawn, strict=True):
            rows = [row for row in self.rows if row.what == what]
            for side, (name, label) in enumerate(self.sides.items()):
                places = [place + BAR * (side - 0.5) for place in range(len(rows))]
                figures = [getattr(row, name) for row in rows]
                bars = axes.bar(places, figures, BAR, color=LINES[side], label=label)
                axes.bar_label(bars, fmt="%.3g", fontsize=6, padding=1)
            axes.set_title(what, fontsize=10)
            axes.set_xticks(range(len(rows)), [row.mix for row in rows])
            axes.set_xlabel("mix of requests", fontsize=9)
            axes.set_ylabel(what.rpartition(", ")[2], fontsize=9)
        put_legend_below(figure, all_axes)
        return figure


def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table of Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


def shown(spread: Spread) -> str:
    median, low, high = spread
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def number(figure: float) -> str:
    """Write a figure as it is in the file."""
    return f"{figure:,}"


def titled(one: Ratios | Pairs) -> str:
    """Return what a picture says of itself: its title, and under which conditions its figures were measured."""
    return f"{one.title}\nMedians; {', '.join(f'{name}: {value}' for name, value in one.conditions.items())}"


def panelled(title: str, panels: int, *, same_scale: bool) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, in lines of three or of two, and room for a legend below."""
    columns = 2 if panels == 4 else min(panels, 3)
    lines = -(-panels // columns)
    width, height = INCHES
    figure = Figure(figsize=(width, lines * height + LEGEND_INCHES), layout="constrained")
    figure.suptitle(title, fontsize=10)
    all_axes = list(figure.subplots(lines, columns, sharey=same_scale, squeeze=False).flat)
    for unused in all_axes[panels:]:
        unused.remove()
    for axes in all_axes[:panels]:
        axes.set_axisbelow(True)
        axes.grid(alpha=0.4, axis="y")
        axes.margins(y=0.12)
        axes.tick_params(labelsize=8, labelleft=True)
    return figure, all_axes[:panels]


def put_legend_below(figure: Figure, all_axes: Sequence[Axes]) -> None:
    handles: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def figures() -> Iterator[tuple[str, Ratios | Pairs]]:
    """Yield the figures of every file, by its name."""
    for path in sorted(FIGURES.glob("*.json")):
        given = json.loads(path.read_text())
        yield path.stem, msgspec.convert(given, Pairs if "sides" in given else Ratios)


def digest(name: str) -> str:
    """Return the digest of a file of figures. Its chart has it, too, so an older chart can be told."""
    return hashlib.sha256((FIGURES / f"{name}.json").read_bytes()).hexdigest()


def draw(folder: Path) -> list[Path]:
    """Draw every file of figures; return what was written."""
    drawn: list[Path] = []
    for name, one in figures():
        drawn.append(folder / f"{name}.svg")
        with mpl.rc_context(STYLE):
            one.draw().savefig(drawn[-1], transparent=True, metadata={"Date": None, "Source": digest(name)})
    return drawn


if __name__ == "__main__":
    if sys.argv[1:] == ["tables"]:
        sys.stdout.writelines("\n".join([*one.table(), "", ""]) for _, one in figures())
    else:
        draw(FIGURES)
