"""Where somebody watches, a bar shows how far a command is; where nobody does, stderr stays empty."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.conformance.lender import keys_of

pytestmark = pytest.mark.usefixtures("outside")

COMMAND = [sys.executable, "-c", "from kvtier.tools.cli import main; main()"]
TITLES = {"verify": "verifying", "du": "counting", "ls": "listing", "prune": "looking"}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}


def arguments(command: str, root: Path) -> list[str]:
    return [*COMMAND, command, str(root), *(["--older-than", "1d"] if command == "prune" else [])]


@pytest.mark.parametrize("command", TITLES)
def test_a_terminal_shows_a_bar(store, root: Path, command: str) -> None:
    store(keys_of(20))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(arguments(command, root), stdout=subprocess.DEVNULL, stderr=theirs, env=environment())
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4_096):
            shown += piece
    except OSError:
        pass  # Linux's way to say that the other end was closed.
    os.close(ours)
    assert process.wait() == 0
    assert TITLES[command] in shown.decode()


@pytest.mark.parametrize("command", TITLES)
def test_a_pipe_gets_none(store, root: Path, command: str) -> None:
    store(keys_of(3))
    ran = subprocess.run(arguments(command, root), capture_output=True, env=environment(), check=True)
    assert ran.stderr == b""
