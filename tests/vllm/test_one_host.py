"""One engine, one host: a worker that shares no rows with the scheduler is named at the start, at both doors."""

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier.errors import ConfigError
from kvtier.integrations.vllm import KVTierOffloadingSpec, spec
from kvtier.integrations.vllm.rows import require_one_node, require_rows_of_all

PAGE, WORKERS = 4_096, 4

# A worker as far as rows go: it maps them, and says so.
WORKER = """
import sys
from kvtier.memory import Region
path, rows, row_bytes, rank, workers = sys.argv[1], *map(int, sys.argv[2:])
region = Region.shared(path, rows, row_bytes, participant=rank, participants=workers + 1)
print("mapped", flush=True)
sys.stdin.readline()
"""


def config(directory, rank=0, **extra):
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=PAGE,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": 1 << 20, "shared_memory_dir": directory} | extra,
        engine_id="engine",
        model=OffloadingModelConfig(name="tiny", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            **dict.fromkeys(("pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1),
            **dict.fromkeys(("tp_size", "world_size"), WORKERS),
            rank=rank,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        kv_cache_layout="LBHNC",
    )


@pytest.fixture
def hosts():
    """Return two hosts' shared memory, as far as names go."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as one, tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        yield one, other


@pytest.fixture
def worker():
    rows = (1 << 20) // (PAGE * WORKERS)
    with ExitStack() as at_end:

        def start(directory, rank):
            command = [sys.executable, "-c", WORKER, f"{directory}/kvtier-vllm-engine"]
            numbers = map(str, (rows, PAGE * WORKERS, rank, WORKERS))
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
            process = at_end.enter_context(subprocess.Popen([*command, *numbers], **pipes))
            at_end.callback(process.kill)
            assert process.stdout.readline() == b"mapped\n"

        yield start


@pytest.mark.promise("vLLM: a worker does not share the scheduler's `/dev/shm`")
def test_a_scheduler_without_its_workers_does_not_start_and_names_them(hosts, worker, monkeypatch):
    here, there = hosts
    monkeypatch.setattr(spec, "MET_S", 0.02)
    for rank in range(WORKERS):
        worker(here if rank < 2 else there, rank)
    message = (
        rf"^{here}/kvtier-vllm-engine: workers of rank 2 to 3 \(of 4\) have not mapped it on {socket.gethostname()}, "
        r".*give each engine one host"
    )
    with pytest.raises(ConfigError, match=message):
        KVTierOffloadingSpec(config(here)).get_manager()


def test_a_scheduler_whose_workers_are_all_here_starts_and_leaves_no_name(hosts, worker):
    for rank in range(WORKERS):
        worker(hosts[0], rank)
    KVTierOffloadingSpec(config(hosts[0], secondary_tiers=[{"type": "dummy"}])).get_manager().shutdown()
    assert os.listdir(hosts[0]) == []


def test_a_worker_without_its_scheduler_copies_nothing(hosts):
    caches = CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(torch.zeros(8, PAGE, dtype=torch.int8), PAGE)],
        group_data_refs=[[CanonicalKVCacheRef(0, PAGE)]],
    )
    made = KVTierOffloadingSpec(config(hosts[0], rank=1)).get_worker(caches)
    for submit in (made.submit_store, made.submit_load):
        with pytest.raises(ConfigError, match=r"workers of rank 0, 2 to 3 \(of 4\) and the scheduler have not mapped"):
            submit(1, None, None)
    made.shutdown()


def test_an_engine_that_vllm_is_told_to_spread_over_hosts_is_refused_by_the_field():
    for count in (1, 2):
        given = SimpleNamespace(parallel_config=SimpleNamespace(nnodes_within_dp=count))
        refused = pytest.raises(ConfigError, match=r"^--nnodes: 2 hosts given for one engine, 1 accepted")
        with refused if count > 1 else nullcontext():
            require_one_node(given)


def test_behind_vllms_manager_rows_that_a_worker_does_not_share_are_refused(hosts, worker, tmp_path):
    """vLLM's rows have no place for those who have mapped them, so processes are counted."""
    here, there = hosts
    for rank in range(WORKERS):
        worker(here if rank else there, rank)
    rows = Path(here) / "kvtier-vllm-engine"
    with rows.open("r+b") as file:
        region = spec.Region.attach(file.fileno(), rows.stat().st_size // PAGE // WORKERS, PAGE * WORKERS)
        vllms = SimpleNamespace(_scheduler_mmap=SimpleNamespace(fd=file.fileno()), config=config(here))
        with region, pytest.raises(ConfigError, match=rf"^{rows}: 1 of 4 workers have not mapped it on "):
            require_rows_of_all(vllms)
        worker(here, 0)
        with region.attach(file.fileno(), region.rows, region.row_bytes):
            require_rows_of_all(vllms)
