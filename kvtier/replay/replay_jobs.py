"""A replay as the command line asks for it: in real time with real tiers, or in virtual time with models of them."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import uvloop

from kvtier.config import EngineConfig, load_config
from kvtier.replay.chunks import ChunkSource
from kvtier.replay.replay import Replay
from kvtier.replay.scale_model import default_model, scale_model
from kvtier.replay.setup import check_directory, check_room, check_roots, default_config, rooted, without_root
from kvtier.replay.study import Extent
from kvtier.replay.tally import Tally
from kvtier.replay.traces import Trace
from kvtier.replay.virtual import Prefill, VirtualReplay
from kvtier.replay.workload import GeneratedTrace
from kvtier.testing.virtual_time import VirtualTimeLoop


class Options(NamedTuple):
    """What was asked for."""

    requests: Trace | GeneratedTrace
    extent: Extent
    config_path: str | None
    fs: str | None
    seed: int
    concurrency: int
    prefill: Prefill


class Job(NamedTuple):
    """One replay, ready to run, and what its report says of the engine."""

    replay: Replay | VirtualReplay
    loop_factory: Callable[[], asyncio.AbstractEventLoop]
    row_bytes: int
    engine: Mapping[str, Any]


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
        config = default_model(options.extent, block_tokens)
    else:
        config = load_config(options.config_path)
    model = scale_model(config)
    replay = VirtualReplay(
        options.requests,
        model,
        _source(options, model.chunk_bytes),
        Tally(options.extent.requests),
        chunk_bytes=config.chunk_bytes,
        block_tokens=block_tokens,
        prefill=options.prefill,
    )
    engine = {**_engine(model), "chunk_bytes": config.chunk_bytes, "prefill": options.prefill._asdict()}
    return Job(replay, VirtualTimeLoop, config.row_bytes, engine)


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
