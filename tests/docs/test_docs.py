"""The pages do what they say: their code runs, their files decode, their tables name what there is.

A page is one story, in a folder of its own: its blocks run in order. A block with a title is a file, written under that
name; Python without a title runs in one namespace a page; shell blocks run `kvtier` and `python`. A block of the class
`output` is what the shell block before it prints. In it, a figure behind a `~` differs from run to run, and `…` stands
for lines. Commands of the checkout itself (`make …`) are run by `.ci/run`; here only their names are checked, unless
the page shows what they print.
"""

import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

import kvtier.errors
from kvtier.config import EngineConfig, tier_options
from kvtier.engine.answers import EventKind
from kvtier.engine.metrics import TRANSFER_SECONDS, WAIT_SECONDS, described
from kvtier.policies import known_policies
from kvtier.runner.messages import Code
from kvtier.settings import decode, option_fields
from kvtier.testing import conformance
from kvtier.tools import statuses
from kvtier.tools.commands import COMMANDS
from kvtier.tools.options import COMMON, JSON
from kvtier.tools.replay.replay_command import rooted
from tests.docs.tables import built, hooks
from tests.docs.test_remedies import ERRORS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
VARYING = r"[\d.,]+"  # A figure.
DIAGRAMS = ("flowchart", "sequenceDiagram", "stateDiagram-v2")
COMMANDS_OF_THE_CHECKOUT = ("make", "git", "pip", "cd", "vllm")  # Tests inside vLLM run those of vLLM.
BIN = os.path.dirname(sys.executable)
MAKE_HERE = f"make --directory {ROOT} --old-file .venv/.installed BIN={BIN} DEMO=$PWD/demo"
"""`make` with the interpreter that runs the tests, and with its results in the page's folder."""


class Block(NamedTuple):
    page: Path
    line: int  # Of its first line of code, from 1.
    language: str
    title: str  # Of a file; else empty.
    text: str
    is_output: bool  # Of the block of commands before it.

    @property
    def where(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self):
        return [line.split()[0] for line in self.text.splitlines() if line.strip() and line[0] not in " #"]

    @property
    def of_the_checkout(self):
        return any(one in COMMANDS_OF_THE_CHECKOUT or one.startswith(("tests/", ".venv")) for one in self.commands)


NOTHING = Block(ROOT, 0, "text", "", "", is_output=False)


def blocks(page):
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence" and token.map is not None:
            language, _, rest = token.info.strip("{. }").partition(" ")
            title = re.search(r'title="([^"]+)"', rest)
            is_output = ".output" in rest.split()
            yield Block(page, token.map[0] + 2, language, title[1] if title else "", token.content, is_output)


def run_shell(block, folder):
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", re.sub(r"^make\b", MAKE_HERE, block.text, flags=re.MULTILINE)],
        cwd=folder,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, f"{block.where}: exit status {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def assert_prints(shown, printed):
    """Compare a sample with what its commands print. A column is as wide as its widest figure: spaces do not count."""
    rest = "\n".join(map(one_spaced, printed.splitlines()))
    for passage in re.split(r"^…$", shown.text, flags=re.MULTILINE):
        wanted = "\n".join(map(pattern, passage.strip().splitlines()))
        found = re.search(rf"^{wanted}$", rest, re.MULTILINE)
        assert found, f"{shown.where} shows\n{passage}\nand the command prints\n{printed}"
        rest = rest[found.end() :]


def pattern(line):
    return VARYING.join(map(re.escape, re.split(f"~{VARYING}", one_spaced(line))))


def one_spaced(line):
    return " ".join(line.split())


def decode_configuration(block, table):
    """Decode a configuration as a replay would; what a fragment leaves out is made up."""
    config = decode(EngineConfig, {"cpu_bytes_to_use": "1GiB", "chunk_bytes": "1MiB", **table}, block.where)
    for index, tier in enumerate(rooted(config, "tier", override=False).secondary_tiers):
        if ":" not in tier.type:
            tier_options(tier, f"{block.where} secondary_tiers[{index}]")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_code_of_a_page_runs(outside, page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__page__"}
    printed = ""
    for block, following in pairwise([*blocks(page), NOTHING]):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        match block.language:
            case "python" if block.title:
                compile(block.text, block.where, "exec")
            case "python":
                exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), namespace)
            case "sh":
                if following.is_output or not block.of_the_checkout:
                    if block.of_the_checkout and shutil.which("make") is None:
                        pytest.skip("make is not installed")
                    printed = run_shell(block, tmp_path)
            case "text" if block.is_output:
                assert_prints(block, printed)
            case "toml":
                table = tomllib.loads(block.text)
                if "project" not in table:
                    decode_configuration(block, table)
            case "json":
                json.loads(block.text)
            case "promql":
                pass  # Asked of an engine's metrics and of Prometheus, in tests/monitoring.
            case "mermaid":
                assert block.text.split(maxsplit=1)[0] in DIAGRAMS, f"{block.where}: no diagram that mermaid knows"
            case other:
                assert other == "text", f"{block.where}: a block of {other!r} is not checked by anything"


def test_the_page_on_backends_shows_the_example_as_it_is():
    (shown, *_) = [block.text for block in blocks(DOCS / "how-to" / "write-a-backend.md") if block.title]
    assert (ROOT / "examples" / "write_a_backend.py").read_text().partition('"""\n\n')[2] == shown


def test_a_page_only_names_commands_that_the_checkout_has():
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= rules, page
        lanes = re.findall(r"(?:^|[` ])(tests/[a-z]+/(?:run|setup))\b", text, re.MULTILINE)
        assert all(os.access(ROOT / lane, os.X_OK) for lane in lanes), page


def test_the_page_on_contributing_lists_what_ci_runs():
    script = (ROOT / ".ci" / "run").read_text()
    phases = re.findall(r"^(?:phase|begin) ((?:make|tests/).*)$", script, re.MULTILINE)
    texts = [block.text for block in blocks(DOCS / "how-to" / "contribute.md")]
    (listed,) = [text for text in texts if text.startswith("make setup\n")]
    assert listed.splitlines() == phases
    begun, finished = (re.findall(rf"^{word} (\S.*)$", script, re.MULTILINE) for word in ("begin", "finish"))
    assert sorted(begun) == sorted(finished)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_reads_its_rules_and_lists_them(outside):
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rules = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in done.stdout.splitlines()] == rules


def test_no_page_holds_a_merges_marks():
    assert [name for name in NAMES if re.search(r"^(<{7}|>{7}) ", (ROOT / name).read_text(), re.MULTILINE)] == []


def test_every_test_that_a_page_names_exists():
    modules = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "kvtier" / "testing").rglob("*.py")]
    there = {name for module in modules for name in re.findall(r"def (test_\w+)", module.read_text())}
    text = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"`(test_\w+)`", text)) - there == set()
    named = {(ROOT / path, name) for path, name in re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", text)}
    assert named
    assert [path for path, _ in named if not path.exists()] == []
    assert [(path, name) for path, name in named if name and f"def {name}(" not in path.read_text()] == []
    assert set(re.findall(r"`(\w+Conformance)`", text)) <= vars(conformance).keys()


def section_of(text, heading):
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"no section {heading!r}"
    return found[1]


def first_cells(text):
    return {name for cell in re.findall(r"^\| `([^|]+)` \|", text, re.MULTILINE) for name in cell.split("`, `")}


@pytest.mark.parametrize(
    ("page", "heading", "there"),
    [
        ("reference/configuration.md", "Eviction policies", set(known_policies())),
        ("reference/api.md", "Errors", {error.__name__ for error in ERRORS}),
        ("how-to/troubleshooting.md", "Reasons", {code.name.lower() for code in Code}),
        ("reference/events.md", "Kinds", {kind.value for kind in EventKind}),
    ],
)
def test_a_page_names_everything_that_there_is(page, heading, there):
    assert first_cells(section_of((DOCS / page).read_text(), heading)) == there


def test_the_built_page_on_configuration_has_every_option_of_every_tier():
    options = {name for struct in hooks.STRUCTS.values() for name in option_fields(struct)}
    page = built("configuration.md")
    assert options - first_cells(page) == set()
    assert [name for name, struct in hooks.STRUCTS.items() if hooks.options_of(struct) not in page] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_built_pages_have_every_command_with_its_options_and_its_json(name):
    options = {param.opts[0] for param in hooks.command_named(name).params if param.opts[0].startswith("--")}
    common = {f"--{option}" for option in COMMON}
    section = section_of(built("cli.md"), f"kvtier {name}")
    assert options - common == {one for one in first_cells(section) if one.startswith("--")}
    assert first_cells(section_of(built("cli.md"), "Options of every command")) >= common
    if name != "simulate":  # Its JSON is that of `replay`.
        assert (f"[JSON Schema]({hooks.schema_name(name)})" in built("json.md")) == (JSON in options)


def test_the_built_page_on_metrics_has_every_metric():
    found = {name + ("_total" if metric.kind == "counter" else "") for name, metric, _ in described()}
    found |= {TRANSFER_SECONDS.name, WAIT_SECONDS.name}
    named = {name for name in first_cells(built("metrics.md")) if name.startswith("kvtier_")}
    assert {
        name for name in named if not name.startswith("kvtier_keeper_")
    } == found  # Those `kvtier serve` has itself.


@pytest.mark.parametrize("page", ["cli.md", "configuration.md", "json.md", "metrics.md"])
def test_every_row_of_a_built_table_has_a_meaning(page):
    assert re.findall(r"^.*\|\s*\|$", built(page), re.MULTILINE) == []


def test_a_schema_has_the_meaning_of_every_field():
    schema = hooks.schema(hooks.REPORTS["du"])
    described_fields = schema["$defs"]["DirectoryUsage"]["properties"]
    assert described_fields["left_out"]["description"] == "Files and folders that could not be read."


def test_a_table_that_no_code_has_fails_the_build():
    with pytest.raises(ValueError, match="no table has this name"):
        hooks.on_page_markdown("[Options of nothing](../../kvtier/config.py)")
    with pytest.raises(ValueError, match="it is in"):
        hooks.on_page_markdown("[Limits of a tier](../../kvtier/errors.py)")


def test_the_command_line_page_names_every_exit_status():
    known = {str(value) for name, value in vars(statuses).items() if name.isupper()}
    assert {status for status in first_cells(section_of(built("cli.md"), "Exit status")) if status.isdecimal()} == known


def test_the_api_page_leads_to_every_public_name_and_to_nothing_that_is_not_there():
    text = (DOCS / "reference" / "api.md").read_text()
    led_to = re.findall(r"^ *::: ([\w.]+)$", text, re.MULTILINE)
    for name in led_to:
        assert pkgutil.resolve_name(name) is not None, name
    named = {*re.findall(r"`(\w+)`", text), *(name.rpartition(".")[2] for name in led_to)}
    assert set(kvtier.__all__) - {"__version__"} <= named
