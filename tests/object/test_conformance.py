"""The object tier keeps the contract on a real server, as it comes and with every option the other way."""

from functools import partial
from typing import Any

import pytest

from kvtier.backend import chunk_hash
from kvtier.testing.conformance import (
    CountedConformance,
    InventoryConformance,
    Lender,
    key_of,
)
from tests.remote.servers import PATIENCE_S
from tests.remote.suites import RemoteSuites

KEYS = "KVTIER_TEST_OBJECT_KEYS"


class Suites(RemoteSuites):
    """Every suite that fits; a subclass says how the bucket is used."""

    @pytest.fixture
    def open_tier(self, opened):
        return partial(opened, timeout_s=PATIENCE_S)


class TestObject(Suites, InventoryConformance):
    """As it comes."""


class TestObjectWithEveryOptionTheOtherWay(Suites):
    """Encrypted, one request at a time, nothing known without asking, at the bucket's top."""

    @pytest.fixture
    def fields(self, monkeypatch, tmp_path, server) -> dict[str, Any]:
        monkeypatch.setenv(KEYS, "ab" * 32)
        credentials = tmp_path / "credentials"
        credentials.write_text(
            f"[kv]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
        )
        credentials.chmod(0o600)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        return {
            "prefix": "",
            "seal": "aes-256-gcm",
            "seal_key_env": KEYS,
            "window_bytes": 1,
            "requests": 1,
            "index_chunks": 0,
            "absent_ttl_s": 0,
            "region": "us-east-1",
            "credentials_file": str(credentials),
            "profile": "kv",
        }


class TestObjectCounts(CountedConformance):
    """Corrupt chunks."""

    chunk_bytes = 8_192

    @pytest.fixture
    async def backend(self, opened):
        return await opened(chunk_bytes=self.chunk_bytes, timeout_s=PATIENCE_S)

    @pytest.fixture
    def provoke(self, backend, server, bucket):
        lender, key = Lender(self.chunk_bytes), key_of(1_000)

        async def provoke():
            await lender.keep(backend, [key])
            (name,) = [name for name in server.names(bucket) if chunk_hash(key).hex() in name]
            body, metadata = server.get(bucket, name)
            server.put(bucket, name, body[:100] + b"?" + body[101:], metadata)
            assert await lender.recall(backend, [key]) == ["ChunkCorrupt"]

        return provoke
