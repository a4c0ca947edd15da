"""An engine's rows: what a row holds, and that scheduler and workers, on one host, share them.

Scheduler and workers decide the plan of a row alike, from what vLLM tells both. There are two layouts. *Workers' own*:
each worker's pages lie in a slot of its own, as vLLM's tiers have them by default; the bytes depend on the number of
workers. *Canonical*: all workers share one area, in which each page lies as if there were no workers; the bytes are the
same for every tensor-parallel size. With one worker, both are the same bytes if the heads of a block lie outside of its
tokens. vLLM's offloading connector asks for that.

A worker on another host finds no file of that name, makes one, and runs. Of its part of a chunk the scheduler's rows
would hold zeros, and tiers would store them with a right checksum. So nothing begins until all have met. vLLM makes the
scheduler's side when all workers have their caches: whoever is missing then does not come.
"""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.backend import Group, Namespace
from kvtier.config import PLACES
from kvtier.errors import ConfigError
from kvtier.memory import Apart, Region, mappings, ranges

MET_S = 30.0  # Workers have mapped the rows before; only an unforeseen case takes this long.

_REMEDY = (
    "give each engine one host, with tensor and pipeline parallelism within it and data parallelism across hosts;"
    " if they are containers of one host, give them one /dev/shm (--ipc=host)"
)


def places_of(config: OffloadingConfig) -> dict[str, str]:
    """Return the values of this engine's `PLACES`, for `{name}` in a tier's paths."""
    values = str(config.parallel.data_parallel_index), config.engine_id.replace("/", "_")
    return dict(zip(PLACES, values, strict=True))


class RowPlan(NamedTuple):
    """The plan of a row: its length, and the place of this worker's bytes in it."""

    worker_chunk_bytes: int  # One worker's part of a chunk.
    copies: int  # Workers whose bytes differ: 1 if all are the same.
    canonical: bool
    rank: int

    @property
    def chunk_bytes(self) -> int:
        return self.worker_chunk_bytes * self.copies

    @property
    def slot_start(self) -> int:
        """The first of this worker's bytes in a row."""
        return 0 if self.canonical or self.copies == 1 else self.worker_chunk_bytes * self.rank


def plan_rows(config: OffloadingConfig, canonical_layout: bool | None, *, interop: bool) -> RowPlan:
    """Return the plan for vLLM's KV cache and workers; `canonical_layout` is the user's choice.

    None: canonical where vLLM vouches for it, unless rows must be those of vLLM's own file tier without that choice.
    """
    parallel = config.parallel
    if config.worker_kv_bytes_per_block < 1:
        raise ConfigError("vLLM has no KV cache to offload: it reports 0 bytes a block")
    vouched = parallel.is_parallelism_agnostic and parallel.world_size == parallel.tp_size
    return RowPlan(
        worker_chunk_bytes=config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
        copies=1 if config.replicated_layout else parallel.world_size,
        canonical=config.canonical_layout or (canonical_layout is None and vouched and not interop),
        rank=parallel.rank,
    )


def namespace_of(config: OffloadingConfig, plan: RowPlan, *, revision: str | None, interop: bool) -> Namespace:
    """Return the namespace of the chunks, in the scheduler's view."""
    parallel = config.parallel
    if interop and not plan.canonical and parallel.is_parallelism_agnostic and parallel.world_size > 1:
        raise ConfigError(
            f'kv_connector_extra_config.interop: "vllm" given with {parallel.world_size} workers; set '
            "canonical_layout: true here and in vLLM's own engines, whose default rows are not the same at every size"
        )
    layout = config.kv_cache_layout
    if plan.canonical and layout is None:
        raise ConfigError("vLLM does not say which KV-cache layout it uses: set canonical_layout: false")
    return Namespace(
        model_name=config.model.name,
        tokens_per_hash=config.cache.tokens_per_hash,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        pcp_size=parallel.pcp_size,
        dcp_size=parallel.dcp_size,
        dtype=config.model.dtype,
        kv_cache_groups=tuple(
            Group(tokens_per_block=group.tokens_per_block, layer_names=tuple(group.layer_names))
            for group in config.groups
        ),
        replicated_layout=config.replicated_layout,
        canonical_format=canonical_format_id(layout) if plan.canonical and layout is not None else None,
        weights_revision=revision,
        layout=layout,
        parallel_agnostic=True,
        is_parallelism_agnostic=parallel.is_parallelism_agnostic,
        interop="vllm" if interop else None,
    )


def require_one_node(config: VllmConfig) -> None:
    """Raise `ConfigError` if vLLM is told to spread one engine over several hosts."""
    if (nodes := config.parallel_config.nnodes_within_dp) > 1:
        raise ConfigError(f"--nnodes: {nodes} hosts given for one engine, 1 accepted with kvtier: {_REMEDY}")


@contextmanager
def one_host(workers: int) -> Generator[None]:
    """Turn `Apart` into a `ConfigError` in vLLM's words: participants are workers by rank, and then the scheduler."""
    try:
        yield
    except Apart as error:
        ranks = [participant for participant in error.missing if participant < workers]
        who = [f"workers of rank {ranges(ranks)} (of {workers})"] if ranks else []
        who += ["the scheduler"] if workers in error.missing else []
        raise ConfigError(_refusal(error.path, " and ".join(who))) from error


def require_met(region: Region, workers: int) -> None:
    """Raise `ConfigError` unless scheduler and workers have all mapped these rows."""
    with one_host(workers):
        region.require_met()


def rows_fd(spec: OffloadingSpec) -> int | None:
    """Return the descriptor of vLLM's own rows, or of the first part of them; None if there is none."""
    fd = getattr(getattr(spec, "_scheduler_mmap", None), "fd", None)
    return fd if isinstance(fd, int) else None


def require_rows_of_all(spec: OffloadingSpec) -> None:
    """Raise `ConfigError` if fewer processes than workers have mapped vLLM's rows on this host: vLLM starts anyway."""
    fd, workers = rows_fd(spec), spec.config.parallel.world_size
    found = 0 if fd is None else mappings(fd, workers + 1)
    if fd is not None and 0 < found <= workers:
        raise ConfigError(_refusal(os.readlink(f"/proc/self/fd/{fd}"), f"{workers + 1 - found} of {workers} workers"))


def _refusal(path: str, who: str) -> str:
    return f"{path}: {who} have not mapped it on {socket.gethostname()}, and chunks would lack their part: {_REMEDY}"
