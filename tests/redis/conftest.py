"""A server for all tests of a run, each under a prefix of its own; servers and proxies for those that break them."""

import socket
import threading
from functools import partial

import pytest

from kvtier_backends.redis import RedisBackend
from tests.own import until_end
from tests.redis.servers import PATIENCE_S, RedisServer
from tests.remote.redis import Values
from tests.remote.tiers import lender, prefix, proxy
from tests.testing.suites import open_with

__all__ = ["lender", "open_with", "prefix", "proxy"]

QUICK = {"timeout_s": 1.0}  # These tests wait for the time-outs.


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch):
    monkeypatch.setattr("kvtier_backends.redis.servers.RETRY_S", 0.001)


def started(outside, tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


server = pytest.fixture(started, scope="session")
another_server = pytest.fixture(started, scope="session")


@pytest.fixture
def own_server(request, outside, tmp_path):
    return lambda *how, **fields: until_end(request, own := RedisServer(tmp_path, *how, **fields), own.kill).start()


@pytest.fixture
def names_hang(monkeypatch):
    """Leave look-ups of `localhost` unanswered until the event is set."""
    look_up, answered = socket.getaddrinfo, threading.Event()
    answered.set()

    def hangs(host, *about, **more):
        if host == "localhost" and not more.get("flags"):  # Flags mean that no server is asked.
            assert answered.wait(PATIENCE_S), "a look-up was waited for"
        return look_up(host, *about, **more)

    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    yield answered
    answered.set()


@pytest.fixture
def opened(prefix, open_with):
    async def opened(*servers, scheme="redis", user="", path="", **fields):
        return await open_with(RedisBackend, url=f"{scheme}://{user}{','.join(servers)}{path}", prefix=prefix, **fields)

    return opened


@pytest.fixture
def open_tier(opened, server):
    return partial(opened, server.address)


@pytest.fixture
def open_by_proxy(opened, proxy):
    return partial(opened, proxy.address, **QUICK)


@pytest.fixture
def stored(server, prefix):
    return Values(server, prefix)
