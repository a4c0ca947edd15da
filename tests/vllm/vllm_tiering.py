"""vLLM's own tiering, on CPU: its manager, its region and its file tier, with a worker that needs no GPU."""

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.integrations.vllm.rows import RowPlan
from kvtier.integrations.vllm.worker import VllmWorker


class TieringOnCpu(TieringOffloadingSpec):
    """Everything is vLLM's but the copies."""

    def get_worker(self, kv_caches):
        if self._worker is None:
            parallel = self.config.parallel
            rank = 0 if self.replicated_layout else parallel.rank
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            copies = 1 if self.replicated_layout else parallel.world_size
            plan = RowPlan(self.cpu_page_size_per_worker, copies, self.config.canonical_layout, rank)
            rows = region.base_tensor.view(self.num_chunks, -1)
            self._worker = VllmWorker(kv_caches, rows, plan, self.blocks_per_chunk, region.cleanup)
        return self._worker


def vllm_tiering(disk, **changes):
    """Return `kv_connector_extra_config` for vLLM's own tiering, with its file tier if a directory is given."""
    tiers = [] if disk is None else [{"type": "fs", "root_dir": str(disk)}]
    spec = {"spec_name": "TieringOnCpu", "spec_module_path": "tests.vllm.vllm_tiering"}
    return spec | {"cpu_bytes_to_use": 64 << 20, "secondary_tiers": tiers} | changes
