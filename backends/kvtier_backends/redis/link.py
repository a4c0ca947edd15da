"""One connection: requests out, replies in, rows straight between the socket and the lent memory.

Client libraries read into a bytes object first and copy. Here the kernel writes into the row itself. Nothing is written
there after a call has returned or raised: a call that fails closes its connection. A row is one system call. Python's
own time-outs would need three for each piece, so the kernel keeps the time. The protocol is RESP2 (https://redis.io/docs/latest/develop/reference/protocol-spec/).
"""

import errno
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from kvtier.backend import Lanes
from kvtier.errors import one_line
from kvtier_backends.redis.options import Address

AHEAD_BYTES = 4_096  # Read beyond a row's end, and copied: its seal, and the next reply's head.
END = b"\r\n"
MICROSECONDS = 1_000_000
DEPTH_MAX = 8  # Nested arrays; a table of slots has 4.
VALUES_MAX = 1 << 20  # In one answer; a table of single slots, each on three nodes, has half of them.

_TIMEVAL = struct.Struct("@ll")

Buffer = bytes | bytearray | memoryview


class Lost(Exception):
    """The connection cannot be used any more. The state of unanswered requests is unknown."""

    def __init__(self, why: str, *, late: bool = False, number: int = 0) -> None:
        super().__init__(why)
        self.late = late
        self.number = errno.ETIMEDOUT if late else number


class Refused(Exception):
    """An error reply. Its first word is its kind."""

    @property
    def kind(self) -> str:
        return str(self).partition(" ")[0]


class Link:
    """A connection, for one thread at a time, until its deadline."""

    def __init__(self, opened: socket.socket, address: Address) -> None:
        self.address = address
        self.ends_at = 0.0  # Deadline of requests in flight, by `time.monotonic`.
        self.memory = bytearray()  # A buffer for the user of the link.
        self._values_left = 0  # Of the answer that is read.
        self._socket = opened
        self._scatters = not isinstance(opened, ssl.SSLSocket)  # A TLS socket has no sendmsg and no recvmsg_into.
        if self._scatters:
            opened.settimeout(None)
        self._bytes = bytearray(AHEAD_BYTES)
        self._ahead = memoryview(self._bytes)
        self._start: int = 0  # Range of `_bytes` that was read ahead.
        self._end: int = 0

    def close(self) -> None:
        self._socket.close()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def quiet(self) -> bool:
        """Return False if anything has arrived on an idle connection: an end, or a reply to no request."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return self._start == self._end and not waiting.poll(0)

    def interrupt(self) -> None:
        """Make another thread's call fail at once. For any thread."""
        with suppress(OSError):  # Closed, or never connected. TLS's own would leave the rest to be read undecrypted.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def send(self, parts: Sequence[Buffer]) -> None:
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            sent = self._sent(left[:512])  # One sendmsg takes up to 1,024 buffers.
            whole = 0
            while whole < len(left) and sent >= len(left[whole]):
                sent -= len(left[whole])
                whole += 1
            del left[:whole]
            if sent:
                left[0] = left[0][sent:]

    def _sent(self, parts: list[memoryview]) -> int:
        self._limit(socket.SO_SNDTIMEO)
        try:
            return self._socket.sendmsg(parts) if self._scatters else self._socket.send(parts[0])
        except OSError as error:
            raise _lost(error) from None

    def head(self) -> bytes:
        """Read a reply's first line, without its end. Raises `Refused` for an error."""
        while (at := self._bytes.find(END, self._start, self._end)) < 0:
            self._read_ahead()
        line = bytes(self._ahead[self._start : at])
        self._start = at + len(END)
        if line.startswith(b"-"):
            raise refusal_of(line)
        return line

    def heads(self, most: int) -> list[bytes]:
        """Read one to `most` replies of a single line each, errors included."""
        while self._bytes.find(END, self._start, self._end) < 0:
            self._read_ahead()
        lines = bytes(self._ahead[self._start : self._end]).split(END, most)[:-1]
        self._start += sum(map(len, lines)) + len(END) * len(lines)
        return lines

    def _read_ahead(self) -> None:
        if (kept := self._end - self._start) == AHEAD_BYTES:
            raise Lost("the server does not speak Redis's protocol: a reply's head has no end")
        self._ahead[:kept] = bytes(self._ahead[self._start : self._end])
        self._start, self._end = 0, kept
        self._end += self._received([self._ahead[kept:]])

    def fill(self, places: Sequence[memoryview]) -> None:
        """Read a bulk reply's bytes into places, in order, and its end."""
        left = [place for place in (self._taken(place) for place in places) if len(place)]
        while left:
            # The buffer ahead is empty here: its bytes went into the places first.
            got = self._received([*left, self._ahead[: len(END)]], socket.MSG_WAITALL)
            while left and got >= len(left[0]):
                got -= len(left.pop(0))
            if left:
                left[0] = left[0][got:]
            else:
                self._start, self._end = 0, got
        self._expect_end()

    def _taken(self, place: memoryview) -> memoryview:
        ready = min(self._end - self._start, len(place))
        place[:ready] = self._ahead[self._start : self._start + ready]
        self._start += ready
        return place[ready:]

    def answer(self) -> Any:
        """Read a reply of any kind: arrays as lists, texts as bytes. Raises `Refused`, and `Lost` beyond the limits."""
        self._values_left = VALUES_MAX
        return self._value(DEPTH_MAX)

    def _value(self, depth: int) -> Any:
        head = self.head()
        kind, is_null = head[:1], head[1:] == b"-1"
        self._values_left -= 1
        if not depth or not self._values_left:
            raise Lost(f"the server answers more than {VALUES_MAX:,} values, or more than {DEPTH_MAX} arrays in arrays")
        if kind == b"*" and not is_null:
            return [self._value(depth - 1) for _ in range(number_in(head, b"*"))]
        if kind == b"$" and not is_null:
            return self._text(number_in(head, b"$"))
        return None if is_null else number_in(head, b":") if kind == b":" else head[1:]

    def _text(self, length: int) -> bytes:
        if length > 1_024:  # A host's name or a node's id; a name in the DNS has 253.
            raise Lost(f"the server answers {length:,} bytes where a name was asked for")
        text = bytearray(length)
        self.fill([memoryview(text)])
        return bytes(text)

    def _expect_end(self) -> None:
        while self._end - self._start < len(END):
            self._read_ahead()
        if not self._bytes.startswith(END, self._start):
            raise Lost("the server does not speak Redis's protocol: a reply does not end where it should")
        self._start += len(END)

    def _received(self, places: list[memoryview], flags: int = 0) -> int:
        self._limit(socket.SO_RCVTIMEO)
        try:
            if self._scatters:
                got = self._socket.recvmsg_into(places, 0, flags)[0]
            else:
                got = self._socket.recv_into(places[0])
        except OSError as error:
            raise _lost(error) from None
        if not got:
            raise Lost("the server has closed the connection", number=errno.ECONNRESET)
        return got

    def _limit(self, option: int) -> None:
        """Set the deadline of the next system call. Raises `Lost` once it has passed."""
        if (left := self.ends_at - time.monotonic()) <= 0:
            raise Lost("the server has not answered in time", late=True)
        if self._scatters:
            given = _TIMEVAL.pack(*divmod(max(1, int(left * MICROSECONDS)), MICROSECONDS))  # Zeros would mean no limit.
            self._socket.setsockopt(socket.SOL_SOCKET, option, given)
        else:
            self._socket.settimeout(left)


def refusal_of(line: bytes) -> Refused:
    return Refused(one_line(line[1:].decode("utf-8", "replace")[:400]))  # Shown of a server's error.


def number_in(head: bytes, kind: bytes) -> int:
    """Return the number in a head of this kind. Raises `Lost` for any other head."""
    digits = head[1:]
    if head[:1] != kind or not digits.isdigit() or len(digits) > 18:  # Below 2^60: no length is longer.
        raise Lost(f"the server answers {head[:32]!r} where {kind.decode()} and a number were expected")
    return int(digits)


def request(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class HostNames:
    """The addresses of a host's name. The system's look-up has no time-out, so it runs in its own thread."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._found: Future[list[Any]] | None = None

    def look_up(self, ends_at: float) -> list[Any]:
        """Return `getaddrinfo`'s answer. Raises `OSError`. Any number of threads wait for one look-up."""
        with suppress(socket.gaierror):
            return self._asked(socket.AI_NUMERICHOST)  # Needs no look-up.
        with self._lock:
            if self._found is None or self._found.done():
                lane = Lanes(1, "kvtier-resolve")
                self._found = lane.submit(self._asked)
                lane.shutdown(wait=False)  # The thread ends with the look-up.
            found = self._found
        try:
            return found.result(max(0.0, ends_at - time.monotonic()))
        except TimeoutError:
            raise TimeoutError("its name was not resolved in time") from None

    def _asked(self, flags: int = 0) -> list[Any]:
        try:
            return socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM, flags=flags)
        except (UnicodeError, OverflowError) as error:  # An impossible name or port, which a cluster may report.
            raise OSError(f"no address: {error}") from None


def connect(address: Address, names: HostNames, tls: ssl.SSLContext | None, ends_at: float) -> Link:
    """Make a connection. Raises `OSError`, of which TLS's errors are a kind."""
    opened = _connected(names, ends_at)
    try:
        if tls is not None:
            opened.settimeout(max(ends_at - time.monotonic(), 0.001))
            opened = tls.wrap_socket(opened, server_hostname=address.host)
        return Link(opened, address)
    except BaseException:
        opened.close()
        raise


def _connected(names: HostNames, ends_at: float) -> socket.socket:
    found, why = names.look_up(ends_at), OSError("its name has no address")
    for tried, (family, _, _, _, where) in enumerate(found):
        left_s = (ends_at - time.monotonic()) / (len(found) - tried)  # An equal share: the first might use it all.
        if left_s <= 0:
            raise TimeoutError("not connected in time")
        try:
            opened = _connected_to(family, where, left_s)
        except OSError as error:  # Also of a family that this machine does not have, such as IPv6.
            why = error
            continue
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return opened
    raise why


def _connected_to(family: int, where: Any, left_s: float) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.settimeout(left_s)
        opened.connect(where)
    except BaseException:
        opened.close()
        raise
    return opened


def number_of(error: OSError) -> int:
    """Return the system's number for an error, or 0: TLS and look-ups of names have other numbers."""
    if isinstance(error, TimeoutError):
        return errno.ETIMEDOUT
    return 0 if isinstance(error, ssl.SSLError | socket.gaierror) else error.errno or 0


def _lost(error: OSError) -> Lost:
    if isinstance(error, TimeoutError | BlockingIOError):
        return Lost("the server has not answered in time", late=True)
    return Lost(error.strerror or str(error), number=number_of(error))
