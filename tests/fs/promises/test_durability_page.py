"""The pages that promise say which tests prove it."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_every_test_that_the_page_names_is_there() -> None:
    page = (REPOSITORY / "docs/explanation/durability.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    suites = set(re.findall(r"`(\w+Conformance)`", page))
    sources = [source.read_text() for source in (REPOSITORY / "tests").rglob("test_*.py")]
    shipped = [source.read_text() for source in (REPOSITORY / "kvtier/testing/conformance").glob("*.py")]
    defined = {name for source in sources for name in re.findall(r"def (test_\w+)", source)}
    assert named
    assert named - defined == set()
    assert suites - {name for source in shipped for name in re.findall(r"class (\w+)", source)} == set()
