"""The tables of the page on performance are those of its figures in docs/assets/performance.

    .venv/bin/python -m tests.docs.test_figures

prints them. A file's `only` names the rows that the page shows. Ratios are those of `kvtier bench` and of the
benchmarks: the median of the rounds, the lowest and the highest.
"""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = {path.stem: json.loads(path.read_text()) for path in (ROOT / "docs/assets/performance").glob("*.json")}
PAGE = (ROOT / "docs" / "explanation" / "performance.md").read_text()


def table(figures):
    """Yield the lines of a table of Markdown: of two sides' figures, or of medians by a chunk's length."""
    only = figures.get("only", {})
    rows = [row for row in figures["rows"] if all(row[name] in kept for name, kept in only.items())]
    if "sides" in figures:
        head = ["mix", "what", *figures["sides"].values(), "better by"]
        cells = [
            [row["mix"], row["what"], f"{row['kvtier']:,}", f"{row['vllm']:,}", shown(row["better_by"])] for row in rows
        ]
    else:
        names = [name for name in figures["heads"] if len({row[name] for row in rows}) > 1]
        head = [*(figures["heads"][name] for name in names), *figures["columns"]]
        cells = [[row[name] for name in names] + [f"{median:.2f}" for median, _, _ in row["ratios"]] for row in rows]
    yield from (f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))


def shown(spread):
    median, low, high = spread
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


@pytest.mark.parametrize("name", FIGURES)
def test_the_pages_table_is_that_of_its_figures(name):
    assert "\n\n" + "\n".join(table(FIGURES[name])) + "\n\n" in PAGE


def test_the_page_leads_to_the_file_of_every_table():
    assert set(re.findall(r"\(\.\./assets/performance/([\w-]+)\.json\)", PAGE)) == set(FIGURES)


if __name__ == "__main__":
    sys.stdout.writelines("\n".join([*table(each), "", ""]) for each in FIGURES.values())
