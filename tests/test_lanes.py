"""The lanes: tests that stay in one process, tests that leave it, and studies of real traces."""

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import NOT_OUTSIDE
from tests.own import WORKER, shared_memory
from tests.tools.replay.real import AGENTIC, CONVERSATION, MINI_SWE

ROOT = Path(__file__).parents[1]
REMOTE = ("mooncake", "object", "remote")


@pytest.mark.parametrize("start", [lambda: subprocess.Popen(["true"]), os.fork], ids=["Popen", "fork"])
def test_a_test_of_the_inner_lane_that_starts_a_process_fails_and_is_told_what_to_ask_for(
    start: Callable[[], object],
) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"starts a process .* ask for the fixture `outside`"):
        start()


def test_a_test_that_asks_for_it_may_start_processes(outside: None) -> None:
    subprocess.run(["true"], check=True)


def test_a_worker_counts_no_shared_memory_of_another_worker() -> None:
    own, of_another = (f"/dev/shm/kvtier-test-{name}-lanes" for name in (WORKER, uuid.uuid4().hex))
    try:
        for path in (own, of_another):
            Path(path).touch()
        assert own in shared_memory(WORKER)
        assert of_another not in shared_memory(WORKER)
    finally:
        for path in (own, of_another):
            Path(path).unlink()


def is_outside(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("outside") is not None


@pytest.mark.parametrize("runner", ["inline", "process"])
def test_a_runner_in_its_own_process_is_outside(request: pytest.FixtureRequest, runner: str) -> None:
    assert is_outside(request) == (runner == "process")


def test_a_fixture_that_asks_for_it_takes_its_tests_along(request: pytest.FixtureRequest, goes_outside: None) -> None:
    assert is_outside(request)


def test_a_test_that_takes_long_is_left_to_the_outer_lane(request: pytest.FixtureRequest, thorough: None) -> None:
    assert is_outside(request)


def test_the_inner_lane_imports_no_torch(outside: None) -> None:
    told = run_pytest("--collect-only", "-q", "-m", NOT_OUTSIDE, "-p", "tests.torch_watch")
    assert "torch is imported by" not in told


@pytest.mark.skipif(find_spec("moto") is not None, reason="their servers are installed here")
def test_tests_of_remote_tiers_say_that_they_are_left_out_where_their_servers_are_not_installed(outside: None) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", *(f"tests/{folder}" for folder in REMOTE)]
    told = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    for folder in REMOTE:
        assert f"tests/{folder} is left out" in told
    left = {line.strip() for line in told.splitlines() if line.strip().startswith("<Module")}
    assert left <= {"<Module test_options.py>"}  # The bounds of options need no server.


def run_pytest(*options: str, **environment: str) -> str:
    """Run pytest in another process, which must succeed; return what it prints."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_studies_of_real_traces_name_the_files_that_they_lack(outside: None, tmp_path: Path) -> None:
    nowhere = {"KVTIER_TRACES": str(tmp_path), "KVTIER_ALL_TRACES": "1"}
    told = run_pytest("-rs", "-m", "traces", "tests/tools", **nowhere)
    assert re.search(r"\d+ skipped, \d+ deselected in", told)
    for name in (AGENTIC, CONVERSATION, MINI_SWE):
        assert f"{name} is not in {tmp_path}: put it there, or name a folder that has it in KVTIER_TRACES" in told


def test_each_test_of_real_traces_is_in_one_lane(outside: None) -> None:
    def chosen(marks: str) -> set[str]:
        told = run_pytest("--collect-only", "-q", "-m", marks, "tests/tools/replay")
        return set(re.findall(r"^tests/.*::.*", told, re.MULTILINE))

    recipes = re.findall(r'\$\(PYTEST\) -m "(.*)"', (ROOT / "Makefile").read_text())
    lanes = [chosen(marks) for marks in (*recipes, "traces")]
    assert len(lanes) == 3
    assert lanes[2]
    assert {sum(test in lane for lane in lanes) for test in lanes[2]} == {1}


@pytest.fixture
def goes_outside(outside: None) -> None:
    """A fixture that starts processes."""
