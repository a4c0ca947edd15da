"""The page on compatibility says what the code says of versions, and each file and test that it names is there."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORDS = ("tried", "expected", "refused", "not there", "yes", "until", "[not yet]", "calls checked")


def rows(heading):
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.endswith("shows it |")]


def known_to_the_door_of(engine):
    """Return the versions of an LLM engine that kvtier was tried with, without that engine."""
    module = ast.parse((ROOT / "kvtier" / "integrations" / engine.lower() / "signatures.py").read_text())
    (known,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TRIED_VERSIONS"
    )
    return ast.literal_eval(known)


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_the_versions_of_an_llm_engine_are_those_that_kvtier_knows(engine):
    known = known_to_the_door_of(engine)
    assert [version for version, word, _ in rows(engine) if re.match(r"\d", version)] == list(known)
    states = [row[:2] for row in rows(engine)]
    assert ["any other", "refused"] in states
    assert ["any other with the same signatures", "expected"] in states


def test_the_oldest_python_is_that_of_the_package():
    least = PROJECT["requires-python"].removeprefix(">=")
    refused = f"{least.rpartition('.')[0]}.{int(least.rpartition('.')[2]) - 1} and earlier"
    assert [row[:2] for row in rows("Python")][:2] == [[refused, "refused"], [least, "tried"]]


def test_the_oldest_torch_is_that_of_the_extra():
    (asked,) = PROJECT["optional-dependencies"]["torch"]
    assert f"torch {asked.removeprefix('torch>=')} and later" in [row[0] for row in rows("torch and CUDA")]


def test_each_row_says_how_much_is_known_and_what_shows_it():
    tables = re.findall(r"^\|(?!-)(.*)\|$", PAGE, re.MULTILINE)
    assert all(len(row.split("|")) in (2, 3, 4) for row in tables)
    for heading in ("Operating system and processor", "Python", "vLLM", "SGLang", "torch and CUDA", "File systems"):
        for row in rows(heading):
            assert row[1].startswith(WORDS), row
            assert row[1] != "tried" or row[2], row
