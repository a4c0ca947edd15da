"""Every warning and every error leads to the section of the page on troubleshooting that says what to do about it."""

import ast
import pickle
import re
import traceback
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown.extensions.toc import slugify
from markdown_it import MarkdownIt

import kvtier.errors
from kvtier.errors import ChunkMissing, KVTierError, Remedy
from kvtier.tools.commands import COMMANDS, run
from tests.docs import readme

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "how-to" / "troubleshooting.md"
SHIPPED = [path for package in ("kvtier", "backends") for path in sorted((ROOT / package).rglob("*.py"))]
LOUD = {"warn", "warning", "error", "exception", "critical", "fatal", "log"}
ERRORS = [error for error in vars(kvtier.errors).values() if isinstance(error, type) and issubclass(error, KVTierError)]


class Said(NamedTuple):
    """One place in the code that says a warning or an error."""

    where: str
    text: str  # With its `%s`.
    last: str  # Its last argument, as written.


def said():
    for path in SHIPPED:
        module = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: node.value.value
            for node in module.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(module):
            if is_loud(node):
                texts = node.args[1:] if node.func.attr == "log" else node.args
                first = texts[0]
                text = first.value if isinstance(first, ast.Constant) else constants.get(getattr(first, "id", ""), "")
                last = ast.unparse(texts[-1])
                if last != "remedy":  # Of a call's log, which is given it.
                    yield Said(f"{path.relative_to(ROOT)}:{node.lineno}", str(text), last)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "line":
                yield Said(f"{path.relative_to(ROOT)}:{node.lineno}", "; see %s", ast.unparse(node.args[-1]))


def warned():
    for path in SHIPPED:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "warn":
                yield from re.findall(r"Remedy\.[A-Z_]+", ast.unparse(node))


def is_loud(node):
    """Return True for a call of a logger, by whatever name; `math.log` and a task's `exception()` are not."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOUD):
        return False
    return bool(node.args) and ast.unparse(node.func.value) != "math"


SAID = list(said())


def headings(level):
    tokens = MarkdownIt().parse(FILE.read_text())
    return [text.content for mark, text in pairwise(tokens) if (mark.tag, mark.nesting) == (level, 1)]


def test_every_warning_and_error_that_is_logged_ends_with_where_to_read_on():
    assert len(SAID) > 40, "the code is not seen"
    wrong = [one for one in SAID if not (one.text.endswith("; see %s") and re.fullmatch(r"Remedy\.[A-Z_]+", one.last))]
    assert wrong == []
    assert {one.last.removeprefix("Remedy.") for one in SAID} <= set(Remedy.__members__)


@pytest.mark.parametrize("error", ERRORS)
def test_every_public_error_has_a_remedy_that_a_traceback_ends_with_and_its_text_does_not(error):
    assert "remedy" in vars(error), "its own, and not its base's"
    raised = error("row 7: no")
    assert (str(raised), traceback.format_exception(raised)[-1]) == ("row 7: no", f"see {raised.remedy}\n")
    raised.add_note("and more")
    again = pickle.loads(pickle.dumps(raised))
    assert again.__notes__ == raised.__notes__ == [f"see {raised.remedy}", "and more"]
    assert error("another").__notes__ == [f"see {raised.remedy}"]


def test_an_outcome_that_nobody_shows_has_no_address():
    outcome = ChunkMissing("gone")
    assert (str(outcome), vars(outcome)) == ("gone", {})


def test_the_page_has_a_section_for_every_remedy_and_no_other():
    there = headings("h3")
    assert sorted(map(readme.anchor, there)) == sorted(remedy.value for remedy in Remedy)
    assert [readme.anchor(one) for one in there] == [slugify(one, "-") for one in there], "as our own pages name them"
    assert max(Counter(map(readme.anchor, [*there, *headings("h2"), *headings("h1")])).values()) == 1


def test_every_remedy_is_one_of_something_that_is_said():
    used = {one.last for one in SAID} | {f"Remedy.{error.remedy.name}" for error in ERRORS} | set(warned())
    assert {f"Remedy.{remedy.name}" for remedy in Remedy} == used


@pytest.mark.parametrize("remedy", Remedy)
def test_help_shows_a_remedys_section_without_addresses(remedy, capsys):
    assert f"{remedy}" == f"kvtier help {remedy.value}"
    assert run(["help", remedy.value]) == 0
    heading, _, text = capsys.readouterr().out.partition("\n")
    assert (readme.anchor(heading), "](" in text, bool(text.strip())) == (remedy.value, False, True)


def test_help_lists_all_codes_and_refuses_others(capsys):
    assert run(["help"]) == 0
    assert set(capsys.readouterr().out.split()) == {remedy.value for remedy in Remedy}
    assert run(["help", "nothing"]) == 2
    assert capsys.readouterr().err == "kvtier: 'nothing': no such code; `kvtier help` lists all\n"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_help_of_every_command_ends_with_how_to_read_on(name, capsys):
    assert run([*name.split(), "--help"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("Remedies for each message: kvtier help CODE")
