import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import NOT_OUTSIDE

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("start", [lambda: subprocess.Popen(["true"]), os.fork], ids=["Popen", "fork"])
def test_a_test_of_the_inner_lane_that_starts_a_process_fails_and_is_told_what_to_ask_for(start):
    with pytest.raises(pytest.fail.Exception, match=r"starts a process .* ask for the fixture `outside`"):
        start()


@pytest.mark.parametrize("runner", ["inline", "process"])
def test_a_runner_in_its_own_process_is_outside(request, runner):
    assert (request.node.get_closest_marker("outside") is not None) == (runner == "process")


def test_the_inner_lane_imports_no_torch(outside):
    told = run_pytest("--collect-only", "-q", "-m", NOT_OUTSIDE, "-p", "tests.torch_watch")
    assert "torch is imported by" not in told


def run_pytest(*options):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_each_test_of_real_traces_is_in_one_lane(outside):
    def chosen(marks):
        told = run_pytest("--collect-only", "-q", "-m", marks, "tests/tools/replay")
        return set(re.findall(r"^tests/.*::.*", told, re.MULTILINE))

    recipes = re.findall(r'\$\(PYTEST\) -m "(.*)"', (ROOT / "Makefile").read_text())
    lanes = [chosen(marks) for marks in (*recipes, "traces")]
    assert len(lanes) == 3
    assert lanes[2]
    assert {sum(test in lane for lane in lanes) for test in lanes[2]} == {1}
