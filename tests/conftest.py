"""Shared by all tests: lanes, readable assertions, Hypothesis profiles, and a mark for tests in virtual time.

A test of the inner lane (`make test`) stays in this process and imports no torch. A test that starts a process asks for
the fixture `outside`; folders whose tests need torch or check pages are outside as a whole. Of these tests,
`make test-all` runs all except those that ask for real traces (`tests/traces/run`).
"""

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("kvtier.testing", "tests.simulation")

from kvtier.testing.virtual_time import VirtualTimeLoop  # noqa: E402  # After its assertions are registered.

# A deadline would time the machine rather than the code (others build on it); seeds that failed are kept by name.
settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

HERE = Path(__file__).parent
OUTSIDE = frozenset(
    {"browser", "docs", "frozen", "gpu", "kvcache", "monitoring", "sglang", "vllm"}
)  # Folders that `make test` does not read.
NOT_OUTSIDE = "not outside"  # The marks that `make test` asks for.
SCAN_S = 60.0  # For a start-up scan that must end: a machine under load may take its time.
STARTS = frozenset({"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})


class Fence:
    """The audit hook that keeps the inner lane in its process. Hooks cannot be removed, so it opens and closes."""

    closed = False

    def __call__(self, event, arguments):
        if event in STARTS and self.closed:
            pytest.fail(f"This test starts a process ({event}): ask for the fixture `outside`.")


FENCE = Fence()


def pytest_configure(config):
    config.addinivalue_line("markers", "virtual_time: run the test on a VirtualTimeLoop, where sleeping takes no time.")
    config.addinivalue_line(
        "markers", "promise(failure): prove the row of this failure on docs/explanation/failure-modes.md."
    )
    config.addinivalue_line("markers", "outside: left to `make test-all`; follows from a test's fixtures and folder.")
    config.addinivalue_line("markers", "traces: left to `tests/traces/run`; follows from a test's fixtures.")
    sys.addaudithook(FENCE)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # In a shell's background, and in all that it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path, config):
    """Skip folders whose tests are all outside, where none of them is asked for: their imports take seconds."""
    inner = config.getoption("markexpr") == NOT_OUTSIDE
    return True if inner and collection_path.parent == HERE and collection_path.name in OUTSIDE else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without the garbage collector, and exempt modules and tests from it.

    Many tests collect garbage to see what is left. With modules and tests, each collection would take 0.3 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items):
    for item in items:
        if isinstance(item, pytest.Function) and _is_outside(item):
            item.add_marker("outside")
            if "traces" in item.fixturenames:
                item.add_marker("traces")


def _is_outside(item):
    if item.path.relative_to(HERE).parts[0] in OUTSIDE:
        return True
    runs_elsewhere = hasattr(item, "callspec") and item.callspec.params.get("runner") == "process"
    return runs_elsewhere or not {"outside", "thorough"}.isdisjoint(item.fixturenames)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    FENCE.closed = item.get_closest_marker("outside") is None
    try:
        return (yield)
    finally:
        FENCE.closed = False


@pytest.fixture(scope="session", autouse=True)
def patient():
    """Let calls of a file tier wait for its start-up scan to end, instead of half a second.

    The answer of a call that stops waiting would be chance. A test whose scan hangs calls `hurry`.
    """
    with pytest.MonkeyPatch.context() as patch:
        _wait_for_scans(patch, SCAN_S)
        yield


@pytest.fixture
def hurry(monkeypatch):
    """Return a function after which no call waits for a file tier's start-up scan."""
    return lambda: _wait_for_scans(monkeypatch, 0.0)


def _wait_for_scans(patch, seconds):
    for constant in ("files.layout.SCAN", "segments.catalog.SCAN", "files.layout.SMALL"):
        patch.setattr(f"kvtier_backends.fs.{constant}_PATIENCE_S", seconds)


@pytest.fixture(scope="session")
def outside():
    """Let a test start processes or mount a file system; `make test-all` runs it."""


@pytest.fixture(scope="session")
def thorough():
    """Let a test take seconds, because its promise needs many turns; `make test-all` runs it."""


def pytest_asyncio_loop_factories(item):
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Return a function that installs a distribution with entry points of a group of kvtier's."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, points, group="backends"):
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "\n".join(f"{point} = {value}" for point, value in points.items())
        (folder / "entry_points.txt").write_text(f"[kvtier.{group}]\n{lines}\n")

    return install
