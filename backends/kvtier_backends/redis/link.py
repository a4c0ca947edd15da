"""One connection: requests out, replies in, rows straight between the socket and the lent memory.

Every library copies: what was read goes into a bytes object first. Here the kernel writes into the row itself, and once
a call has returned or raised, nobody does: a call that fails closes its connection, so nothing can come late.
The protocol is RESP2 (https://redis.io/docs/latest/develop/reference/protocol-spec/).
"""

import socket
import ssl
import time
from collections.abc import Sequence

from kvtier_backends.redis.options import Address

AHEAD_BYTES = 4_096  # What is read beyond a row's end: its seal, and the next reply's head. It is copied, a row is not.
PARTS_MAX = 512  # Of one sendmsg; the system takes 1,024.
END = b"\r\n"

Buffer = bytes | bytearray | memoryview


class Lost(Exception):
    """The connection cannot be used any more: nothing is known of what was asked and not answered."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        """Say why; `late`: time was up."""
        super().__init__(why)
        self.late = late


class Refused(Exception):
    """An error that the server answered: its first word is its kind."""

    @property
    def kind(self) -> str:
        return str(self).partition(" ")[0]


class Link:
    """A connection, for one thread at a time, until its deadline."""

    def __init__(self, opened: socket.socket, address: Address) -> None:
        """Take over a socket that is connected."""
        self.address = address
        self.ends_at = 0.0
        """When what is under way must be over, by `time.monotonic`."""
        self.memory = bytearray()
        """For whoever uses the link: a buffer that goes with it."""
        self._socket = opened
        self._scatters = not isinstance(opened, ssl.SSLSocket)  # A TLS socket has no sendmsg and no recvmsg_into.
        self._bytes = bytearray(AHEAD_BYTES)
        self._ahead = memoryview(self._bytes)
        self._start: int = 0  # Of what was read ahead.
        self._end: int = 0

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._socket.close()

    def interrupt(self) -> None:
        """Have another thread's call fail at once; from any thread."""
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # TLS's own would have the rest read undecrypted.
        except OSError:
            return  # It was closed, or never connected.

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send all of it."""
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            sent = self._sent(left[:PARTS_MAX])
            whole = 0
            while whole < len(left) and sent >= len(left[whole]):
                sent -= len(left[whole])
                whole += 1
            del left[:whole]
            if sent:
                left[0] = left[0][sent:]

    def _sent(self, parts: list[memoryview]) -> int:
        self._socket.settimeout(self._time_left())
        try:
            return self._socket.sendmsg(parts) if self._scatters else self._socket.send(parts[0])
        except OSError as error:
            raise _lost(error) from None

    def head(self) -> bytes:
        """Read a reply's first line, without its end; raises `Refused` if it is an error."""
        while (at := self._bytes.find(END, self._start, self._end)) < 0:
            self._read_ahead()
        line = bytes(self._ahead[self._start : at])
        self._start = at + len(END)
        if line.startswith(b"-"):
            raise Refused(line[1:].decode("utf-8", "replace"))
        return line

    def _read_ahead(self) -> None:
        kept = self._end - self._start
        if kept == AHEAD_BYTES:
            raise Lost("the server does not speak Redis's protocol: a reply's head has no end")
        self._ahead[:kept] = bytes(self._ahead[self._start : self._end])
        self._start, self._end = 0, kept
        self._end += self._received([self._ahead[kept:]])

    def fill(self, places: Sequence[memoryview]) -> None:
        """Read a bulk reply's bytes into places, in order, and its end."""
        left = [place for place in (self._taken(place) for place in places) if len(place)]
        while left:
            got = self._received([*left, self._ahead])  # The buffer ahead is empty, else nothing were left.
            while left and got >= len(left[0]):
                got -= len(left.pop(0))
            if left:
                left[0] = left[0][got:]
            else:
                self._start, self._end = 0, got
        self._expect_end()

    def _taken(self, place: memoryview) -> memoryview:
        """Fill a place from what was read ahead, and return the rest of it."""
        ready = min(self._end - self._start, len(place))
        place[:ready] = self._ahead[self._start : self._start + ready]
        self._start += ready
        return place[ready:]

    def skip(self, count: int) -> None:
        """Read so many bytes of a bulk reply for nothing, and its end."""
        while count:
            if self._start == self._end:
                self._start, self._end = 0, self._received([self._ahead])
            passed = min(count, self._end - self._start)
            self._start += passed
            count -= passed
        self._expect_end()

    def _expect_end(self) -> None:
        while self._end - self._start < len(END):
            self._read_ahead()
        if not self._bytes.startswith(END, self._start):
            raise Lost("the server does not speak Redis's protocol: a reply goes on where it should end")
        self._start += len(END)

    def _received(self, places: list[memoryview]) -> int:
        self._socket.settimeout(self._time_left())
        try:
            got = self._socket.recvmsg_into(places)[0] if self._scatters else self._socket.recv_into(places[0])
        except OSError as error:
            raise _lost(error) from None
        if not got:
            raise Lost("the server has closed the connection")
        return got

    def _time_left(self) -> float:
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise Lost("the server has not answered in time", late=True)
        return left


def request(*words: bytes) -> bytes:
    """Write a request."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def connect(address: Address, tls: ssl.SSLContext | None, ends_at: float) -> Link:
    """Make a connection. Raises `OSError`, also for what TLS refuses."""
    left = ends_at - time.monotonic()
    if left <= 0:
        raise TimeoutError("not connected in time")
    opened = _connected(address, left)
    try:
        if tls is not None:
            opened.settimeout(max(ends_at - time.monotonic(), 0.001))
            opened = tls.wrap_socket(opened, server_hostname=address.host)
        return Link(opened, address)
    except BaseException:
        opened.close()
        raise


def _connected(address: Address, timeout_s: float) -> socket.socket:
    if address.port:
        opened = socket.create_connection(address, timeout_s)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return opened
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.settimeout(timeout_s)
        opened.connect(address.host)
    except BaseException:
        opened.close()
        raise
    return opened


def _lost(error: OSError) -> Lost:
    if isinstance(error, TimeoutError):
        return Lost("the server has not answered in time", late=True)
    return Lost(error.strerror or str(error))
