"""KVTierOffloadingSpec: vLLM's offloading connector makes one in the scheduler and one in every worker.

They share the region of rows. The first to come creates it, under a name that is removed when all have mapped it. The
scheduler's side, which vLLM makes last, waits for that, and owns engine and runner; a worker's side copies blocks.

A store: the scheduler calls `VllmManager.prepare_store`, which reserves rows. vLLM tells its workers the rows' numbers,
and `VllmWorker.submit_store` copies blocks into them. When all workers have reported it, the scheduler calls
`complete_store`, and at the step's end (`on_schedule_end`) the rows go on to the tiers. A load: `lookup`, which
promotes from a tier if need be, `prepare_load`, `VllmWorker.submit_load` and `complete_load`.
"""

from functools import partial
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.config import EngineConfig
from kvtier.engine.steps import StepManager
from kvtier.errors import ConfigError
from kvtier.integrations.signatures import warn_if_untried
from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.rows import MET_S, namespace_of, one_host, places_of, plan_rows, require_met
from kvtier.integrations.vllm.signatures import VLLM
from kvtier.integrations.vllm.stats import INFO_KEYS, Stats, log_as_vllm, metric_definitions, unregister_earlier
from kvtier.integrations.vllm.worker import make_worker
from kvtier.integrations.vllm_options import engine_config, read_mark, read_options
from kvtier.memory import Region


class KVTierOffloadingSpec(OffloadingSpec):
    """Offloading to kvtier. Everything is checked when it is made, before anything is allocated."""

    def __init__(self, config: OffloadingConfig) -> None:
        """Raises `ConfigError` with the path of what is wrong in `kv_connector_extra_config`."""
        super().__init__(config)
        log_as_vllm()
        self._options = read_options(config.extra_config)
        self._read_mark = partial(read_mark, self._options.revision_file)
        self._read_mark()
        interop = self._options.interop is not None
        self._plan = plan_rows(config, self._options.canonical_layout, interop=interop)
        self.replicated_layout = config.replicated_layout  # Read by vLLM: one worker stores for all.
        namespace = namespace_of(config, self._plan, revision=self._options.revision, interop=interop)
        events = self.kv_events_config.enable_kv_cache_events
        self._engine_config = engine_config(self._options, self._plan, namespace, places_of(config), events=events)
        self._manager: VllmManager | None = None
        self._worker: OffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        unregister_earlier()
        return metric_definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # vLLM 0.33's.
        """Return the labels of `vllm:kv_offload_config_info`."""
        return INFO_KEYS

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            warn_if_untried(VLLM)
            workers = self.config.parallel.world_size
            with one_host(workers):
                region = self._region(participant=workers, met_s=MET_S)  # Workers go by their ranks, below it.
            stats = Stats()
            engine = StepManager.start(
                self._engine_config, region=region, observer=stats.observe, waited=stats.observe_wait
            )
            self._manager = VllmManager(engine, stats, self._read_mark)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            if self._plan.canonical:
                _require_certified(kv_caches, portable=self.config.parallel.is_parallelism_agnostic)
            region = self._region(participant=self._plan.rank)
            try:
                met = partial(require_met, region, self.config.parallel.world_size)
                self._worker = make_worker(kv_caches, region, self._plan, self.blocks_per_chunk, met)
            except BaseException:
                region.close()
                raise
        return self._worker

    def _region(self, participant: int, met_s: float | None = None) -> Region:
        """Join the rows that scheduler and workers of this engine share; each takes a part of the pre-faulting."""
        config: EngineConfig = self._engine_config
        return Region.shared(
            f"{self._options.shared_memory_dir}/kvtier-vllm-{self.config.engine_id.replace('/', '_')}",
            config.rows,
            config.row_bytes,
            participant=participant,
            participants=self.config.parallel.world_size + 1,
            met_s=met_s,
        )


def _require_certified(kv_caches: CanonicalKVCaches, *, portable: bool) -> None:
    """Refuse canonical pages that vLLM has not certified: chunks would be named as what they are not."""
    mappings = [ref.mapping for refs in kv_caches.group_data_refs for ref in refs]
    if not all(mapping is not None and (mapping.parallelism_agnostic or not portable) for mapping in mappings):
        raise ConfigError(
            "vLLM cannot certify this KV cache's pages as canonical (the same for every tensor-parallel size): set"
            " canonical_layout: false in kv_connector_extra_config, and each size then keeps separate chunks"
        )
