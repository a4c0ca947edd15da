"""What all pictures share: colours, axes with units, labels at the ends of lines, and files."""

# matplotlib leaves the types of its keyword arguments out:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter, StrMethodFormatter

from kvtier.tools.outputs import picture_format, replacing

DOTS_PER_INCH = 150
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#888888")
"""Okabe and Ito's: told apart by people who do not see all colours, on white and on black."""
LABEL_GAP = 0.05  # Between two labels at the ends of lines, as a share of the picture's height.
LABEL_CHARACTERS_MAX = 24  # Of a name beside a line or a bar. The tables have the whole.
LEGEND_CHARACTERS = 80  # In a row above a picture of full width.


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def short(name: str) -> str:
    """Cut a name that somebody gave, so that no picture becomes as long as it."""
    plain = shown_text(name)
    return plain if len(plain) <= LABEL_CHARACTERS_MAX else f"{plain[: LABEL_CHARACTERS_MAX - 1]}…"


def shown_text(name: str) -> str:
    """Return a name as text: a file's name may have bytes that are none."""
    return name.encode("utf-8", "replace").decode()


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def finish(axes: Axes) -> None:
    """Give an axes its grid, and no frame where nothing ends."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def put_legend_above(axes: Axes) -> None:
    """Put it where it hides no line, in as many rows as it takes."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        width = max(len(label) for label in labels) + 6  # The line before each.
        columns = max(1, min(len(labels), LEGEND_CHARACTERS // width))
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, frameon=False, fontsize=8)


def milliseconds(axes: Axes) -> None:
    """Have the x axis be logarithmic, in milliseconds."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.12g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def bytes_per_s(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(EngFormatter(unit="B/s"))


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name (x, y, name, colour) beside its end; names that would overlap move apart."""
    low, high = axes.get_ylim()
    gap = LABEL_GAP * (high - low)
    placed = spread([y for _, y, _, _ in ends], gap, low, high)
    for (x, y, name, ink), place in zip(ends, placed, strict=True):
        axes.annotate(
            name,
            (x, y),
            xytext=(1.03, (place - low) / (high - low)),
            textcoords="axes fraction",
            color=ink,
            va="center",
            fontsize=9,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": ink, "alpha": 0.5, "lw": 0.8},
            parse_math=False,
        )


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places for labels: in the order of their values, at least a gap apart, and near them."""
    order = sorted(range(len(values)), key=values.__getitem__)
    places = [0.0] * len(values)
    below = low - gap
    for index in order:
        below = places[index] = max(values[index], below + gap)
    above = max(high, low + gap * (len(values) - 1)) + gap
    for index in reversed(order):
        above = places[index] = min(places[index], above - gap)
    return places


def save(figure: Figure, path: str) -> None:
    """Write a picture in the format that the file's name asks for."""
    with replacing(path) as file, _any_letters():
        figure.savefig(file, format=picture_format(path), dpi=DOTS_PER_INCH)


@contextmanager
def _any_letters() -> Generator[None]:
    """Let names have letters that the font lacks: the picture has boxes in their place, and no warning is shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield
