"""Servers, and the server of each chunk: by its name alone, behind Sentinel, or in a cluster.

Answers of sentinels and nodes are bounded and checked before an address in them is used.
"""

import errno
import ssl
import threading
import time
from abc import ABC, abstractmethod
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from xxhash import xxh3_64_intdigest

from kvtier.errors import ConfigError
from kvtier_backends.redis.link import HostNames, Link, Lost, Refused, connect, number_of, request
from kvtier_backends.redis.options import Address, RedisOptions, told_address

CONNECT_S = 1.0  # Limit of making a connection, and of asking a server where others are.
RETRY_S = 1.0  # Pause before a server that is away is tried again.
NOT_LET_IN = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})
SLOTS = 16_384  # Of every cluster (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/).

A = TypeVar("A")


class Away(Exception):
    """The server cannot be used now; nothing was sent."""

    def __init__(self, why: str, number: int = 0, option: str | None = None) -> None:
        super().__init__(why)
        self.number = number  # The system's error number; 0 if there is none.
        self.option = option  # The option that has to be mended, where the server does not let us in.


class Login:
    """The login of a connection: a user, a database and TLS, read once. Making one blocks."""

    def __init__(self, options: RedisOptions, *, at_sentinels: bool = False) -> None:
        """Read password and certificates. Raises `ConfigError`. Sentinels get a password only with `sentinel_login`."""
        wanted, target = options.sentinel_login or not at_sentinels, options.target()
        self.password = options.password() if wanted else None
        self.tls: ssl.SSLContext | None = options.tls_context()
        self._password_option = "password_file" if options.password_env is None else "password_env"
        self._greeting = [(request(b"PING"), b"+PONG")]  # Fails now if a server loads its data or is overrun.
        if target.db and not at_sentinels:
            self._greeting.insert(0, (request(b"SELECT", b"%d" % target.db), b"+OK"))
        if self.password is not None:
            names = [name.encode() for name in (target.username, self.password) if name is not None]
            self._greeting.insert(0, (request(b"AUTH", *names), b"+OK"))

    def greet(self, link: Link) -> None:
        """Log in. Raises `Lost`, which shows no password, and `Refused`, which may."""
        link.send([b"".join(asked for asked, _ in self._greeting)])
        refusals: list[Refused] = []
        for _, answer in self._greeting:
            try:
                if link.head() != answer:  # Not shown: an echo server would send back the password.
                    raise Lost("the server does not speak Redis's protocol: unexpected answer to a greeting")
            except Refused as refusal:
                refusals.append(refusal)
        if refusals:
            raise refusals[0]  # It explains the others.

    def to_mend(self, refusal: Refused) -> str | None:
        """Return the option to mend; None for a refusal that may pass by itself."""
        words = str(refusal)
        if refusal.kind == "NOPERM" or "DB index" in words or "SELECT" in words:
            return "url"
        return self._password_option if refusal.kind in NOT_LET_IN or "AUTH" in words or "password" in words else None

    def hide(self, told: str) -> str:
        """Return a server's text without the password: an error may repeat what was sent, cut off or not."""
        told = told.partition(", with args")[0]  # An error repeats the request behind these words.
        return told.replace(self.password, "***") if self.password else told


class Server:
    """Connections to one address, for any thread. A silent server is away for `RETRY_S`; then one thread retries."""

    def __init__(self, address: Address, login: Login) -> None:
        self.address = address
        self._names = HostNames(address)
        self._login = login
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._lent: set[Link] = set()
        self._closed = False
        self._away_until = 0.0
        self._why, self._number = "", 0

    def borrow(self, ends_at: float) -> tuple[Link, bool]:
        """Return a connection, and True if it is new. Raises `Away`."""
        with self._lock:
            if self._closed:
                raise Away(f"{self.address}: closed")
            if time.monotonic() < self._away_until:
                raise Away(f"{self.address}: {self._why}", self._number)
            while self._idle:
                link = self._idle.pop()
                if link.quiet():
                    self._lent.add(link)
                    link.ends_at = ends_at
                    return link, False
                link.close()
            if self._why:
                self._away_until = time.monotonic() + CONNECT_S  # This thread tries; others do not wait.
        link = self._opened(min(ends_at, time.monotonic() + CONNECT_S))
        link.ends_at = ends_at
        return link, True

    @contextmanager
    def link(self, limit_s: float) -> Generator[Link]:
        """Lend a connection for the length of the block; an error closes it. Raises `Away`, also for the server's."""
        link, _ = self.borrow(time.monotonic() + limit_s)
        try:
            yield link
        except (Lost, Refused) as error:
            self.drop(link)
            raise self._away(error) from None
        except BaseException:
            self.drop(link)
            raise
        self.give_back(link)

    def give_back(self, link: Link) -> None:
        """Keep a connection without requests in flight."""
        with self._lock:
            self._lent.discard(link)
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

    def drop(self, link: Link, why: str = "", *, late: bool = False) -> None:
        """Close a connection, and the idle ones, which have probably ended, too. `late`: it missed a deadline."""
        with self._lock:
            self._lent.discard(link)
            idle, self._idle = self._idle, []
            if late:
                self._is_away(why, errno.ETIMEDOUT)
        for one in (link, *idle):
            one.close()

    def forget(self) -> bool:
        """Lend no more, and close idle connections. Return True if others are still in use."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            lent = bool(self._lent)
        for link in idle:
            link.close()
        return lent

    def close(self) -> None:
        """Close idle connections, and make calls in flight fail."""
        self.forget()
        with self._lock:
            for link in self._lent:
                link.interrupt()

    def _opened(self, ends_at: float) -> Link:
        link: Link | None = None
        try:
            link = connect(self.address, self._names, self._login.tls, ends_at)
            with self._lock:
                self._lent.add(link)
                if self._closed:
                    link.interrupt()  # Closed while it connected.
            link.ends_at = ends_at
            self._login.greet(link)
        except (OSError, Lost, Refused) as error:
            if link is not None:
                self.drop(link)
            away = self._away(error)
            with self._lock:
                self._is_away(str(away).partition(": ")[2], away.number)
            raise away from None
        with self._lock:
            self._away_until, self._why = 0.0, ""
        return link

    def _away(self, error: OSError | Lost | Refused) -> Away:
        why, number, option = str(error), 0, None
        if isinstance(error, ssl.SSLCertVerificationError):
            why, option = f"its certificate is refused: {error.verify_message}", "tls_ca_file"
        elif isinstance(error, OSError):
            why, number = error.strerror or why, number_of(error)
        elif isinstance(error, Lost):
            number = error.number
        else:
            why, option = self._login.hide(why), self._login.to_mend(error)
        return Away(f"{self.address}: {why}", number, option)

    def _is_away(self, why: str, number: int) -> None:
        self._away_until, self._why, self._number = time.monotonic() + RETRY_S, why, number


def check(server: Server, prefix: bytes, *, cluster: bool, timeout_s: float) -> None:
    """Try every request that the tier makes, on one small value. Raises `Away` and `ConfigError`."""
    name = prefix + b"opened"
    try:
        with server.link(timeout_s) as link:
            for words in (
                (b"CLUSTER", b"KEYSLOT", name),
                (b"EXISTS", name),
                (b"SET", name, b"", b"PX", b"1000"),
                (b"GET", name),
                (b"UNLINK", name),
                *([(b"ASKING",)] if cluster else []),
            ):
                link.send([request(*words)])
                try:
                    link.answer()
                except Refused as refusal:
                    _judge(refusal, words[0].decode(), str(server.address), cluster=cluster)
                else:
                    if words[0] == b"CLUSTER" and not cluster:
                        raise ConfigError(f"url: {server.address} is a node of a cluster: redis+cluster:// accepted")
    except Away as error:
        if error.option is None:
            raise
        raise ConfigError(f"{error.option}: {error}") from error


def _judge(refusal: Refused, command: str, where: str, *, cluster: bool) -> None:
    if command == "CLUSTER":
        if cluster and "support disabled" in str(refusal):
            raise ConfigError(f"url: {where} is no node of a cluster: redis:// accepted")
    elif refusal.kind in NOT_LET_IN:
        raise ConfigError(f"url: {where} does not allow its user {command}: {refusal}")
    elif "unknown command" in str(refusal):
        raise ConfigError(f"url: {where} keeps no values (a sentinel?): {refusal}")
    elif refusal.kind not in ("MOVED", "ASK", "OOM", "WRONGTYPE"):
        raise Away(f"{where}: {refusal}")


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
    def server_of(self, name: bytes) -> Server: ...

    def places_of(self, names: Sequence[bytes]) -> dict[Server, list[int]]:
        places: defaultdict[Server, list[int]] = defaultdict(list)
        for index, name in enumerate(names):
            places[self.server_of(name)].append(index)
        return places

    def refresh(self) -> None:
        """Ask where servers are now. Blocks. Raises `Away` without an answer."""
        self.stale = False

    def renew(self) -> None:
        """Refresh a stale topology, at most every `RETRY_S`. Without an answer the old one stays."""
        if not self._renewing.acquire(blocking=False):
            return  # Another thread does it, and may take long.
        try:
            if self.stale and time.monotonic() >= self._next_try_at:
                with suppress(Away):
                    self.refresh()
                self._next_try_at = time.monotonic() + RETRY_S
        finally:
            self._renewing.release()

    def _first_answer(
        self, servers: Sequence[Server], words: Sequence[bytes], read: Callable[[Any, Address], A], who: str = ""
    ) -> A:
        """Return the first server's answer, as `read`; each gets `CONNECT_S`. Raises `Away` with all reasons."""
        reasons: list[str] = []
        for server in servers:
            try:
                with server.link(CONNECT_S) as link:
                    link.send([request(*words)])
                    return read(link.answer(), server.address)
            except Away as error:
                reasons.append(str(error))
        raise Away(who + "; ".join(reasons))

    def known(self) -> list[Server]:
        """Return every server in use, and those that redirects have named since the last refresh."""
        with self._lock:
            return list(self._servers.values())

    def at(self, address: Address) -> Server:
        with self._lock:
            if (server := self._servers.get(address)) is None:
                server = self._servers[address] = Server(address, self.login)
                if self._closed:
                    server.close()
            return server

    def forget_all_but(self, servers: Collection[Server]) -> None:
        """Forget the other servers and their idle connections, or they would pile up where servers come and go."""
        with self._lock:
            gone = [server for server in self._servers.values() if server not in servers]
            self._servers = {server.address: server for server in servers}
            self._forgotten = [server for server in (*self._forgotten, *gone) if server.forget()]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            every = [*self._servers.values(), *self._forgotten]
        for server in every:
            server.close()


class ServerList(Topology):
    """A given list of servers; rendezvous hashing (https://doi.org/10.1109/90.663936) selects the server of each name.

    A server that is added or removed takes or leaves its share, and no other chunk changes its place.
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
        self._sentinels = [Server(address, at_sentinels) for address in options.target().addresses]
        self._primary: Server | None = None

    def server_of(self, name: bytes) -> Server:  # noqa: ARG002
        assert self._primary is not None
        return self._primary

    def refresh(self) -> None:
        words = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self.options.target().primary.encode())
        self._primary = self.at(self._first_answer(self._sentinels, words, _primary_told, "sentinels: "))
        self.forget_all_but({self._primary})
        self.stale = False

    def close(self) -> None:
        for sentinel in self._sentinels:
            sentinel.close()
        super().close()


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


def _primary_told(answer: Any, _: Address) -> Address:
    if answer is None:
        raise Lost("it watches no primary of this name")
    with suppress(AttributeError, TypeError, ValueError):
        host, port = answer
        if address := told_address(host.decode(), port.decode()):
            return address
    raise Lost("its answer is no address of a primary")


def _slots_told(answer: Any, asked: Address) -> list[Address]:
    """Check a node's table of slots. A slot that is missing there is asked of this node, which knows better."""
    slots = [asked] * SLOTS
    try:
        for start, end, (host, port, *_), *_replicas in answer:
            if not 0 <= start <= end < SLOTS:
                raise Lost(f"it names slots {start:,} to {end:,}, and a cluster has {SLOTS:,}")
            slots[start : end + 1] = [_node_told(host or b"", port, asked)] * (end + 1 - start)
    except (AttributeError, TypeError, ValueError):
        raise Lost("its answer is no list of slots") from None
    return slots


def _node_told(host: bytes, port: int, asked: Address) -> Address:
    """Return a node's address: an empty host is that of the node asked, and "?" an unknown one."""
    if host == b"?":
        return asked
    if (address := told_address(host.decode() or asked.host, str(port))) is None:
        raise Lost(f"it names a node at {host!r} and port {port!r}, which is no address")
    return address
