"""kvtier's fs tier beside vLLM's own (0.32), in both of its paths: C, and Python.

    PYTHONPATH=.:backends PEERS/vllm/bin/python -m tests.benchmarks.peers.vllm_fs [DIR]

The same chunks of the same rows, in the same directory, with O_DIRECT, in turn; 16 requests at once, each of which is
one job to vLLM and one call to kvtier. vLLM has 16 threads to read and 16 to write, as it does by default; kvtier as
many as `--lanes` says. The figure is kvtier's, the limit vLLM's: above 1, kvtier is faster.
"""

import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, ReqContext
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from tests.benchmarks.peers.side_by_side import arguments, compare_disks, give_out

WAIT_S = 0.0002  # Between two looks at what has ended: a step of an engine is longer.


def spec_of(chunk_bytes):
    sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0, data_parallel_index=0, data_parallel_rank_local=None, is_parallelism_agnostic=False, **sizes
        ),
    )
    events = OffloadingKVEventsConfig(enable_kv_cache_events=False, self_describing_kv_events=False)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)


class VllmFs:
    def __init__(self, root, region, call_chunks, *, native):
        view, self._native = region.view.cast("B", (region.rows, region.row_bytes)), native
        self._call_chunks = call_chunks
        self._tier = FileSystemTierManager(spec_of(region.row_bytes), view, "fs", root)
        assert self._tier._use_o_direct
        self._jobs = 0

    def store(self, keys, rows):
        self._run(keys, promotion=False)

    def load(self, keys, rows):
        self._run(keys, promotion=True)

    def close(self):
        self._tier.shutdown()

    def _run(self, keys, *, promotion):
        with patch.object(io, "_HAS_FSIO_C", self._native):
            open_jobs = set()
            for start in range(0, len(keys), self._call_chunks):
                some = list(keys[start : start + self._call_chunks])
                self._jobs += 1
                ids = np.arange(start, start + len(some), dtype=np.int32)
                job = TransferJob(self._jobs, some, ids, promotion, ReqContext(req_id=str(self._jobs)))
                (self._tier.submit_load if promotion else self._tier.submit_store)(job)
                open_jobs.add(self._jobs)
            while open_jobs:
                for result in self._tier.get_finished_jobs():
                    assert result.success, result
                    open_jobs.discard(result.job_id)
                time.sleep(WAIT_S)


def main():
    assert io._HAS_FSIO_C, "vLLM's C path is not installed"
    given = arguments(__doc__)
    paths = {"vLLM's fs tier in C": True, "vLLM's fs tier in Python": False}
    peers = {name: partial(VllmFs, native=native) for name, native in paths.items()}
    give_out("peers vllm_fs", given, lambda folder: compare_disks(folder, given, peers))


if __name__ == "__main__":
    main()
