"""A Redis tier's options: the URL of its servers, the secrets, and the number of requests at once."""

import ipaddress
import re
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec

from kvtier import settings
from kvtier.backend.codec import CodecOptions
from kvtier.backend.remote import PORT_MAX, Prefix, Text
from kvtier.errors import ConfigError

PORT, SENTINEL_PORT = 6_379, 26_379
LANES_MAX = 64  # A server is one core: more threads only queue there.
PASSWORD_BYTES_MAX = 4_096
ACCEPTED = "'redis://host:6379', or rediss://, redis+sentinel:// or redis+cluster:// accepted"

Topology = Literal["servers", "sentinel", "cluster"]
Lanes = Annotated[int, msgspec.Meta(ge=1, le=LANES_MAX)]

_TOPOLOGIES: dict[str, Topology] = {"": "servers", "sentinel": "sentinel", "cluster": "cluster"}
_URL = re.compile(r"(rediss?)(?:\+(sentinel|cluster))?://(?:([^/@]*)@)?([^/@]+)(?:/(.*))?", re.DOTALL)
_WORD = re.compile(r"[^\s:/?#@=,;&%\0]+")  # A user or a primary. Passwords of other programs follow these characters.


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Servers(NamedTuple):
    """The servers that a URL names, and how they are used."""

    addresses: tuple[Address, ...]
    topology: Topology = "servers"
    tls: bool = False
    username: str | None = None
    db: int = 0
    primary: str = ""  # Name under which sentinels watch it.


def told_address(host: str, port: str) -> Address | None:
    """Return the address that a server or a URL names; None if it is no host with a port from 1 to 65,535."""
    is_port = port.isascii() and port.isdecimal() and len(port) <= len(str(PORT_MAX)) and 1 <= int(port) <= PORT_MAX
    return Address(host, int(port)) if is_port and host != "?" and _is_host(host) else None


class RedisOptions(CodecOptions, frozen=True, kw_only=True):
    """Servers and how they are used. The servers' own configuration decides their capacity and their eviction."""

    meant: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("address", "cluster", "db", "endpoint", "host", "hosts", "nodes", "port", "sentinels", "servers"),
            "'url', such as 'redis://host:6379/0'",
        ),
        **dict.fromkeys(("username", "user"), "'url', such as 'redis://user@host'"),
        **dict.fromkeys(("tls", "ssl"), "'url', such as 'rediss://host'"),
        "password": "'password_file' or 'password_env'",
    }

    url: Text = "redis://127.0.0.1:6379"
    """`redis://[user@]host[:port][,host…][/db]`, or `rediss://` with TLS. With several servers, each chunk's name
    decides which one has it: all engines need the same list.
    `redis+sentinel://host[,host…]/primary[/db]`: sentinels say where the primary is. `redis+cluster://host[,host…]`:
    some nodes of a cluster. `rediss+sentinel://` and `rediss+cluster://`: with TLS."""

    sentinel_login: bool = False
    """The sentinels need the same user and password."""

    password_file: settings.SecretPath | None = None
    """File whose first line is the password. No other user may read it."""

    password_env: settings.SecretName | None = None
    """Name of an environment variable that holds the password, instead of a file."""

    tls_ca_file: settings.Path | None = None
    """Certificates of the authorities that sign the servers'; unset: the system's."""

    tls_cert_file: settings.SecretPath | None = None
    """Client certificate, where servers ask for one."""

    tls_key_file: settings.SecretPath | None = None
    """Key of the client certificate; unset: it is in the certificate's file."""

    prefix: Prefix = "kvtier/"
    """Beginning of every name, so that other programs can use the servers, too."""

    ttl_s: settings.Age | None = None
    """Age at which chunks expire; unset: when the servers need room."""

    lanes: Lanes = 4
    """Threads that load, and as many that store, each with its own connection. A load never queues behind stores."""

    window_bytes: settings.PositiveSize = 1 << 20
    """Most bytes of rows in flight on a connection, and at least one row. `lanes` times this should be the network's
    bandwidth times its delay: 4 MiB for 10 Gbit/s at 3 ms."""

    timeout_s: settings.PositiveDuration = 5.0
    """Limit of one call on all servers. A chunk that misses it fails, and its row is free."""

    def __post_init__(self) -> None:
        super().__post_init__()
        target = self.target()
        if self.password_file is not None and self.password_env is not None:
            raise ConfigError("password_env: given with password_file, one of them accepted")
        if target.username is not None and self.password_file is None and self.password_env is None:
            raise ConfigError("url: a user given without a password, which password_file or password_env has")
        if self.sentinel_login and target.topology != "sentinel":
            raise ConfigError("sentinel_login: goes with redis+sentinel://")
        if target.topology == "cluster" and "{" in self.prefix:
            raise ConfigError(
                f"prefix: {self.prefix!r} given, one without braces accepted with a cluster: of a name with braces, "
                "only the part between them selects the node"
            )
        given = [name for name in ("tls_ca_file", "tls_cert_file", "tls_key_file") if getattr(self, name) is not None]
        if given and not target.tls:
            raise ConfigError(f"{given[0]}: no use without rediss://")
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ConfigError("tls_key_file: given without tls_cert_file")

    def doubts(self) -> Iterable[str]:
        yield from super().doubts()
        for read in (self.password, self.tls_context):
            try:
                read()
            except ConfigError as error:
                yield str(error)

    def target(self) -> Servers:
        """Return the URL's servers. `ConfigError` never shows the URL: users paste other programs', with passwords."""
        if (match := _URL.fullmatch(self.url)) is None:
            raise ConfigError(f"url: no URL of servers given, {ACCEPTED}")
        scheme, kind, _, hosts, path = match.groups("")
        topology = _TOPOLOGIES[kind]
        port = SENTINEL_PORT if topology == "sentinel" else PORT
        addresses = tuple(_address(host, place, port) for place, host in enumerate(hosts.split(","), 1))
        if len(set(addresses)) < len(addresses):
            raise ConfigError("url: the same server is given twice")
        primary, db = _primary_and_db(path, topology)
        return Servers(addresses, topology, scheme == "rediss", _word(match[3]), db, primary)

    def password(self) -> str | None:
        """Read the password: not for the loop. Raises `ConfigError`."""
        if self.password_env is not None:
            return _password(settings.secret_variable("password_env", self.password_env), "password_env: the variable")
        if self.password_file is None:
            return None
        with settings.open_secret("password_file", self.password_file) as file:
            line = file.readline(PASSWORD_BYTES_MAX + 2)
        return _password(line.rstrip(b"\r\n"), "password_file: the file")

    def tls_context(self) -> ssl.SSLContext | None:
        """Read the files for TLS: not for the loop. Raises `ConfigError`."""
        if not self.target().tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
        except OSError as error:  # `ssl.SSLError` is one.
            raise ConfigError(f"tls_ca_file: {self.tls_ca_file} cannot be used: {error.strerror}") from error
        if self.tls_cert_file is not None:
            self._load_certificate(context, self.tls_cert_file)
        return context

    def _load_certificate(self, context: ssl.SSLContext, path: str) -> None:
        key = "tls_cert_file" if self.tls_key_file is None else "tls_key_file"
        settings.check_secret(key, self.tls_key_file or path)
        try:  # An empty passphrase, or OpenSSL would ask the terminal for one.
            context.load_cert_chain(path, self.tls_key_file, password="")
        except OSError as error:
            both = "" if self.tls_key_file is None else " with tls_key_file"
            raise ConfigError(
                f"tls_cert_file: cannot be used{both}: {error.strerror}; a certificate and its key without a "
                "passphrase, both in PEM, accepted"
            ) from None


def _password(line: bytes, where: str) -> str:
    """Return the password, which no message shows."""
    with suppress(UnicodeDecodeError):
        if 1 <= len(line) <= PASSWORD_BYTES_MAX:
            return line.decode()
    raise ConfigError(f"{where} holds no password: one line of 1 to {PASSWORD_BYTES_MAX:,} bytes of UTF-8 accepted")


def _word(given: str | None) -> str | None:
    if given is None or _WORD.fullmatch(given):
        return given
    raise ConfigError(
        "url: its user is no name without punctuation: nothing is percent-decoded, and password_file or password_env "
        "has the password"
    )


def _primary_and_db(path: str, topology: Topology) -> tuple[str, int]:
    primary, _, number = path.partition("/") if topology == "sentinel" else ("", "", path)
    if topology == "sentinel" and not _WORD.fullmatch(primary):
        raise ConfigError("url: no primary named, 'redis+sentinel://host:26379/primary' accepted")
    if topology == "cluster" and number:
        raise ConfigError("url: a database given, none accepted with a cluster")
    if number and not re.fullmatch(r"[0-9]{1,9}", number):
        raise ConfigError("url: no number of a database behind the servers, such as '/0'")
    return primary, int(number or 0)


def _address(text: str, place: int, port: int) -> Address:
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        host, number = text, str(port)
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    address = told_address(name, number)
    if address is None or (set(name) & set(":%") and not _is_ipv6(name)):  # Not `host:6379:secret`.
        raise ConfigError(f"url: server {place} of it is no 'host:port'; {ACCEPTED}")
    return address


def _is_ipv6(name: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(name.partition("%")[0]))
    except ValueError:
        return False


def _is_host(name: str) -> bool:
    try:
        return bool(name.encode("idna")) and name.isprintable() and not set(name) & set(" []/@=,;&?#")
    except UnicodeError:  # A part of it is empty, or too long.
        return False
