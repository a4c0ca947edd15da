"""Replays a trace at its own pace in virtual time, and says how long each request waited for its first token.

The model: requests queue, first come first served, for `slots` equal servers that prefill one prompt each. A server
takes the leading run that the engine's own prefix cache on the GPU has: that costs nothing, and kvtier never hears of
it. It looks the rest up, has what the tiers hold brought into the primary, copies it to the GPU, computes what is left
at `tokens_per_s`, and is free again with the first token. The prompt is then in the cache on the GPU. What was computed
is stored as an engine stores it, without waiting: what a tier cannot take is dropped and counted.

Without tiering all is the same, but that what the cache on the GPU does not have is computed.

What it leaves out flatters no one for sure: all servers share one cache on the GPU, as with a router that knows what
each has (so tiering looks worse), real engines load while others compute (here a server that loads does nothing else,
so tiering looks worse), attention grows with the square of the prompt (so recomputing looks cheaper), and decoding is
somewhere else.
"""

import asyncio
import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from kvtier.config import EngineConfig
from kvtier.errors import TraceError
from kvtier.manager import TieringOffloadingManager
from kvtier.policies.lru import LRU
from kvtier.replay.chunks import ChunkSource
from kvtier.replay.client import Client, task_group
from kvtier.replay.study import Cache
from kvtier.replay.tally import Tally
from kvtier.replay.traces import BLOCK_TOKENS, Request

GPU_LOAD_BYTES_PER_S = 25e9  # Host to device over sixteen lanes of PCIe 4, as most machines reach it.
GPU_CACHE_TOKENS = 262_144  # Of each server. 80 GB hold 420,000 of an 8B model beside its weights; what runs has some.

WITH_TIERING, WITHOUT_TIERING = "with_tiering", "without_tiering"


class Prefill(NamedTuple):
    """How fast prompts are computed."""

    tokens_per_s: float = 20_000.0  # Of one server: an 8B model on one GPU of 2023.
    slots: int = 4

    def seconds(self, tokens: int) -> float:
        """Return the time to the first token of a prompt of which so many tokens are not there; one always is not."""
        return max(1, tokens) / self.tokens_per_s


class VirtualReplay:
    """One pass of requests through an engine, on a `VirtualTimeLoop`. `tally` may be read after a cancelled run, too.

    `config` is a scale model; its chunks stand for `chunk_bytes` each.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        config: EngineConfig,
        source: ChunkSource,
        tally: Tally,
        *,
        chunk_bytes: int,
        block_tokens: int,
        prefill: Prefill,
        gpu_cache_blocks: int = 0,
    ) -> None:
        """`gpu_cache_blocks`: of the engine's own prefix cache, in front of both sides; 0: there is none."""
        self.tally = tally
        if gpu_cache_blocks:
            tally.gpu_hits = 0
        self._gpu_cache_blocks = gpu_cache_blocks
        self._gpu = gpu_cache(gpu_cache_blocks)
        self.times_to_first_token_s: dict[str, array[float]] = {WITH_TIERING: array("d")}
        """Those without tiering are there once all requests have been replayed."""
        self._requests = requests
        self._config = config
        self._source = source
        self._load_s_per_chunk = chunk_bytes / GPU_LOAD_BYTES_PER_S
        self._block_tokens = block_tokens
        self._prefill = prefill

    async def run(self, progress: Callable[[], None] = lambda: None) -> Tally:
        """Replay all requests, calling `progress` after each, and wait until what they stored has reached the tiers."""
        arrivals = arrivals_s(self._requests)
        async with await TieringOffloadingManager.open(self._config, observer=self.tally.observe) as manager:
            clock = asyncio.get_running_loop().time
            client = Client(manager, self._source, self.tally, clock=clock, load_s_per_chunk=self._load_s_per_chunk)
            try:
                await self._replay(client, arrivals, progress)
                self.tally.drained = await manager.drained()
            finally:
                self.tally.sample(manager.ledger, client.seconds)
        return self.tally

    async def _replay(self, client: Client, arrivals: Sequence[float], progress: Callable[[], None]) -> None:
        free = asyncio.Semaphore(self._prefill.slots)
        async with task_group() as group:
            for request, arrival_s in zip(self._requests, arrivals, strict=True):
                await asyncio.sleep(arrival_s - client.seconds)
                task = group.create_task(self._serve(request, arrival_s, client, free))
                task.add_done_callback(lambda _: progress())
        self.times_to_first_token_s[WITHOUT_TIERING] = without_tiering_s(
            self._requests,
            arrivals,
            self._prefill,
            block_tokens=self._block_tokens,
            gpu_cache_blocks=self._gpu_cache_blocks,
        )

    async def _serve(self, request: Request, arrival_s: float, client: Client, free: asyncio.Semaphore) -> None:
        keys = list(map(self._source.key, request.hash_ids))
        with client.request() as request_id:
            async with free:
                keys = keys[self._found_in_gpu(request) :]
                hits = await client.fetch(keys, request_id) if keys else 0
                found = len(request.hash_ids) - len(keys) + hits
                await asyncio.sleep(self._prefill.seconds(request.input_length - found * self._block_tokens))
                if self._gpu is not None:
                    self._gpu.use(request.hash_ids)
            self.times_to_first_token_s[WITH_TIERING].append(client.seconds - arrival_s)
            client.store(keys, hits, request_id)
        self.tally.finished(client.manager.ledger, client.seconds)

    def _found_in_gpu(self, request: Request) -> int:
        if self._gpu is None:
            return 0
        found = self._gpu.leading_run(request.hash_ids)
        self.tally.found_in_gpu(found)
        return found


def gpu_cache(blocks: int) -> Cache | None:
    """Return an empty prefix cache as LLM engines have it, by recency of use; None for none of its blocks."""
    return Cache(LRU(blocks), blocks) if blocks else None


def arrivals_s(requests: Iterable[Request]) -> "array[float]":
    """Return when requests arrive, in seconds from the first; those of one timestamp spread over the time it covers.

    That is the shortest time between two timestamps of the trace: Mooncake's come in batches of three seconds, each of
    which would otherwise wait for itself. Raises `TraceError` where a timestamp is earlier than the one before.
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


def without_tiering_s(
    requests: Iterable[Request],
    arrivals: Sequence[float],
    prefill: Prefill,
    *,
    block_tokens: int = BLOCK_TOKENS,
    gpu_cache_blocks: int = 0,
) -> "array[float]":
    """Return the times to first token where the same servers compute all that their cache on the GPU has not."""
    cache = gpu_cache(gpu_cache_blocks)
    free_at = [0.0] * prefill.slots
    computed: list[tuple[float, int, tuple[int, ...]]] = []  # A heap: when prompts come into the cache, in order.
    waited = array("d")
    for number, (request, arrival_s) in enumerate(zip(requests, arrivals, strict=True)):
        begin_s, found = max(arrival_s, free_at[0]), 0
        if cache is not None:
            while computed and computed[0][0] <= begin_s:
                cache.use(heapq.heappop(computed)[-1])
            found = cache.leading_run(request.hash_ids)
        end_s = begin_s + prefill.seconds(request.input_length - found * block_tokens)
        if cache is not None:
            heapq.heappush(computed, (end_s, number, request.hash_ids))
        heapq.heapreplace(free_at, end_s)
        waited.append(end_s - arrival_s)
    return waited
