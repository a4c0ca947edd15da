"""KVTierConnector: vLLM's offloading connector, which also measures how fast the LLM engine computes prompts.

Only a connector sees a step's tokens, and when it is answered. A step's time begins when it was scheduled, or when the
step before was answered, whichever was later, and ends with its answer: neither idle time nor another step's counts.
"""

import logging
import math
import time
from collections import deque
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvtier.config import EngineConfig
from kvtier.errors import Remedy
from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.rows import require_one_node
from kvtier.integrations.vllm_options import with_spec

logger = logging.getLogger(__name__)

DECODE_NEWEST = 0.125  # The newest step's part in the mean time of a step that only decodes.


class KVTierConnector(OffloadingConnector):
    """vLLM's connector in both roles; the scheduler's measures prefill unless its speed is configured.

    Behind vLLM's own manager nothing is measured, because that manager decides what is loaded.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        require_one_node(vllm_config)
        _name_spec(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        manager = None if self.connector_scheduler is None else self.connector_scheduler.manager
        self._meter: PrefillMeter | None = None
        if isinstance(manager, VllmManager):
            self._engine = manager.engine
            _warn_of_short_end(self._engine.config, vllm_config.shutdown_timeout)
            if self._engine.config.prefill_tokens_per_s is None:
                self._meter = PrefillMeter(vllm_config.max_concurrent_batches)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *given: Any, **named: Any) -> KVConnectorPromMetrics:
        _name_spec(vllm_config)  # In the API server's process, too.
        return super().build_prom_metrics(vllm_config, *given, **named)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._meter is not None:
            self._meter.scheduled(*step_tokens(scheduler_output), time.monotonic())
        return super().build_connector_meta(scheduler_output)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the changes. vLLM asks once for every answer of a step, which marks the step's end."""
        if self._meter is not None and (prefill := self._meter.answered(time.monotonic())):
            self._engine.note_prefill(*prefill)
        return super().get_kv_connector_stats()


def _name_spec(config: VllmConfig) -> None:
    """Let vLLM's factory make kvtier's spec where the configuration names none: vLLM would take its own."""
    transfer = config.kv_transfer_config
    assert transfer is not None
    transfer.kv_connector_extra_config = with_spec(transfer.kv_connector_extra_config)


def _warn_of_short_end(config: EngineConfig, shutdown_timeout_s: int) -> None:
    """Warn if vLLM will kill the engine before `cascade = "evict"` has written what only memory has."""
    needed_s = math.ceil(2 * config.limits.close_s)  # To write it, and to close the tiers.
    if shutdown_timeout_s < needed_s and any(tier.cascade == "evict" for tier in config.secondary_tiers):
        logger.warning(
            "--shutdown-timeout is %d: when vLLM ends, it kills its engine after this many seconds, and chunks that"
            " cascade = 'evict' has not written are lost: set at least %d plus the time of running requests; see %s",
            shutdown_timeout_s,
            needed_s,
            Remedy.UNWRITTEN,
        )


def step_tokens(output: SchedulerOutput) -> tuple[int, int]:
    """Return a step's tokens of prompts (preempted ones again) and answers; (0, 0) if its time also goes elsewhere."""
    counts, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
    if output.scheduled_encoder_inputs or output.has_sync_kv_loads:
        return 0, 0
    if total == len(counts):  # Most steps: a token for each request.
        return 0, total
    drafts = output.scheduled_spec_decode_tokens
    prefill = sum(count for request, count in counts.items() if count > 1 + len(drafts.get(request, ())))
    return prefill, total - prefill


class PrefillMeter:
    """Measures prefill from the times of steps: those in flight, in order, and those answered."""

    def __init__(self, steps_max: int) -> None:
        """`steps_max`: the most steps that the LLM engine has in flight at once."""
        self._in_flight: deque[tuple[int, int, float]] = deque(maxlen=steps_max)
        self._answered_at = float("-inf")
        self._decode_s: float | None = None  # Mean time of a step that only decodes.

    def scheduled(self, prefill: int, decode: int, now: float) -> None:
        """Record the start of a step with these tokens, which may queue behind those in flight."""
        self._in_flight.append((prefill, decode, now))

    def answered(self, now: float) -> tuple[int, float] | None:
        """Record the answer of the oldest step in flight; return its prefill, if it has one: tokens and seconds.

        The time of a step that only decodes is subtracted, but at most the decoded tokens' share of the step.
        """
        if not self._in_flight:
            return None
        prefill, decode, scheduled_at = self._in_flight.popleft()
        seconds = now - max(scheduled_at, self._answered_at)
        self._answered_at = now
        mean = self._decode_s
        if prefill:
            return prefill, seconds - min(mean or 0.0, seconds * decode / (prefill + decode))
        if decode:
            self._decode_s = seconds if mean is None else mean + DECODE_NEWEST * (seconds - mean)
        return None
