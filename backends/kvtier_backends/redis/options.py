"""A Redis tier's options: the servers, the login, and the number of requests at once."""

import os
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec

from kvtier.backend import SealOptions
from kvtier.errors import ConfigError
from kvtier.settings import (
    Age,
    Index,
    Path,
    PositiveDuration,
    PositiveSize,
    SecretName,
    SecretPath,
    check_secret,
    open_secret,
    secret_variable,
)

PORT, SENTINEL_PORT = 6_379, 26_379
PORT_MAX = (1 << 16) - 1
LANES_MAX = 64  # A server is one core: more threads only queue there.
PATH_BYTES_MAX = 107  # Of a socket (https://man7.org/linux/man-pages/man7/unix.7.html).
PREFIX_BYTES_MAX = 128
PASSWORD_BYTES_MAX = 4_096

Text = Annotated[str, msgspec.Meta(min_length=1)]
Lanes = Annotated[int, msgspec.Meta(ge=1, le=LANES_MAX)]
Prefix = Annotated[str, msgspec.Meta(max_length=PREFIX_BYTES_MAX, pattern=r"^[!-~]*$")]


class Address(NamedTuple):
    """Where a server listens: a host and its port, or a path and the port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        if not self.port:
            return f"unix:{self.host}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def told_address(host: str, port: str) -> Address | None:
    """Return the address that a server names; None if it is no host with a port from 1 to 65,535.

    A server never names a path: that would send us, and our password, to any socket of this machine.
    """
    is_port = port.isascii() and port.isdecimal() and len(port) <= len(str(PORT_MAX)) and 1 <= int(port) <= PORT_MAX
    return Address(host, int(port)) if is_port and host != "?" and _is_host(host) else None


class RedisOptions(SealOptions, frozen=True, kw_only=True):
    """Servers and how they are used. How much they hold, and what goes for room, is the servers' own configuration."""

    meant: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("address", "endpoint", "host", "hosts", "nodes", "port", "server", "url"), "'servers'"),
        "password": "'password_file' or 'password_env'",
    }

    servers: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1)] = ("127.0.0.1:6379",)
    """`host:port` or `unix:/path`. With several, each chunk's name says whose it is: all engines give the same list."""

    topology: Literal["servers", "sentinel", "cluster"] = "servers"
    """`sentinel`: `servers` are sentinels, who say where the primary is. `cluster`: some of a cluster's nodes."""

    sentinel_primary: Text | None = None
    """Name under which the sentinels watch the primary."""

    sentinel_login: bool = False
    """Whether the sentinels want user and password, too: the same."""

    username: Text | None = None
    """User of an access list; nothing: the server's default user."""

    password_file: SecretPath | None = None
    """File whose first line is the password. Nobody else may read it."""

    password_env: SecretName | None = None
    """Name of an environment variable that holds the password, instead of a file."""

    db: Index = 0
    """Number of the database; a cluster has only the first."""

    tls: bool = False
    """Whether connections are encrypted, and the servers' certificates checked."""

    tls_ca_file: Path | None = None
    """Certificates of those who may have signed the servers'; nothing: the system's."""

    tls_cert_file: SecretPath | None = None
    """Our own certificate, where servers ask for one."""

    tls_key_file: SecretPath | None = None
    """Its key; nothing: it is in the certificate's file."""

    prefix: Prefix = "kvtier/"
    """What every name begins with, so that others can use the servers, too."""

    ttl_s: Age | None = None
    """Chunks go so long after they were stored; nothing: when the servers need room."""

    load_lanes: Lanes = 4
    """Threads that load, each with a connection of its own."""

    store_lanes: Lanes = 4
    """Threads that store: others than those that load, so that a load never queues behind stores."""

    window_bytes: PositiveSize = 1 << 20
    """Most bytes of rows that a connection has on their way, and at least one row.

    A server copies what waits in it, and that costs more the less of it fits its caches. A network wants lanes times
    this as bandwidth times delay: 4 MiB are 10 Gbit/s at 3 ms.
    """

    timeout_s: PositiveDuration = 5.0
    """For all that one call asks of all servers: later is a failure, and rows are free again."""

    connect_timeout_s: PositiveDuration = 1.0
    """For a connection to be made."""

    retry_s: PositiveDuration = 1.0
    """How long a server that could not be reached is not tried again."""

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        super().__post_init__()
        addresses = self.addresses()
        if len(set(addresses)) < len(addresses):
            raise ConfigError("servers: the same one is given twice")
        if self.password_file is not None and self.password_env is not None:
            raise ConfigError("password_env: given beside password_file, one of them accepted")
        if self.username is not None and self.password_file is None and self.password_env is None:
            raise ConfigError("username: given without a password, which password_file or password_env has")
        self._check_topology(addresses)
        self._check_tls()

    def _check_topology(self, addresses: "tuple[Address, ...]") -> None:
        if (self.topology == "sentinel") != (self.sentinel_primary is not None):
            raise ConfigError("sentinel_primary: goes with topology = 'sentinel', which needs it")
        if self.sentinel_login and self.topology != "sentinel":
            raise ConfigError("sentinel_login: goes with topology = 'sentinel'")
        if self.topology != "servers" and not all(address.port for address in addresses):
            raise ConfigError(f"servers: a path given, 'host:port' accepted with topology = {self.topology!r}")
        if self.topology == "cluster" and "{" in self.prefix:
            raise ConfigError(
                f"prefix: {self.prefix!r} given, one without braces accepted with topology = 'cluster': of a name with "
                "braces, only what is between them says where it goes"
            )
        if self.topology == "cluster" and self.db:
            raise ConfigError(f"db: {self.db} given, 0 accepted with topology = 'cluster'")

    def _check_tls(self) -> None:
        given = [name for name in ("tls_ca_file", "tls_cert_file", "tls_key_file") if getattr(self, name) is not None]
        if self.tls and (path := next((str(one) for one in self.addresses() if not one.port), None)):
            raise ConfigError(f"tls: true given with the path {path!r}, false accepted: a path has no certificate")
        if given and not self.tls:
            raise ConfigError(f"{given[0]}: no use without tls = true")
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ConfigError("tls_key_file: given without tls_cert_file")

    def doubts(self) -> Iterable[str]:
        """Yield why the seal's keys, the password or the files for TLS cannot be read."""
        yield from super().doubts()
        for read in (self.password, self.tls_context):
            try:
                read()
            except ConfigError as error:
                yield str(error)

    def addresses(self) -> tuple[Address, ...]:
        """Return where `servers` are."""
        port = SENTINEL_PORT if self.topology == "sentinel" else PORT
        return tuple(_address(text, f"servers[{index}]", port) for index, text in enumerate(self.servers))

    def password(self) -> str | None:
        """Read the password: not for the loop. Raises `ConfigError`."""
        if self.password_env is not None:
            return _password(secret_variable("password_env", self.password_env), "password_env: the variable")
        if self.password_file is None:
            return None
        with open_secret("password_file", self.password_file) as file:
            line = file.readline(PASSWORD_BYTES_MAX + 2)
        return _password(line.rstrip(b"\r\n"), "password_file: the file")

    def tls_context(self) -> ssl.SSLContext | None:
        """Read the files for TLS: not for the loop. Raises `ConfigError`."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
        except OSError as error:  # Of which ssl.SSLError is one.
            raise ConfigError(f"tls_ca_file: {self.tls_ca_file} cannot be used: {error.strerror}") from error
        if self.tls_cert_file is not None:
            self._load_certificate(context, self.tls_cert_file)
        return context

    def _load_certificate(self, context: ssl.SSLContext, path: str) -> None:
        key = "tls_cert_file" if self.tls_key_file is None else "tls_key_file"
        check_secret(key, self.tls_key_file or path)
        try:  # With a passphrase of its own: or the terminal would be asked for one.
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


def _address(text: str, where: str, port: int) -> Address:
    if text.startswith("unix:/"):
        path = text.removeprefix("unix:")
        if (path_bytes := len(os.fsencode(path))) > PATH_BYTES_MAX:
            raise ConfigError(f"{where}: a path of {path_bytes} bytes given, at most {PATH_BYTES_MAX} accepted")
        if "\0" in path:
            raise ConfigError(f"{where}: {text!r} given, a path without NUL bytes accepted")
        return Address(path, 0)
    if "@" in text or "//" in text:
        raise ConfigError(
            f"{where}: a URL given, 'host:port' accepted: user, password and TLS have options of their own"
        )
    host, colon, number = text.rpartition(":")
    if not colon or text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        host, number = text, str(port)
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (address := told_address(name, number)) is None:
        raise ConfigError(f"{where}: {text!r} given, 'host:port' or 'unix:/path' accepted")
    return address


def _is_host(name: str) -> bool:
    with suppress(UnicodeError):  # A part of it is empty, or too long.
        return bool(name.encode("idna")) and name.isprintable() and not set(name) & set(" []/@")
    return False
