"""The redis tier keeps the contract on a real server, with its defaults and with every option changed."""

from functools import partial

import pytest

from tests.remote.suites import KEYS, CodedSuites, CodedValues, DamagedValues, DisturbedNetwork, RemoteSuites


class TestRedis(RemoteSuites):
    pass


class TestRedisWithEveryOptionChanged(RemoteSuites):
    """Spread over two servers, encrypted, one request at a time, in another database, for an hour."""

    @pytest.fixture
    def open_tier(self, opened, server, another_server):
        return partial(opened, server.address, another_server.address, path="/1")

    @pytest.fixture
    def fields(self, monkeypatch):
        monkeypatch.setenv(KEYS, "ab" * 32)
        return {"seal": "aes-256-gcm", "seal_key_env": KEYS, "window_bytes": 1, "lanes": 1, "ttl_s": "1h"}


class TestRedisCoded(CodedSuites):
    pass


class TestCodedValues(CodedValues):
    pass


class TestDamagedValues(DamagedValues):
    pass


class TestDisturbedNetwork(DisturbedNetwork):
    pass
