"""The conformance suite is tested, too: each promise is broken by a tier that it then rejects."""

import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from tests.testing import bad_tiers

PROMISES = [name for name in dir(bad_tiers.Everything) if name.startswith("test_")]
REJECTIONS = [(tier.__name__, promise) for tier in bad_tiers.all_tiers() for promise in tier.breaks]


@pytest.fixture(scope="module")
def failures(outside, tmp_path_factory):
    """Run all promises against the honest tier, and against each other one those that it breaks: how did they fail."""
    report = tmp_path_factory.mktemp("rejects") / "report.xml"
    wanted = [*(("Tier", promise) for promise in PROMISES), *REJECTIONS]
    nodes = [f"{bad_tiers.__file__}::Test{tier}::{promise}" for tier, promise in wanted]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *nodes]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    found = {pair: [] for pair in wanted}
    for case in ET.parse(report).iter("testcase"):
        pair = case.get("classname").rpartition(".Test")[2], case.get("name").partition("[")[0]
        found[pair] += [failure.text for failure in case if failure.tag in ("failure", "error")]
    return found


@pytest.mark.parametrize(("tier", "promise"), REJECTIONS)
def test_a_tier_that_breaks_a_promise_is_rejected(failures, tier, promise):
    assert failures[tier, promise]


def test_an_honest_tier_is_not(failures):
    assert {promise: failures["Tier", promise] for promise in PROMISES if failures["Tier", promise]} == {}


def test_every_promise_is_broken_by_a_tier():
    assert {promise for _, promise in REJECTIONS} == set(PROMISES)


def test_a_rejection_says_whose_bytes_were_found(failures):
    (story,) = failures["TearsChunks", "test_of_stores_of_one_key_at_once_one_whole_chunk_wins"]
    assert "no chunk: from byte 0 " in story
    (story,) = failures["Forgets", "test_what_was_stored_is_loaded_bit_for_bit_again_and_again"]
    assert "assert ['ChunkMissin" in story


# In a project of somebody else: other settings, no conftest of ours.

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


def test_the_suite_runs_in_strict_mode_and_explains_its_assertions(outside, tmp_path):
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "test_theirs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "TestGood or test_the_last_store"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert "1 failed" in said
    assert "FAILED test_theirs.py::TestBad::test_the_last_store_of_a_key_counts" in said
    assert "At index 0 diff: 'ChunkMissing' != " in said
