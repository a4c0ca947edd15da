"""The two lanes: what stays in one process, and what asks to leave it."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest

REMOTE = ("mooncake", "object", "remote")


@pytest.mark.parametrize("start", [lambda: subprocess.Popen(["true"]), os.fork], ids=["Popen", "fork"])
def test_a_test_of_the_inner_lane_that_starts_a_process_fails_and_is_told_what_to_ask_for(
    start: Callable[[], object],
) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"starts a process .* ask for the fixture `outside`"):
        start()


def test_a_test_that_asks_for_it_may_start_processes(outside: None) -> None:
    subprocess.run(["true"], check=True)


def is_outside(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("outside") is not None


@pytest.mark.parametrize("runner", ["inline", "thread", "process"])
def test_a_runner_in_a_process_of_its_own_is_outside(request: pytest.FixtureRequest, runner: str) -> None:
    assert is_outside(request) == (runner == "process")


def test_a_fixture_that_asks_for_it_takes_its_tests_along(request: pytest.FixtureRequest, goes_outside: None) -> None:
    assert is_outside(request)


def test_what_takes_long_is_left_to_the_outer_lane(request: pytest.FixtureRequest, thorough: None) -> None:
    assert is_outside(request)


@pytest.mark.skipif(find_spec("moto") is not None, reason="their servers are installed here")
def test_tests_of_remote_tiers_say_that_they_are_left_out_where_their_servers_are_not_installed(outside: None) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", *(f"tests/{folder}" for folder in REMOTE)]
    told = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    for folder in REMOTE:
        assert f"tests/{folder} is left out" in told
    left = {line.strip() for line in told.splitlines() if line.strip().startswith("<Module")}
    assert left <= {"<Module test_options.py>"}  # What an option may be needs no server.


@pytest.fixture
def goes_outside(outside: None) -> None:
    """A fixture that starts processes."""
