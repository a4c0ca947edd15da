"""The mooncake tier keeps the contract on a real pool, with its defaults and with every option changed."""

import pytest

from tests.remote.suites import KEYS, DamagedValues, RemoteSuites


class TestMooncake(RemoteSuites):
    pass


class TestMooncakeWithEveryOptionChanged(RemoteSuites):
    """Encrypted, a chunk at a time, for another tenant."""

    @pytest.fixture
    def fields(self, monkeypatch):
        monkeypatch.setenv(KEYS, "ab" * 32)
        sealed = {"seal": "aes-256-gcm", "seal_key_env": KEYS}
        return sealed | {"staging_bytes": 2 * (self.chunk_bytes + 128), "tenant": "other"}


class TestDamagedValues(DamagedValues):
    pass
