"""What cannot be read stops no command: the rest is looked at, what is left out is named, and the status says so."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs.disk.footer import FOOTER_BYTES

HEADER_BYTES, ROW_BYTES = 4_096, 8_192
SLOT_BYTES = ROW_BYTES + FOOTER_BYTES
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


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def told(self) -> Any:
        return json.loads(self.out)


def unprivileged(*args: object) -> Ran:
    """Run a command as somebody who is bound by permissions."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PROGRAM": WITHOUT_PRIVILEGE,
        "COLUMNS": "200",
    }
    command = [sys.executable, "-c", WITHOUT_PRIVILEGE, *map(str, args)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture
def forbidden(outside: None, root: Path, store) -> Callable[[Callable[[list[Path]], Path]], list[Path]]:
    """Have a tier with files and take the permissions of one of its files or folders away, until the test ends."""
    taken: list[Path] = []

    def forbidden(which: Callable[[list[Path]], Path]) -> list[Path]:
        files = store(keys_of(5))
        which(files).chmod(0)
        taken.append(which(files))
        return files

    yield forbidden
    for path in taken:
        if path.exists():
            path.chmod(0o755)


def name_of(path: Path, root: Path) -> str:
    return str(path.relative_to(root))


def a_file(files: list[Path]) -> Path:
    return files[2]


def a_folder(files: list[Path]) -> Path:
    return files[2].parent


@pytest.mark.parametrize("which", [a_file, a_folder])
def test_verify_goes_on_after_what_it_cannot_read_and_counts_it_apart(forbidden, root: Path, which) -> None:
    files = forbidden(which)
    os.truncate(files[4], 100)
    ran = unprivileged("verify", root, "--json")
    told = ran.told
    assert ran.status == 1
    assert (told["checked"], told["corrupt"], told["unreadable"]) == (4, {"truncated": 1}, 1)
    wrong = {each["file"]: (each["state"], each["fault"]) for each in told["files"]}
    assert wrong == {
        name_of(which(files), root): ("unreadable", "Permission denied"),
        name_of(files[4], root): ("corrupt", "truncated"),
    }
    assert ran.err == ""


@pytest.mark.parametrize("command", ["du", "ls"])
def test_du_and_ls_count_the_rest_and_say_what_they_left_out(forbidden, root: Path, command: str) -> None:
    files = forbidden(a_folder)
    ran = unprivileged(command, root, "--json")
    chunks = ran.told["chunks"] if command == "du" else len(ran.told)
    assert (ran.status, chunks) == (1, 4)
    assert ran.err == f"kvtier: {name_of(files[2].parent, root)}: Permission denied; 1 left out\n"


@pytest.mark.parametrize("which", [a_file, a_folder])
def test_prune_removes_the_rest_and_says_what_it_left_out(forbidden, root: Path, which) -> None:
    files = forbidden(which)
    os.truncate(files[0], 100)
    os.truncate(files[4], 100)
    ran = unprivileged("prune", root, "--corrupt", "--yes", "--json")
    assert (ran.status, ran.told["files"], ran.told["left_out"]) == (1, 2, 1)
    assert ran.err == f"kvtier: {name_of(which(files), root)}: Permission denied; 1 left out\n"
    assert not files[0].exists()
    assert not files[4].exists()


@pytest.mark.usefixtures("outside")
def test_prune_goes_on_after_what_it_cannot_remove(root: Path, store) -> None:
    files = store(keys_of(5))
    files[2].parent.chmod(0o555)
    ran = unprivileged("prune", root, "--to-size", "0B", "--yes", "--json")
    files[2].parent.chmod(0o755)
    assert (ran.status, ran.told["files"], ran.told["left_out"]) == (1, 4, 1)
    assert [path.exists() for path in files] == [False, False, True, False, False]
    assert "Permission denied; 1 left out" in ran.err


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("command", ["verify", "du", "ls", "prune"])
def test_a_segment_that_cannot_be_opened_costs_its_own_chunks_only(root: Path, store, command: str) -> None:
    (segment,) = store(keys_of(3), layout="segments")
    store(keys_of(2))
    segment.chmod(0)
    options = ["--corrupt", "--yes"] if command == "prune" else []
    ran = unprivileged(command, root, "--json", *options)
    segment.chmod(0o644)
    assert ran.status == 1
    if command == "verify":
        (wrong,) = ran.told["files"]
        assert wrong == {
            "file": name_of(segment, root),
            "key": None,
            "state": "unreadable",
            "fault": "Permission denied",
        }
        assert (ran.told["checked"], ran.told["unreadable"]) == (2, 1)
    else:
        assert ran.err == f"kvtier: {name_of(segment, root)}: Permission denied; 1 left out\n"


def test_verify_lists_every_file_that_is_not_well_with_its_key(run, root: Path, store) -> None:
    """However many: a script that mends them must not be told of the first hundred only."""
    files = store(keys_of(130))
    for path in files[:120]:
        os.truncate(path, 100)
    status, out = run("verify", root, "--json")
    told = json.loads(out)
    assert (status, told["checked"], told["corrupt"]) == (1, 130, {"truncated": 120})
    assert {each["file"]: each["key"] for each in told["files"]} == {
        name_of(path, root): key.hex() for path, key in zip(files[:120], keys_of(130), strict=False)
    }
    assert {(each["state"], each["fault"]) for each in told["files"]} == {("corrupt", "truncated")}


def test_a_segment_that_is_cut_off_counts_what_it_lost(run, root: Path, store) -> None:
    (segment,) = store(keys_of(5), layout="segments")
    slots = (segment.stat().st_size - HEADER_BYTES) // SLOT_BYTES
    os.truncate(segment, HEADER_BYTES + 2 * SLOT_BYTES + 100)
    status, out = run("verify", root, "--json")
    told = json.loads(out)
    assert (status, told["checked"], told["corrupt"]) == (1, slots, {"truncated": slots - 2})
    assert [each["file"] for each in told["files"]] == [f"{name_of(segment, root)}#{n}" for n in range(2, slots)]
    status, out = run("du", root, "--json")
    assert (status, json.loads(out)["chunks"]) == (0, 2)
    status, out = run("prune", root, "--corrupt", "--yes", "--json")
    assert (status, json.loads(out)["files"]) == (0, slots - 2)
    assert run("verify", root)[0] == 0
