"""What tests of a tier have around a fault: the tier is used by itself, without an engine."""

import asyncio
import time
import uuid
from typing import Any

import pytest

from kvtier.backend import BackendUnavailable
from kvtier.testing.conformance import Lender, key_of, keys_of, label
from tests.remote.servers import PATIENCE_S, Proxy
from tests.testing.suites import CHUNK_BYTES


@pytest.fixture
def prefix():
    return f"test-{uuid.uuid4().hex}/"


@pytest.fixture
def lender():
    lender = Lender(CHUNK_BYTES)
    yield lender
    lender.take_back()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server.port)
    yield proxy
    proxy.end()


async def kept(lender, opening, count):
    """Return a tier that is being opened, and keys that it holds by then."""
    tier, keys = await opening, keys_of(count)
    await lender.keep(tier, keys)
    return tier, keys


async def used_again(lender, rows):
    """Use rows for something else, as an engine does, and see that nobody else does."""
    for row in rows:
        row[:] = lender.chunk(key_of(99))
    await asyncio.sleep(0.05)
    assert [lender.identify(row) for row in rows] == [label(key_of(99))] * len(rows)


async def recalled(tier, lender, keys):
    ends_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            told = await lender.recall(tier, keys)
        except BackendUnavailable as error:
            told = ["TransferFailed", str(error)]
        if "TransferFailed" not in told:
            return told
        assert time.monotonic() < ends_at, told
        await asyncio.sleep(0.01)


async def recovers(tier, lender, keys):
    ends_at = time.monotonic() + PATIENCE_S
    outcomes: list[Any] = ["nothing was stored"]
    while any(outcomes):
        assert time.monotonic() < ends_at, outcomes
        try:
            outcomes = list(await tier.store(lender.writes(keys)))
        except BackendUnavailable as error:
            outcomes = [error]
        await asyncio.sleep(0.01)
    assert await recalled(tier, lender, keys) == [label(key) for key in keys]
