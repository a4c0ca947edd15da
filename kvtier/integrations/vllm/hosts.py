"""One host for each engine: its scheduler and its workers share rows in memory, and another host has other memory.

A worker there finds no file of that name, makes one, and runs. Of its part of a chunk the scheduler's rows would hold
zeros, and tiers would store them with a right checksum. So nothing begins until all have met. In vLLM 0.32 and 0.33 the
scheduler's side is made when all workers have their caches: whoever is missing then does not come.
"""

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager

from vllm.config import VllmConfig
from vllm.v1.kv_offload.base import OffloadingSpec

from kvtier.errors import ConfigError
from kvtier.memory import Apart, Region, mappings, ranges

MET_S = 30.0  # Workers have mapped the rows before; only an unforeseen case takes this long.

_REMEDY = (
    "give each engine one host, with tensor and pipeline parallelism within it and data parallelism across hosts;"
    " if they are containers of one host, give them one /dev/shm (--ipc=host)"
)


def require_one_node(config: VllmConfig) -> None:
    """Raise `ConfigError` if vLLM is told to spread one engine over several hosts."""
    nodes = config.parallel_config.nnodes_within_dp
    if nodes > 1:
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
    """Raise `ConfigError` if fewer processes than vLLM has workers have mapped vLLM's own rows on this host.

    vLLM starts all the same and keeps no record. Each worker maps the file once, and so does the scheduler.
    """
    fd, workers = rows_fd(spec), spec.config.parallel.world_size
    found = 0 if fd is None else mappings(fd, workers + 1)
    if fd is not None and 0 < found <= workers:
        raise ConfigError(_refusal(os.readlink(f"/proc/self/fd/{fd}"), f"{workers + 1 - found} of {workers} workers"))


def _refusal(path: str, who: str) -> str:
    return f"{path}: {who} have not mapped it on {socket.gethostname()}, and chunks would lack their part: {_REMEDY}"
