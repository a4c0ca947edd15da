"""The page on failures names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "failure-modes.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 20
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_failure_names_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [line.split("|")[1:-1] for line in rows]
    assert all("tests/" in row[3] for row in cells if row[0].strip() not in {"failure", "---"})
