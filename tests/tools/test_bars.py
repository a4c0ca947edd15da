"""A terminal shows a progress bar; a pipe's stderr stays empty."""

from pathlib import Path

import pytest

from kvtier.testing.conformance.lender import keys_of
from kvtier.tools.cli import main

TITLES = {"verify": "verifying", "du": "counting", "ls": "listing", "prune": "looking"}


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize("command", TITLES)
def test_a_terminal_shows_a_bar_and_a_pipe_none(
    store, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, terminal: bool
) -> None:
    store(keys_of(3))
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(SystemExit, match="0"):
        main([command, str(root), *(["--older-than", "1d"] if command == "prune" else [])])
    shown = capsys.readouterr().err
    assert TITLES[command] in shown if terminal else shown == ""
