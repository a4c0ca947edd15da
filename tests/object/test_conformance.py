"""The object tier keeps the contract on a real server, with its defaults and with every option changed."""

import pytest

from kvtier.testing.conformance import InventoryConformance
from tests.remote.suites import CodedSuites, CodedValues, DamagedValues, DisturbedNetwork, RemoteSuites, sealed_by


class TestObject(RemoteSuites, InventoryConformance):
    many_chunks = 100

    @pytest.fixture(autouse=True)
    def small_batches(self, monkeypatch):
        for module in ("kvtier.backend", "kvtier.backend.inventory"):
            monkeypatch.setattr(f"{module}.INVENTORY_BATCH_KEYS", 64)


class TestObjectWithEveryOptionChanged(RemoteSuites):
    """Encrypted, one request at a time, without an index, at the bucket's top."""

    @pytest.fixture
    def fields(self, monkeypatch, tmp_path, server):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        sealed = sealed_by("aes-256-gcm", monkeypatch)
        credentials = {"credentials_file": server.write_credentials(tmp_path / "credentials")}
        sparing = {"window_bytes": 1, "requests": 1, "index_chunks": 0, "absent_ttl_s": 0}
        return sealed | credentials | sparing | {"prefix": "", "region": "us-east-1"}


class TestObjectCoded(CodedSuites, InventoryConformance):
    codec, seal = "auto", "xxh3"
    many_chunks = 100  # Batches of reports do not depend on the codec.


TestCodedValues = CodedValues
TestDamagedValues = DamagedValues
TestDisturbedNetwork = DisturbedNetwork
