"""The page of a report: sections of words, tables and pictures, as one file of HTML.

Nothing in it asks a network, and nothing in it is a script: pictures are SVG within the page, and the page's own policy
forbids all else. Names of traces and tiers come from others, so every text is escaped, and pictures are images, whose
text is shapes.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import jinja2
from matplotlib.figure import Figure

from kvtier import __version__
from kvtier.tools.outputs import replacing
from kvtier.tools.pictures import svg

FIGURE_CHARACTERS_MAX = 32
TEMPLATE = "page.html"
ALONE = "value"  # The heading of a run that has no other beside it.


class Table(NamedTuple):
    """Rows of words. The first cell names its row; rows that differ between runs are marked."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()
    wordy: bool = False  # Whether cells are words rather than numbers.


class Picture(NamedTuple):
    """A picture, and what it shows: for people who do not see it, too."""

    caption: str
    source: str


class Section(NamedTuple):
    """One part of the page, with a heading."""

    title: str
    words: Sequence[str] = ()
    warnings: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    wide: bool = False  # Whether its pictures are wide ones, with nothing beside them.

    @property
    def anchor(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.title.lower())


class Page(NamedTuple):
    """All that is told."""

    title: str
    subtitle: str
    sections: Sequence[Section]


def write_page(path: str, page: Page) -> None:
    """Write a page as one file, which appears when it is whole."""
    text = _template().render(page=page, version=__version__)
    with replacing(path) as file:
        file.write(text.encode("utf-8", "replace"))  # A file's name may have bytes that are no text.


@cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("kvtier.tools.report", ".")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["unbroken"] = unbroken
    return environment.get_template(TEMPLATE)


def unbroken(cell: str) -> str:
    """Keep a figure and its unit on one line; what is longer than a figure is a name."""
    return "\n".join(
        line if len(line) > FIGURE_CHARACTERS_MAX else line.replace(" ", "\N{NO-BREAK SPACE}")
        for line in cell.split("\n")
    )


def picture(caption: str, figure: Figure) -> Picture:
    return Picture(caption, f"data:image/svg+xml;base64,{base64.b64encode(svg(figure)).decode()}")


def side_by_side(runs: Mapping[str, Mapping[str, str]], *, wordy: bool = False) -> Table:
    """Return a table with a column for each run, of what is told of each by name. Rows that differ are marked."""
    names = list(dict.fromkeys(name for told in runs.values() for name in told))
    rows = [[name, *(told.get(name, "") for told in runs.values())] for name in names]
    marked = frozenset(number for number, (_, *cells) in enumerate(rows) if len(set(cells)) > 1)
    return Table(["", *headings(runs)], rows, marked, wordy)


def headings(runs: Iterable[str]) -> list[str]:
    return [name or ALONE for name in runs]


def change(value: float, first: float) -> str:
    """Write by how much a value differs from the first run's."""
    return f" ({100 * (value / first - 1):+,.1f} %)" if first and value != first else ""
