"""The comparison of hot functions with their stored baseline."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.compare import COUNTED, Verdict, instructions, main, report, stored
from tests.benchmarks.hot import CALIBRATION, CASES, TIMED_ONLY

FAKE_VALGRIND = """#!/bin/sh
# Writes parts as callgrind does: odd ones are what lies between calls, even ones the calls.
for argument in "$@"; do case "$argument" in --callgrind-out-file=*) out="${argument#*=}" ;; esac; done
number=1
while [ $number -le 40 ]; do
    printf 'version: 1\\ntotals: %d\\n' $((number % 2 ? 999999 : number * 100)) > "$out.$number"
    number=$((number + 1))
done
"""


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return tmp_path / "baseline.json"


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_repeated(name: str) -> None:
    work = CASES[name].make()
    for _ in range(4):
        work()


def test_a_case_that_costs_more_than_it_may_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Verdict("same", 1.04, 1.0), Verdict("slower", 1.06, 1.0), Verdict("new", 9.0, None)]
    assert not report(found, 0.05)
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("SLOWER") for line in lines[:3]] == [False, True, False]
    assert lines[3] == "3 cases, 1 cost more than 5% above their baseline"
    assert report(found[:1], 0.05)


def test_a_regression_is_an_exit_status(baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--times", "--baseline", str(baseline), "group_index"]
    assert main(arguments) == 2  # There is nothing to compare with.
    assert "store them with --write" in capsys.readouterr().out
    assert main([*arguments, "--write"]) == 0
    told = json.loads(baseline.read_text())
    (version,) = told["times"]
    told["times"][version]["group_index"] = 1e-6
    baseline.write_text(json.dumps(told))
    assert main(arguments) == 1
    told["times"][version]["group_index"] = 1e6
    baseline.write_text(json.dumps(told))
    assert main(arguments) == 0


@pytest.mark.usefixtures("outside")
def test_a_count_is_the_median_of_the_marked_calls(tmp_path: Path) -> None:
    valgrind = tmp_path / "valgrind"
    valgrind.write_text(FAKE_VALGRIND)
    valgrind.chmod(0o755)
    counts = instructions([CALIBRATION, "group_index"], str(valgrind))
    assert COUNTED == 3
    assert counts == {CALIBRATION: 400.0, "group_index": 1_000.0}  # Of parts 2, 4, 6 and 8, 10, 12.


def test_the_stored_baseline_has_every_case() -> None:
    counted = stored("instructions", "3.11", Path(__file__).parents[1] / "benchmarks" / "baseline.json")
    assert counted is not None
    assert set(counted) == set(CASES) - TIMED_ONLY - {CALIBRATION}
