"""A tier on Redis or Valkey: it chooses the server of each key, and lanes exchange requests and replies with servers.

A window of requests is sent ahead. Each reply is recorded as it is read: a lost connection costs unanswered ones only.
"""

import asyncio
import errno
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Generic, NamedTuple, Self, TypeVar

from kvtier import backend as api
from kvtier.backend.codec import CodedSeal
from kvtier.backend.remote import RemoteBackend, Totals, caused, name_prefix
from kvtier_backends.redis.link import END, Buffer, Link, Lost, Refused, number_in, refusal_of, request
from kvtier_backends.redis.options import Address, RedisOptions, told_address
from kvtier_backends.redis.servers import CONNECT_S, Away, Login, Server, Topology, check, make_topology

ASK_LANES = 3  # For small requests, which never queue behind rows. One of them may be busy asking where servers are.
VALUE_BYTES_MAX = 512 << 20  # The servers' default (proto-max-bulk-len).
PART_BYTES_MIN = 4 << 20  # Least share of a call for one lane: a smaller one is done before another thread has begun.
ASKED_MAX = 1_024  # Small requests in flight: their replies fit a socket's buffer.
OF_ONE_CHUNK = frozenset({"OOM", "WRONGTYPE", "ERR"})

ASKING = request(b"ASKING")
OK = b"+OK"

A = TypeVar("A")


class RedisBackend(RemoteBackend[RedisOptions]):
    """Chunks as values of a server's, sealed."""

    durability = api.Durability.HOST  # Our process may end. What a server's end costs is the server's configuration.
    options_type = RedisOptions
    described = ("url", "codec")

    @classmethod
    async def open(cls, options: RedisOptions, context: api.TierContext) -> Self:
        """Find the servers, and try on each what the tier will ask of it. One that answers is enough."""
        if context.row_bytes + api.SEAL_BYTES > VALUE_BYTES_MAX:
            raise api.ConfigError(
                f"chunk_bytes: rows of {context.row_bytes:,} bytes, at most {VALUE_BYTES_MAX - api.SEAL_BYTES:,} "
                "accepted: no value may be longer"
            )
        made = ExitStack()
        try:
            lanes = RedisLanes.start(options, context.name, made)
            topology, seal = await api.in_thread(lanes.ask, _prepared, options, context, made)
            tier = cls(options, context, topology, seal, lanes)
        except BaseException:  # A cancelled thread's result is lost, and its connections would be with it.
            made.close()
            raise
        return tier

    def __init__(
        self, options: RedisOptions, context: api.TierContext, topology: Topology, seal: api.Seal, lanes: "RedisLanes"
    ) -> None:
        super().__init__(options, context)
        # A cluster hashes only what is between braces: with them, every chunk would be on one node.
        folder = context.mapper.chunks_folder.replace("{", "%7B")
        self._prefix = f"{name_prefix(options.prefix, context.mapper)}{folder}/"
        self._name_of = api.NAMINGS[context.mapper.naming].name
        self._topology = topology
        self._lanes = lanes
        window = max(1, options.window_bytes // context.row_bytes)
        self._means = Means(self._counts, options.make_coded(seal, context.mapper, self._counts), window, options.ttl_s)

    async def aclose(self, deadline_s: float) -> api.Abandoned:
        """Close, as the contract says. Calls that miss the deadline fail at once: their connections are closed."""
        ends_at = time.monotonic() + deadline_s
        try:
            await self._calls.close(deadline_s)  # First: a call may need lanes more than once.
            left = sum(
                await asyncio.gather(*(lanes.aclose(max(0.0, ends_at - time.monotonic())) for lanes in self._lanes))
            )
        finally:  # A cancelled close does not wait any longer, either.
            for lanes in self._lanes:
                lanes.shutdown(wait=False, cancel_futures=True)
            self._topology.close()
        return api.Abandoned(left)

    def _names(self, keys: Sequence[api.OffloadKey]) -> list[bytes]:
        name_of, prefix = self._name_of, self._prefix
        return [(prefix + name_of(key)).encode() for key in keys]

    async def _probe(self, keys: Sequence[api.OffloadKey]) -> Sequence[bool]:
        work = await self._ask(b"EXISTS", self._names(keys))
        self._refuse_if_away(work)
        return [work.answers.get(index, False) for index in range(len(keys))]

    async def _load(self, reads: Sequence[api.Read]) -> Sequence[api.Outcome]:
        work = LoadWork(self._names([read.key for read in reads]), reads, self._means)
        began = time.monotonic()
        await self._move(work, self._lanes.load)
        self._means.seal.pace.loaded(time.monotonic() - began, work.coded)
        if work.corrupt:
            await self._ask(b"UNLINK", [work.names[index] for index in work.corrupt], work.ends_at)
        return self._outcomes(work, reads)

    async def _store(self, writes: Sequence[api.Write]) -> Sequence[api.Outcome]:
        work = StoreWork(self._names([write.key for write in writes]), writes, self._means)
        await self._move(work, self._lanes.store)
        return self._outcomes(work, writes)

    async def _delete(self, keys: Sequence[api.OffloadKey]) -> None:
        work = await self._ask(b"UNLINK", self._names(keys))
        if work.unreachable:
            raise caused(api.BackendUnavailable(f"{self._name}: {next(iter(work.unreachable.values()))}"), work.number)

    async def _ask(self, command: bytes, names: Sequence[bytes], ends_at: float | None = None) -> "AskWork":
        work = AskWork(command, names, self._counts)
        work.ends_at = ends_at
        await self._move(work, self._lanes.ask)
        return work

    def _outcomes(
        self, work: "Work[api.Outcome]", chunks: Sequence[api.Read] | Sequence[api.Write]
    ) -> list[api.Outcome]:
        self._refuse_if_away(work)
        for index, why in work.unreachable.items():
            work.answers[index] = caused(api.TransferFailed(f"{chunks[index].key.hex()}: {why}"), work.number)
        return [work.answers[index] for index in range(len(chunks))]

    def _refuse_if_away(self, work: "Work[Any]") -> None:
        if work.unreachable and len(work.unreachable) == len(work.names):
            raise caused(api.BackendUnavailable(f"{self._name}: {work.unreachable[0]}"), work.number)

    async def _move(self, work: "Work[Any]", lanes: api.Lanes) -> None:
        """Get an answer for every name, from its server or from another that it redirects to."""
        topology = self._topology
        if topology.stale:
            with suppress(TimeoutError):  # Rows are lent: a late answer serves later calls.
                async with asyncio.timeout(CONNECT_S):
                    await self._lanes.ask.run(topology.renew)
        await self._exchange(work, lanes, topology.places_of(work.names))
        for _ in range(3):  # Redirections of one chunk: a cluster whose slots move answers after one or two.
            if not work.redirects or not topology.cluster:
                break
            redirects, work.redirects = work.redirects, {}
            self._counts.count("redirected", len(redirects))
            places: defaultdict[Server, list[int]] = defaultdict(list)
            for index, address in redirects.items():
                places[topology.at(address)].append(index)
            await self._exchange(work, lanes, places)
        remedy = "" if topology.cluster else "; redis+cluster:// is accepted with a cluster"
        for index, address in work.redirects.items():
            work.unreachable[index] = f"its slot has moved to {address}{remedy}"
        topology.stale = topology.stale or work.stale or bool(work.unreachable)

    async def _exchange(self, work: "Work[Any]", lanes: api.Lanes, places: dict[Server, list[int]]) -> None:
        by_server: list[list[Callable[[], None]]] = [
            [
                partial(exchange, server, work, part, self._options.timeout_s)
                for part in _parts(some, lanes.count, work.part_chunks)
            ]
            for server, some in places.items()
        ]
        in_turn = chain.from_iterable(zip_longest(*by_server))  # A server that hangs must not take every lane.
        await api.in_threads(lanes, [call for call in in_turn if call is not None])


class RedisLanes(NamedTuple):
    """A tier's threads, by what can delay them."""

    ask: api.Lanes
    load: api.Lanes
    store: api.Lanes

    @classmethod
    def start(cls, options: RedisOptions, name: str, made: ExitStack) -> Self:
        """Start the threads. Clean-up calls go into `made`. RuntimeError: the process may have no more of them."""
        lanes: list[api.Lanes] = []
        for what, count in (("ask", ASK_LANES), ("load", options.lanes), ("store", options.lanes)):
            lanes.append(api.Lanes(count, f"kvtier-{name}-{what}"))
            made.callback(lanes[-1].shutdown, wait=False)
        return cls(*lanes)


def _prepared(options: RedisOptions, context: api.TierContext, made: ExitStack) -> tuple[Topology, api.Seal]:
    """Read secrets and find the servers; blocks. `made` gets clean-up calls. `ConfigError`, or `BackendUnavailable`."""
    seal = options.make_seal(context.mapper.fingerprint, context.row_bytes)
    topology = make_topology(options, Login(options))
    made.callback(topology.close)
    try:
        topology.refresh()
        _check_servers(topology, options)
    except Away as error:
        raise api.BackendUnavailable(f"{context.name}: {error}") from error
    return topology, seal


def _check_servers(topology: Topology, options: RedisOptions) -> None:
    reasons: list[str] = []
    for server in topology.known():
        try:
            check(server, options.prefix.encode(), cluster=topology.cluster, timeout_s=options.timeout_s)
        except Away as error:
            reasons.append(str(error))
    if len(reasons) == len(topology.known()):
        raise Away("; ".join(reasons))


def _parts(indices: list[int], count: int, least: int) -> list[list[int]]:
    parts = max(1, min(count, len(indices) // least))
    size = -(-len(indices) // parts)
    return [indices[start : start + size] for start in range(0, len(indices), size)]


class Means(NamedTuple):
    counters: Totals
    seal: CodedSeal
    window: int  # Requests in flight on one connection.
    ttl_s: float | None


class Work(ABC, Generic[A]):
    """One call's chunks by their places in the batch; one thread at a time works on a place."""

    has_rows = False  # Rows must not be copied into a joined request.

    def __init__(self, names: Sequence[bytes], counters: Totals, window: int = ASKED_MAX, row_bytes: int = 0) -> None:
        self.names = names
        self.counters = counters
        self.window = window
        self.gulp = max(1, window // 2)  # Requests of one send.
        self.part_chunks = max(1, PART_BYTES_MIN // row_bytes) if row_bytes else len(names) + 1
        self.answers: dict[int, A] = {}
        self.unreachable: dict[int, str] = {}  # Reasons, of places whose server is away.
        self.number = 0  # The system's error number of the last reason that has one.
        self.redirects: dict[int, Address] = {}
        self.asking: set[int] = set()  # Places whose redirect is for one request alone.
        self.stale = False  # A server has answered that it is not the right one.
        self.ends_at: float | None = None  # Deadline on every server; set when the first lane begins.

    @abstractmethod
    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:
        """Return a place's request; `turn` is its index in the `gulp`."""

    def ask_some(self, link: Link, indices: Sequence[int]) -> list[Buffer]:
        parts: list[Buffer] = []
        for turn, index in enumerate(indices):
            if index in self.asking:
                parts.append(ASKING)
            parts += self.ask(link, index, turn)
        return parts if self.has_rows else [b"".join(parts)]

    @abstractmethod
    def read(self, link: Link, index: int) -> A:
        """Read a place's reply. Raises `Refused` for an error reply and `Lost` for an unreadable one."""

    @abstractmethod
    def refused(self, index: int, refusal: Refused) -> A:
        """Return the outcome of an error of this chunk alone."""

    def done(self, index: int) -> bool:
        return index in self.answers or index in self.unreachable or index in self.redirects

    def fail(self, indices: Sequence[int], why: str, number: int) -> None:
        self.number = number or self.number
        for index in indices:
            self.unreachable[index] = why

    def hear_some(self, link: Link, indices: Sequence[int]) -> int:
        self.hear(link, indices[0])
        return 1

    def hear(self, link: Link, index: int) -> None:
        not_allowed = _read_asking(link) if index in self.asking else None
        try:
            self.answers[index] = self.read(link, index)
        except Refused as refusal:
            self._record(link, index, not_allowed or refusal)

    def _record(self, link: Link, index: int, refusal: Refused) -> None:
        kind = refusal.kind
        self.stale = self.stale or kind in {"READONLY", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "NOAUTH"}
        if kind in ("MOVED", "ASK"):
            self.redirects[index] = target_of(refusal, link.address)
            (self.asking.add if kind == "ASK" else self.asking.discard)(index)
        elif kind in OF_ONE_CHUNK:
            self.answers[index] = self.refused(index, refusal)
        else:
            self.counters.count("refused")
            self.unreachable[index] = f"{link.address}: {refusal}"


class LoadWork(Work[api.Outcome]):
    def __init__(self, names: Sequence[bytes], reads: Sequence[api.Read], means: Means) -> None:
        super().__init__(names, means.counters, means.window, means.seal.sealed_bytes)
        self.corrupt: list[int] = []  # Places whose values are to be deleted.
        self.coded: list[bool] = []  # True for each loaded row that was coded.
        self._reads = reads
        self._seal = means.seal

    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:  # noqa: ARG002
        return [request(b"GET", self.names[index])]

    def read(self, link: Link, index: int) -> api.Outcome:
        key, row = self._reads[index]
        if (head := link.head()) == b"$-1":
            return api.ChunkMissing(key.hex())
        if not self._seal.fits(length := number_in(head, b"$")):
            self.answers[index] = self._faulty(index, key, api.SealFault.LENGTH)
            raise Lost(f"a value of {length:,} bytes")  # Left behind with its connection, however long it is.
        beside = beside_of(link, self._seal.opening_bytes(length))
        link.fill(self._seal.places(row, beside, length))
        if (fault := self._seal.open(key, row, beside, length)) is not None:
            return self._faulty(index, key, fault)
        self.coded.append(length < self._seal.sealed_bytes)
        return None

    def refused(self, index: int, refusal: Refused) -> api.Outcome:
        key = self._reads[index].key
        if refusal.kind == "WRONGTYPE":
            return self._faulty(index, key, api.SealFault.FOREIGN)
        return api.TransferFailed(f"{key.hex()}: {refusal}")

    def _faulty(self, index: int, key: api.OffloadKey, fault: api.SealFault) -> api.Outcome:
        self.counters.count(f"{'corrupt' if fault.corrupt else 'sealed'}_{fault}")
        if fault.corrupt:
            self.corrupt.append(index)
        return fault.outcome(key)


class StoreWork(Work[api.Outcome]):
    has_rows = True

    def __init__(self, names: Sequence[bytes], writes: Sequence[api.Write], means: Means) -> None:
        super().__init__(names, means.counters, means.window, means.seal.sealed_bytes)
        self._writes = writes
        self._seal = means.seal
        self._head, self._tail = b"*3\r\n", END
        if means.ttl_s is not None:
            milliseconds = b"%d" % max(1, round(means.ttl_s * 1_000))
            self._head, self._tail = b"*5\r\n", b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(milliseconds), milliseconds)

    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:
        key, row = self._writes[index]
        name = self.names[index]
        beside = beside_of(link, self._seal.closing_bytes, self.gulp, turn)
        value = self._seal.close(key, row, beside, self._seal.code_until())
        length = sum(part.nbytes for part in value)
        return [b"%b$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (self._head, len(name), name, length), *value, self._tail]

    def read(self, link: Link, index: int) -> api.Outcome:  # noqa: ARG002
        if (head := link.head()) != OK:
            raise Lost(f"the server answers {head[:32]!r} to SET")
        return None

    def refused(self, index: int, refusal: Refused) -> api.Outcome:
        key = self._writes[index].key
        if refusal.kind == "OOM":
            self.counters.count("no_room")
            return api.NoSpace(f"{key.hex()}: {refusal}")
        return api.TransferFailed(f"{key.hex()}: {refusal}")


class AskWork(Work[bool]):
    """Small requests: EXISTS and UNLINK."""

    def __init__(self, command: bytes, names: Sequence[bytes], counters: Totals) -> None:
        super().__init__(names, counters)
        self._command = command

    def ask(self, link: Link, index: int, turn: int) -> list[Buffer]:  # noqa: ARG002
        name = self.names[index]
        return [self._head(len(name)), name, END]

    def ask_some(self, link: Link, indices: Sequence[int]) -> list[Buffer]:
        """Join all requests at once where names have one length, as they mostly do."""
        names = [self.names[index] for index in indices]
        if self.asking or len(set(map(len, names))) != 1:
            return super().ask_some(link, indices)
        head = self._head(len(names[0]))
        return [head, (END + head).join(names), END]

    def _head(self, name_bytes: int) -> bytes:
        return b"*2\r\n$6\r\n%b\r\n$%d\r\n" % (self._command, name_bytes)

    def hear_some(self, link: Link, indices: Sequence[int]) -> int:
        if self.asking:
            return super().hear_some(link, indices)
        heads = link.heads(len(indices))
        answers = [answer for answer in map({b":0": False, b":1": True}.get, heads) if answer is not None]
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


def exchange(server: Server, work: Work[A], indices: Sequence[int], timeout_s: float) -> None:
    """Ask one server for these places, in a lane, until the work's deadline.

    A lost connection is replaced once (an idle one may be dead), and again while each new one gets an answer.
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
            _converse(link, work, left)
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


def _converse(link: Link, work: Work[A], indices: Sequence[int]) -> None:
    sent = heard = 0
    while heard < len(indices):
        while sent < len(indices) and sent - heard <= work.window - work.gulp:
            some = indices[sent : sent + work.gulp]
            link.send(work.ask_some(link, some))
            sent += len(some)
        heard += work.hear_some(link, indices[heard:sent])


def _read_asking(link: Link) -> Refused | None:
    """Read the reply to ASKING, and return its error, if any: the request behind it has its own reply."""
    try:
        if (head := link.head()) != OK:
            raise Lost(f"the server answers {head[:32]!r} to ASKING")
    except Refused as refusal:
        return refusal
    return None


def beside_of(link: Link, size: int, count: int = 1, turn: int = 0) -> memoryview:
    """Return one of `count` buffers of this size for a seal's calls. The link keeps them for later calls."""
    if len(link.memory) < size * count:
        link.memory = bytearray(size * count)
    return memoryview(link.memory)[size * turn : size * (turn + 1)]


def target_of(refusal: Refused, asked: Address) -> Address:
    """Return the address in a redirect. Without a host it is another port of the same one; without a port, no other."""
    words = str(refusal).split(" ")
    host, _, port = words[2].rpartition(":") if len(words) == 3 else ("", "", "")
    return told_address(host.strip("[]") or asked.host, port) or asked
