"""A worker's side: copies between rows and the KV cache that vLLM registered.

On the CPU platform both are host memory, and a copy is done when it is submitted: vLLM submits loads before the forward
pass that reads them, and stores after the one that wrote them.
"""

import time
from collections.abc import Callable, Iterator

import torch
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvtier.integrations.vllm.pages import Copy, Places, page_copies
from kvtier.integrations.vllm.rows import RowPlan
from kvtier.region import Region
from kvtier_backends.cpu import CpuMemory


def make_worker(
    kv_caches: CanonicalKVCaches, region: Region, plan: RowPlan, blocks_per_chunk: int
) -> OffloadingWorker:
    """Make the worker for the device that the KV cache is on; it owns the region from now on."""
    memory = CpuMemory(region)

    def release() -> None:
        memory.close()
        region.close()

    return CpuWorker(page_copies(kv_caches, memory.rows, plan, blocks_per_chunk), blocks_per_chunk, release)


class CpuWorker(OffloadingWorker):
    """Copies at once, on the caller's thread."""

    def __init__(self, copies: list[list[Copy]], blocks_per_chunk: int, release: Callable[[], None]) -> None:
        """`copies` are each KV-cache group's; `release` gives the rows back, at the end."""
        self._copies = copies
        self._blocks_per_chunk = blocks_per_chunk
        self._release = release
        self._finished: list[TransferResult] = []

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._transfer(job_id, src_spec, dst_spec, Copy.store)

    @override
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._transfer(job_id, dst_spec, src_spec, Copy.load)

    @override
    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    @override
    def shutdown(self) -> None:
        self._copies.clear()  # They hold views of the rows.
        self._release()

    def _transfer(
        self, job_id: int, blocks: GPULoadStoreSpec, rows: LoadStoreSpec, copy: Callable[[Copy, Places], int]
    ) -> bool:
        """Copy a job's blocks, group by group; never fails but by a bug, since vLLM takes no failure for an answer."""
        assert isinstance(rows, BlockIDsLoadStoreSpec), rows
        begun = time.perf_counter()
        size_bytes = 0
        for places, copies in zip(self._places(blocks, rows), self._copies, strict=True):
            if len(places.blocks):
                size_bytes += sum(copy(each, places) for each in copies)
        seconds = time.perf_counter() - begun
        self._finished.append(TransferResult(job_id, True, size_bytes, seconds))
        return True

    def _places(self, blocks: GPULoadStoreSpec, rows: BlockIDsLoadStoreSpec) -> Iterator[Places]:
        """Pair blocks with pages of rows: group by group, each beginning in the middle of a row where its chunk does."""
        pages_a_row = self._blocks_per_chunk
        block_ids, row_ids = torch.from_numpy(blocks.block_ids), torch.from_numpy(rows.block_ids)
        block, row = 0, 0
        for count, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            page = torch.arange(count) + first % pages_a_row
            row_of = torch.div(page, pages_a_row, rounding_mode="floor")
            yield Places(block_ids[block : block + count].long(), row_ids[row + row_of].long(), page % pages_a_row)
            block += count
            row += -(-(count + first % pages_a_row) // pages_a_row) if count else 0
        assert (block, row) == (len(block_ids), len(row_ids)), "blocks and rows do not match"
