"""What every test stands on: its lane, readable assertions, Hypothesis profiles, and a mark for tests in virtual time.

A test of the inner lane (`make test`) lives in this process; whoever starts another one asks for the fixture `outside`.
Of the others, those that ask for real traces have a lane of their own (`make test-traces`).
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("kvtier.testing", "tests.simulation")

from kvtier.testing.virtual_time import VirtualTimeLoop  # noqa: E402  # After its assertions are registered.

# A deadline would time the machine rather than the code (others build on it); seeds that failed are kept by name.
settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

SCAN_S = 60.0  # For a start-up scan that must end: a machine under load may take its time.
STARTS = frozenset({"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})


class Fence:
    """The audit hook that keeps the inner lane in its process; it cannot be removed, so it is closed or open."""

    closed = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS and self.closed:
            pytest.fail(f"This test starts a process ({event}): ask for the fixture `outside`.")


FENCE = Fence()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual_time: run the test on a VirtualTimeLoop, where sleeping takes no time.")
    config.addinivalue_line("markers", "outside: left to `make test-all`; it follows from the fixtures of a test.")
    config.addinivalue_line("markers", "traces: left to `make test-traces` if it is outside; it follows likewise.")
    sys.addaudithook(FENCE)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # In a shell's background, and in all that it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, and exempt from it what lives as long as the run.

    Many tests collect garbage to see what is left. Modules and collected tests would make each of these collections a
    third of a second long.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and _is_outside(item):
            item.add_marker("outside")
        if isinstance(item, pytest.Function) and "traces" in item.fixturenames:
            item.add_marker("traces")


def _is_outside(item: pytest.Function) -> bool:
    if "vllm" in item.path.parts:  # Its own lane, `make test-vllm`: vLLM starts processes as it likes.
        return True
    runs_elsewhere = hasattr(item, "callspec") and item.callspec.params.get("runner") == "process"
    return runs_elsewhere or not {"outside", "thorough"}.isdisjoint(item.fixturenames)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    FENCE.closed = item.get_closest_marker("outside") is None
    try:
        return (yield)
    finally:
        FENCE.closed = False


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """Have calls of a file tier in this process wait for its start-up scan until it has ended, and not half a second.

    What a call that gave up would find is chance: a test whose scan sticks calls `hurry`.
    """
    with pytest.MonkeyPatch.context() as patch:
        for layout in ("files", "segments"):
            patch.setattr(f"kvtier_backends.fs.{layout}.layout.SCAN_PATIENCE_S", SCAN_S)
        patch.setattr("kvtier_backends.fs.files.layout.SMALL_PATIENCE_S", SCAN_S)
        yield


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, have nobody wait for the start-up scan of a file tier: it sticks until the test lets it go."""

    def hurry() -> None:
        for layout in ("files", "segments"):
            monkeypatch.setattr(f"kvtier_backends.fs.{layout}.layout.SCAN_PATIENCE_S", 0.0)
        monkeypatch.setattr("kvtier_backends.fs.files.layout.SMALL_PATIENCE_S", 0.0)

    return hurry


@pytest.fixture(scope="session")
def outside() -> None:
    """Let a test start processes or mount a file system: it is one of the outer lane (`make test-all`)."""


@pytest.fixture(scope="session")
def thorough() -> None:
    """Let a test take seconds, because what it proves needs so many turns: it is one of the outer lane, too."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}
