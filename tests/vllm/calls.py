"""The reports of failed stores to vLLM, in any version."""

from vllm.v1.kv_offload import base

from kvtier.backend.namespace import make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.steps import StepManager
from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.stats import Stats


def told_of_failed_stores():
    """Fail two stores, try one of them again, and return what vLLM is told: keys, removed, of descriptions only."""
    config = EngineConfig(cpu_bytes_to_use=16_384, chunk_bytes=4_096, events=True)
    manager, context = VllmManager(StepManager.start(config), Stats()), base.ReqContext(req_id="r")
    manager.on_new_request(context)
    manager.prepare_store(keys := [make_offload_key(bytes([number])) for number in (1, 2)], context)
    manager.complete_store(keys, context, success=False)
    manager.prepare_store(keys[:1], context)
    manager.prepare_store(third := [make_offload_key(bytes([3]))], context)
    manager.complete_store(third, context)
    told = list(manager.take_events())
    manager.shutdown()
    return [([key[0] for key in each.keys], each.removed, getattr(each, "metadata_only", False)) for each in told]
