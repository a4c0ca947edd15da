"""The mooncake tier keeps the contract on a real pool, with its defaults and with every option changed."""

import pytest

from tests.remote.suites import DamagedValues, RemoteSuites, sealed_by


class TestMooncake(RemoteSuites):
    pass


class TestMooncakeWithEveryOptionChanged(RemoteSuites):
    """Encrypted, a chunk at a time, for another tenant."""

    @pytest.fixture
    def fields(self, monkeypatch):
        sealed = sealed_by("aes-256-gcm", monkeypatch)
        return sealed | {"staging_bytes": 2 * (self.chunk_bytes + 128), "tenant": "other"}


TestDamagedValues = DamagedValues
