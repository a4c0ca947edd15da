"""The worker: transfers between rows and the KV cache that vLLM registers, as vLLM submits, polls and awaits them."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches as VllmKVCaches

from kvtier.integrations.vllm.rows import RowPlan
from kvtier.kvcache.layout import CanonicalKVCaches, DataRef
from kvtier.kvcache.transfer import GroupBlocks, TransferWorker
from kvtier.memory import Region
from kvtier_backends.cpu import CpuMemory, cuda_runtime

if TYPE_CHECKING:
    import torch


def make_worker(
    kv_caches: VllmKVCaches, region: Region, plan: RowPlan, blocks_per_chunk: int, require_met: Callable[[], None]
) -> OffloadingWorker:
    """Make the worker for the cache's device; it owns the region, and calls `require_met` before its first transfer."""
    memory = CpuMemory(region, pin_with=cuda_runtime() if kv_caches.tensors[0].tensor.is_cuda else None)

    def release() -> None:
        memory.close()
        region.close()

    return VllmWorker(kv_caches, memory.rows, plan, blocks_per_chunk, release, require_met)


class VllmWorker(OffloadingWorker):
    """The transfers of one worker. vLLM accepts no failed result, so a failure is raised: see `get_finished`."""

    def __init__(
        self,
        kv_caches: VllmKVCaches,
        rows: "torch.Tensor",
        plan: RowPlan,
        blocks_per_chunk: int,
        release: Callable[[], None],
        require_met: Callable[[], None] | None = None,
    ) -> None:
        """`rows` is (rows, row_bytes), int8; `release` frees it, after the last copy.

        `require_met` raises if the scheduler has other rows, such as those of a worker that was restarted.
        """
        slots = rows if plan.canonical else rows[:, plan.slot_start : plan.slot_start + plan.worker_chunk_bytes]
        self._transfers = TransferWorker(
            canonical_caches(kv_caches), slots, blocks_per_chunk=blocks_per_chunk, canonical=plan.canonical
        )
        self._blocks_per_chunk = blocks_per_chunk
        self._release = release
        self._require_met = require_met  # None once it was called.

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._begin()
        self._transfers.submit_store(job_id, list(self._groups(src_spec, dst_spec)))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # vLLM 0.33's; loads never queue behind stores.
    ) -> bool:
        self._begin()
        self._transfers.submit_load(job_id, list(self._groups(dst_spec, src_spec)))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended. Raises `TransferFailed` for a copy that failed.

        A block that was not loaded, or a row that was not stored, must not pass for one that was. vLLM 0.32 and 0.33
        have no failed result and stop at an assertion; this exception tells the cause.
        """
        results = self._transfers.poll()
        for result in results:
            if result.error is not None:
                raise result.error
        return [TransferResult(result.job_id, True, result.size_bytes, result.seconds) for result in results]

    def wait(self, job_ids: set[int]) -> None:
        self._transfers.wait(job_ids)

    def shutdown(self) -> None:
        self._transfers.close()
        self._release()

    def _begin(self) -> None:
        """Check before the first transfer that the scheduler maps the same rows."""
        if self._require_met is not None:
            self._require_met()
            self._require_met = None

    def _groups(self, blocks: GPULoadStoreSpec, rows: LoadStoreSpec) -> Iterator[GroupBlocks]:
        """Split a job's blocks and rows into groups: a group's first chunk may begin before its first block."""
        assert isinstance(rows, BlockIDsLoadStoreSpec), rows
        block, row = 0, 0
        for count, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            chunks = -(-(count + first % self._blocks_per_chunk) // self._blocks_per_chunk) if count else 0
            yield GroupBlocks(blocks.block_ids[block : block + count], rows.block_ids[row : row + chunks], first)
            block, row = block + count, row + chunks
        assert row == len(rows.block_ids), f"{len(rows.block_ids)} rows for blocks of {row} chunks"


def canonical_caches(given: VllmKVCaches) -> CanonicalKVCaches:
    """Translate vLLM's pages: layers that share bytes move once, a page without a mapping never as a canonical one."""
    groups = [
        dict.fromkeys(DataRef(ref.tensor_idx, ref.page_size_bytes, mapping=ref.mapping) for ref in refs)
        for refs in given.group_data_refs
    ]
    return CanonicalKVCaches(tuple(each.tensor for each in given.tensors), tuple(map(tuple, groups)))
