"""The redis tier keeps the contract on a real server, with its defaults and with every option changed."""

from functools import partial

import pytest

from tests.remote.suites import CodedSuites, CodedValues, DamagedValues, DisturbedNetwork, RemoteSuites, sealed_by


class TestRedis(RemoteSuites):
    pass


class TestRedisWithEveryOptionChanged(RemoteSuites):
    """Spread over two servers, encrypted, one request at a time, in another database, for an hour."""

    @pytest.fixture
    def open_tier(self, opened, server, another_server, monkeypatch):
        options = sealed_by("aes-256-gcm", monkeypatch) | {"window_bytes": 1, "lanes": 1, "ttl_s": "1h", "path": "/1"}
        return partial(opened, server.address, another_server.address, chunk_bytes=self.chunk_bytes, **options)


class TestRedisCoded(CodedSuites):
    codec, seal = "fp8", "aes-256-gcm"


TestCodedValues = CodedValues
TestDamagedValues = DamagedValues
TestDisturbedNetwork = DisturbedNetwork
