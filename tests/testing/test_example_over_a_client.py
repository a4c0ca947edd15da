"""The example over a client of coroutines: true to the contract, honest if its server fails."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.backend import BackendUnavailable, NoSpace
from kvtier.testing.conformance import keys_of, label
from tests.redis.conftest import own_server
from tests.remote.tiers import lender
from tests.testing.suites import open_with

__all__ = ["lender", "open_with", "own_server"]

FOLDER = Path(__file__).parents[2] / "examples" / "coroutine_client"
MISSING = "ChunkMissing"

spec = importlib.util.spec_from_file_location("valkey_backend", FOLDER / "valkey_backend.py")
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


@pytest.fixture
def opened(open_with):
    return lambda server, **fields: open_with(example.ValkeyBackend, url=f"redis://{server.address}", **fields)


def test_it_passes_its_own_suite_as_the_page_shows_it(own_server, tmp_path):
    for path in FOLDER.glob("*.py"):
        shutil.copy(path, tmp_path)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_valkey_backend.py"],
        cwd=tmp_path,
        env={**os.environ, "VALKEY_URL": f"redis://{own_server().address}"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout


async def test_a_server_that_is_gone_is_unavailable_and_its_successor_is_used(own_server, opened, lender):
    server, keys = own_server(), keys_of(3)
    tier = await opened(server)
    await lender.keep(tier, keys)
    server.kill()
    for call in (tier.probe(keys), lender.recall(tier, keys), lender.keep(tier, keys), tier.delete(keys)):
        with pytest.raises(BackendUnavailable):
            await call
    server.start()
    assert await lender.recall(tier, keys) == [MISSING] * 3


async def test_a_server_that_hangs_costs_a_call_its_time_out_and_no_later_chunk(own_server, opened, lender):
    server, keys = own_server(), keys_of(8)
    tier = await opened(server, timeout_s=1)
    await lender.keep(tier, keys)
    server.signal(signal.SIGSTOP)
    with pytest.raises(BackendUnavailable, match="TimeoutError"):
        await lender.recall(tier, keys[:4])
    server.signal(signal.SIGCONT)
    later = keys[4:]
    assert await lender.recall(tier, later) == list(map(label, later))  # Not the replies that come too late.


async def test_a_full_server_refuses_chunks_one_by_one(own_server, opened, lender):
    server, keys = own_server("--maxmemory", "4mb"), keys_of(2_000)
    tier = await opened(server, timeout_s=60)
    outcomes = await tier.store(lender.writes(keys))
    assert {type(outcome) for outcome in outcomes} == {type(None), NoSpace}
    stored = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None]
    assert await lender.recall(tier, stored) == list(map(label, stored))


async def test_a_chunk_that_another_client_has_changed_is_corrupt(own_server, opened, lender):
    server, keys = own_server(), keys_of(4)
    tier = await opened(server)
    await lender.keep(tier, keys)
    changed, cut, replaced, gone = map(tier.context.mapper.name, keys)
    server.ask("SETRANGE", changed, 100, b"?")
    server.ask("SET", cut, b"short")
    server.ask("RENAME", gone, replaced)
    assert await lender.recall(tier, keys) == [*["ChunkCorrupt"] * 3, MISSING]
