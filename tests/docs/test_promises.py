"""Each row of the page on failures has a test that is marked with it, and each mark is a row."""

import re

from tests.docs.tables import DOCS, hooks

PAGE = (DOCS / "explanation" / "failure-modes.md").read_text()
ROWS = [row for table in hooks.FAILURES.findall(PAGE) for row in table.splitlines()[2:]]


def test_each_failure_is_proved_by_a_test_and_each_marked_test_proves_one():
    failures = [hooks.failure_of(row) for row in ROWS]
    assert len(set(failures)) == len(failures) > 50
    assert set(failures) == hooks.promises().keys()


def test_the_built_page_shows_the_tests_of_each_failure():
    built = hooks.on_page_markdown(PAGE)
    places = re.findall(r"^\| .*? \| (`[\w/]+\.py:\d+`(?: `[\w/]+\.py:\d+`)*) \|$", built, re.MULTILINE)
    assert [place.strip("`").split("` `") for place in places] == [
        hooks.promises()[hooks.failure_of(row)] for row in ROWS
    ]
