"""The page that promises says which tests prove it."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_every_test_that_the_page_names_is_there() -> None:
    page = (REPOSITORY / "docs/explanation/fs-format.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    sources = [*(REPOSITORY / "tests/fs").glob("test_*.py"), REPOSITORY / "tests/test_lend.py"]
    defined = {name for source in sources for name in re.findall(r"def (test_\w+)", source.read_text())}
    assert named
    assert named - defined == set()
