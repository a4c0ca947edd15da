"""The replay in virtual time: a trace at its own pace against models of the tiers, and how long each request waited.

The model: requests queue, first come first served, for `slots` equal servers that prefill one prompt each. A server
takes the leading run that the LLM engine's own prefix cache on the GPU has: that costs nothing, and kvtier never hears
of it. It looks the rest up, has what the tiers hold brought into the primary, copies it to the GPU, computes what is
left at `tokens_per_s`, and is free again with the first token. The prompt is then in the cache on the GPU. What was
computed is stored as an engine stores it, without waiting: what a tier cannot take is dropped and counted.

Without tiering all is the same, but that what the cache on the GPU does not have is computed.

What the model leaves out flatters no one for sure: all servers share one cache on the GPU, as with a router that knows
what each has (so tiering looks worse), real engines load while others compute (here a server that loads does nothing
else, so tiering looks worse), attention grows with the square of the prompt (so recomputing looks cheaper), and
decoding is somewhere else.

The engine of a configuration becomes a model: a page stands for a chunk, a dummy tier for a disk. Chunks of a real
engine have tens of MiB, and nobody has a thousand million times that in memory. So every size is divided by the number
of pages in a row, bandwidths, too: transfers then take as long as the real ones would. What is modelled, with which
figures and from where, is told with the model: a study is worth what its model is.

A disk's figures come from `kvtier bench --json`, which gives rates, and no latency. With so many threads each way
one chunk takes depth * chunk / rate (Little's law), of which chunk / rate are its bytes on the link; the rest is the
latency.
"""

import asyncio
import heapq
import logging
import math
import os
from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvtier.config import PRIMARY_NAME, EngineConfig, TierConfig, TierLimits, tier_options
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.metrics import EngineStats
from kvtier.errors import ConfigError, TraceError
from kvtier.memory import PAGE_BYTES
from kvtier.policies import LRU
from kvtier.settings import foreign
from kvtier.tools.replay.replay import GPU_NAME, ChunkSource, Client, Tally, task_group
from kvtier.tools.replay.report import Figure, ModelPart
from kvtier.tools.replay.setup import FOOTER_BYTES, chunk_bytes_on_disk, fs_options, primary_rows
from kvtier.tools.replay.study import Cache, Extent
from kvtier.tools.replay.traces import BLOCK_TOKENS, Request

COMMAND = "kvtier bench"
KV_BYTES_PER_TOKEN = 131_072  # Llama 3.1 8B in bf16: K and V of 32 layers, 8 heads of 128, 2 bytes each.
SSDS = 4  # One for each GPU of the default model, as servers have them.
DISK_QUEUE_CHUNKS = 1_024  # Four times as many as a long prompt has; the disks take them in five seconds.
GPU_LOAD_BYTES_PER_S = 25e9  # Host to device over sixteen lanes of PCIe 4, as most machines reach it.
GPU_CACHE_TOKENS = 262_144  # Of each server. 80 GB hold 420,000 of an 8B model beside its weights; what runs has some.
TELL_OF_LOSSES = ("kvtier.engine", "kvtier.runner")
WITH_TIERING, WITHOUT_TIERING = "with_tiering", "without_tiering"


class Prefill(NamedTuple):
    """The servers that compute prompts."""

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
        compared: bool = True,
    ) -> None:
        """`gpu_cache_blocks`: of the LLM engine's own prefix cache, in front of both sides; 0: there is none.

        `compared`: whether the times without tiering are wanted, too.
        """
        self.tally = tally
        if gpu_cache_blocks:
            tally.gpu_hits = 0
        self._gpu_cache_blocks = gpu_cache_blocks
        self._gpu = gpu_cache(gpu_cache_blocks)
        self.times_to_first_token_s: dict[str, array[float]] = {WITH_TIERING: array("d")}
        """Those without tiering, where they are wanted, are there once all requests have been replayed."""
        self._compared = compared
        self.stats: EngineStats | None = None
        """The engine's own figures, at the end."""
        self._requests = requests
        self._config = config
        self._source = source
        self._load_s_per_chunk = chunk_bytes / GPU_LOAD_BYTES_PER_S
        self._block_tokens = block_tokens
        self._prefill = prefill

    async def run(self, progress: Callable[[], None] = lambda: None) -> Tally:
        """Replay all requests, calling `progress` after each, and wait until what they stored has reached the tiers."""
        arrivals = arrivals_s(self._requests)
        with _quiet_tiers():
            return await self._run(arrivals, progress)

    async def _run(self, arrivals: Sequence[float], progress: Callable[[], None]) -> Tally:
        async with TieringOffloadingManager.open(self._config, observer=self.tally.observe) as manager:
            clock = asyncio.get_running_loop().time
            client = Client(manager, self._source, self.tally, clock=clock, load_s_per_chunk=self._load_s_per_chunk)
            try:
                await self._replay(client, arrivals, progress)
                self.tally.drained = await manager.drain()
            finally:
                self.stats = manager.stats()
                self.tally.sample(self.stats, client.seconds)
        return self.tally

    async def _replay(self, client: Client, arrivals: Sequence[float], progress: Callable[[], None]) -> None:
        free = asyncio.Semaphore(self._prefill.slots)
        async with task_group() as group:
            for request, arrival_s in zip(self._requests, arrivals, strict=True):
                await asyncio.sleep(arrival_s - client.seconds)
                task = group.create_task(self._serve(request, arrival_s, client, free))
                task.add_done_callback(lambda _: progress())
        if self._compared:
            self.times_to_first_token_s[WITHOUT_TIERING] = without_tiering_s(
                self._requests,
                arrivals,
                self._prefill,
                block_tokens=self._block_tokens,
                gpu_cache_blocks=self._gpu_cache_blocks,
            )

    async def _serve(self, request: Request, arrival_s: float, client: Client, free: asyncio.Semaphore) -> None:
        keys = list(map(self._source.key, request.hash_ids))
        with client.request(request.hint) as request_id:
            async with free:
                keys = keys[self._found_in_gpu(request) :]
                hits = await client.fetch(keys, request_id) if keys else 0
                asked = request.input_length - (len(request.hash_ids) - len(keys)) * self._block_tokens
                self.tally.tokens_found += max(0, min(asked, hits * self._block_tokens))
                found = len(request.hash_ids) - len(keys) + hits
                await asyncio.sleep(self._prefill.seconds(request.input_length - found * self._block_tokens))
                if self._gpu is not None:
                    self._gpu.use(request.hash_ids)
            self.times_to_first_token_s[WITH_TIERING].append(client.seconds - arrival_s)
            client.store(keys, hits, request_id)
        self.tally.finished(client.manager.stats, client.seconds)

    def _found_in_gpu(self, request: Request) -> int:
        if self._gpu is None:
            return 0
        found = self._gpu.leading_run(request.hash_ids)
        self.tally.found_in_gpu(found)
        return found


@contextmanager
def _quiet_tiers() -> Generator[None]:
    """Have nobody warn of chunks that were lost: a minute passes in no time here, and the report counts them all."""
    before = [(logger, logger.level) for logger in map(logging.getLogger, TELL_OF_LOSSES)]
    for logger, _ in before:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


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


class Disk(NamedTuple):
    """A disk's speed, and who says so."""

    load_bytes_per_s: float
    store_bytes_per_s: float
    latency_s: float
    concurrency: int
    source: str


SSD = Disk(7e9, 4e9, 100e-6, 64, "assumed: one NVMe SSD")  # Of a data centre, behind four lanes of PCIe 4.


class Row(msgspec.Struct, frozen=True):
    """One operation of a benchmark, as far as a model needs it."""

    operation: str
    settings: Mapping[str, Any]
    unit: str
    figure: float
    chunk_bytes: int | None = None

    def is_rate(self, operation: str, wanted: Mapping[str, Any]) -> bool:
        """Say whether this is the rate of an operation, with these settings."""
        depth = self.settings.get("depth")
        right = self.operation == operation and all(self.settings.get(name) == wanted[name] for name in wanted)
        rate = self.unit == "MB/s" and self.figure > 0 and bool(self.chunk_bytes)
        return right and rate and isinstance(depth, int) and depth > 0


class BenchReport(msgspec.Struct, frozen=True):
    """A benchmark's report."""

    command: str
    rows: list[Row]
    path: str = ""

    def disk(self, row_bytes: int, options: Any) -> Disk:
        """Return the disk for an fs tier with these options: the rates of the chunk size that is nearest to its rows.

        Raises `ConfigError` if the benchmark measured no tier with this layout, fsync and I/O.
        """
        load = self._row("load", row_bytes, options, options.load_lanes)
        store = self._row("store", row_bytes, options, options.store_lanes)
        load_bytes_per_s, depth = load.figure * 1e6, load.settings["depth"]
        return Disk(
            load_bytes_per_s=load_bytes_per_s,
            store_bytes_per_s=store.figure * 1e6,
            latency_s=(depth - 1) * (load.chunk_bytes or 0) / load_bytes_per_s,
            concurrency=depth + store.settings["depth"],
            source=f"{os.path.basename(self.path)}: load of {load.chunk_bytes:,} bytes, "
            f"store of {store.chunk_bytes:,} bytes",
        )

    def _row(self, operation: str, row_bytes: int, options: Any, lanes: int) -> Row:
        """Return the row of the nearest chunk size, then the way of I/O and then the number of threads."""
        wanted = {"layout": options.layout, "fsync": options.fsync}
        if options.io != "auto":
            wanted["io"] = options.io
        fitting = [row for row in self.rows if row.is_rate(operation, wanted)]
        if not fitting:
            settings = ", ".join(f"{name} {value}" for name, value in wanted.items())
            raise ConfigError(
                f"--bench {self.path}: no figure of {operation!r} with {settings}; a report of {COMMAND} CONFIG with "
                "such a tier accepted"
            )
        return min(
            fitting,
            key=lambda row: (
                abs(math.log((row.chunk_bytes or 1) / row_bytes)),
                row.settings.get("io") != "direct",
                abs(row.settings["depth"] - lanes),
            ),
        )


def read_bench(path: str) -> BenchReport:
    """Read a report. Raises `ConfigError` if the file is none, or another benchmark's."""
    accepted = f"a report of {COMMAND} --json accepted"
    try:
        with open(path, "rb") as file:
            report = foreign(msgspec.json.Decoder(BenchReport).decode, file.read())
    except OSError as error:
        raise ConfigError(f"--bench {path}: cannot be read: {error.strerror}; {accepted}") from error
    except ValueError as error:
        raise ConfigError(f"--bench {path}: {error}; {accepted}") from error
    if report.command != COMMAND:
        raise ConfigError(f"--bench {path}: a report of {report.command!r} given, {accepted}")
    return replace(report, path=path)


class ScaleModel(NamedTuple):
    """An engine to run in virtual time, and what it stands for: figures are those of the real one."""

    config: EngineConfig
    parts: tuple[ModelPart, ...]


def default_model(extent: Extent, block_tokens: int, slots: int) -> EngineConfig:
    """Put a small primary over SSDs, for chunks of the trace's blocks as an 8B model has them."""
    chunk_bytes = block_tokens * KV_BYTES_PER_TOKEN
    in_flight = DISK_QUEUE_CHUNKS * chunk_bytes
    limits = TierLimits(load_bytes_in_flight=in_flight, store_bytes_in_flight=in_flight)
    options = {
        "latency_s": SSD.latency_s,
        "bandwidth_bytes_per_s": SSDS * int(SSD.load_bytes_per_s),
        "store_bandwidth_bytes_per_s": SSDS * int(SSD.store_bytes_per_s),
        "concurrency": SSDS * SSD.concurrency,
        "loads_first": True,
    }
    return EngineConfig(
        cpu_bytes_to_use=primary_rows(extent, slots) * chunk_bytes,
        chunk_bytes=chunk_bytes,
        secondary_tiers=(TierConfig(type="dummy", name="ssds", limits=limits, options=options),),
    )


def scale_model(config: EngineConfig, *, source: str = "configuration", bench: BenchReport | None = None) -> ScaleModel:
    """Scale an engine down to rows of one page, with its runner on the caller's loop.

    Tiers of type `fs` become dummy ones, because real files take real time: with their capacity, low-water mark, write
    budget and limits, and the speed of the disk that `bench` measured, else of `SSD`. Sizes among the options of other
    types than dummy stay as they are. `source` is where the configuration comes from. Raises `ConfigError` for options
    that are none of their type's.
    """
    primary = ModelPart(
        PRIMARY_NAME,
        {
            "capacity_bytes": config.rows * config.row_bytes,
            "chunks": config.rows,
            "eviction_policy": config.eviction_policy,
        },
        source,
    )
    parts, tiers = [primary], list[TierConfig]()
    for index, tier in enumerate(config.secondary_tiers):
        where = f"secondary_tiers[{index}]"
        if tier.name == GPU_NAME:
            raise ConfigError(
                f"{where}.name: {tier.name!r} given, another accepted: so the LLM engine's own cache is called"
            )
        options, of_tier = _modelled(tier, config.row_bytes, where, source, bench)
        parts += of_tier
        tiers.append(_scaled(tier, options, config.row_bytes // PAGE_BYTES))
    scaled = replace(
        config,
        cpu_bytes_to_use=config.rows * PAGE_BYTES,
        chunk_bytes=PAGE_BYTES,
        runner="inline",
        namespace=replace(config.namespace, row_bytes=None),
        secondary_tiers=tuple(tiers),
    )
    return ScaleModel(scaled, tuple(parts))


def _modelled(
    tier: TierConfig, row_bytes: int, where: str, source: str, bench: BenchReport | None
) -> tuple[dict[str, Any] | None, list[ModelPart]]:
    """Return the options of the dummy tier that stands for one, in real sizes, and what is to be said of it.

    There are no options for a tier that runs as it is.
    """
    if tier.type == "fs":
        options = fs_options(tier, where)
        disk = SSD if bench is None else bench.disk(row_bytes, options)
        modelled = _disk_options(disk) | _room_options(options, row_bytes)
        left_out = _left_out(options)
        return modelled, [
            ModelPart(tier.name, _device_figures(modelled), disk.source),
            ModelPart(tier.name, _room_figures(modelled, tier.limits, row_bytes), source),
            *([ModelPart(tier.name, {"not_modelled": left_out}, source)] if left_out else []),
        ]
    if tier.type != "dummy":
        return None, [ModelPart(tier.name, {"type": tier.type}, "runs as it is, in real time")]
    modelled = msgspec.structs.asdict(tier_options(tier, where))
    figures = _device_figures(modelled) | _room_figures(modelled, tier.limits, row_bytes)
    return modelled, [ModelPart(tier.name, figures, source)]


def _disk_options(disk: Disk) -> dict[str, Any]:
    return {
        "latency_s": disk.latency_s,
        "bandwidth_bytes_per_s": int(disk.load_bytes_per_s),
        "store_bandwidth_bytes_per_s": int(disk.store_bytes_per_s),
        "concurrency": disk.concurrency,
        "loads_first": True,
    }


def _room_options(options: Any, row_bytes: int) -> dict[str, Any]:
    """Return how much an fs tier may hold and write, in bytes of rows: without footers and folders."""
    capacity_bytes, budget_bytes = options.capacity_bytes, options.write_budget_bytes_per_day
    written_bytes = row_bytes + FOOTER_BYTES
    return {
        "capacity_bytes": capacity_bytes and capacity_bytes // chunk_bytes_on_disk(options, row_bytes) * row_bytes,
        "low_water": 1.0 if options.low_water is None else options.low_water,  # Segments: one goes for each that comes.
        "write_budget_bytes_per_day": budget_bytes and max(1, budget_bytes * row_bytes // written_bytes),
    }


def _left_out(options: Any) -> list[str]:
    """Return what is set of an fs tier and has no part in its model."""
    modelled = {"eviction_policy": "lru", "min_free_bytes": 0, "ttl_s": None, "shared": False}
    return [name for name, without in modelled.items() if getattr(options, name) not in (without, None)]


def _device_figures(options: Mapping[str, Any]) -> dict[str, Figure]:
    load_bytes_per_s, store_bytes_per_s = options["bandwidth_bytes_per_s"], options["store_bandwidth_bytes_per_s"]
    return {
        "load_bytes_per_s": load_bytes_per_s,
        "store_bytes_per_s": load_bytes_per_s if store_bytes_per_s is None else store_bytes_per_s,
        "latency_s": options["latency_s"],
        "concurrency": options["concurrency"],
    }


def _room_figures(options: Mapping[str, Any], limits: TierLimits, row_bytes: int) -> dict[str, Figure]:
    capacity_bytes = options["capacity_bytes"]
    return {
        "capacity_bytes": capacity_bytes,
        **({} if capacity_bytes is None else {"chunks": capacity_bytes // row_bytes}),
        "low_water": options["low_water"],
        "write_budget_bytes_per_day": options["write_budget_bytes_per_day"],
        "load_bytes_in_flight": limits.load_bytes_in_flight,
        "store_bytes_in_flight": limits.store_bytes_in_flight,
    }


def _scaled(tier: TierConfig, options: dict[str, Any] | None, pages: int) -> TierConfig:
    limits = replace(
        tier.limits,
        load_bytes_in_flight=max(PAGE_BYTES, tier.limits.load_bytes_in_flight // pages),
        store_bytes_in_flight=max(PAGE_BYTES, tier.limits.store_bytes_in_flight // pages),
    )
    if options is None:
        return replace(tier, limits=limits)
    sizes = ("bandwidth_bytes_per_s", "store_bandwidth_bytes_per_s", "write_budget_bytes_per_day")
    scaled = {size: max(1, options[size] // pages) for size in sizes if options[size] is not None}
    if options["capacity_bytes"] is not None:
        scaled["capacity_bytes"] = options["capacity_bytes"] // pages
    return replace(tier, type="dummy", limits=limits, options=options | scaled)
