"""Which server has a chunk: by its name alone, behind Sentinel, or in a cluster.

redis-py, the extra `kvtier[redis]`, says which server is the primary and which node has which slots. For servers that
are given one by one it is not needed.
"""

import importlib
import ssl
import threading
import time
from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from xxhash import xxh3_64_intdigest

from kvtier.errors import ConfigError
from kvtier_backends.redis.options import Address, RedisOptions
from kvtier_backends.redis.server import Away, Login, Server

SLOTS = 16_384  # Of every cluster (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/).


class Topology(ABC):
    """The servers that are known, and whose a name is. For any thread; a `refresh` at a time."""

    cluster = False

    def __init__(self, options: RedisOptions, login: Login) -> None:
        self.options = options
        self.login = login
        self.stale = False
        """Whether some server was not what it was taken for."""
        self._next_try_at = 0.0
        self._renewing = threading.Lock()
        self._servers: dict[Address, Server] = {}
        self._forgotten: list[Server] = []  # Of which connections are in use still.
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def server_of(self, name: bytes) -> Server:
        """Return the server that has this name; from memory."""

    def places_of(self, names: Sequence[bytes]) -> dict[Server, list[int]]:
        """Return which of these names are whose, by their places; from memory."""
        places: defaultdict[Server, list[int]] = defaultdict(list)
        for index, name in enumerate(names):
            places[self.server_of(name)].append(index)
        return places

    def refresh(self) -> None:
        """Ask where servers are now; blocks. Raises `Away` if nobody says."""
        self.stale = False

    def renew(self) -> None:
        """Refresh stale facts, but not again and again. Without a new answer the old facts stay."""
        if not self._renewing.acquire(blocking=False):
            return  # Somebody is at it, perhaps for long.
        try:
            if self.stale and time.monotonic() >= self._next_try_at:
                with suppress(Away):
                    self.refresh()
                self._next_try_at = time.monotonic() + self.options.retry_s
        finally:
            self._renewing.release()

    def known(self) -> list[Server]:
        """Return every server that is used, or that somebody was sent to since the last refresh."""
        with self._lock:
            return list(self._servers.values())

    def at(self, address: Address) -> Server:
        """Return the server at an address."""
        with self._lock:
            server = self._servers.get(address)
            if server is None:
                server = self._servers[address] = Server(address, self.login, self.options)
                if self._closed:
                    server.close()
            return server

    def forget_all_but(self, servers: Collection[Server]) -> None:
        """Use no others any more, and keep no connections to them: where servers come and go, there are ever more."""
        with self._lock:
            gone = [server for server in self._servers.values() if server not in servers]
            self._servers = {server.address: server for server in servers}
            self._forgotten = [server for server in (*self._forgotten, *gone) if server.forget()]

    def close(self) -> int:
        """Close every connection, those too that are in use; say how many these are."""
        with self._lock:
            self._closed = True
            every = [*self._servers.values(), *self._forgotten]
        return sum(server.close() for server in every)


class Listed(Topology):
    """Servers that are given, each chunk on the one that its name has drawn: rendezvous hashing.

    A server that is added or removed takes or leaves its share, and no other chunk changes its place
    (https://doi.org/10.1109/90.663936).
    """

    def __init__(self, options: RedisOptions, login: Login) -> None:
        super().__init__(options, login)
        addresses = options.addresses()
        self._draws = [(xxh3_64_intdigest(str(address).encode()), self.at(address)) for address in addresses]

    def places_of(self, names: Sequence[bytes]) -> dict[Server, list[int]]:
        if len(self._draws) == 1:
            return {self._draws[0][1]: list(range(len(names)))} if names else {}
        return super().places_of(names)

    def server_of(self, name: bytes) -> Server:
        return max(self._draws, key=lambda draw: xxh3_64_intdigest(name, draw[0]))[1]


class Watched(Topology):
    """One primary, of which sentinels say where it is."""

    def __init__(self, options: RedisOptions, login: Login) -> None:
        super().__init__(options, login)
        self._redis = _library("sentinel")
        self._primary: Server | None = None

    def server_of(self, name: bytes) -> Server:  # noqa: ARG002
        assert self._primary is not None
        return self._primary

    def refresh(self) -> None:
        options = self.options
        given = _client_options(self._redis, options, self.login)
        if not options.sentinel_login:
            given |= {"password": None, "username": None}
        sentinel: Any = self._redis.sentinel.Sentinel(
            [tuple(address) for address in options.addresses()], sentinel_kwargs=given
        )
        try:
            host, port = sentinel.discover_master(options.sentinel_primary)
        except self._redis.exceptions.RedisError as error:
            raise Away(f"sentinels: {self.login.hide(str(error))}") from None
        finally:
            for client in sentinel.sentinels:
                client.close()
        self._primary = self.at(Address(str(host), int(port)))
        self.forget_all_but({self._primary})
        self.stale = False


class Slotted(Topology):
    """A cluster: a name's slot says which node has it."""

    cluster = True

    def __init__(self, options: RedisOptions, login: Login) -> None:
        super().__init__(options, login)
        self._redis = _library("cluster")
        self._slots: list[Server] = []

    def server_of(self, name: bytes) -> Server:
        return self._slots[_slot(name)]

    def refresh(self) -> None:
        seeds = dict.fromkeys([*(server.address for server in self.known()), *self.options.addresses()])
        reasons: list[str] = []
        for seed in seeds:
            try:
                self._slots = self._asked(seed)
            except (Away, self._redis.exceptions.RedisError) as error:
                reasons.append(f"{seed}: {self.login.hide(str(error))}")
            else:
                self.forget_all_but(set(self._slots))
                self.stale = False
                return
        raise Away("; ".join(reasons))

    def _asked(self, seed: Address) -> list[Server]:
        given = _client_options(self._redis, self.options, self.login)
        client: Any = self._redis.Redis(host=seed.host, port=seed.port, **given)
        try:
            ranges = client.execute_command("CLUSTER", "SLOTS")  # Two words: the library leaves the reply as it is.
        finally:
            client.close()
        first = self.at(seed)
        slots = [first] * SLOTS  # Of slots that nobody has, the seed says so itself.
        try:
            for start, end, (host, port, *_), *_ in ranges:
                server = self.at(Address(_text(host) or seed.host, int(port)))
                slots[start : end + 1] = [server] * (end + 1 - start)
        except (TypeError, ValueError):
            raise Away("what it says of the cluster's slots is no list of them") from None
        if len(slots) != SLOTS:
            raise Away("what it says of the cluster's slots are slots that no cluster has")
        return slots


def make_topology(options: RedisOptions, login: Login) -> Topology:
    """Return the topology that the options ask for. It has asked no server yet.

    Raises `ConfigError` if the library is not there.
    """
    kinds: dict[str, type[Topology]] = {"servers": Listed, "sentinel": Watched, "cluster": Slotted}
    return kinds[options.topology](options, login)


def _slot(name: bytes) -> int:
    """Return a name's slot; of a name with braces only what is between the first pair counts."""
    start = name.find(b"{")
    end = name.find(b"}", start + 1)
    tagged = start >= 0 and end > start + 1
    return crc_hqx(name[start + 1 : end] if tagged else name, 0) % SLOTS


def _library(module: str) -> Any:
    try:
        importlib.import_module(f"redis.{module}")
        return importlib.import_module("redis")
    except ImportError as error:
        raise ConfigError(f"topology: needs the extra kvtier[redis]: {error}") from error


def _client_options(library: Any, options: RedisOptions, login: Login) -> dict[str, Any]:
    given: dict[str, Any] = {
        "username": login.username,
        "password": login.password,
        "socket_timeout": options.connect_timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        "retry": library.retry.Retry(library.backoff.NoBackoff(), 0),  # Whoever asks has others to ask.
        "protocol": 2,
    }
    if login.tls is not None:
        given |= {
            "ssl": True,
            "ssl_check_hostname": True,  # As our own connections do; some versions of the library do not by themselves.
            "ssl_ca_certs": options.tls_ca_file,
            "ssl_certfile": options.tls_cert_file,
            "ssl_keyfile": options.tls_key_file,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        }
    return given


def _text(given: object) -> str:
    return given.decode() if isinstance(given, bytes) else str(given or "")
