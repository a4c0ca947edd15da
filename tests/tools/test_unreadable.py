"""A command goes on after a file that it may not read, names it, and counts it in its status. It follows no link."""

import json
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from kvtier.testing.conformance.lender import keys_of
from tests.tools.test_damage import truncate

WITHOUT_PRIVILEGE = """
import ctypes, sys
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24
if len(sys.argv) > 1 and sys.argv[1] == "--dropped":
    from kvtier.tools.cli import main
    main(sys.argv[2:])
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):  # Or the superuser may read everything.
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
import os
os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"], "--dropped", *sys.argv[1:]])
"""
PLACES = {"file": lambda files: files[2], "folder": lambda files: files[2].parent, "segment": lambda files: files[0]}
CALLS = {"verify": ("verify",), "du": ("du",), "ls": ("ls",), "prune": ("prune", "--corrupt", "--yes")}
READING_NO_FILE = {("file", "du"), ("file", "ls")}


class Ran(NamedTuple):
    status: int
    told: Any
    err: str


def unprivileged(root, command, *options):
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PROGRAM": WITHOUT_PRIVILEGE}
    line = [sys.executable, "-c", WITHOUT_PRIVILEGE, command, str(root), "--json", *options]
    ran = subprocess.run(line, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
    return Ran(ran.returncode, json.loads(ran.stdout), ran.stderr)


@pytest.fixture
def forbid(request, outside, root):
    def forbid(path, mode):
        path.chmod(mode)
        request.addfinalizer(lambda: path.chmod(0o755))

    return forbid


@pytest.mark.parametrize(
    ("place", "command"),
    [(place, command) for place in PLACES for command in CALLS if (place, command) not in READING_NO_FILE],
)
def test_a_command_names_what_it_may_not_read_and_goes_on(forbid, root, store, place, command):
    store(keys_of(2), model="other")
    files = store(keys_of(5), layout="segments" if place == "segment" else "files")
    path = PLACES[place](files)
    forbid(path, 0)
    if place != "segment":
        truncate(100)(files[4])
    ran, name = unprivileged(root, *CALLS[command]), str(path.relative_to(root))
    whole, wrong = (2, 0) if place == "segment" else (5, 1)
    if command == "verify":
        bad = {each["file"]: (each["state"], each["fault"]) for each in ran.told["files"]}
        assert bad.pop(name) == ("unreadable", "Permission denied")
        assert list(bad.values()) == [("corrupt", "truncated")] * wrong
        assert (ran.told["checked"], ran.told["unreadable"], ran.err) == (whole + wrong, 1, "")
    else:
        assert ran.err == f"kvtier: {name}: Permission denied; 1 left out\n"
    if command == "prune":
        assert (ran.told["files"], ran.told["left_out"]) == (wrong, 1)
        assert files[-1].exists() == (place == "segment")
    elif command != "verify":
        assert (ran.told["chunks"] if command == "du" else len(ran.told)) == whole + wrong
    assert ran.status == 1


def test_prune_goes_on_after_a_file_that_it_may_not_remove(forbid, root, store):
    files = store(keys_of(5))
    forbid(files[2].parent, 0o555)
    ran = unprivileged(root, "prune", "--to-size", "0B", "--yes")
    assert (ran.status, ran.told["files"], ran.told["left_out"]) == (1, 4, 1)
    assert [path.exists() for path in files] == [False, False, True, False, False]
    assert "Permission denied; 1 left out" in ran.err


@pytest.mark.parametrize("command", [*CALLS.values(), ("prune", "--older-than", "0s", "--yes")], ids=" ".join)
@pytest.mark.parametrize("place", ["namespace", "first", "segment"])
def test_a_command_names_a_link_goes_on_and_leaves_its_target(root, store, run, place, command, capsys):
    files = store(keys_of(3), layout="segments" if place == "segment" else "files")
    link = {"namespace": files[0].parents[2], "first": files[0].parents[1], "segment": files[0]}[place]
    elsewhere = root.parent / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    before = {path: path.read_bytes() for path in [elsewhere, *elsewhere.rglob("*")] if path.is_file()}
    assert before
    assert run(command[0], root, *command[1:])[0] == 1
    assert {path: path.read_bytes() for path in before} == before
    (bad,) = json.loads(run("verify", root, "--json")[1])["files"]
    assert re.search(f"{link.name} is a symbolic link, a .* or nothing accepted; remove it", bad["fault"])


def test_a_pipe_in_the_place_of_the_configuration_holds_up_nothing(root, store, run_json):
    store(keys_of(3))
    (config,) = root.glob("*/config.json")
    config.unlink()
    os.mkfifo(config)
    (row,) = run_json("du", root)["namespaces"].values()
    assert (row["model"], row["chunks"]) == ("", 3)


def test_the_directory_itself_may_be_a_link(root, store, run_json, tmp_path):
    store(keys_of(3))
    (tmp_path / "link").symlink_to(root)
    assert run_json("du", tmp_path / "link")["chunks"] == 3
