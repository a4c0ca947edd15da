import importlib.util
from functools import partial
from pathlib import Path

import pytest

from kvtier.testing import conformance
from tests.testing.suites import Reopened, open_with

__all__ = ["open_with"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "write_a_backend.py"

spec = importlib.util.spec_from_file_location("write_a_backend", EXAMPLE)
write_a_backend = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write_a_backend)


SUITES = (conformance.BackendConformance, conformance.DurableBackendConformance, conformance.NamespacedConformance)


class TestTheExampleBackend(Reopened, *SUITES):
    @pytest.fixture
    def open_tier(self, open_with, tmp_path):
        where = {"path": str(tmp_path / "chunks.db"), "chunk_bytes": self.chunk_bytes}
        return partial(open_with, write_a_backend.SqliteBackend, **where)
