"""A replay as the command line asks for it: in real time with real tiers, or in virtual time with models of them."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import uvloop

from kvtier.config import EngineConfig, load_config
from kvtier.replay.bench_report import read_bench
from kvtier.replay.chunks import ChunkSource
from kvtier.replay.replay import Replay
from kvtier.replay.scale_model import ModelPart, default_model, scale_model
from kvtier.replay.setup import check_directory, check_room, check_roots, default_config, rooted, without_root
from kvtier.replay.study import Extent
from kvtier.replay.tally import GPU_NAME, Tally
from kvtier.replay.traces import Trace
from kvtier.replay.virtual import GPU_CACHE_TOKENS, GPU_LOAD_BYTES_PER_S, Prefill, VirtualReplay
from kvtier.replay.workload import GeneratedTrace
from kvtier.testing.virtual_time import VirtualTimeLoop

DEFAULT_SOURCE = "assumed: an 8B model, four NVMe SSDs"


class Options(NamedTuple):
    """What was asked for."""

    requests: Trace | GeneratedTrace
    extent: Extent
    config_path: str | None
    fs: str | None
    seed: int
    concurrency: int
    prefill: Prefill
    bench_path: str | None = None
    gpu_cache_blocks: int | None = None  # None: `GPU_CACHE_TOKENS` for each server.


class Job(NamedTuple):
    """One replay, ready to run, and what its report says of the engine."""

    replay: Replay | VirtualReplay
    loop_factory: Callable[[], asyncio.AbstractEventLoop]
    row_bytes: int
    engine: Mapping[str, Any]
    model: Sequence[ModelPart] | None = None


def real_job(options: Options, scratch: Callable[[], str]) -> Job:
    """Prepare a replay with real bytes. `scratch` makes a temporary directory; it is called only if one is needed."""
    config = default_config(options.extent) if options.config_path is None else load_config(options.config_path)
    if options.fs is not None:
        check_directory("--fs", options.fs)
        config = rooted(config, options.fs, override=True)
    else:
        check_roots(config)
        if without_root(config):
            directory = scratch()
            check_room(config, options.extent, directory)
            config = rooted(config, directory, override=False)
    replay = Replay(
        options.requests,
        config,
        _source(options, config.chunk_bytes),
        Tally(options.extent.requests),
        concurrency=options.concurrency,
    )
    return Job(replay, uvloop.new_event_loop, config.row_bytes, {**_engine(config), "concurrency": options.concurrency})


def virtual_job(options: Options) -> Job:
    """Prepare a replay in virtual time."""
    block_tokens = options.requests.block_tokens
    if options.config_path is None:
        config, source = default_model(options.extent, block_tokens), DEFAULT_SOURCE
    else:
        config, source = load_config(options.config_path), os.path.basename(options.config_path)
    bench = None if options.bench_path is None else read_bench(options.bench_path)
    model = scale_model(config, source=source, bench=bench)
    gpu_cache_blocks = options.gpu_cache_blocks
    if gpu_cache_blocks is None:
        gpu_cache_blocks = options.prefill.slots * GPU_CACHE_TOKENS // block_tokens
    replay = VirtualReplay(
        options.requests,
        model.config,
        _source(options, model.config.chunk_bytes),
        Tally(options.extent.requests),
        chunk_bytes=config.chunk_bytes,
        block_tokens=block_tokens,
        prefill=options.prefill,
        gpu_cache_blocks=gpu_cache_blocks,
    )
    prefill = options.prefill._asdict()
    engine = {**_engine(model.config), "chunk_bytes": config.chunk_bytes, "prefill": prefill}
    parts = (
        ModelPart("prefill", prefill, "--prefill-tokens-per-s, --slots"),
        ModelPart(GPU_NAME, {"cache_blocks": gpu_cache_blocks}, _gpu_source(options)),
        ModelPart("copy to the GPU", {"load_bytes_per_s": GPU_LOAD_BYTES_PER_S}, "assumed: sixteen lanes of PCIe 4"),
        *model.parts,
    )
    return Job(replay, VirtualTimeLoop, config.row_bytes, engine, parts)


def _gpu_source(options: Options) -> str:
    given = options.gpu_cache_blocks is not None
    return "--gpu-cache-blocks" if given else f"default: {GPU_CACHE_TOKENS:,} tokens a server"


def _source(options: Options, chunk_bytes: int) -> ChunkSource:
    """Make chunks that no other trace has: in a directory that several have used, each finds its own only."""
    first = next(iter(options.requests))
    return ChunkSource(chunk_bytes, seed=options.seed, trace=msgspec.json.encode(first))


def _engine(config: EngineConfig) -> dict[str, Any]:
    return {
        "rows": config.rows,
        "chunk_bytes": config.chunk_bytes,
        "eviction_policy": config.eviction_policy,
        "runner": config.runner,
        "tiers": {tier.name: tier.type for tier in config.secondary_tiers},
    }
