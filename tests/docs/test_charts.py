"""The charts and tables of the page on performance are those of its figures."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs import charts

PAGE = charts.ROOT / "docs" / "explanation" / "performance.md"
FIGURES = dict(charts.figures())


@pytest.mark.parametrize("name", FIGURES)
def test_the_pages_table_is_that_of_its_figures(name: str) -> None:
    """`python -m tests.docs.charts tables` prints what should be there."""
    assert "\n\n" + "\n".join(FIGURES[name].table()) + "\n\n" in PAGE.read_text()


def test_the_page_shows_every_chart_and_leads_to_its_figures() -> None:
    named = re.findall(r"\(\.\./assets/performance/([\w-]+)\.(\w+)\)", PAGE.read_text())
    assert sorted(named) == sorted((name, kind) for name in FIGURES for kind in ("json", "svg"))


@pytest.mark.parametrize("name", FIGURES)
def test_the_chart_is_drawn_from_these_figures(name: str) -> None:
    """`python -m tests.docs.charts` draws it again."""
    (source,) = ET.parse(charts.FIGURES / f"{name}.svg").iter("{http://purl.org/dc/elements/1.1/}source")
    assert source.text == charts.digest(name)


def test_a_chart_has_its_lines_axes_and_conditions_as_text(tmp_path: Path) -> None:
    for path in charts.draw(tmp_path):
        one = FIGURES[path.stem]
        texts = ["".join(text.itertext()) for text in ET.parse(path).iter() if text.tag.endswith("text")]
        assert words_of(one) - set(texts) == set(), path.name
        assert all(f"{name}: {value}" in " ".join(texts) for name, value in one.conditions.items()), path.name


def words_of(one: charts.Ratios | charts.Pairs) -> set[str]:
    """Return what a chart has to name: its axes, its panels, its lines or bars."""
    if isinstance(one, charts.Pairs):
        return {"mix of requests", *one.drawn, *one.sides.values(), *(row.mix for row in one.rows)}
    panels = one.panels()
    lines = {getattr(row, one.line_by) for rows in panels.values() for row in rows}
    return {one.axis, "length of a chunk", *one.columns, *panels, *lines}
