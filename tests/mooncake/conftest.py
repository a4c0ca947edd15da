"""A shared pool, with a prefix for each test, and private pools for tests that break them.

Mooncake reads its environment once a process. Opening and closing a client take up to a second each. So the time-outs
are set here, and the tests' tiers share clients.
"""

import os
from functools import partial
from importlib.util import find_spec

import pytest

from kvtier.backend import SEAL_BYTES
from kvtier.testing.conformance import tier_context
from tests.own import until_end
from tests.remote.servers import PATIENCE_S
from tests.remote.tiers import lender, prefix
from tests.testing.suites import CHUNK_BYTES, open_with

__all__ = ["lender", "open_with", "prefix"]

TIMEOUT_S = 2.0  # Of whatever hangs.
WHY = "mooncake-transfer-engine-non-cuda is not installed here"
if find_spec("mooncake") is not None:
    from kvtier_backends.mooncake import MooncakeBackend, MooncakeOptions, backend
    from kvtier_backends.mooncake.client import PoolClient, connect, environment

    os.environ.update(environment(MooncakeOptions(timeout_s=TIMEOUT_S)), MC_LOG_LEVEL="ERROR")
    try:
        import mooncake.store  # noqa: F401

        WHY = None
    except ImportError as error:  # Of the system's libraries.
        WHY = str(error)
if WHY is not None:
    collect_ignore_glob = ["test_[!o]*.py"]  # Options need no package.
else:
    from tests.mooncake.pools import Pool


def pytest_report_header():
    return [] if WHY is None else [f"tests/mooncake is left out: {WHY} (tests/remote/run)"]


@pytest.fixture(scope="session")
def pool(outside, tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("mooncake"))
    pool.add_owner()
    yield pool
    pool.close()


@pytest.fixture
def own_pool(request, outside, tmp_path_factory):
    return lambda **fields: until_end(request, own := Pool(tmp_path_factory.mktemp("mooncake"), **fields), own.close)


@pytest.fixture(scope="session")
def shared_clients():
    clients = {}

    class Shared(PoolClient):
        def close(self):
            """Stay open for the next test."""

    def shared(options, tier_name):
        about = {name: getattr(options, name) for name in ("master", "tenant", "replicas")}
        found = MooncakeOptions(timeout_s=TIMEOUT_S, **about)
        if found not in clients:
            made = connect(found, tier_name)
            clients[found] = Shared(made._store, made._kept)
        return clients[found]

    yield shared
    for client in clients.values():
        client._store.close()


@pytest.fixture
def client(shared_clients, pool):
    return shared_clients(MooncakeOptions(master=pool.address), "the test's")


@pytest.fixture
def opened(prefix, pool, shared_clients, monkeypatch, open_with):
    monkeypatch.setattr(backend, "connect", shared_clients)

    async def opened(**fields):
        return await open_with(MooncakeBackend, **{"master": pool.address, "prefix": prefix, **fields})

    return opened


@pytest.fixture
def opened_alone(prefix, open_with, monkeypatch):
    monkeypatch.setattr("tests.testing.suites.CLOSE_S", 0.0)

    async def opened_alone(pool, **fields):
        given = {"master": pool.address, "prefix": prefix, "timeout_s": TIMEOUT_S, **fields}
        return await open_with(MooncakeBackend, **given)

    return opened_alone


@pytest.fixture
def open_tier(opened):
    return partial(opened, timeout_s=PATIENCE_S)


@pytest.fixture
def stored(client, prefix):
    from tests.remote.mooncake import Values

    return Values(client, prefix, tier_context(CHUNK_BYTES).mapper, CHUNK_BYTES + SEAL_BYTES)
