"""The suite in somebody else's project: other settings, no conftest of ours, assertions that explain themselves."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("outside")

SETTINGS = """
[pytest]
asyncio_mode = strict
asyncio_default_fixture_loop_scope = function
filterwarnings = error
"""
TESTS = """
import pytest_asyncio
from kvtier.testing.conformance import BackendConformance, tier_context
from kvtier_backends.dummy import DummyBackend, DummyOptions

class Forgets(DummyBackend):
    async def store(self, writes):
        return [None] * len(writes)

class TestGood(BackendConformance):
    @pytest_asyncio.fixture
    async def backend(self):
        yield DummyBackend(DummyOptions(), tier_context(self.chunk_bytes))

class TestBad(BackendConformance):
    chunk_bytes = 4_096

    @pytest_asyncio.fixture
    async def backend(self):
        yield Forgets(DummyOptions(), tier_context(self.chunk_bytes))
"""


def test_the_suite_runs_in_strict_mode_and_explains_its_assertions(tmp_path):
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_theirs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "TestGood or test_the_last_store"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert "1 failed" in said
    assert "FAILED test_theirs.py::TestBad::test_the_last_store_of_a_key_counts" in said
    assert "At index 0 diff: 'ChunkMissing' != " in said
