import json

import msgspec
import pytest
import torch

from kvtier.tools import selftest_checks as checks
from kvtier.tools.commands import run
from kvtier.tools.selftest import SelftestReport
from kvtier.tools.selftest_checks import NotHere, Wrong


@pytest.fixture
def tested(tmp_path, monkeypatch):
    def tested(*given):
        monkeypatch.setattr(checks, "checks", lambda: [(check.__name__, check) for check in given])
        monkeypatch.setitem(checks.RATE_BYTES, "cpu", 1 << 20)
        status = run(["selftest", "--device", "cpu", "--json", str(tmp_path / "report.json")])
        return status, msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=SelftestReport)

    return tested


def check(name, error=None):
    def made(device):
        if error is not None:
            raise error
        return "all bytes"

    made.__name__ = name
    return made


RIGHT, NOT_HERE = check("right"), check("not_here", NotHere("no streams"))
WRONG, BROKEN = check("wrong", Wrong("a byte [is] wrong")), check("broken", RuntimeError("an illegal address"))


def test_a_dry_run_says_that_it_is_one_and_has_a_rate_each_way_beside_a_plain_copy(tested, capsys):
    status, report = tested(RIGHT, NOT_HERE)
    assert (status, report.dry_run) == (0, True)
    assert [check.outcome for check in report.checks] == ["kept", "skipped", "kept"]
    assert [(row.operation, row.limit_is) for row in report.rows] == [
        ("store", "one plain copy to host"),
        ("load", "one plain copy to device"),
    ]
    assert all(row.figure > 0 and row.limit > 0 for row in report.rows)
    assert report.device["torch"].startswith(torch.__version__.partition("+")[0])
    assert "A dry run on the CPU" in capsys.readouterr().out


def test_a_wrong_byte_is_reported_the_others_are_checked_all_the_same_and_the_status_is_1(tested, capsys):
    status, report = tested(WRONG, BROKEN, NOT_HERE, RIGHT)
    assert status == 1
    assert [(check.promise, check.outcome, check.detail) for check in report.checks[:4]] == [
        ("wrong", "broken", "Wrong: a byte [is] wrong"),
        ("broken", "broken", "RuntimeError: an illegal address"),
        ("not_here", "skipped", "no streams"),
        ("right", "kept", "all bytes"),
    ]
    assert "a byte [is] wrong" in capsys.readouterr().out


def test_json_for_standard_output_goes_there_alone(monkeypatch, capsys):
    monkeypatch.setattr(checks, "checks", list)
    assert run(["selftest", "--device", "cpu", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert (json.loads(shown.out)["command"], shown.err) == ("kvtier selftest", "")


def test_an_absent_or_unknown_device_is_refused(capsys):
    assert run(["selftest", "--device", "tpu"]) == 2
    assert "'tpu' is not one of 'cuda', 'cpu'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert run(["selftest"]) == 2
        assert f"torch {torch.__version__} finds none; cpu accepted, for a dry run" in capsys.readouterr().err
