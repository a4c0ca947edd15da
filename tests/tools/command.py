import json
import sys

import pytest

from kvtier.tools.cli import main

KVTIER = [sys.executable, "-c", "from kvtier.tools.cli import main; main()"]
"""The command in another process."""


def run(*args):
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    assert isinstance(end.value.code, int)
    return end.value.code


def reported(folder, *args, status=0):
    """Run a command with `--json` and a file in the folder; return the JSON."""
    path = folder / "reported.json"
    assert run(*args, "--json", path) == status
    return json.loads(path.read_bytes())


def check_refusal(capsys, complaint):
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvtier: ")
    assert complaint in shown.err
    assert shown.err.count("\n") == 1


def verified(report):
    """Return what `kvtier verify` counted that is not zero, without the list of files, and without what it took."""
    left_out = ("files", "skipped", "read_bytes", "seconds")
    return {name: told for name, told in report.items() if told and name not in left_out}
