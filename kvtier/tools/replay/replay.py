"""A replay: a trace through an engine at full speed, with real bytes; every loaded chunk is compared."""

import asyncio
import hashlib
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import PRIMARY_NAME, EngineConfig
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.metrics import EngineStats
from kvtier.runner.runner import Budget
from kvtier.settings.hints import Hint
from kvtier.tools.replay.traces import TraceRequest

CONCURRENCY = 8
CONCURRENCY_MAX = 4_096  # Requests, a task each. Engines run some hundreds; the bytes have their own limit.
OPEN_BYTES_MAX = 256 << 20  # Generated for all open requests together, next to the primary.
PUT_BYTES_MAX = 64 << 20  # Generated and put at once: longer prompts are put in pieces, to bound memory.
GPU_NAME = "gpu"  # The LLM engine's own prefix cache, next to the names of tiers.
SAMPLES_MAX = 400  # Of one replay: a picture shows no more points.
WRONG_KEYS_MAX = 8  # Named in the report; all are counted.
WORD_BYTES = 8


class ChunkSource:
    """The keys and the bytes of a trace's chunks, by block id; the same for the same arguments.

    Each 8-byte word is a random word of its place, XOR one of the chunk's key: mixed, exchanged and shifted bytes show.
    """

    def __init__(self, chunk_bytes: int, *, seed: int = 0, trace: bytes = b"") -> None:
        """Derive all from `seed` and from `trace`, bytes that differ between traces."""
        self.chunk_bytes = chunk_bytes
        self._salt = hashlib.sha256(b"%d " % seed + trace).digest()
        words = -(-chunk_bytes // WORD_BYTES)
        places = np.random.Philox(np.frombuffer(self._salt, np.uint32).tolist())
        self._words_of_places: npt.NDArray[np.uint64] = places.random_raw(words)

    @classmethod
    def of(cls, requests: Iterable[TraceRequest], chunk_bytes: int, seed: int) -> "ChunkSource":
        """Return the chunks of a trace: in a directory that several traces have used, each finds its own only."""
        return cls(chunk_bytes, seed=seed, trace=msgspec.json.encode(next(iter(requests))))

    def key(self, block_id: int) -> OffloadKey:
        """Return the key of a block: 32 bytes of hash, as in LLM engines, and KV-cache group 0."""
        return make_offload_key(hashlib.sha256(self._salt + b"%d" % block_id).digest())

    def chunks(self, keys: Sequence[OffloadKey]) -> list[memoryview]:
        return [row.data for row in self._rows(keys)]

    def wrong(self, keys: Sequence[OffloadKey], chunks: Sequence[memoryview]) -> list[OffloadKey]:
        """Return the keys whose chunk differs from the generated one; only leading keys have chunks. Keeps no view."""
        size = max(1, (4 << 20) // self.chunk_bytes)  # Generated at once for a comparison: fits the processor's cache.
        return [
            key
            for start in range(0, len(chunks), size)
            for key in self._wrong(keys[start : start + size], chunks[start : start + size])
        ]

    def _wrong(self, keys: Sequence[OffloadKey], chunks: Sequence[memoryview]) -> Iterator[OffloadKey]:
        for key, made, chunk in zip(keys, self._rows(keys), chunks, strict=False):
            if not np.array_equal(made, np.frombuffer(chunk, np.uint8)):
                yield key

    def _rows(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.uint8]:
        words = np.frombuffer(b"".join(key[:WORD_BYTES] for key in keys), np.uint64)
        return np.bitwise_xor(words[:, np.newaxis], self._words_of_places).view(np.uint8)[:, : self.chunk_bytes]


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's part. Of the primary, chunks that were read and that were put."""

    hits: int  # Chunks found in this tier.
    chunks_loaded: int  # Chunks loaded, or read from the primary.
    chunks_stored: int  # Chunks stored.
    bytes_loaded: int  # Bytes of the chunks loaded.
    bytes_stored: int  # Bytes of the chunks stored.
    dropped: Mapping[str, int]  # Cascades that were never sent, by reason.
    failed: Mapping[str, int]  # Failed transfers, by reason.
    skipped: Mapping[str, int]  # Cascades that were not to be written, or no longer, by reason.
    refused: Mapping[str, int]  # Chunks without a row in the primary: `stores` and `promotions`.


def tier_report(hits: int, loaded: int, stored: int, row_bytes: int, **reasons: Mapping[str, int]) -> TierReport:
    return TierReport(
        hits=hits,
        chunks_loaded=loaded,
        chunks_stored=stored,
        bytes_loaded=loaded * row_bytes,
        bytes_stored=stored * row_bytes,
        **{name: reasons.get(name, {}) for name in ("dropped", "failed", "skipped", "refused")},
    )


class Sample(NamedTuple):
    seconds: float  # Since the replay began.
    requests: int
    chunk_references: int
    tiers: Mapping[str, TierReport]


@dataclass
class ReplayTally:
    requests_expected: int
    row_bytes: int  # Of the real engine, if a model is replayed.
    requests: int = 0
    chunk_references: int = 0
    hits: int = 0
    gpu_hits: int | None = None  # Hits in the LLM engine's own cache; None if it has none.
    tokens_found: int = 0  # Tokens of prompts found in tiers, in virtual time.
    wrong_chunks: int = 0
    wrong_keys: list[OffloadKey] = field(default_factory=list[OffloadKey])
    seconds: float = 0.0
    drained: bool = False  # All cascades had reached their tiers at the end.
    latencies_s: "dict[str, array[float]]" = field(default_factory=dict[str, "array[float]"])
    samples: list[Sample] = field(default_factory=list[Sample])

    def time(self, operation: str, seconds: float) -> None:
        self.latencies_s.setdefault(operation, array("d")).append(seconds)

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        """Record the duration of one batch of a tier; an engine's observer."""
        self.time(f"{tier} {operation}", seconds)

    def looked_up(self, chunks: int, hits: int, wrong: Sequence[OffloadKey]) -> None:
        self.chunk_references += chunks
        self.hits += hits
        self.wrong_chunks += len(wrong)
        self.wrong_keys.extend(wrong[: WRONG_KEYS_MAX - len(self.wrong_keys)])

    def found_in_gpu(self, chunks: int) -> None:
        """Count chunks that the LLM engine's own cache had: kvtier was not asked for them."""
        assert self.gpu_hits is not None
        self.chunk_references += chunks
        self.hits += chunks
        self.gpu_hits += chunks

    def finished(self, stats: Callable[[], EngineStats], seconds: float) -> None:
        """Count a finished request; keep a sample of the totals every few requests."""
        self.requests += 1
        if self.requests % max(1, -(-self.requests_expected // SAMPLES_MAX)) == 0:
            self.sample(stats(), seconds)

    def sample(self, stats: EngineStats, seconds: float) -> None:
        self.seconds = seconds
        gpu = {} if self.gpu_hits is None else {GPU_NAME: tier_report(self.gpu_hits, 0, 0, 0)}
        self.samples.append(Sample(seconds, self.requests, self.chunk_references, gpu | totals(stats, self.row_bytes)))

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.chunk_references if self.chunk_references else 0.0


def totals(stats: EngineStats, row_bytes: int) -> dict[str, TierReport]:
    """Return the totals of every tier, the primary first. All hits are read from the primary."""
    primary = stats.primary
    read = primary.hits + sum(tier.hits for tier in stats.tiers)
    refused = {"stores": primary.stores_refused, "promotions": primary.promotions_refused}
    refused = {what: chunks for what, chunks in refused.items() if chunks}
    found = {PRIMARY_NAME: tier_report(primary.hits, read, primary.stores, row_bytes, refused=refused)}
    for tier in stats.tiers:
        reasons = {"dropped": tier.dropped, "failed": tier.failed, "skipped": tier.skipped}
        found[tier.name] = tier_report(tier.hits, tier.loaded, tier.stored, row_bytes, **reasons)
    return found


class ClaimTurn(NamedTuple):
    number: int
    block_ids: Sequence[int]
    claimed: set[int]  # Blocks that this request alone computes.
    ended: asyncio.Event


class BlockClaims:
    """The blocks that open requests compute: later requests wait for them, so hits do not depend on concurrency."""

    def __init__(self) -> None:
        self._holders: dict[int, ClaimTurn] = {}  # Block -> the request that computes it.
        self._computed: set[int] = set()  # Blocks that a request has computed; a tier may have lost them since.
        self._admitted = 0

    def admit(self, block_ids: Sequence[int]) -> ClaimTurn:
        """Queue a request; it claims every block that no other request has computed or claimed."""
        self._admitted += 1
        turn = ClaimTurn(self._admitted, block_ids, set(), asyncio.Event())
        self._claim(turn, [block for block in block_ids if block not in self._computed])
        return turn

    async def wait(self, turn: ClaimTurn) -> None:
        """Wait until no earlier open request claims a block of this one."""
        while ahead := [each for each in map(self._holders.get, turn.block_ids) if each and each.number < turn.number]:
            await ahead[0].ended.wait()  # Only earlier ones: otherwise two requests could wait for each other.

    def looked_up(self, turn: ClaimTurn, hits: int) -> None:
        """Record the hits of a request: its leading blocks are available, and it claims all others."""
        self._drop(turn, turn.block_ids[:hits])
        self._computed.update(turn.block_ids[:hits])
        self._claim(turn, turn.block_ids[hits:])

    def leave(self, turn: ClaimTurn) -> None:
        """End a request: the blocks that it claimed are computed."""
        self._computed.update(turn.claimed)
        self._drop(turn, tuple(turn.claimed))
        turn.ended.set()

    def _claim(self, turn: ClaimTurn, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if self._holders.setdefault(block, turn) is turn:
                turn.claimed.add(block)

    def _drop(self, turn: ClaimTurn, block_ids: Sequence[int]) -> None:
        for block in turn.claimed.intersection(block_ids):
            del self._holders[block]
            turn.claimed.discard(block)


class ReplayClient:
    """A client of one engine. A prompt longer than the primary is cut to the primary's rows."""

    def __init__(
        self,
        manager: TieringOffloadingManager,
        source: ChunkSource,
        tally: ReplayTally,
        *,
        clock: Callable[[], float],
        load_s_per_chunk: float = 0.0,
    ) -> None:
        """Measure with `clock`, in seconds. `load_s_per_chunk` models the copy of a chunk to the GPU."""
        self.manager = manager
        self.source = source
        self.tally = tally
        self._load_s_per_chunk = load_s_per_chunk
        self._put_chunks = max(1, PUT_BYTES_MAX // source.chunk_bytes)
        self._clock = clock
        self._begun = clock()
        self._numbers = 0

    @property
    def seconds(self) -> float:
        return self._clock() - self._begun

    @contextmanager
    def request(self, hint: Hint | None = None) -> Generator[str]:
        """Begin a request with its hint; yield its id; finish the request at the end of the block."""
        self._numbers += 1
        request_id = f"replay-{self._numbers}"
        self.manager.steps.on_new_request(request_id, hint=hint)
        try:
            yield request_id
        finally:
            self.manager.steps.on_request_finished(request_id)

    async def fetch(self, keys: Sequence[OffloadKey], request_id: str) -> int:
        """Load the longest leading run, compare its bytes, and return its length."""
        begun = self._clock()
        async with self.manager.fetch(keys, request_id=request_id) as chunks:
            self.tally.time("fetch", self._clock() - begun)
            hits = len(chunks)
            self.tally.looked_up(len(keys), hits, self.source.wrong(keys, chunks))
            if hits and self._load_s_per_chunk:
                await asyncio.sleep(hits * self._load_s_per_chunk)
        return hits

    async def put(self, keys: Sequence[OffloadKey], hits: int, request_id: str) -> None:
        """Store the misses; wait for room and for the tiers' budgets."""
        for piece in self._computed(keys, hits):
            chunks = self.source.chunks(piece)
            begun = self._clock()
            await self.manager.put(piece, chunks, request_id=request_id)
            self.tally.time("put", self._clock() - begun)

    def store(self, keys: Sequence[OffloadKey], hits: int, request_id: str) -> None:
        """Store the misses without waiting, as an LLM engine does: chunks without room are dropped."""
        steps, size = self.manager.steps, self.source.chunk_bytes
        for piece in self._computed(keys, hits):
            plan = steps.prepare_store(piece, request_id)
            if plan is None or not plan.keys:
                continue
            for row, chunk in zip(plan.rows, self.source.chunks(plan.keys), strict=True):
                steps.region.row(row)[:size] = chunk
            steps.complete_store(plan.keys, request_id)
            steps.end_step()

    def _computed(self, keys: Sequence[OffloadKey], hits: int) -> Generator[Sequence[OffloadKey]]:
        end = min(len(keys), self.manager.config.rows)
        return (keys[start : min(start + self._put_chunks, end)] for start in range(hits, end, self._put_chunks))


@asynccontextmanager
async def task_group() -> AsyncGenerator[asyncio.TaskGroup]:
    """Yield a group of tasks that raises its first error alone: the others follow from it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


@dataclass
class Replay:
    """One pass of requests through one engine. `tally` may be read at any time, even after a cancelled run."""

    requests: Iterable[TraceRequest]
    config: EngineConfig
    source: ChunkSource
    tally: ReplayTally
    concurrency: int = field(default=CONCURRENCY, kw_only=True)

    async def run(self, progress: Callable[[], None] = lambda: None) -> ReplayTally:
        """Replay all requests, calling `progress` after each, and wait until all cascades have reached the tiers.

        A cancel closes the engine within a second; `tally` keeps the counts.
        """
        manager = await TieringOffloadingManager.open(self.config, observer=self.tally.observe)
        close_s = None
        try:
            client = ReplayClient(manager, self.source, self.tally, clock=time.perf_counter)  # uvloop's ticks in ms.
            try:
                await self._replay(client, progress)
                # Each cascade waits once for budget and once for the tier.
                deadlines_s = (tier.limits.deadline_s for tier in self.config.secondary_tiers)
                self.tally.drained = await manager.drain(1.0 + 2 * max(deadlines_s, default=0.0))
            finally:
                self.tally.sample(manager.stats(), client.seconds)
        except asyncio.CancelledError:
            close_s = 0.1  # Once for transfers and once for tiers: Ctrl-C takes effect within a second.
            raise
        finally:
            await manager.aclose(close_s)
        return self.tally

    async def _replay(self, client: ReplayClient, progress: Callable[[], None]) -> None:
        claims, requests = BlockClaims(), iter(self.requests)
        room = Budget(OPEN_BYTES_MAX, _open_chunks_max(client.manager))
        async with task_group() as group:
            for _ in range(self.concurrency):
                group.create_task(self._work(requests, client, claims, room, progress))

    async def _work(
        self,
        requests: Iterator[TraceRequest],
        client: ReplayClient,
        claims: BlockClaims,
        room: Budget,
        progress: Callable[[], None],
    ) -> None:
        """Serve requests one after the other. Each is claimed when it is taken, before anything waits."""
        for request in requests:
            turn = claims.admit(request.hash_ids)
            chunks = len(request.hash_ids)
            size_bytes = min(chunks * self.source.chunk_bytes, PUT_BYTES_MAX)
            await room.acquire(size_bytes, chunks)
            try:
                await claims.wait(turn)
                await self._serve(client, claims, turn, request.hint)
            finally:
                room.release(size_bytes, chunks)
                claims.leave(turn)
            self.tally.finished(client.manager.stats, client.seconds)
            progress()

    async def _serve(self, client: ReplayClient, claims: BlockClaims, turn: ClaimTurn, hint: Hint | None) -> None:
        keys = list(map(self.source.key, turn.block_ids))
        with client.request(hint) as request_id:
            hits = await client.fetch(keys, request_id)
            claims.looked_up(turn, hits)
            await client.put(keys, hits, request_id)


def _open_chunks_max(manager: TieringOffloadingManager) -> int:
    """Return how many rows open requests may hold: cascades and leases then never leave one without a row."""
    limits, rows = manager.config.limits, manager.config.rows
    return max(1, int(min(limits.lease_share, 1 - limits.cascade_share) * rows))
