"""The replay in virtual time: a trace at its own pace against models of the tiers; measures times to first token.

The model: requests queue, first come first served, for `slots` equal servers that compute one prompt each. A server
takes the leading run that the LLM engine's own prefix cache on the GPU holds: it is free, and kvtier is not asked for
it. It looks the rest up, waits until the tiers' chunks are in the primary, copies them to the GPU, computes the other
tokens at `tokens_per_s`, and is free again with the first token. The prompt is then in the cache on the GPU. Computed
chunks are stored without waiting: what a tier cannot take is dropped and counted. Without tiering, the server computes
all that the cache on the GPU does not hold.

Where the model differs from real engines: all servers share one cache on the GPU, and a server that loads does nothing
else (both make tiering look worse); attention grows with the square of the prompt (which makes recomputing look
cheaper); decoding is left out.
"""

import asyncio
import heapq
import logging
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from kvtier.config import EngineConfig
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.metrics import EngineStats
from kvtier.errors import TraceError
from kvtier.policies import LRU
from kvtier.tools.replay.model import DiskSpeed, ScaleModel, scale_model
from kvtier.tools.replay.replay import GPU_NAME, ChunkSource, ReplayClient, ReplayTally, task_group
from kvtier.tools.replay.study import Cache
from kvtier.tools.replay.traces import BLOCK_TOKENS, TraceRequest
from kvtier.tools.replay.workload import AnyTrace

PREFILL_TOKENS_PER_S = 20_000.0  # Of one server: an 8B model on one GPU of 2023.
SLOTS = 4
GPU_LOAD_BYTES_PER_S = 25e9  # Host to device over sixteen lanes of PCIe 4.
GPU_CACHE_TOKENS = 262_144  # Of one server. 80 GB hold 420,000 of an 8B model next to its weights and running requests.
LOGGERS_OF_LOSSES = ("kvtier.engine", "kvtier.runner")


class Servers(NamedTuple):
    """The servers that compute prompts, all alike."""

    tokens_per_s: float = PREFILL_TOKENS_PER_S  # Of one server.
    slots: int = SLOTS
    cache_tokens: int = GPU_CACHE_TOKENS  # Held by the LLM engine's own prefix cache on each server's GPU.

    def seconds(self, tokens: int) -> float:
        """Return the time to first token of a prompt with `tokens` misses; one token is always computed."""
        return max(1, tokens) / self.tokens_per_s

    def cache(self, block_tokens: int) -> Cache | None:
        """Return an empty LRU prefix cache, shared by all servers; None if it holds no block."""
        blocks = self.slots * self.cache_tokens // block_tokens
        return Cache(LRU(blocks), blocks) if blocks else None

    def figures(self) -> dict[str, dict[str, float]]:
        """Return what is modelled of the servers, and with which figures."""
        return {
            "prefill": {"tokens_per_s": self.tokens_per_s, "slots": self.slots},
            GPU_NAME: {"cache_tokens": self.cache_tokens, "load_bytes_per_s": GPU_LOAD_BYTES_PER_S},
        }


class VirtualReplay:
    """One pass of requests through a scale model of an engine, on a `VirtualTimeLoop`.

    Each chunk of `config` stands for `chunk_bytes`. `tally` and `times_to_first_token_s` may be read after a cancelled
    run, too.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        config: EngineConfig,
        source: ChunkSource,
        tally: ReplayTally,
        *,
        chunk_bytes: int,
        block_tokens: int,
        servers: Servers,
    ) -> None:
        self.tally = tally
        self.times_to_first_token_s = array("d")
        self.stats: EngineStats | None = None
        """The engine's statistics at the end."""
        self._gpu = servers.cache(block_tokens)
        if self._gpu is not None:
            tally.gpu_hits = 0
        self._requests = requests
        self._config = config
        self._source = source
        self._load_s_per_chunk = chunk_bytes / GPU_LOAD_BYTES_PER_S
        self._block_tokens = block_tokens
        self._servers = servers

    async def run(self, progress: Callable[[], None] = lambda: None) -> ReplayTally:
        """Replay all requests, calling `progress` after each, and wait until all cascades have reached the tiers."""
        arrivals = arrivals_s(self._requests)
        with _silent_losses():
            async with TieringOffloadingManager.open(self._config, observer=self.tally.observe) as manager:
                clock = asyncio.get_running_loop().time
                client = ReplayClient(
                    manager, self._source, self.tally, clock=clock, load_s_per_chunk=self._load_s_per_chunk
                )
                try:
                    await self._replay(client, arrivals, progress)
                    self.tally.drained = await manager.drain()
                finally:
                    self.stats = manager.stats()
                    self.tally.sample(self.stats, client.seconds)
        return self.tally

    async def _replay(self, client: ReplayClient, arrivals: Sequence[float], progress: Callable[[], None]) -> None:
        free = asyncio.Semaphore(self._servers.slots)
        async with task_group() as group:
            for request, arrival_s in zip(self._requests, arrivals, strict=True):
                await asyncio.sleep(arrival_s - client.seconds)
                task = group.create_task(self._serve(request, arrival_s, client, free))
                task.add_done_callback(lambda _: progress())

    async def _serve(
        self, request: TraceRequest, arrival_s: float, client: ReplayClient, free: asyncio.Semaphore
    ) -> None:
        keys = list(map(self._source.key, request.hash_ids))
        with client.request(request.hint) as request_id:
            async with free:
                keys = keys[self._found_in_gpu(request) :]
                hits = await client.fetch(keys, request_id) if keys else 0
                asked = request.input_length - (len(request.hash_ids) - len(keys)) * self._block_tokens
                self.tally.tokens_found += max(0, min(asked, hits * self._block_tokens))
                found = len(request.hash_ids) - len(keys) + hits
                await asyncio.sleep(self._servers.seconds(request.input_length - found * self._block_tokens))
                if self._gpu is not None:
                    self._gpu.use(request.hash_ids)
            self.times_to_first_token_s.append(client.seconds - arrival_s)
            client.store(keys, hits, request_id)
        self.tally.finished(client.manager.stats, client.seconds)

    def _found_in_gpu(self, request: TraceRequest) -> int:
        if self._gpu is None:
            return 0
        found = self._gpu.leading_run(request.hash_ids)
        self.tally.found_in_gpu(found)
        return found


@contextmanager
def _silent_losses() -> Generator[None]:
    """Suppress warnings of lost chunks: an hour passes in seconds here, and the report counts them all."""
    before = [(logger, logger.level) for logger in map(logging.getLogger, LOGGERS_OF_LOSSES)]
    for logger, _ in before:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


def arrivals_s(requests: Iterable[TraceRequest]) -> "array[float]":
    """Return the arrivals in seconds from the first; those of one timestamp are spread over the time it covers.

    This time is the shortest between two timestamps of the trace: Mooncake's come in batches of three seconds, whose
    requests would otherwise all queue at once. Raises `TraceError` for a timestamp that is earlier than the one before.
    """
    stamps = array("d")
    for number, request in enumerate(requests, 1):
        if stamps and request.timestamp_ms < stamps[-1]:
            raise TraceError(
                f"request {number:,}: timestamp {request.timestamp_ms:,} after {stamps[-1]:,.0f}; timestamps that do "
                "not decrease accepted, where requests are replayed at their own times"
            )
        stamps.append(request.timestamp_ms)
    steps = [after - before for before, after in pairwise(stamps) if after > before]
    span = min(steps, default=0.0)
    spread = array("d")
    start = 0
    for end in range(1, len(stamps) + 1):
        if end == len(stamps) or stamps[end] != stamps[start]:
            spread.extend(
                (stamps[start] - stamps[0] + span * place / (end - start)) / 1_000 for place in range(end - start)
            )
            start = end
    return spread


def modelled(
    requests: AnyTrace,
    config: EngineConfig,
    servers: Servers,
    disk: DiskSpeed,
    requests_expected: int,
    *,
    load_always: bool = False,
    seed: int = 0,
) -> tuple[ScaleModel, VirtualReplay]:
    """Return an engine's scale model and its replay. A prefill speed in the configuration wins over the servers'."""
    speed = None if load_always else config.prefill_tokens_per_s or servers.tokens_per_s
    model = scale_model(replace(config, prefill_tokens_per_s=speed, chunk_tokens=requests.block_tokens), disk)
    replay = VirtualReplay(
        requests,
        model.config,
        ChunkSource.of(requests, model.config.chunk_bytes, seed),
        ReplayTally(requests_expected),
        chunk_bytes=config.chunk_bytes,
        block_tokens=requests.block_tokens,
        servers=servers,
    )
    return model, replay


def without_tiering_s(
    requests: Iterable[TraceRequest], arrivals: Sequence[float], servers: Servers, block_tokens: int = BLOCK_TOKENS
) -> "array[float]":
    """Return the times to first token if the servers compute all that their cache on the GPU does not hold."""
    cache = servers.cache(block_tokens)
    free_at = [0.0] * servers.slots
    computed: list[tuple[float, int, tuple[int, ...]]] = []  # A heap: when prompts enter the cache, in order.
    waited = array("d")
    for number, (request, arrival_s) in enumerate(zip(requests, arrivals, strict=True)):
        begin_s, found = max(arrival_s, free_at[0]), 0
        if cache is not None:
            while computed and computed[0][0] <= begin_s:
                cache.use(heapq.heappop(computed)[-1])
            found = cache.leading_run(request.hash_ids)
        end_s = begin_s + servers.seconds(request.input_length - found * block_tokens)
        if cache is not None:
            heapq.heappush(computed, (end_s, number, request.hash_ids))
        heapq.heapreplace(free_at, end_s)
        waited.append(end_s - arrival_s)
    return waited
