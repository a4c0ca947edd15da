"""The mooncake tier keeps the contract on a real pool, as it comes and with every option the other way."""

from functools import partial
from typing import Any

import pytest

from kvtier.testing.conformance import (
    CountedConformance,
    Lender,
    key_of,
)
from tests.remote.servers import PATIENCE_S
from tests.remote.suites import RemoteSuites

KEYS = "KVTIER_TEST_MOONCAKE_KEYS"


class Suites(RemoteSuites):
    """Every suite that fits; a subclass says how the pool is used."""

    @pytest.fixture
    def open_tier(self, opened):
        return partial(opened, timeout_s=PATIENCE_S)


class TestMooncake(Suites):
    """As it comes."""


class TestMooncakeWithEveryOptionTheOtherWay(Suites):
    """Encrypted, a chunk at a time, for another tenant."""

    @pytest.fixture
    def fields(self, monkeypatch) -> dict[str, Any]:
        monkeypatch.setenv(KEYS, "ab" * 32)
        return {
            "seal": "aes-256-gcm",
            "seal_key_env": KEYS,
            "lanes": 3,
            "staging_bytes": 2 * (self.chunk_bytes + 128),
            "tenant": "other",
        }


class TestMooncakeCounts(CountedConformance):
    """Corrupt chunks."""

    chunk_bytes = 8_192

    @pytest.fixture
    async def backend(self, opened):
        return await opened(chunk_bytes=self.chunk_bytes, timeout_s=PATIENCE_S)

    @pytest.fixture
    def provoke(self, backend, foreign):
        lender, key = Lender(self.chunk_bytes), key_of(1_000)

        async def provoke():
            await foreign(backend, key, bytes(self.chunk_bytes + 128))
            assert await lender.recall(backend, [key]) == ["ChunkCorrupt"]

        return provoke
