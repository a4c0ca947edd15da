"""The charts and tables of the page on performance are those of its figures."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.docs import charts

PAGE = charts.ROOT / "docs" / "explanation" / "performance.md"
FIGURES = dict(charts.figures())
SCHEMES = [scheme.name for scheme in charts.SCHEMES]


@pytest.mark.parametrize("name", FIGURES)
def test_the_pages_table_is_that_of_its_figures(name: str) -> None:
    """`python -m tests.docs.charts tables` prints what should be there."""
    assert "\n\n" + "\n".join(FIGURES[name].table()) + "\n\n" in PAGE.read_text()


def test_the_page_shows_every_chart_in_both_schemes_and_leads_to_its_figures() -> None:
    page = PAGE.read_text()
    shown = re.findall(r"^!\[[^]]+\]\(\.\./assets/drawn/([\w-]+)-(\w+)\.svg#only-(\w+)\)$", page, re.MULTILINE)
    assert sorted(shown) == [(name, scheme, scheme) for name in FIGURES for scheme in sorted(SCHEMES)]
    assert set(re.findall(r"\(\.\./assets/performance/([\w-]+)\.json\)", page)) == set(FIGURES)


def test_every_chart_is_drawn_with_its_lines_axes_and_conditions_as_text(tmp_path: Path) -> None:
    drawn = charts.draw(tmp_path)
    assert [path.name for path in drawn] == [f"{name}-{scheme}.svg" for name in FIGURES for scheme in SCHEMES]
    for path in drawn:
        one = FIGURES[path.stem.rpartition("-")[0]]
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
