"""Real traces, which are never part of the project: beside it, or where KVTIER_TRACES says."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[4] / "shared" / "traces"


@pytest.fixture(scope="session")
def traces() -> Path:
    """Return the folder of the real traces."""
    folder = Path(os.environ.get("KVTIER_TRACES", BESIDE))
    if not folder.is_dir():
        pytest.skip(f"no real traces in {folder}; KVTIER_TRACES names another folder")
    return folder


@pytest.fixture
def trace_file(tmp_path: Path) -> Callable[..., str]:
    """Write bytes as a trace's file and return its path."""

    def write(content: bytes, name: str = "trace.jsonl") -> str:
        path = tmp_path / name
        path.write_bytes(content)
        return str(path)

    return write
