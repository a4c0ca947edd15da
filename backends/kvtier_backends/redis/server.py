"""One server: our login there, its idle connections, and whether it is away."""

import errno
import ssl
import threading
import time

from kvtier.errors import ConfigError
from kvtier_backends.redis.link import HostNames, Link, Lost, Refused, connect, number_of, request
from kvtier_backends.redis.options import Address, RedisOptions

REPEATED = ", with args"  # An error repeats the request behind these words.
NOT_LET_IN = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})


class Away(Exception):
    """The server cannot be used now; nothing was sent."""

    def __init__(self, why: str, number: int = 0) -> None:
        super().__init__(why)
        self.number = number  # The system's error number; 0 if there is none.


class NotLetIn(Away):
    """The server refuses the login: its access lists or our options have to be mended."""

    def __init__(self, why: str, option: str) -> None:
        super().__init__(why)
        self.option = option  # The option that is refused.


class Login:
    """The login of a connection: a user, a database and TLS, read once. Making one blocks."""

    def __init__(self, options: RedisOptions, *, at_sentinels: bool = False) -> None:
        """Read password and certificates. Raises `ConfigError`. Sentinels get a password only with `sentinel_login`."""
        wanted, target = options.sentinel_login or not at_sentinels, options.target()
        self.username = target.username if wanted else None
        self.password = options.password() if wanted else None
        self.tls: ssl.SSLContext | None = options.tls_context()
        self._password_option = "password_file" if options.password_env is None else "password_env"
        self._greeting = self._greetings(0 if at_sentinels else target.db)

    def _greetings(self, db: int) -> list[tuple[bytes, bytes]]:
        """Return each request with its expected reply."""
        names = [name.encode() for name in (self.username, self.password) if name is not None]
        greeting = [(request(b"AUTH", *names), b"+OK")] if self.password is not None else []
        if db:
            greeting.append((request(b"SELECT", b"%d" % db), b"+OK"))
        # PING fails now, not later, while a server loads its data or has too many clients.
        return [*greeting, (request(b"PING"), b"+PONG")]

    def greet(self, link: Link) -> None:
        """Log in. Raises `Lost` and `Refused`, which show no password."""
        link.send([b"".join(asked for asked, _ in self._greeting)])
        refusals: list[Refused] = []
        for _, answer in self._greeting:
            try:
                if link.head() != answer:  # Not shown: an echo server would send back the password.
                    raise Lost("the server does not speak Redis's protocol: unexpected answer to a greeting")
            except Refused as refusal:
                refusals.append(refusal)
        if refusals:  # The first explains the others.
            raise Refused(self.hide(str(refusals[0])))

    def to_mend(self, refusal: Refused) -> str | None:
        """Return the option to mend; None for a refusal that may pass by itself."""
        words = str(refusal)
        if refusal.kind == "NOPERM" or "DB index" in words or "SELECT" in words:
            return "url"
        return self._password_option if refusal.kind in NOT_LET_IN or "AUTH" in words or "password" in words else None

    def hide(self, told: str) -> str:
        """Return a server's text without the password: an error may repeat what was sent, cut off or not."""
        told = told.partition(REPEATED)[0]
        return told.replace(self.password, "***") if self.password else told


class Server:
    """Connections to one address. For any thread.

    A server that does not answer is away for `retry_s`: calls fail at once, and afterwards one thread tries again.
    """

    def __init__(self, address: Address, login: Login, options: RedisOptions) -> None:
        self.address = address
        self._names = HostNames(address)
        self._login = login
        self._connect_timeout_s = options.connect_timeout_s
        self._retry_s = options.retry_s
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._lent: set[Link] = set()
        self._closed = False
        self._away_until = 0.0
        self._why, self._number = "", 0

    def borrow(self, ends_at: float) -> tuple[Link, bool]:
        """Return a connection, and True if it is new. Raises `Away`."""
        with self._lock:
            self._check_usable()
            link, unfit = self._kept()
            if link is not None:
                self._lent.add(link)
            elif self._why:
                self._away_until = time.monotonic() + self._connect_timeout_s  # This thread tries; others do not wait.
        for one in unfit:
            one.close()
        if link is not None:
            link.ends_at = ends_at
            return link, False
        link = self._opened(min(ends_at, time.monotonic() + self._connect_timeout_s))
        link.ends_at = ends_at
        return link, True

    def _kept(self) -> tuple[Link | None, list[Link]]:
        """Return a usable idle connection, if any, and the unusable ones found before it."""
        unfit: list[Link] = []
        while self._idle:
            if (link := self._idle.pop()).quiet():
                return link, unfit
            unfit.append(link)
        return None, unfit

    def give_back(self, link: Link) -> None:
        """Keep a connection without requests in flight."""
        with self._lock:
            self._lent.discard(link)
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

    def drop(self, link: Link, why: str = "", *, late: bool = False) -> None:
        """Close a connection, and the idle ones: what ended it has probably ended them, too.

        `late`: the server missed a deadline and is away.
        """
        with self._lock:
            self._lent.discard(link)
            idle, self._idle = self._idle, []
            if late:
                self._note_away(why, errno.ETIMEDOUT)
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

    def close(self) -> int:
        """Close idle connections, make calls in flight fail, and return how many there are."""
        self.forget()
        with self._lock:
            for link in self._lent:
                link.interrupt()
            return len(self._lent)

    def _check_usable(self) -> None:
        if self._closed:
            raise Away(f"{self.address}: closed")
        if time.monotonic() < self._away_until:
            raise Away(f"{self.address}: {self._why}", self._number)

    def _opened(self, ends_at: float) -> Link:
        try:
            link = connect(self.address, self._names, self._login.tls, ends_at)
        except ssl.SSLCertVerificationError as error:
            why = f"{self.address}: its certificate is refused: {error.verify_message}"
            raise self._away(NotLetIn(why, "tls_ca_file")) from None
        except OSError as error:
            raise self._away(Away(f"{self.address}: {error.strerror or error}", number_of(error))) from None
        with self._lock:
            self._lent.add(link)
            if self._closed:
                link.interrupt()  # Closed while it connected.
        link.ends_at = ends_at
        try:
            self._login.greet(link)
        except (Lost, Refused) as error:
            self.drop(link)
            option, why = isinstance(error, Refused) and self._login.to_mend(error), f"{self.address}: {error}"
            number = error.number if isinstance(error, Lost) else 0
            raise self._away(NotLetIn(why, option) if option else Away(why, number)) from None
        with self._lock:
            self._away_until, self._why = 0.0, ""
        return link

    def _away(self, error: Away) -> Away:
        with self._lock:
            self._note_away(str(error).partition(": ")[2], error.number)
        return error

    def _note_away(self, why: str, number: int) -> None:
        self._away_until, self._why, self._number = time.monotonic() + self._retry_s, why, number


def check(server: Server, prefix: bytes, *, cluster: bool, timeout_s: float) -> None:
    """Try every request that the tier makes, on one small value. Raises `Away` and `ConfigError`."""
    name = prefix + b"opened"
    try:
        link, _ = server.borrow(time.monotonic() + timeout_s)
    except NotLetIn as error:
        raise ConfigError(f"{error.option}: {error}") from error
    try:
        for words in (
            (b"CLUSTER", b"KEYSLOT", name),
            (b"EXISTS", name),
            (b"SET", name, b"", b"PX", b"1000"),
            (b"GET", name),
            (b"UNLINK", name),
            *([(b"ASKING",)] if cluster else []),
        ):
            _check_request(link, words, str(server.address), cluster=cluster)
    except Lost as error:
        server.drop(link)
        raise Away(f"{server.address}: {error}", error.number) from None
    except BaseException:
        server.drop(link)
        raise
    server.give_back(link)


def _check_request(link: Link, words: tuple[bytes, ...], where: str, *, cluster: bool) -> None:
    link.send([request(*words)])
    try:
        head = link.head()
        if head == b"$0":
            link.fill([])
        if words[0] == b"CLUSTER" and not cluster:
            raise ConfigError(f"url: {where} is a node of a cluster: redis+cluster:// accepted")
    except Refused as refusal:
        _judge(refusal, words, where, cluster=cluster)


def _judge(refusal: Refused, words: tuple[bytes, ...], where: str, *, cluster: bool) -> None:
    command = words[0].decode()
    if command == "CLUSTER":
        if cluster and "support disabled" in str(refusal):
            raise ConfigError(f"url: {where} is no node of a cluster: redis:// accepted")
    elif refusal.kind in NOT_LET_IN:
        raise ConfigError(f"url: {where} does not allow its user {command}: {refusal}")
    elif "unknown command" in str(refusal):
        raise ConfigError(f"url: {where} keeps no values (a sentinel?): {refusal}")
    elif refusal.kind not in ("MOVED", "ASK", "OOM", "WRONGTYPE"):
        raise Away(f"{where}: {refusal}")
