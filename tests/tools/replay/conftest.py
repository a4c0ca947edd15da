"""The real traces: beside the project, or where KVTIER_TRACES says."""

import os
from pathlib import Path

import pytest

from tests.tools.replay.real import AGENTIC, Traces

BESIDE = Path(__file__).parents[4] / "shared" / "traces"


@pytest.fixture(scope="session")
def traces():
    """Return the real traces. What asks for them and takes seconds is of `tests/traces/run`."""
    return Traces(Path(os.environ.get("KVTIER_TRACES") or BESIDE))


@pytest.fixture(scope="session")
def agents(traces, thorough):
    """Return the largest trace's path: it takes minutes, so only `tests/traces/run` asks for it."""
    if "KVTIER_ALL_TRACES" not in os.environ:
        pytest.skip("takes minutes: tests/traces/run runs it")
    return traces / AGENTIC


@pytest.fixture
def trace_file(tmp_path):
    def write(content, name="trace.jsonl"):
        path = tmp_path / name
        path.write_bytes(content)
        return str(path)

    return write
