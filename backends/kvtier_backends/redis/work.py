"""The requests of one call: one for each chunk, and the meaning of its reply.

A window of requests is sent ahead of the replies. Each reply is recorded as it is read. So a lost connection costs only
the unanswered requests, which are sent again on another connection.
"""

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from kvtier.backend import ChunkMissing, NoSpace, OffloadKey, Outcome, Read, Seal, SealFault, TransferFailed, Write
from kvtier.backend.remote import Totals
from kvtier_backends.redis.link import END, Buffer, Link, Lost, Refused, number_in, refusal_of, request
from kvtier_backends.redis.options import Address, told_address
from kvtier_backends.redis.server import Away, Server

ASKED_MAX = 1_024  # Small requests in flight: their replies fit a socket's buffer.
SKIPPED_BYTES_MAX = 16 << 20  # A longer value costs more to read than a new connection.
OF_ONE_CHUNK = frozenset({"OOM", "WRONGTYPE", "ERR"})
NOT_THE_ONE = frozenset({"READONLY", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "NOAUTH"})

ASKING = request(b"ASKING")
OK = b"+OK"
TRUTHS = {b":0": False, b":1": True}

A = TypeVar("A")


class Redirect(NamedTuple):
    """Another server has a chunk: permanently, or for this request alone (`asking`)."""

    address: Address
    asking: bool


class Work(ABC, Generic[A]):
    """One call's chunks by their places in the batch; one thread at a time works on a place."""

    has_rows = False  # Rows must not be copied into a joined request.
    window = ASKED_MAX  # Requests in flight on one connection.

    @property
    def gulp(self) -> int:
        """Requests of one send."""
        return max(1, self.window // 2)

    def __init__(self, names: Sequence[bytes], counters: Totals) -> None:
        self.names = names
        self.counters = counters
        self.answers: dict[int, A] = {}
        self.unreachable: dict[int, str] = {}  # Reasons, of places whose server is away.
        self.number = 0  # The system's error number of the last reason that has one.
        self.redirects: dict[int, Redirect] = {}
        self.stale = False  # A server has answered that it is not the right one.
        self.ends_at: float | None = None  # Deadline on every server; set when the first lane begins.

    @abstractmethod
    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:
        """Return a place's request; `turn` is its index in the `gulp`."""

    def ask_some(self, link: Link, indices: Sequence[int], *, asking: bool) -> list[Buffer]:
        requests = [self.ask(link, place, turn) for turn, place in enumerate(indices)]
        parts = [part for parts in requests for part in ((ASKING, *parts) if asking else parts)]
        return parts if self.has_rows else [b"".join(parts)]

    @abstractmethod
    def read(self, link: Link, index: int) -> A:
        """Read a place's reply. Raises `Refused` for an error reply and `Lost` for an unreadable one."""

    @abstractmethod
    def refused(self, index: int, refusal: Refused) -> A:
        """Return the outcome of an error of this chunk alone."""

    def done(self, index: int) -> bool:
        """Return True if this server has nothing left to answer for a place."""
        return index in self.answers or index in self.unreachable or index in self.redirects

    def fail(self, indices: Sequence[int], why: str, number: int) -> None:
        self.number = number or self.number
        for index in indices:
            self.unreachable[index] = why

    def cause(self) -> OSError | None:
        return OSError(self.number, os.strerror(self.number)) if self.number else None

    def hear_some(self, link: Link, indices: Sequence[int], *, asking: bool) -> int:
        """Read replies of the first of these places, and return how many. Raises `Lost`."""
        self.hear(link, indices[0], asking=asking)
        return 1

    def hear(self, link: Link, index: int, *, asking: bool) -> None:
        """Read and record a place's reply. Raises `Lost`."""
        not_allowed = _read_asking(link) if asking else None
        try:
            self.answers[index] = self.read(link, index)
        except Refused as refusal:
            self._record(link, index, not_allowed or refusal)

    def _record(self, link: Link, index: int, refusal: Refused) -> None:
        kind = refusal.kind
        self.stale = self.stale or kind in NOT_THE_ONE
        if kind in ("MOVED", "ASK"):
            self.redirects[index] = Redirect(target_of(refusal, link.address), asking=kind == "ASK")
        elif kind in OF_ONE_CHUNK:
            self.answers[index] = self.refused(index, refusal)
        else:
            self.counters.count("refused")
            self.unreachable[index] = f"{link.address}: {refusal}"


class LoadWork(Work[Outcome]):
    """Loads into rows, each checked by its seal."""

    def __init__(
        self, names: Sequence[bytes], reads: Sequence[Read], seal: Seal, window: int, counters: Totals
    ) -> None:
        super().__init__(names, counters)
        self.window = window
        self.corrupt: list[int] = []  # Places whose values are to be deleted.
        self._reads = reads
        self._seal = seal

    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:  # noqa: ARG002
        return [request(b"GET", self.names[index])]

    def read(self, link: Link, index: int) -> Outcome:
        key, row = self._reads[index]
        head = link.head()
        if head == b"$-1":
            return ChunkMissing(key.hex())
        length = number_in(head, b"$")
        if length != self._seal.sealed_bytes:
            outcome = self._faulty(index, key, SealFault.LENGTH)
            if length > SKIPPED_BYTES_MAX:
                self.answers[index] = outcome
                raise Lost(f"a value of {length:,} bytes")
            link.skip(length)
            return outcome
        beside = beside_of(link, self._seal, 1, 0)
        link.fill(self._seal.places(row, beside))
        fault = self._seal.open(key, row, beside)
        return None if fault is None else self._faulty(index, key, fault)

    def refused(self, index: int, refusal: Refused) -> Outcome:
        key = self._reads[index].key
        if refusal.kind == "WRONGTYPE":
            return self._faulty(index, key, SealFault.FOREIGN)
        return TransferFailed(f"{key.hex()}: {refusal}")

    def _faulty(self, index: int, key: OffloadKey, fault: SealFault) -> Outcome:
        self.counters.count(f"{'corrupt' if fault.corrupt else 'sealed'}_{fault}")
        if fault.corrupt:
            self.corrupt.append(index)
        return fault.outcome(key)


class StoreWork(Work[Outcome]):
    """Stores of rows and their seals, each as one value."""

    has_rows = True

    def __init__(
        self,
        names: Sequence[bytes],
        writes: Sequence[Write],
        seal: Seal,
        window: int,
        ttl_s: float | None,
        counters: Totals,
    ) -> None:
        super().__init__(names, counters)
        self.window = window
        self._writes = writes
        self._seal = seal
        self._head = b"*3\r\n" if ttl_s is None else b"*5\r\n"
        milliseconds = b"" if ttl_s is None else b"%d" % max(1, round(ttl_s * 1_000))
        self._tail = b"\r\n" if ttl_s is None else b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(milliseconds), milliseconds)

    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:
        key, row = self._writes[index]
        name = self.names[index]
        head = b"%b$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (self._head, len(name), name, self._seal.sealed_bytes)
        beside = beside_of(link, self._seal, self.gulp, turn)
        return [head, *self._seal.close(key, row, beside), self._tail]

    def read(self, link: Link, index: int) -> Outcome:  # noqa: ARG002
        if (head := link.head()) != OK:
            raise Lost(f"the server answers {head[:32]!r} to SET")
        return None

    def refused(self, index: int, refusal: Refused) -> Outcome:
        key = self._writes[index].key
        if refusal.kind == "OOM":
            self.counters.count("no_room")
            return NoSpace(f"{key.hex()}: {refusal}")
        return TransferFailed(f"{key.hex()}: {refusal}")


class AskWork(Work[bool]):
    """Small requests: EXISTS and UNLINK."""

    def __init__(self, command: bytes, names: Sequence[bytes], counters: Totals) -> None:
        super().__init__(names, counters)
        self._command = command

    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:  # noqa: ARG002
        name = self.names[index]
        return [self._head(len(name)), name, END]

    def ask_some(self, link: Link, indices: Sequence[int], *, asking: bool) -> list[Buffer]:
        """Join all requests at once where names have one length, as they mostly do."""
        names = [self.names[index] for index in indices]
        if asking or len(set(map(len, names))) != 1:
            return super().ask_some(link, indices, asking=asking)
        head = self._head(len(names[0]))
        return [head, (END + head).join(names), END]

    def _head(self, name_bytes: int) -> bytes:
        return b"*2\r\n$6\r\n%b\r\n$%d\r\n" % (self._command, name_bytes)

    def hear_some(self, link: Link, indices: Sequence[int], *, asking: bool) -> int:
        """Read all replies that have arrived: there may be thousands, of four bytes each."""
        if asking:
            return super().hear_some(link, indices, asking=asking)
        heads = link.heads(len(indices))
        answers = [answer for answer in map(TRUTHS.get, heads) if answer is not None]
        if len(answers) == len(heads):
            self.answers.update(zip(indices, answers, strict=False))
            return len(heads)
        for index, head in zip(indices, heads, strict=False):
            if head[:1] == b"-":
                self._record(link, index, refusal_of(head))
            else:
                self.answers[index] = self._answer(head)
        return len(heads)

    def read(self, link: Link, index: int) -> bool:  # noqa: ARG002
        return self._answer(link.head())

    def _answer(self, head: bytes) -> bool:
        if head[:1] != b":":
            raise Lost(f"the server answers {head[:32]!r} to {self._command.decode()}")
        return head != b":0"

    def refused(self, index: int, refusal: Refused) -> bool:  # noqa: ARG002
        return False


def exchange(server: Server, work: Work[A], indices: Sequence[int], timeout_s: float, *, asking: bool = False) -> None:
    """Ask one server for these places, in a lane, until the work's deadline.

    A lost connection is replaced once, and again as long as each new one gets an answer: an idle connection may have
    been closed long ago. A value that is far too long is left behind with its connection.
    """
    now, left = time.monotonic(), list(indices)
    work.ends_at = ends_at = now + timeout_s if work.ends_at is None else work.ends_at
    if now >= ends_at:  # Other servers have used it up.
        return work.fail(left, f"{server.address}: no time was left for it", errno.ETIMEDOUT)
    while left:
        try:
            link, fresh = server.borrow(ends_at)
        except Away as error:
            work.counters.count("unreachable", len(left))
            return work.fail(left, str(error), error.number)
        try:
            _converse(link, work, left, asking=asking)
        except Lost as error:
            work.counters.count("connections_lost")
            server.drop(link, str(error), late=error.late)
            before, left = left, [index for index in left if not work.done(index)]
            if error.late or (fresh and len(left) == len(before)):
                return work.fail(left, f"{server.address}: {error}", error.number)
        except BaseException:
            server.drop(link)
            raise
        else:
            return (server.drop if work.stale else server.give_back)(link)
    return None


def _converse(link: Link, work: Work[A], indices: Sequence[int], *, asking: bool) -> None:
    """Send half a window of requests at a time, and read the replies in order."""
    sent = heard = 0
    while heard < len(indices):
        while sent < len(indices) and sent - heard <= work.window - work.gulp:
            some = indices[sent : sent + work.gulp]
            link.send(work.ask_some(link, some, asking=asking))
            sent += len(some)
        heard += work.hear_some(link, indices[heard:sent], asking=asking)


def _read_asking(link: Link) -> Refused | None:
    """Read the reply to ASKING, and return its error, if any: the request behind it has its own reply."""
    try:
        if (head := link.head()) != OK:
            raise Lost(f"the server answers {head[:32]!r} to ASKING")
    except Refused as refusal:
        return refusal
    return None


def beside_of(link: Link, seal: Seal, count: int, turn: int) -> memoryview:
    """Return one of `count` buffers for a seal's calls. The link keeps them for later calls."""
    if len(link.memory) < seal.beside_bytes * count:
        link.memory = bytearray(seal.beside_bytes * count)
    return memoryview(link.memory)[seal.beside_bytes * turn : seal.beside_bytes * (turn + 1)]


def target_of(refusal: Refused, asked: Address) -> Address:
    """Return the address in a redirect. Without a host it is another port of the same one; without a port, no other."""
    words = str(refusal).split(" ")
    host, _, port = words[2].rpartition(":") if len(words) == 3 else ("", "", "")
    return told_address(host.strip("[]") or asked.host, port) or asked
