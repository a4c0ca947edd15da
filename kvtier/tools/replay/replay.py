"""A replay: a trace through an engine as fast as it goes, with real bytes; every chunk that comes back is compared."""

import asyncio
import hashlib
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import PRIMARY_NAME, EngineConfig
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.metrics import EngineStats
from kvtier.hints import Hint
from kvtier.runner.tiers import Budget
from kvtier.tools.replay.traces import Request

CONCURRENCY = 8
CONCURRENCY_MAX = 4_096  # Requests, a task each. Engines run some hundreds; the bytes have a limit of their own.
OPEN_BYTES_MAX = 256 << 20  # Made for all open requests together, beside the primary.
INTERRUPTED_CLOSE_S = 0.1  # Twice this, for transfers and for the tiers: whoever interrupts waits for a second at most.
PUT_BYTES_MAX = 64 << 20  # Of chunks made and handed over at once: longer prompts go in pieces, or memory would grow.
GPU_NAME = "gpu"  # What the LLM engine's own prefix cache is called where hits are told apart by where they lay.
SAMPLES_MAX = 400  # Of one replay's course: a picture has no more points than this to show.
WRONG_KEYS_MAX = 8  # Named in the report; the others are counted.
WORD_BYTES = 8
COMPARED_BYTES = 4 << 20  # Of chunks made at once for a comparison: more would only leave the processor's cache.


class ChunkSource:
    """The keys and the bytes of a trace's chunks, by block id. The same arguments always give the same ones.

    Each 8-byte word is a random word of its place, XOR a random word of the chunk's id. So a mixture of two chunks, two
    chunks exchanged and bytes at another offset all show, wherever they are, and a chunk costs one pass over its
    memory: 2 µs for 16 KiB, or a second for the 4.7 GB that an hour of chat asks for.
    """

    def __init__(self, chunk_bytes: int, *, seed: int = 0, trace: bytes = b"") -> None:
        """`trace`: what tells this trace from others, whose equal ids stand for other tokens."""
        self.chunk_bytes = chunk_bytes
        self._salt = hashlib.sha256(b"%d " % seed + trace).digest()
        words = -(-chunk_bytes // WORD_BYTES)
        places = np.random.Philox(np.frombuffer(self._salt, np.uint32).tolist())
        self._words_of_places: npt.NDArray[np.uint64] = places.random_raw(words)

    def key(self, block_id: int) -> OffloadKey:
        """Return the key of a block: a hash as long as an engine's own, 32 bytes, and KV-cache group 0."""
        return make_offload_key(hashlib.sha256(self._salt + b"%d" % block_id).digest())

    def chunks(self, keys: Sequence[OffloadKey]) -> list[memoryview]:
        """Make the chunks of these keys, one after the other in fresh memory."""
        return [row.data for row in self._rows(keys)]

    def wrong(self, keys: Sequence[OffloadKey], chunks: Sequence[memoryview]) -> list[OffloadKey]:
        """Return the keys whose chunk is not, byte for byte, what was made for them; leading keys have chunks.

        Keeps no hold of the chunks.
        """
        size = max(1, COMPARED_BYTES // self.chunk_bytes)
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
        made = np.bitwise_xor(words[:, np.newaxis], self._words_of_places)
        return made.view(np.uint8)[:, : self.chunk_bytes]


class TierTotals(NamedTuple):
    """One tier's totals, in chunks."""

    hits: int
    loaded: int
    stored: int
    dropped: Mapping[str, int] = {}  # Cascades that were never sent, by reason.
    failed: Mapping[str, int] = {}  # Chunks that did not move, by what was wrong.
    skipped: Mapping[str, int] = {}  # Chunks that were not to be sent, or not any more, by reason.
    refused: Mapping[str, int] = {}  # Chunks that found no row in the primary: stores and promotions.


class Sample(NamedTuple):
    """The totals at one moment."""

    seconds: float  # Since the replay began.
    requests: int
    chunk_references: int
    tiers: Mapping[str, TierTotals]


class Tally:
    """Counts of one replay."""

    def __init__(self, requests_expected: int) -> None:
        self.requests = 0
        self.chunk_references = 0
        self.hits = 0
        self.gpu_hits: int | None = None  # Of those, what the LLM engine's own cache had; None: it has none.
        self.tokens_found = 0  # In tiers, of prompts; in virtual time.
        self.wrong_chunks = 0
        self.wrong_keys: list[OffloadKey] = []
        self.seconds = 0.0
        self.drained = False  # Whether everything that was stored had reached the tiers when it ended.
        self.latencies_s: dict[str, array[float]] = {}
        self.samples: list[Sample] = []
        self._requests_a_sample = max(1, -(-requests_expected // SAMPLES_MAX))

    def time(self, operation: str, seconds: float) -> None:
        """Take note of how long one call took."""
        samples = self.latencies_s.get(operation)
        if samples is None:
            samples = self.latencies_s[operation] = array("d")
        samples.append(seconds)

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        """Take note of how long a tier took for one batch; an engine's observer."""
        self.time(f"{tier} {operation}", seconds)

    def looked_up(self, chunks: int, hits: int, wrong: Sequence[OffloadKey]) -> None:
        self.chunk_references += chunks
        self.hits += hits
        self.wrong_chunks += len(wrong)
        self.wrong_keys.extend(wrong[: WRONG_KEYS_MAX - len(self.wrong_keys)])

    def found_in_gpu(self, chunks: int) -> None:
        """Count chunks that the LLM engine's own cache had, which nobody looked up."""
        assert self.gpu_hits is not None
        self.chunk_references += chunks
        self.hits += chunks
        self.gpu_hits += chunks

    def finished(self, stats: Callable[[], EngineStats], seconds: float) -> None:
        """Count a request that has ended, and now and then keep the totals."""
        self.requests += 1
        if self.requests % self._requests_a_sample == 0:
            self.sample(stats(), seconds)

    def sample(self, stats: EngineStats, seconds: float) -> None:
        """Keep the totals of this moment."""
        self.seconds = seconds
        gpu = {} if self.gpu_hits is None else {GPU_NAME: TierTotals(self.gpu_hits, 0, 0)}
        self.samples.append(Sample(seconds, self.requests, self.chunk_references, gpu | totals(stats)))

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.chunk_references if self.chunk_references else 0.0


def totals(stats: EngineStats) -> dict[str, TierTotals]:
    """Return every tier's totals, the primary first: loaded are its rows that were read, by whoever asked."""
    primary = stats.primary
    read = primary.hits + sum(tier.hits for tier in stats.tiers)
    refused = {"stores": primary.stores_refused, "promotions": primary.promotions_refused}
    refused = {what: chunks for what, chunks in refused.items() if chunks}
    found = {PRIMARY_NAME: TierTotals(primary.hits, read, primary.stores, refused=refused)}
    for tier in stats.tiers:
        found[tier.name] = TierTotals(tier.hits, tier.loaded, tier.stored, tier.dropped, tier.failed, tier.skipped)
    return found


class Turn(NamedTuple):
    """One open request's place in the claims."""

    number: int
    block_ids: Sequence[int]
    claimed: set[int]  # Blocks that only this request computes.
    ended: asyncio.Event


class Claims:
    """The blocks that open requests compute, so that these overlap and find what they would find one by one.

    A request whose prefix an earlier open one is about to compute waits for that one; all others go on. Without it the
    hits of a replay would depend on how many requests are open: those that look before a chunk is stored would miss it.
    What no tier has lost is found as it would be one by one; what was lost, two that look at once may both compute.
    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._holders: dict[int, Turn] = {}  # Block -> the request that computes it.
        self._computed: set[int] = set()  # Blocks that some request has computed; a tier may have lost them since.
        self._admitted = 0

    def admit(self, block_ids: Sequence[int]) -> Turn:
        """Enter a request behind all others, as the one that computes every block that no other has or does."""
        self._admitted += 1
        turn = Turn(self._admitted, block_ids, set(), asyncio.Event())
        self._claim(turn, [block for block in block_ids if block not in self._computed])
        return turn

    async def wait(self, turn: Turn) -> None:
        """Wait until no earlier open request computes a block of this one."""
        while earlier := next(filter(None, (self._earlier(block, turn) for block in turn.block_ids)), None):
            await earlier.ended.wait()

    def looked_up(self, turn: Turn, hits: int) -> None:
        """Say how many leading blocks were there: those are to be had, and all others are computed now."""
        self._drop(turn, turn.block_ids[:hits])
        self._computed.update(turn.block_ids[:hits])
        self._claim(turn, turn.block_ids[hits:])

    def leave(self, turn: Turn) -> None:
        """Say that what the request computed can be had, as far as it was kept, and that it is over."""
        self._computed.update(turn.claimed)
        self._drop(turn, tuple(turn.claimed))
        turn.ended.set()

    def _earlier(self, block: int, turn: Turn) -> Turn | None:
        # Only earlier ones: so nobody waits for one that waits for him.
        holder = self._holders.get(block)
        return holder if holder is not None and holder.number < turn.number else None

    def _claim(self, turn: Turn, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if self._holders.setdefault(block, turn) is turn:
                turn.claimed.add(block)

    def _drop(self, turn: Turn, block_ids: Sequence[int]) -> None:
        for block in turn.claimed.intersection(block_ids):
            del self._holders[block]
            turn.claimed.discard(block)


class Client:
    """One engine's user. A prompt longer than the primary counts with its leading chunks, as many as there are rows."""

    def __init__(
        self,
        manager: TieringOffloadingManager,
        source: ChunkSource,
        tally: Tally,
        *,
        clock: Callable[[], float],
        load_s_per_chunk: float = 0.0,
    ) -> None:
        """`clock` gives seconds. `load_s_per_chunk`: how long each row of a hit is read for, as if by a GPU."""
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
        """Give the time since the client was made."""
        return self._clock() - self._begun

    @contextmanager
    def request(self, hint: Hint | None = None) -> Generator[str]:
        """Give the id of a request that is known to the engine, with its hint, for as long as the block lasts."""
        self._numbers += 1
        request_id = f"replay-{self._numbers}"
        self.manager.steps.on_new_request(request_id, hint=hint)
        try:
            yield request_id
        finally:
            self.manager.steps.on_request_finished(request_id)

    async def fetch(self, keys: Sequence[OffloadKey], request_id: str) -> int:
        """Have the longest leading run brought in, compare its bytes, and return how long it is."""
        begun = self._clock()
        async with self.manager.fetch(keys, request_id=request_id) as chunks:
            self.tally.time("fetch", self._clock() - begun)
            hits = len(chunks)
            self.tally.looked_up(len(keys), hits, self.source.wrong(keys, chunks))
            if hits and self._load_s_per_chunk:
                await asyncio.sleep(hits * self._load_s_per_chunk)
        return hits

    async def put(self, keys: Sequence[OffloadKey], hits: int, request_id: str) -> None:
        """Store what was not found, waiting for room and for the tiers' budgets."""
        for piece in self._computed(keys, hits):
            chunks = self.source.chunks(piece)
            begun = self._clock()
            await self.manager.put(piece, chunks, request_id=request_id)
            self.tally.time("put", self._clock() - begun)

    def store(self, keys: Sequence[OffloadKey], hits: int, request_id: str) -> None:
        """Store what was not found as an engine does that never waits: what there is no room for is dropped."""
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
    """Give a group of tasks that raises the first error as it is: the others follow from it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class Replay:
    """One pass of requests through one engine. `tally` may be read at any time, and after a cancelled run, too."""

    times_to_first_token_s: None = None  # Requests do not come at their own times here.

    def __init__(
        self,
        requests: Iterable[Request],
        config: EngineConfig,
        source: ChunkSource,
        tally: Tally,
        *,
        concurrency: int = CONCURRENCY,
    ) -> None:
        """`concurrency`: the most requests open at once."""
        self.tally = tally
        self._requests = iter(requests)
        self._config = config
        self._source = source
        self._concurrency = concurrency

    async def run(self, progress: Callable[[], None] = lambda: None) -> Tally:
        """Replay all requests, calling `progress` after each, and wait until what they stored has reached the tiers.

        Cancelled, it closes the engine in under a second and leaves what was counted in `tally`.
        """
        manager = await TieringOffloadingManager.open(self._config, observer=self.tally.observe)
        close_s = None
        try:
            client = Client(manager, self._source, self.tally, clock=time.perf_counter)  # uvloop's ticks in ms.
            try:
                await self._replay(client, progress)
                self.tally.drained = await manager.drain(_drain_s(self._config))
            finally:
                self.tally.sample(manager.stats(), client.seconds)
        except asyncio.CancelledError:
            close_s = INTERRUPTED_CLOSE_S
            raise
        finally:
            await manager.aclose(close_s)
        return self.tally

    async def _replay(self, client: Client, progress: Callable[[], None]) -> None:
        claims = Claims()
        room = Budget(OPEN_BYTES_MAX, _open_chunks_max(client.manager))
        async with task_group() as group:
            for _ in range(self._concurrency):
                group.create_task(self._work(client, claims, room, progress))

    async def _work(self, client: Client, claims: Claims, room: Budget, progress: Callable[[], None]) -> None:
        """Take the next request, serve it, and so on. What is taken is claimed at once: nothing waits between."""
        for request in self._requests:
            turn = claims.admit(request.hash_ids)
            chunks = len(request.hash_ids)
            size_bytes = min(chunks * self._source.chunk_bytes, PUT_BYTES_MAX)
            await room.acquire(size_bytes, chunks)
            try:
                await claims.wait(turn)
                await self._serve(client, claims, turn, request.hint)
            finally:
                room.release(size_bytes, chunks)
                claims.leave(turn)
            self.tally.finished(client.manager.stats, client.seconds)
            progress()

    async def _serve(self, client: Client, claims: Claims, turn: Turn, hint: Hint | None) -> None:
        keys = list(map(self._source.key, turn.block_ids))
        with client.request(hint) as request_id:
            hits = await client.fetch(keys, request_id)
            claims.looked_up(turn, hits)
            await client.put(keys, hits, request_id)


def _open_chunks_max(manager: TieringOffloadingManager) -> int:
    """Return how many rows open requests can hold for sure: none is then refused one that cascades or leases hold."""
    limits, rows = manager.config.limits, manager.config.rows
    return max(1, int(min(limits.lease_share, 1 - limits.cascade_share) * rows))


def _drain_s(config: EngineConfig) -> float:
    """Return when all must have ended: each transfer waits for budget and then for the tier, at most so long."""
    return 1.0 + 2 * max((tier.limits.deadline_s for tier in config.secondary_tiers), default=0.0)
