"""A tier on Redis or Valkey, the asynchronous shell: it chooses the server of each key, and lanes talk to servers."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple, Self

from kvtier.backend import (
    NAMINGS,
    SEAL_BYTES,
    Abandoned,
    BackendUnavailable,
    ConfigError,
    Durability,
    Lanes,
    OffloadKey,
    Outcome,
    Read,
    Seal,
    TierContext,
    TransferFailed,
    Write,
    in_thread,
    in_threads,
)
from kvtier.backend.remote import RemoteBackend, name_prefix
from kvtier_backends.redis.options import RedisOptions
from kvtier_backends.redis.server import Away, Login, Server, check
from kvtier_backends.redis.topology import Topology, make_topology
from kvtier_backends.redis.work import AskWork, LoadWork, StoreWork, Work, exchange

ASK_LANES = 3  # For small requests, which never queue behind rows. One of them may be busy asking where servers are.
VALUE_BYTES_MAX = 512 << 20  # The servers' default (proto-max-bulk-len).
PART_BYTES_MIN = 4 << 20  # Least share of a call for one lane: a smaller one is done before another thread has begun.
REDIRECTS_MAX = 3  # Of one chunk: a cluster whose slots move answers after one or two.


class RedisBackend(RemoteBackend[RedisOptions]):
    """Chunks as values of a server's, sealed."""

    durability = Durability.HOST  # Our process may end. What a server's end costs is the server's configuration.
    options_type = RedisOptions
    described = ("url",)

    @classmethod
    async def open(cls, options: RedisOptions, context: TierContext) -> Self:
        """Find the servers, and try on each what the tier will ask of it. One that answers is enough."""
        if context.row_bytes + SEAL_BYTES > VALUE_BYTES_MAX:
            raise ConfigError(
                f"chunk_bytes: rows of {context.row_bytes:,} bytes, at most {VALUE_BYTES_MAX - SEAL_BYTES:,} "
                "accepted: no value may be longer"
            )
        made = ExitStack()
        try:
            lanes = _started(options, context.name, made)
            topology, seal = await in_thread(lanes.ask, _prepared, options, context, made)
            tier = cls(options, context, topology, seal, lanes)
        except BaseException:  # A cancelled thread's result is lost, and its connections would be with it.
            made.close()
            raise
        return tier

    def __init__(
        self, options: RedisOptions, context: TierContext, topology: Topology, seal: Seal, lanes: "RedisLanes"
    ) -> None:
        """Use `open` instead."""
        super().__init__(options, context)
        # A cluster hashes only what is between braces: with them, every chunk would be on one node.
        folder = context.mapper.chunks_folder.replace("{", "%7B")
        self._prefix = f"{name_prefix(options.prefix, context.mapper)}{folder}/"
        self._name_of = NAMINGS[context.mapper.naming].name
        self._topology = topology
        self._seal = seal
        self._window = max(1, options.window_bytes // context.row_bytes)
        self._part_chunks = max(1, PART_BYTES_MIN // seal.sealed_bytes)
        self._lanes = lanes

    async def aclose(self, deadline_s: float) -> Abandoned:
        """Close, as the contract says. Calls that miss the deadline fail at once: their connections are closed."""
        ends_at = time.monotonic() + deadline_s
        every = (self._lanes.load, self._lanes.store, self._lanes.ask)
        try:
            await self._calls.close(deadline_s)  # First: a call may need lanes more than once.
            left = sum(await asyncio.gather(*(lanes.aclose(max(0.0, ends_at - time.monotonic())) for lanes in every)))
        finally:  # A cancelled close does not wait any longer, either.
            for lanes in every:
                lanes.shutdown(wait=False, cancel_futures=True)
            self._topology.close()
        return Abandoned(left)

    def _names(self, keys: Sequence[OffloadKey]) -> list[bytes]:
        name_of, prefix = self._name_of, self._prefix
        return [(prefix + name_of(key)).encode() for key in keys]

    async def _probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        work = await self._ask(b"EXISTS", self._names(keys))
        self._refuse_if_away(work)
        return [work.answers.get(index, False) for index in range(len(keys))]

    async def _load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        names = self._names([read.key for read in reads])
        work = LoadWork(names, reads, self._seal, self._window, self._counts)
        await self._move(work, self._lanes.load, self._part_chunks)
        if work.corrupt:
            await self._ask(b"UNLINK", [names[index] for index in work.corrupt], work.ends_at)
        return self._outcomes(work, [read.key for read in reads])

    async def _store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        keys = [write.key for write in writes]
        work = StoreWork(self._names(keys), writes, self._seal, self._window, self._options.ttl_s, self._counts)
        await self._move(work, self._lanes.store, self._part_chunks)
        return self._outcomes(work, keys)

    async def _delete(self, keys: Sequence[OffloadKey]) -> None:
        work = await self._ask(b"UNLINK", self._names(keys))
        if work.unreachable:
            raise BackendUnavailable(f"{self._name}: {next(iter(work.unreachable.values()))}") from work.cause()

    async def _ask(self, command: bytes, names: Sequence[bytes], ends_at: float | None = None) -> AskWork:
        work = AskWork(command, names, self._counts)
        work.ends_at = ends_at
        await self._move(work, self._lanes.ask, len(names))
        return work

    def _outcomes(self, work: Work[Outcome], keys: Sequence[OffloadKey]) -> list[Outcome]:
        self._refuse_if_away(work)
        away = {index: TransferFailed(f"{keys[index].hex()}: {why}") for index, why in work.unreachable.items()}
        for outcome in away.values():
            outcome.__cause__ = work.cause()
        return [away[index] if index in away else work.answers[index] for index in range(len(keys))]

    def _refuse_if_away(self, work: Work[Any]) -> None:
        if work.unreachable and len(work.unreachable) == len(work.names):
            raise BackendUnavailable(f"{self._name}: {work.unreachable[0]}") from work.cause()

    async def _move(self, work: Work[Any], lanes: Lanes, part_chunks: int) -> None:
        """Get an answer for every name, from its server or from another that it redirects to."""
        if self._topology.stale:
            with suppress(TimeoutError):  # Rows are lent: a late answer serves later calls.
                async with asyncio.timeout(self._options.connect_timeout_s):
                    await self._lanes.ask.run(self._topology.renew)
        await self._exchange(work, lanes, part_chunks, self._topology.places_of(work.names))
        for _ in range(REDIRECTS_MAX):
            if not work.redirects or not self._topology.cluster:
                break
            redirects, work.redirects = work.redirects, {}
            self._counts.count("redirected", len(redirects))
            for asking in (False, True):
                places: defaultdict[Server, list[int]] = defaultdict(list)
                for index, to in redirects.items():
                    if to.asking == asking:
                        places[self._topology.at(to.address)].append(index)
                await self._exchange(work, lanes, part_chunks, places, asking=asking)
        self._give_up(work)

    def _give_up(self, work: Work[Any]) -> None:
        remedy = "" if self._topology.cluster else "; redis+cluster:// is accepted with a cluster"
        for index, to in work.redirects.items():
            work.unreachable[index] = f"its slot has moved to {to.address}{remedy}"
        self._topology.stale = self._topology.stale or work.stale or bool(work.unreachable)

    async def _exchange(
        self, work: Work[Any], lanes: Lanes, part_chunks: int, places: dict[Server, list[int]], *, asking: bool = False
    ) -> None:
        by_server: list[list[Callable[[], None]]] = [
            [
                partial(exchange, server, work, part, self._options.timeout_s, asking=asking)
                for part in _parts(some, lanes.count, part_chunks)
            ]
            for server, some in places.items()
        ]
        in_turn = chain.from_iterable(zip_longest(*by_server))  # A server that hangs must not take every lane.
        await in_threads(lanes, [call for call in in_turn if call is not None])


class RedisLanes(NamedTuple):
    """A tier's threads, by what can delay them."""

    ask: Lanes
    load: Lanes
    store: Lanes


def _started(options: RedisOptions, name: str, made: ExitStack) -> RedisLanes:
    """Start a tier's threads. Clean-up calls go into `made`. RuntimeError: the process may have no more of them."""
    lanes: list[Lanes] = []
    for what, count in (("ask", ASK_LANES), ("load", options.lanes), ("store", options.lanes)):
        lanes.append(Lanes(count, f"kvtier-{name}-{what}"))
        made.callback(lanes[-1].shutdown, wait=False)
    return RedisLanes(*lanes)


def _prepared(options: RedisOptions, context: TierContext, made: ExitStack) -> tuple[Topology, Seal]:
    """Read secrets and find the servers. Blocks. Clean-up calls, for a tier that does not open, go into `made`.

    Raises `ConfigError`, and `BackendUnavailable` if no server answers.
    """
    seal = options.make_seal(context.mapper.fingerprint, context.row_bytes)
    topology = make_topology(options, Login(options))
    made.callback(topology.close)
    try:
        topology.refresh()
        _check_servers(topology, options)
    except Away as error:
        raise BackendUnavailable(f"{context.name}: {error}") from error
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
    """Divide evenly into up to `count` parts of at least `least` each, or into a single part."""
    parts = max(1, min(count, len(indices) // max(1, least)))
    size = -(-len(indices) // parts)
    return [indices[start : start + size] for start in range(0, len(indices), size)]
