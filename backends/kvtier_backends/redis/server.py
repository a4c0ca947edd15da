"""One server: our login there, its idle connections, and whether it is away."""

import errno
import ssl
import threading
import time

from kvtier.errors import ConfigError
from kvtier_backends.redis.link import Link, Lost, Names, Refused, connect, number_of, request
from kvtier_backends.redis.options import Address, RedisOptions

REPEATED = ", with args"  # What follows it in an error is what was sent.
NOT_LET_IN = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})


class Away(Exception):
    """The server cannot be used now; nothing was sent."""

    def __init__(self, why: str, number: int = 0) -> None:
        """Say why; `number`: the system's for it, where it has one."""
        super().__init__(why)
        self.number = number


class NotLetIn(Away):
    """The server refuses us: its passwords or access lists, or our options, have to be mended."""

    def __init__(self, why: str, option: str) -> None:
        """Say why, and which option says what is refused."""
        super().__init__(why)
        self.option = option


class Login:
    """The login of a connection: a user, a database and TLS, read once. Making it blocks."""

    def __init__(self, options: RedisOptions, *, at_sentinels: bool = False) -> None:
        """Read password and certificates; raises `ConfigError`. Sentinels get a password only if they want it."""
        wanted = options.sentinel_login or not at_sentinels
        self.username = options.username if wanted else None
        self.password = options.password() if wanted else None
        self.tls: ssl.SSLContext | None = options.tls_context()
        self._password_option = "password_file" if options.password_env is None else "password_env"
        self._greeting = self._greetings(0 if at_sentinels else options.db)

    def _greetings(self, db: int) -> list[tuple[bytes, bytes]]:
        """Return requests, and what answers them."""
        names = [name.encode() for name in (self.username, self.password) if name is not None]
        greeting = [(request(b"AUTH", *names), b"+OK")] if self.password is not None else []
        if db:
            greeting.append((request(b"SELECT", b"%d" % db), b"+OK"))
        # Of a server that loads its data, or has too many clients, now and not later.
        return [*greeting, (request(b"PING"), b"+PONG")]

    def greet(self, link: Link) -> None:
        """Log in, and hear whether the server answers. Raises `Lost` and `Refused`, which show no password."""
        link.send([b"".join(asked for asked, _ in self._greeting)])
        refusals: list[Refused] = []
        for _, answer in self._greeting:
            try:
                if link.head() != answer:  # It may be what was sent, password and all: it is not shown.
                    raise Lost("the server does not speak Redis's protocol: it answers a greeting with something else")
            except Refused as refusal:
                refusals.append(refusal)
        if refusals:  # The first explains the others.
            raise Refused(self.hide(str(refusals[0])))

    def to_mend(self, refusal: Refused) -> str | None:
        """Return the option that is wrong; None if what was refused is not for the user to mend, but for time."""
        words = str(refusal)
        if "DB index" in words or "SELECT" in words:
            return "db"
        if refusal.kind == "NOPERM":
            return "username"
        return self._password_option if refusal.kind in NOT_LET_IN or "AUTH" in words or "password" in words else None

    def hide(self, told: str) -> str:
        """Return a server's words without the password: an error may repeat sent bytes, cut off or not."""
        told = told.partition(REPEATED)[0]
        return told.replace(self.password, "***") if self.password else told


class Server:
    """Connections to one address. For any thread.

    A server that does not answer is away for a while: nobody waits for it meanwhile, and then one thread tries.
    """

    def __init__(self, address: Address, login: Login, options: RedisOptions) -> None:
        """Connect to nothing yet."""
        self.address = address
        self._names = Names(address)
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
        """Return a connection, and whether it was made just now. Raises `Away`."""
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
        """Take an idle connection, and those that turn out to be of no use any more."""
        unfit: list[Link] = []
        while self._idle:
            if (link := self._idle.pop()).quiet():
                return link, unfit
            unfit.append(link)
        return None, unfit

    def give_back(self, link: Link) -> None:
        """Keep a connection on which nothing is under way."""
        with self._lock:
            self._lent.discard(link)
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

    def drop(self, link: Link, why: str = "", *, late: bool = False) -> None:
        """Close a connection, and those that are idle: the server has ended it, and probably them, too.

        `late`: it has not answered, and is away.
        """
        with self._lock:
            self._lent.discard(link)
            idle, self._idle = self._idle, []
            if late:
                self._note_away(why, errno.ETIMEDOUT)
        for one in (link, *idle):
            one.close()

    def forget(self) -> bool:
        """Refuse to lend, and close what is idle; say whether there are connections in use, which go on."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            lent = bool(self._lent)
        for link in idle:
            link.close()
        return lent

    def close(self) -> int:
        """Do likewise, and have calls that are under way fail; say how many these are."""
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
                link.interrupt()  # It was closed meanwhile, and waits for nobody.
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
    """Try every request that the tier makes, on one small value. Raises `Away`; `ConfigError` for what is to mend."""
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
            raise ConfigError(f"topology: {where} is one of a cluster: topology = 'cluster' is accepted with it")
    except Refused as refusal:
        _judge(refusal, words, where, cluster=cluster)


def _judge(refusal: Refused, words: tuple[bytes, ...], where: str, *, cluster: bool) -> None:
    command = words[0].decode()
    if command == "CLUSTER":
        if cluster and "support disabled" in str(refusal):
            raise ConfigError(f"topology: {where} is no part of a cluster: topology = 'servers' is accepted with it")
    elif refusal.kind in NOT_LET_IN:
        raise ConfigError(f"username: {where} does not allow {command}: {refusal}")
    elif "unknown command" in str(refusal):
        raise ConfigError(f"servers: {where} keeps no values (a sentinel?): {refusal}")
    elif refusal.kind not in ("MOVED", "ASK", "OOM", "WRONGTYPE"):
        raise Away(f"{where}: {refusal}")
