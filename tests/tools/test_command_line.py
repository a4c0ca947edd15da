"""The command line: help, options of every command, examples that run, JSON that fits its schema, completion."""

import json
import logging
import os
import re
import shlex
import subprocess
import sys

import jsonschema
import msgspec
import pytest

import kvtier
from kvtier.testing.conformance.lender import keys_of
from kvtier.tools.commands import COMMANDS, GROUPS
from kvtier.tools.options import JSON
from tests.docs.tables import hooks
from tests.tools.command import KVTIER
from tests.tools.command import run as run_command
from tests.tools.replay.written import write_prompts

CONFIG = """
cpu_bytes_to_use = "1MiB"
chunk_bytes = "16KiB"
[[secondary_tiers]]
type = "fs"
name = "disk"
root = "tier"
"""
LONE = ("top", "selftest", "serve")  # A live engine, a GPU and a service have tests of their own.
EXAMPLES = [(name, example) for name, command in COMMANDS.items() if name not in LONE for example in command.examples]


@pytest.fixture
def place(root, store, monkeypatch):
    store(keys_of(8))
    monkeypatch.chdir(root.parent)
    (root.parent / "kvtier.toml").write_text(CONFIG)
    write_prompts(root.parent / "trace.jsonl", map(range, range(1, 6)), every_ms=1_000)
    return root.parent


@pytest.mark.parametrize("name", ["", *GROUPS, *COMMANDS])
def test_every_help_shows_the_usage_and_examples_and_h_is_short_for_it(run, name):
    status, out = run(*name.split(), "--help")
    assert (status, out.lstrip().startswith(f"Usage: kvtier {name}")) == (0, True)
    examples = out.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert examples
    assert all(line.startswith("    kvtier ") for line in examples)
    assert run(*name.split(), "-h") == (0, out)


def test_the_help_lists_the_commands_and_imports_none_of_them(outside):
    script = (
        "import sys; from kvtier.tools.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print([m for m in ('torch', 'numpy', 'matplotlib', 'kvtier.tools.replay') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.endswith("[]\n")
    summaries = [command.summary for name, command in COMMANDS.items() if " " not in name]
    assert all(summary in answer.stdout for summary in (*summaries, *GROUPS.values()))


def test_the_version_is_one_line_and_python_runs_the_package_as_the_command(outside):
    command = [sys.executable, "-m", "kvtier", "--version"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"kvtier {kvtier.__version__}\n", "")


@pytest.mark.usefixtures("outside", "place")
@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=lambda value: str(value))
def test_the_examples_of_the_help_run(run, name, example):
    assert run(*shlex.split(example)[1:])[0] == 0


@pytest.mark.usefixtures("outside", "place")
@pytest.mark.parametrize("name", [name for name in hooks.REPORTS if name not in LONE])
def test_the_json_of_a_command_fits_its_schema(capfd, monkeypatch, name):
    """Stdout has the JSON and nothing else, and no field that the schema lacks."""
    first = next(example for other, example in EXAMPLES if other == name)
    call = shlex.split(re.sub(f" {JSON}( [^-][^ ]*)?", "", first))[1:]
    status = run_command(*call, "--quiet", JSON)
    out, err = capfd.readouterr()
    assert (status, err) == (0, "")
    told = json.loads(out)
    jsonschema.validate(told, hooks.schema(hooks.REPORTS[name]))
    assert json.loads(msgspec.json.encode(msgspec.json.decode(out, type=hooks.REPORTS[name]))) == told


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("given", [("--json",), ("--json", "-"), ("--json=-",), ("--json", "--limit", "8")])
def test_json_without_a_file_is_stdout(run, given):
    assert len(json.loads(run("ls", "tier", *given)[1])) == 8


@pytest.mark.usefixtures("place")
def test_a_command_restores_the_loggers(run):
    loggers = [logging.getLogger(name) for name in ("kvtier", "kvtier_backends")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    run("du", "tier", "-vv")
    assert [(logger.level, list(logger.handlers)) for logger in loggers] == before


def impossible(place):
    return write_prompts(place / "impossible.jsonl", [(1,), (2, 1)])


@pytest.mark.parametrize("option", ["-v", "-vv", "--verbose"])
def test_verbose_logs_to_stderr_with_time_and_level(place, capsys, option):
    run_command("policies", impossible(place), "--sizes", "1", option)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING kvtier\.", capsys.readouterr().err)


def test_quiet_leaves_out_warnings_and_keeps_results(place, capsys):
    shown = []
    for options in ([], ["--quiet"], ["-q"]):
        run_command("policies", impossible(place), "--sizes", "1", *options)
        shown.append(capsys.readouterr())
    assert "id 1 follows id 2" in shown[0].err
    assert [each.err for each in shown[1:]] == ["", ""]
    assert shown[0].out == shown[1].out == shown[2].out != ""


TITLES = {"verify": "verifying", "du": "counting", "ls": "listing", "prune": "looking"}


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("command", TITLES)
def test_a_terminal_shows_a_bar_and_a_pipe_none(store, root, monkeypatch, capsys, command, terminal):
    store(keys_of(3))
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert run_command(command, root, *(["--older-than", "1d"] if command == "prune" else [])) == 0
    shown = capsys.readouterr().err
    assert TITLES[command] in shown if terminal else shown == ""


@pytest.mark.parametrize(
    ("words", "completed"),
    [("kvtier ver", {"verify"}), ("kvtier config ", {"check"}), ("kvtier prune tier --le", {"--leftovers"})],
)
def test_a_shell_completes_commands_and_options(outside, words, completed):
    asked = {"_KVTIER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    surroundings = {**os.environ, **asked, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(KVTIER, env=surroundings, capture_output=True, text=True, check=True)
    assert (set(ran.stdout.split()), ran.stderr) == (completed, "")


def test_without_torch_the_self_test_names_the_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kvtier.tools.selftest_checks", None)
    monkeypatch.delattr(kvtier.tools, "selftest_checks", raising=False)
    status = run_command("selftest")
    err = capsys.readouterr().err
    assert (status, err.count("\n")) == (2, 1)
    assert "torch cannot be loaded" in err
    assert "pip install 'kvtier[torch]'" in err
