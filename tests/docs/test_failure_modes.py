"""The page on failures names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "failure-modes.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 20
    for path, name in named:
        assert re.search(rf"^ *(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_failure_names_a_test() -> None:
    tables = re.findall(r"^\| failure \|.*\n\|---.*\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    rows = [line.split("|")[1:-1] for table in tables for line in table.splitlines()]
    assert len(rows) > 100
    assert [cells[0] for cells in rows if "tests/" not in cells[3]] == []
