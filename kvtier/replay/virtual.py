"""Replays a trace at its own pace in virtual time, and says how long each request waited for its first token.

The model: requests queue, first come first served, for `slots` equal servers that prefill one prompt each. A server
looks the prompt up, has what the tiers hold brought into the primary, copies it to the GPU, computes the rest at
`tokens_per_s`, and is free again with the first token. What it computed is stored as an engine stores it, without
waiting: what a tier cannot take is dropped and counted.

What it leaves out flatters no one for sure: real engines load while others compute (here a server that loads does
nothing else, so tiering looks worse), attention grows with the square of the prompt (so recomputing looks cheaper),
and decoding is somewhere else.
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
from kvtier.replay.chunks import ChunkSource
from kvtier.replay.client import Client, task_group
from kvtier.replay.tally import Tally
from kvtier.replay.traces import Request

GPU_LOAD_BYTES_PER_S = 25e9  # Host to device over sixteen lanes of PCIe 4, as most machines reach it.

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
    ) -> None:
        self.tally = tally
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
        self.times_to_first_token_s[WITHOUT_TIERING] = without_tiering_s(self._requests, arrivals, self._prefill)

    async def _serve(self, request: Request, arrival_s: float, client: Client, free: asyncio.Semaphore) -> None:
        keys = list(map(self._source.key, request.hash_ids))
        with client.request() as request_id:
            async with free:
                hits = await client.fetch(keys, request_id)
                await asyncio.sleep(self._prefill.seconds(request.input_length - hits * self._block_tokens))
            self.times_to_first_token_s[WITH_TIERING].append(client.seconds - arrival_s)
            client.store(keys, hits, request_id)
        self.tally.finished(client.manager.ledger, client.seconds)


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


def without_tiering_s(requests: Iterable[Request], arrivals: Sequence[float], prefill: Prefill) -> "array[float]":
    """Return the times to first token where every prompt is computed whole, by the same servers."""
    free_at = [0.0] * prefill.slots
    waited = array("d")
    for request, arrival_s in zip(requests, arrivals, strict=True):
        end_s = max(arrival_s, free_at[0]) + prefill.seconds(request.input_length)
        heapq.heapreplace(free_at, end_s)
        waited.append(end_s - arrival_s)
    return waited
