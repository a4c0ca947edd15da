"""The command line: help, options of every command, examples that run, JSON that fits its schema, completion."""

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

import kvtier
from kvtier.testing.conformance.lender import keys_of
from kvtier.tools.cli import main
from kvtier.tools.commands import COMMANDS, GROUPS
from kvtier.tools.options import JSON
from kvtier.tools.replay.traces import TraceRequest, write_trace
from tests.docs.schemas import REPORTS, written

CONFIG = """
cpu_bytes_to_use = "1MiB"
chunk_bytes = "16KiB"
[[secondary_tiers]]
type = "fs"
name = "disk"
root = "tier"
"""
LONE = ("top", "completion", "selftest")  # A live engine, a shell and a GPU have tests of their own.
EXAMPLES = [(name, example) for name, command in COMMANDS.items() if name not in LONE for example in command.examples]


@pytest.fixture
def place(root: Path, store: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the examples in the help name: a tier, its configuration, a trace and a log."""
    store(keys_of(8))
    monkeypatch.chdir(root.parent)
    (root.parent / "kvtier.toml").write_text(CONFIG)
    (root.parent / "tokens.jsonl").write_text(json.dumps({"token_ids": list(range(64))}) + "\n")
    write_trace(
        root.parent / "trace.jsonl",
        [TraceRequest(1_000 * turn, 512 * turn, 1, tuple(range(turn))) for turn in range(1, 6)],
    )
    return root.parent


@pytest.mark.parametrize("name", ["", *GROUPS, *COMMANDS])
def test_every_help_shows_the_usage_and_examples_and_h_is_short_for_it(run: Any, name: str) -> None:
    status, out = run(*name.split(), "--help")
    assert (status, out.lstrip().startswith(f"Usage: kvtier {name}")) == (0, True)
    examples = out.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert examples
    assert all(line.startswith("    kvtier ") for line in examples)
    assert run(*name.split(), "-h") == (0, out)


@pytest.mark.usefixtures("outside")
def test_the_help_lists_the_commands_and_imports_none_of_them() -> None:
    script = (
        "import sys; from kvtier.tools.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print([m for m in ('torch', 'numpy', 'matplotlib', 'kvtier.tools.replay') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.endswith("[]\n")
    summaries = [command.summary for name, command in COMMANDS.items() if " " not in name]
    assert all(summary in answer.stdout for summary in (*summaries, *GROUPS.values()))


@pytest.mark.usefixtures("outside")
def test_the_version_is_one_line_and_python_runs_the_package_as_the_command() -> None:
    command = [sys.executable, "-m", "kvtier", "--version"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"kvtier {kvtier.__version__}\n", "")


def test_every_command_has_examples_of_its_own() -> None:
    for name, command in COMMANDS.items():
        assert command.examples
        assert all(example.startswith(f"kvtier {name}") for example in command.examples)


@pytest.mark.usefixtures("outside", "place")
@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=lambda value: str(value))
def test_the_examples_of_the_help_run(run: Any, name: str, example: str) -> None:
    assert run(*shlex.split(example)[1:])[0] == 0


@pytest.mark.usefixtures("outside", "place")
@pytest.mark.parametrize("name", [name for name in REPORTS if name not in LONE])
def test_the_json_of_a_command_fits_its_schema(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Stdout has the JSON and nothing else, and no field that the schema lacks."""
    first = next(example for other, example in EXAMPLES if other == name)
    call = shlex.split(re.sub(f" {JSON}( [^-][^ ]*)?", "", first))[1:]
    with pytest.raises(SystemExit) as end:
        main([*call, "--quiet", JSON])
    out, err = capfd.readouterr()
    assert (end.value.code, err) == (0, "")
    told = json.loads(out)
    jsonschema.validate(told, json.loads(written(REPORTS[name])))
    assert json.loads(msgspec.json.encode(msgspec.json.decode(out, type=REPORTS[name]))) == told


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("given", [("--json",), ("--json", "-"), ("--json=-",), ("--json", "--limit", "8")])
def test_json_without_a_file_is_stdout(run: Any, given: tuple[str, ...]) -> None:
    assert len(json.loads(run("ls", "tier", *given)[1])) == 8


def test_json_with_a_file_writes_it_whole_and_the_table_to_stdout(run: Any, place: Path) -> None:
    status, out = run("du", "tier", "--json", "out.json")
    assert (status, "namespace" in out) == (0, True)
    assert json.loads((place / "out.json").read_text())["chunks"] == 8


@pytest.mark.usefixtures("place")
def test_the_word_that_json_took_for_its_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["du", "--json", "tier"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "kvtier: Missing argument 'DIR'. --json took 'tier' for its file; --json=- takes none.\n"
    )


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("option", ["-v", "-vv", "--verbose"])
def test_verbose_logs_to_stderr(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["du", "tier", option])
    out, err = capsys.readouterr()
    assert (end.value.code, out.startswith("namespace")) == (0, True)
    assert {line.split()[2] for line in err.splitlines()} == {"INFO"}
    assert "du: ended after" in err


def test_a_log_file_is_appended_to_and_has_the_reason_of_a_failure(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for call in (["du", "tier"], ["du", "absent"]):
        with pytest.raises(SystemExit):
            main([*call, "--log-file", "kvtier.log"])
    lines = (place / "kvtier.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ kvtier", line) for line in lines)
    assert "absent: No such file or directory; a tier's directory accepted" in lines[-1]
    assert "ERROR" in lines[-1]
    assert capsys.readouterr().err == "kvtier: absent: No such file or directory; a tier's directory accepted\n"


@pytest.mark.usefixtures("place")
def test_a_command_restores_the_loggers(run: Any) -> None:
    loggers = [logging.getLogger(name) for name in ("kvtier", "kvtier_backends")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    run("du", "tier", "-vv", "--log-file", "kvtier.log")
    assert [(logger.level, list(logger.handlers)) for logger in loggers] == before


def impossible(place: Path) -> str:
    """Write a trace that cannot be true, of which its readers warn."""
    path = place / "impossible.jsonl"
    write_trace(path, [TraceRequest(0, 512, 1, (1,)), TraceRequest(1, 1_024, 1, (2, 1))])
    return str(path)


def test_quiet_leaves_out_warnings_and_keeps_results(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for options in ([], ["--quiet"], ["-q"]):
        with pytest.raises(SystemExit):
            main(["trace", "info", impossible(place), *options])
        shown.append(capsys.readouterr())
    assert "id 1 follows id 2" in shown[0].err
    assert [each.err for each in shown[1:]] == ["", ""]
    assert shown[0].out == shown[1].out == shown[2].out != ""


# A shell's completion.


BASH = """
source <(kvtier completion bash)
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_kvtier_completion kvtier
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(words: str) -> set[str]:
    """Press Tab behind these words in a bash."""
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", BASH.format(words=words)],
        env={**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    return set(ran.stdout.split())


@pytest.mark.usefixtures("outside")
@pytest.mark.skipif(not os.path.exists(f"{os.path.dirname(sys.executable)}/kvtier"), reason="kvtier is not installed")
def test_bash_completes_commands_and_options() -> None:
    assert completed("kvtier ver") == {"verify"}
    assert completed("kvtier trace ''") >= {"info", "convert"}
    assert completed("kvtier prune tier --le") == {"--leftovers"}
    assert completed("kvtier completion ''") == {"bash", "zsh", "fish"}


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_are_in_their_language(run: Any, shell: str) -> None:
    status, out = run("completion", shell)
    assert (status, "_KVTIER_COMPLETE=complete_" + shell in out) == (0, True)
    if program := shutil.which(shell):
        subprocess.run([program, "-n", "-c", out], check=True)
