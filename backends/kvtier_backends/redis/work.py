"""The requests of one call to servers: one for each chunk, and the meaning of its reply.

Requests are sent ahead of their replies, as far as the window goes. Each chunk's answer is noted when its reply has
been read. So a lost connection costs only requests without an answer. They are made again on another connection.
"""

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from kvtier.backend import (
    ChunkMissing,
    NoSpace,
    OffloadKey,
    Outcome,
    Read,
    Seal,
    SealFault,
    TransferFailed,
    Write,
)
from kvtier_backends.redis.counters import RedisCounters
from kvtier_backends.redis.link import END, Buffer, Link, Lost, Refused, number_in, refusal_of, request
from kvtier_backends.redis.options import Address, told_address
from kvtier_backends.redis.server import Away, Server

ASKED_MAX = 1_024  # Small requests on the way at once: their replies fit what a socket holds.
SKIPPED_BYTES_MAX = 16 << 20  # Of a value that is too long: beyond it a new connection costs less than reading it.
OF_ONE_CHUNK = frozenset({"OOM", "WRONGTYPE", "ERR"})
NOT_THE_ONE = frozenset({"READONLY", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "NOAUTH"})

ASKING = request(b"ASKING")
OK = b"+OK"
SAID = {b":0": False, b":1": True}

A = TypeVar("A")


class Redirect(NamedTuple):
    """Another server has a chunk: for good, or for this once (`asking`)."""

    address: Address
    asking: bool


class Work(ABC, Generic[A]):
    """One call's chunks by their places in the batch; each place is one thread's at a time."""

    has_rows = False
    """Whether requests have rows in them, which are not to be copied."""

    window = ASKED_MAX
    """How many requests may be on their way at once on one connection."""

    @property
    def gulp(self) -> int:
        """How many are sent at once."""
        return max(1, self.window // 2)

    def __init__(self, names: Sequence[bytes], counters: RedisCounters) -> None:
        """Ask for these names."""
        self.names = names
        self.counters = counters
        self.answers: dict[int, A] = {}
        self.unreachable: dict[int, str] = {}
        """Why a place has no answer: its server is away."""
        self.number = 0
        """The system's number for the last of these reasons that has one."""
        self.redirects: dict[int, Redirect] = {}
        self.stale = False
        """Whether a server has said that it is not, or no longer, the right one."""
        self.ends_at: float | None = None
        """When all of it is over, on every server; known once a lane has begun."""

    @abstractmethod
    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:
        """Return a place's request, one of a `gulp`; `turn` counts these from 0."""

    def ask_some(self, link: Link, indices: Sequence[int], *, asking: bool) -> list[Buffer]:
        """Return the requests of a `gulp` of places."""
        requests = [self.ask(link, place, turn) for turn, place in enumerate(indices)]
        parts = [part for parts in requests for part in ((ASKING, *parts) if asking else parts)]
        return parts if self.has_rows else [b"".join(parts)]

    @abstractmethod
    def read(self, link: Link, index: int) -> A:
        """Read a place's reply. Raises `Refused` for an error; `Lost` if it cannot be read."""

    @abstractmethod
    def refused(self, index: int, refusal: Refused) -> A:
        """Return the outcome of an error that concerns this chunk alone."""

    def done(self, index: int) -> bool:
        """Say whether there is nothing to be asked any more for this place, of this server."""
        return index in self.answers or index in self.unreachable or index in self.redirects

    def fail(self, indices: Sequence[int], why: str, number: int) -> None:
        """Note that a server did not answer for these places."""
        self.number = number or self.number
        for index in indices:
            self.unreachable[index] = why

    def cause(self) -> OSError | None:
        """Return the system's cause for places without an answer."""
        return OSError(self.number, os.strerror(self.number)) if self.number else None

    def hear_some(self, link: Link, indices: Sequence[int], *, asking: bool) -> int:
        """Read the replies of the first of these places, and return of how many. Raises `Lost`."""
        self.hear(link, indices[0], asking=asking)
        return 1

    def hear(self, link: Link, index: int, *, asking: bool) -> None:
        """Read a place's reply, and note what it says. Raises `Lost`."""
        not_allowed = _heard_asking(link) if asking else None
        try:
            self.answers[index] = self.read(link, index)
        except Refused as refusal:
            self._note(link, index, not_allowed or refusal)

    def _note(self, link: Link, index: int, refusal: Refused) -> None:
        kind = refusal.kind
        self.stale = self.stale or kind in NOT_THE_ONE
        if kind in ("MOVED", "ASK"):
            self.redirects[index] = Redirect(target_of(refusal, link.address), asking=kind == "ASK")
        elif kind in OF_ONE_CHUNK:
            self.answers[index] = self.refused(index, refusal)
        else:
            self.counters.count("refused")
            self.unreachable[index] = f"{link.address}: {refusal}"


class Loads(Work[Outcome]):
    """Chunks into rows, each checked by its seal."""

    def __init__(
        self, names: Sequence[bytes], reads: Sequence[Read], seal: Seal, window: int, counters: RedisCounters
    ) -> None:
        super().__init__(names, counters)
        self.window = window
        self.corrupt: list[int] = []
        """Places whose values are of no use to anybody."""
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


class Stores(Work[Outcome]):
    """Rows and their seals, each as one value."""

    has_rows = True

    def __init__(
        self,
        names: Sequence[bytes],
        writes: Sequence[Write],
        seal: Seal,
        window: int,
        ttl_s: float | None,
        counters: RedisCounters,
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


class Questions(Work[bool]):
    """Whether names are there (EXISTS), or were until now (UNLINK)."""

    def __init__(self, command: bytes, names: Sequence[bytes], counters: RedisCounters) -> None:
        super().__init__(names, counters)
        self._command = command

    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:  # noqa: ARG002
        name = self.names[index]
        return [self._head(len(name)), name, END]

    def ask_some(self, link: Link, indices: Sequence[int], *, asking: bool) -> list[Buffer]:
        """Names are mostly of one length: then it is one join, however many there are."""
        names = [self.names[index] for index in indices]
        if asking or len(set(map(len, names))) != 1:
            return super().ask_some(link, indices, asking=asking)
        head = self._head(len(names[0]))
        return [head, (END + head).join(names), END]

    def _head(self, name_bytes: int) -> bytes:
        return b"*2\r\n$6\r\n%b\r\n$%d\r\n" % (self._command, name_bytes)

    def hear_some(self, link: Link, indices: Sequence[int], *, asking: bool) -> int:
        """As many as have come: there may be thousands, of four bytes each."""
        if asking:
            return super().hear_some(link, indices, asking=asking)
        heads = link.heads(len(indices))
        said = [one for one in map(SAID.get, heads) if one is not None]
        if len(said) == len(heads):
            self.answers.update(zip(indices, said, strict=False))
            return len(heads)
        for index, head in zip(indices, heads, strict=False):
            if head[:1] == b"-":
                self._note(link, index, refusal_of(head))
            else:
                self.answers[index] = self._said(head)
        return len(heads)

    def read(self, link: Link, index: int) -> bool:  # noqa: ARG002
        return self._said(link.head())

    def _said(self, head: bytes) -> bool:
        if head[:1] != b":":
            raise Lost(f"the server answers {head[:32]!r} to {self._command.decode()}")
        return head != b":0"

    def refused(self, index: int, refusal: Refused) -> bool:  # noqa: ARG002
        return False


def exchange(server: Server, work: Work[A], indices: Sequence[int], timeout_s: float, *, asking: bool = False) -> None:
    """Have one server answer for these places, or note that it does not. In a lane; over when the work's time is.

    A lost connection is replaced once, and again as long as each new one gets an answer. An idle connection may have
    been closed long ago. A value that is too long is left behind with its connection.
    """
    now, left = time.monotonic(), list(indices)
    work.ends_at = ends_at = now + timeout_s if work.ends_at is None else work.ends_at
    if now >= ends_at:  # Others have used it up: nothing is known of this one.
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
    """Send requests half a window at a time, and read their replies in order."""
    sent = heard = 0
    while heard < len(indices):
        while sent < len(indices) and sent - heard <= work.window - work.gulp:
            some = indices[sent : sent + work.gulp]
            link.send(work.ask_some(link, some, asking=asking))
            sent += len(some)
        heard += work.hear_some(link, indices[heard:sent], asking=asking)


def _heard_asking(link: Link) -> Refused | None:
    """Read the reply to ASKING, and return what refuses it: the request behind it has a reply of its own."""
    try:
        if (head := link.head()) != OK:
            raise Lost(f"the server answers {head[:32]!r} to ASKING")
    except Refused as refusal:
        return refusal
    return None


def beside_of(link: Link, seal: Seal, count: int, turn: int) -> memoryview:
    """Return one of `count` buffers for a seal's calls; they are the link's, and the same each time."""
    if len(link.memory) < seal.beside_bytes * count:
        link.memory = bytearray(seal.beside_bytes * count)
    return memoryview(link.memory)[seal.beside_bytes * turn : seal.beside_bytes * (turn + 1)]


def target_of(refusal: Refused, asked: Address) -> Address:
    """Return where an error of a cluster's sends us: without a host, to another port of the same one.

    One that names no address sends us nowhere else.
    """
    words = str(refusal).split(" ")
    host, _, port = words[2].rpartition(":") if len(words) == 3 else ("", "", "")
    return told_address(host.strip("[]") or asked.host, port) or asked
