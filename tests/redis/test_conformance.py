"""The redis tier keeps the contract on a real server, as it comes and with every option the other way."""

from functools import partial
from typing import Any

import pytest

from kvtier.backend import chunk_hash
from kvtier.testing.conformance import (
    CountedConformance,
    Lender,
    key_of,
)
from tests.remote.suites import RemoteSuites

KEYS = "KVTIER_TEST_REDIS_KEYS"


class Suites(RemoteSuites):
    """Every suite that fits; a subclass says how the server is used."""

    @pytest.fixture
    def servers(self, server) -> list[str]:
        return [server.address]

    @pytest.fixture
    def open_tier(self, opened, servers):
        return partial(opened, *servers)


class TestRedis(Suites):
    """As it comes."""


class TestRedisWithEveryOptionTheOtherWay(Suites):
    """Spread over two servers, encrypted, one request at a time, in another database, for an hour."""

    @pytest.fixture
    def servers(self, server, another_server) -> list[str]:
        return [server.address, another_server.address]

    @pytest.fixture
    def fields(self, monkeypatch) -> dict[str, Any]:
        monkeypatch.setenv(KEYS, "ab" * 32)
        return {
            "seal": "aes-256-gcm",
            "seal_key_env": KEYS,
            "window_bytes": 1,
            "lanes": 1,
            "path": "/1",
            "ttl_s": "1h",
        }


class TestRedisCounts(CountedConformance):
    """Corrupt chunks."""

    chunk_bytes = 8_192

    @pytest.fixture
    async def backend(self, opened, server):
        return await opened(server.address, chunk_bytes=self.chunk_bytes)

    @pytest.fixture
    def provoke(self, backend, server, prefix):
        lender, key = Lender(self.chunk_bytes), key_of(1_000)

        async def provoke():
            await lender.keep(backend, [key])
            (name,) = server.ask("KEYS", f"{prefix}*{chunk_hash(key).hex()}.bin")
            server.ask("SETRANGE", name, 100, b"?")
            assert await lender.recall(backend, [key]) == ["ChunkCorrupt"]

        return provoke
