"""`kvtier simulate`: a trace at its own pace, in virtual time, against models of the tiers; times to first token.

In the scale model of an engine a page stands for a chunk, and a dummy tier for a disk. Every size and bandwidth is
divided by the number of pages in a row, so transfers take their real time.
"""

import asyncio
import heapq
import logging
import os
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Annotated, Any, Literal, NamedTuple

import typer
from msgspec.structs import asdict, replace

from kvtier.config import EngineConfig, TierConfig, TierLimits, read_config, tier_options
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.metrics import EngineStats
from kvtier.errors import ConfigError, TraceError
from kvtier.memory import PAGE_BYTES
from kvtier.policies import LRU
from kvtier.settings import parse_size
from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier.tools import options
from kvtier.tools.outputs import check_outputs, log_levels
from kvtier.tools.replay.replay import GPU_NAME, ChunkSource, ReplayClient, ReplayTally, task_group
from kvtier.tools.replay.replay_command import chunk_bytes_on_disk, fs_options, measured, primary_rows, run_with_bar
from kvtier.tools.replay.report import deliver, make_report
from kvtier.tools.replay.study import Cache
from kvtier.tools.replay.traces import BLOCK_TOKENS, TraceRequest
from kvtier.tools.replay.workload import GENERATED, AnyTrace, open_trace

PREFILL_TOKENS_PER_S = 20_000.0  # Of one server: an 8B model on one GPU of 2023.
SLOTS = 4
GPU_LOAD_BYTES_PER_S = 25e9  # Host to device over sixteen lanes of PCIe 4.
GPU_CACHE_TOKENS = 262_144  # Of one server. 80 GB hold 420,000 of an 8B model next to its weights and running requests.
LOGGERS_OF_LOSSES = ("kvtier.engine", "kvtier.runner")
KV_BYTES_PER_TOKEN = 131_072  # Llama 3.1 8B in bf16: K and V of 32 layers, 8 heads of 128, 2 bytes each.
SSDS_RATES = "28GB/s,16GB/s"  # Those of `SSDS`.
DISK_NAME = "disk"  # The name of the modelled tier, for hints whose `no_store` names tiers.
CascadeName = Literal["store", "evict", "second_use"]
WITH_TIERING, WITHOUT_TIERING = "with_tiering", "without_tiering"


def simulate(
    trace: options.TraceArgument = GENERATED,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The engine, in TOML or JSON; by default chunks of an 8B model in a primary of 5 % of the unique "
            "blocks, or more for long requests, over a disk without a limit.",
        ),
    ] = None,
    prefill_tokens_per_s: options.PrefillOption = PREFILL_TOKENS_PER_S,
    slots: options.SlotsOption = SLOTS,
    gpu_cache_tokens: options.GpuCacheOption = GPU_CACHE_TOKENS,
    disk_rates: options.DiskSpeedOption = SSDS_RATES,
    load_always: options.LoadAlwaysOption = False,
    limit: options.LimitOption = None,
    json_path: options.JsonOption = None,
    seed: options.SeedOption = 0,
) -> None:
    """Replay a trace at its own times in virtual time, against models of the tiers, and report first tokens.

    Ctrl-C ends the replay with a report of the finished requests.
    """
    check_outputs(json_path)
    disk = disk_speed("--disk-speed", disk_rates)
    opened = open_trace(trace, seed=seed, limit=limit)
    extent = measured(opened)
    servers = Servers(prefill_tokens_per_s, slots, gpu_cache_tokens)
    chunk_bytes = opened.block_tokens * KV_BYTES_PER_TOKEN
    by_default = model_engine(chunk_bytes, primary_rows(extent, slots) * chunk_bytes, None, disk)
    engine = by_default if config is None else read_config(config)
    replay = modelled(opened, engine, servers, disk, extent.requests, load_always=load_always, seed=seed)
    interrupted = run_with_bar(replay.run, replay.tally, VirtualTimeLoop, extent.requests)
    times = {WITH_TIERING: replay.times_to_first_token_s}
    if not interrupted:
        times[WITHOUT_TIERING] = without_tiering_s(opened, arrivals_s(opened), servers, opened.block_tokens)
    report = make_report(
        replay.tally,
        command="kvtier simulate",
        trace=os.path.basename(opened.path),
        seed=seed,
        extent=extent,
        config=engine,
        interrupted=interrupted,
        ttft_s=times,
    )
    deliver(report, json_path)


class DiskSpeed(NamedTuple):
    """The speed of a disk, or of several as one; latency and concurrency are those of four NVMe SSDs."""

    load_bytes_per_s: int
    store_bytes_per_s: int
    latency_s: float = 100e-6
    concurrency: int = 256


SSDS = DiskSpeed(28_000_000_000, 16_000_000_000)  # Four of a data centre, one a server, behind four lanes of PCIe 4.


def disk_speed(option: str, text: str) -> DiskSpeed:
    try:
        load, store = (
            parse_size(rate.strip().removesuffix("/s")) * rate.strip().endswith("/s") for rate in text.split(",")
        )
    except ValueError:
        load = store = 0
    if not load or not store:
        raise ConfigError(f"{option} {text!r}: expected bytes a second for reads and for writes, as in 7GB/s,4GB/s")
    return DiskSpeed(load, store)


def model_engine(
    chunk_bytes: int, memory_bytes: int, disk_bytes: int | None, disk: DiskSpeed, cascade: CascadeName = "store"
) -> EngineConfig:
    """Return an engine with a primary over one disk with a capacity; None: without a limit, 0: no disk."""
    in_flight = 1_024 * chunk_bytes  # Four times the chunks of a long prompt; an SSD takes them in five seconds.
    limits = TierLimits(load_bytes_in_flight=in_flight, store_bytes_in_flight=in_flight)
    own = _disk_options(disk) | {"capacity_bytes": disk_bytes}
    tier = TierConfig(type="dummy", name=DISK_NAME, limits=limits, cascade=cascade, options=own)
    return EngineConfig(
        cpu_bytes_to_use=memory_bytes, chunk_bytes=chunk_bytes, secondary_tiers=() if disk_bytes == 0 else (tier,)
    )


def scale_model(config: EngineConfig, disk: DiskSpeed = SSDS) -> EngineConfig:
    """Scale an engine down to rows of one page, on the caller's loop; real files take real time: fs becomes dummy.

    Dummies have the tier's capacity and limits, and the speed of `disk`. `ConfigError` for options that a type lacks.
    """
    tiers = list[TierConfig]()
    for index, tier in enumerate(config.secondary_tiers):
        where = f"secondary_tiers[{index}]"
        if tier.name == GPU_NAME:
            raise ConfigError(f"{where}.name: {tier.name!r} given, another accepted: the LLM engine's cache has it")
        own = None  # A tier that runs as it is.
        if tier.type == "fs":
            given, row_bytes = fs_options(tier, where), config.row_bytes
            room = given.capacity_bytes and given.capacity_bytes // chunk_bytes_on_disk(given, row_bytes) * row_bytes
            own = _disk_options(disk) | {"capacity_bytes": room}
        elif tier.type == "dummy":
            own = asdict(tier_options(tier, where))
        tiers.append(_scaled(tier, own, config.row_bytes // PAGE_BYTES))
    return replace(
        config,
        cpu_bytes_to_use=config.rows * PAGE_BYTES,
        chunk_bytes=PAGE_BYTES,
        runner="inline",
        namespace=replace(config.namespace, row_bytes=None),
        secondary_tiers=tuple(tiers),
    )


def _disk_options(disk: DiskSpeed) -> dict[str, Any]:
    return {
        "latency_s": disk.latency_s,
        "bandwidth_bytes_per_s": disk.load_bytes_per_s,
        "store_bandwidth_bytes_per_s": disk.store_bytes_per_s,
        "concurrency": disk.concurrency,
    }


def _scaled(tier: TierConfig, own: dict[str, Any] | None, pages: int) -> TierConfig:
    limits = replace(
        tier.limits,
        load_bytes_in_flight=max(PAGE_BYTES, tier.limits.load_bytes_in_flight // pages),
        store_bytes_in_flight=max(PAGE_BYTES, tier.limits.store_bytes_in_flight // pages),
    )
    if own is None:
        return replace(tier, limits=limits)
    sizes = ("bandwidth_bytes_per_s", "store_bandwidth_bytes_per_s")
    scaled = {size: max(1, own[size] // pages) for size in sizes if own.get(size) is not None}
    if own["capacity_bytes"] is not None:
        scaled["capacity_bytes"] = own["capacity_bytes"] // pages
    return replace(tier, type="dummy", limits=limits, options=own | scaled)


class Servers(NamedTuple):
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


@dataclass
class VirtualReplay:
    """One pass of requests through a scale model of an engine, on a `VirtualTimeLoop`.

    Each chunk of `config` stands for `chunk_bytes`. A cancelled run leaves `tally` and `times_to_first_token_s`.
    """

    requests: Iterable[TraceRequest]
    config: EngineConfig
    source: ChunkSource
    tally: ReplayTally
    chunk_bytes: int = field(kw_only=True)
    block_tokens: int = field(kw_only=True)
    servers: Servers = field(kw_only=True)
    times_to_first_token_s: "array[float]" = field(default_factory=lambda: array("d"))
    stats: EngineStats | None = None  # At the end.

    def __post_init__(self) -> None:
        self._gpu = self.servers.cache(self.block_tokens)
        self.tally.gpu_hits = None if self._gpu is None else 0

    async def run(self, progress: Callable[[], None] = lambda: None) -> ReplayTally:
        """Replay all requests, calling `progress` after each, and wait until all cascades have reached the tiers."""
        arrivals = arrivals_s(self.requests)
        with log_levels(LOGGERS_OF_LOSSES, logging.ERROR):  # An hour passes in seconds, and the report counts them.
            async with TieringOffloadingManager.open(self.config, observer=self.tally.observe) as manager:
                clock = asyncio.get_running_loop().time
                load_s = self.chunk_bytes / GPU_LOAD_BYTES_PER_S
                client = ReplayClient(manager, self.source, self.tally, clock=clock, load_s_per_chunk=load_s)
                try:
                    await self._replay(client, arrivals, progress)
                    self.tally.drained = await manager.drain()
                finally:
                    self.stats = manager.stats()
                    self.tally.sample(self.stats, client.seconds)
        return self.tally

    async def _replay(self, client: ReplayClient, arrivals: Sequence[float], progress: Callable[[], None]) -> None:
        free = asyncio.Semaphore(self.servers.slots)
        async with task_group() as group:
            for request, arrival_s in zip(self.requests, arrivals, strict=True):
                await asyncio.sleep(arrival_s - client.seconds)
                group.create_task(self._serve(request, arrival_s, client, free)).add_done_callback(lambda _: progress())

    async def _serve(
        self, request: TraceRequest, arrival_s: float, client: ReplayClient, free: asyncio.Semaphore
    ) -> None:
        keys = list(map(self.source.key, request.hash_ids))
        with client.request(request.hint) as request_id:
            async with free:
                keys = keys[self._found_in_gpu(request) :]
                hits = await client.fetch(keys, request_id) if keys else 0
                asked = request.input_length - (len(request.hash_ids) - len(keys)) * self.block_tokens
                self.tally.tokens_found += max(0, min(asked, hits * self.block_tokens))
                found = len(request.hash_ids) - len(keys) + hits
                await asyncio.sleep(self.servers.seconds(request.input_length - found * self.block_tokens))
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


def arrivals_s(requests: Iterable[TraceRequest]) -> "array[float]":
    """Return the arrivals in seconds from the first; those of one timestamp are spread over the shortest gap.

    Mooncake's come in batches of three seconds. Raises `TraceError` for a timestamp earlier than the one before.
    """
    stamps = array("d", (request.timestamp_ms for request in requests))
    for number, (before, after) in enumerate(pairwise(stamps), 2):
        if after < before:
            raise TraceError(
                f"request {number:,}: timestamp {after:,.0f} after {before:,.0f}; timestamps that do not decrease "
                "accepted, where requests are replayed at their own times"
            )
    span = min((after - before for before, after in pairwise(stamps) if after > before), default=0.0)
    spread = array("d")
    for stamp, same in groupby(stamps):
        count = len(list(same))
        spread.extend((stamp - stamps[0] + span * place / count) / 1_000 for place in range(count))
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
) -> VirtualReplay:
    """Return a replay through a scale model. A prefill speed in the configuration wins over the servers'."""
    speed = None if load_always else config.prefill_tokens_per_s or servers.tokens_per_s
    model = scale_model(replace(config, prefill_tokens_per_s=speed, chunk_tokens=requests.block_tokens), disk)
    return VirtualReplay(
        requests,
        model,
        ChunkSource.of(requests, model.chunk_bytes, seed),
        ReplayTally(requests_expected, config.row_bytes),
        chunk_bytes=config.chunk_bytes,
        block_tokens=requests.block_tokens,
        servers=servers,
    )


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
