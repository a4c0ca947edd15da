"""The server of each chunk: by its name alone, behind Sentinel, or in a cluster.

Answers of sentinels and nodes are bounded and checked before an address in them is used.
"""

import threading
import time
from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from kvtier_backends.redis.link import Link, Lost, Refused, number_in, request
from kvtier_backends.redis.options import Address, RedisOptions, told_address
from kvtier_backends.redis.server import Away, Login, Server

A = TypeVar("A")

SLOTS = 16_384  # Of every cluster (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/).


class Topology(ABC):
    """The known servers, and the server of each name. For any thread; one `refresh` at a time."""

    cluster = False

    def __init__(self, options: RedisOptions, login: Login) -> None:
        self.options = options
        self.login = login
        self.stale = False  # Set once a server turns out to be another than the one expected.
        self._next_try_at = 0.0
        self._renewing = threading.Lock()
        self._servers: dict[Address, Server] = {}
        self._forgotten: list[Server] = []  # Some of their connections are still in use.
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def server_of(self, name: bytes) -> Server:
        """Return the server of a name, from memory."""

    def places_of(self, names: Sequence[bytes]) -> dict[Server, list[int]]:
        """Return the places of these names by server, from memory."""
        places: defaultdict[Server, list[int]] = defaultdict(list)
        for index, name in enumerate(names):
            places[self.server_of(name)].append(index)
        return places

    def refresh(self) -> None:
        """Ask where servers are now. Blocks. Raises `Away` without an answer."""
        self.stale = False

    def renew(self) -> None:
        """Refresh a stale topology, at most every `retry_s`. Without an answer the old one stays."""
        if not self._renewing.acquire(blocking=False):
            return  # Another thread does it, and may take long.
        try:
            if self.stale and time.monotonic() >= self._next_try_at:
                with suppress(Away):
                    self.refresh()
                self._next_try_at = time.monotonic() + self.options.retry_s
        finally:
            self._renewing.release()

    def _first_answer(
        self, servers: Sequence[Server], words: Sequence[bytes], read: Callable[[Link], A], who: str = ""
    ) -> A:
        """Return the first server's answer; each gets `connect_timeout_s`. Raises `Away` with all reasons."""
        reasons: list[str] = []
        for server in servers:
            try:
                link, _ = server.borrow(time.monotonic() + self.options.connect_timeout_s)
            except Away as error:
                reasons.append(str(error))
                continue
            try:
                link.send([request(*words)])
                answer = read(link)
            except (Lost, Refused) as error:
                reasons.append(f"{server.address}: {self.login.hide(str(error))}")
                server.drop(link)
            except BaseException:
                server.drop(link)
                raise
            else:
                server.give_back(link)
                return answer
        raise Away(who + "; ".join(reasons))

    def known(self) -> list[Server]:
        """Return every server in use, and those that redirects have named since the last refresh."""
        with self._lock:
            return list(self._servers.values())

    def at(self, address: Address) -> Server:
        with self._lock:
            server = self._servers.get(address)
            if server is None:
                server = self._servers[address] = Server(address, self.login, self.options)
                if self._closed:
                    server.close()
            return server

    def forget_all_but(self, servers: Collection[Server]) -> None:
        """Forget the other servers and their idle connections, or they would pile up where servers come and go."""
        with self._lock:
            gone = [server for server in self._servers.values() if server not in servers]
            self._servers = {server.address: server for server in servers}
            self._forgotten = [server for server in (*self._forgotten, *gone) if server.forget()]

    def close(self) -> int:
        """Close every connection, and return how many were in use."""
        with self._lock:
            self._closed = True
            every = [*self._servers.values(), *self._forgotten]
        return sum(server.close() for server in every)


class ServerList(Topology):
    """A given list of servers; rendezvous hashing selects the server of each name.

    A server that is added or removed takes or leaves its share, and no other chunk changes its place
    (https://doi.org/10.1109/90.663936).
    """

    def __init__(self, options: RedisOptions, login: Login) -> None:
        super().__init__(options, login)
        addresses = options.target().addresses
        self._draws = [(xxh3_64_intdigest(str(address).encode()), self.at(address)) for address in addresses]

    def places_of(self, names: Sequence[bytes]) -> dict[Server, list[int]]:
        if len(self._draws) == 1:
            return {self._draws[0][1]: list(range(len(names)))} if names else {}
        return super().places_of(names)

    def server_of(self, name: bytes) -> Server:
        return max(self._draws, key=lambda draw: xxh3_64_intdigest(name, draw[0]))[1]


class Sentinels(Topology):
    """One primary, whose address sentinels know."""

    def __init__(self, options: RedisOptions, login: Login) -> None:
        super().__init__(options, login)
        at_sentinels = Login(options, at_sentinels=True)
        self._sentinels = [Server(address, at_sentinels, options) for address in options.target().addresses]
        self._primary: Server | None = None

    def server_of(self, name: bytes) -> Server:  # noqa: ARG002
        assert self._primary is not None
        return self._primary

    def refresh(self) -> None:
        name = self.options.target().primary.encode()
        words = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name)
        address = self._first_answer(self._sentinels, words, _primary_told, "sentinels: ")
        self._primary = self.at(address)
        self.forget_all_but({self._primary})
        self.stale = False

    def close(self) -> int:
        for sentinel in self._sentinels:
            sentinel.close()
        return super().close()


class Cluster(Topology):
    """A cluster: the slot of a name selects its node."""

    cluster = True

    def __init__(self, options: RedisOptions, login: Login) -> None:
        super().__init__(options, login)
        self._slots: list[Server] = []

    def server_of(self, name: bytes) -> Server:
        return self._slots[_slot(name)]

    def refresh(self) -> None:
        seeds = dict.fromkeys([*self.known(), *map(self.at, self.options.target().addresses)])
        slots = self._first_answer(list(seeds), (b"CLUSTER", b"SLOTS"), _slots_told)
        servers = {address: self.at(address) for address in set(slots)}
        self._slots = [servers[address] for address in slots]
        self.forget_all_but(set(self._slots))
        self.stale = False


def make_topology(options: RedisOptions, login: Login) -> Topology:
    """Return the topology of the URL. It has asked no server yet."""
    kinds: dict[str, type[Topology]] = {"servers": ServerList, "sentinel": Sentinels, "cluster": Cluster}
    return kinds[options.target().topology](options, login)


def _slot(name: bytes) -> int:
    """Return a name's slot. Only the part between the first pair of braces counts, if there is one."""
    start = name.find(b"{")
    end = name.find(b"}", start + 1)
    tagged = start >= 0 and end > start + 1
    return crc_hqx(name[start + 1 : end] if tagged else name, 0) % SLOTS


def _primary_told(link: Link) -> Address:
    """Read a sentinel's answer: a host and a port."""
    length = link.length(b"*")
    if length is None:
        raise Lost("it watches no primary of this name")
    if length == 2 and (address := told_address(_text(link.text()), _text(link.text()))):
        return address
    raise Lost("its answer is no address of a primary")


def _slots_told(link: Link) -> list[Address]:
    """Read a node's table of slots. A slot that is missing there is asked of this node, which knows better."""
    slots = [link.address] * SLOTS
    for _ in range(_length(link, 0, SLOTS)):
        parts = _length(link, 3)
        start, end = number_in(link.head(), b":"), number_in(link.head(), b":")
        if not start <= end < SLOTS:
            raise Lost(f"it names slots {start:,} to {end:,}, and a cluster has {SLOTS:,}")
        facts = _length(link, 2)
        node = _node_told(_text(link.text()), number_in(link.head(), b":"), link.address)
        link.pass_over(facts - 2)
        link.pass_over(parts - 3)  # The replicas.
        slots[start : end + 1] = [node] * (end + 1 - start)
    return slots


def _node_told(host: str, port: int, asked: Address) -> Address:
    """Return a node's address: an empty host is that of the node asked, and "?" an unknown one."""
    if host == "?":
        return asked
    if (address := told_address(host or asked.host, str(port))) is None:
        raise Lost(f"it names a node at {host!r} and port {port:,}, which is no address")
    return address


def _length(link: Link, least: int, most: int | None = None) -> int:
    length = link.length(b"*")
    if length is None or length < least or (most is not None and length > most):
        raise Lost("its answer is no list of slots")
    return length


def _text(given: bytes | None) -> str:
    try:
        return (given or b"").decode()
    except UnicodeDecodeError:
        raise Lost(f"it names a host {given!r}") from None
