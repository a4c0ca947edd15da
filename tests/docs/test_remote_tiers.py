import re
from pathlib import Path

import pytest

from tests.remote.outcomes import OUTCOMES, Fault

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "remote-tiers.md"


@pytest.mark.parametrize("side", ["loads", "stores"])
def test_the_pages_table_is_the_suites(side):
    section = PAGE.read_text().partition(f"### {side.capitalize()}\n")[2].partition("\n#")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    assert head == ["fault", *(f"`{name}`" for name in OUTCOMES)]
    told = {row[0]: [set(re.findall(r"`(\w+)`", cell)) for cell in row[1:]] for row in rows}
    outcomes = {fault: [OUTCOMES[name][fault] for name in OUTCOMES] for fault in Fault}  # Text: not so, and why.
    words = {
        fault: [set() if isinstance(one, str) else getattr(one, side) for one in outcomes[fault]] for fault in Fault
    }
    assert told == words
