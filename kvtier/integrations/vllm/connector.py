"""KVTierConnector: vLLM's offloading connector, which also measures how long the LLM engine's steps take.

vLLM passes requests and keys to a manager. Only a connector sees a step's tokens, and when it is answered.
"""

import time

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.integrations.vllm.hosts import require_one_node
from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.prefill import PrefillMeter, step_tokens


class KVTierConnector(OffloadingConnector):
    """vLLM's connector in both roles; the scheduler's measures prefill unless its speed is configured.

    Behind vLLM's own manager nothing is measured, because that manager decides what is loaded.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        require_one_node(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        manager = None if self.connector_scheduler is None else self.connector_scheduler.manager
        self._meter: PrefillMeter | None = None
        if isinstance(manager, VllmManager) and manager.engine.config.prefill_tokens_per_s is None:
            self._engine = manager.engine
            self._meter = PrefillMeter(vllm_config.max_concurrent_batches)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._meter is not None:
            self._meter.scheduled(step_tokens(scheduler_output), time.monotonic())
        return super().build_connector_meta(scheduler_output)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the changes. vLLM asks once for every answer of a step, which marks the step's end."""
        if self._meter is not None and (prefill := self._meter.answered(time.monotonic())):
            self._engine.note_prefill(prefill.tokens, prefill.seconds)
        return super().get_kv_connector_stats()
