"""The calls between vLLM and kvtier: what each of kvtier's methods takes, and what vLLM is told."""

import inspect

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvtier.backend.namespace import make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.steps import StepManager
from kvtier.integrations.vllm import KVTierConnector, KVTierOffloadingSpec, KVTierSecondaryTier
from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.stats import Stats
from kvtier.integrations.vllm.worker import VllmWorker

OURS = {
    KVTierConnector: OffloadingConnector,
    KVTierOffloadingSpec: base.OffloadingSpec,
    VllmManager: base.OffloadingManager,
    VllmWorker: base.OffloadingWorker,
    KVTierSecondaryTier: SecondaryTierManager,
}


def mismatches():
    """Say which methods do not take what vLLM passes."""
    for ours, theirs in OURS.items():
        yield from (f"{ours.__name__} lacks {name}" for name in getattr(ours, "__abstractmethods__", ()))
        for name, method in inspect.getmembers(theirs, callable):
            mine = getattr(ours, name)
            if name.startswith("__") or mine is method:
                continue
            wanted = inspect.signature(method).parameters
            given = inspect.signature(mine).parameters
            yield from (f"{ours.__name__}.{name} has no {each}" for each in wanted if each not in given)
            yield from (
                f"{ours.__name__}.{name} needs {each.name}"
                for each in given.values()
                if each.default is each.empty and each.name not in wanted
            )


def told_of_failed_stores():
    """Fail two stores, try one of them again, and return what vLLM is told: keys, removed, of descriptions only."""
    config = EngineConfig(cpu_bytes_to_use=16_384, chunk_bytes=4_096, events=True)
    manager = VllmManager(StepManager.start(config), Stats())
    context = base.ReqContext(req_id="r")
    manager.on_new_request(context)
    manager.prepare_store(keys := [make_offload_key(bytes([number])) for number in (1, 2)], context)
    manager.complete_store(keys, context, success=False)
    manager.prepare_store(keys[:1], context)
    manager.prepare_store(third := [make_offload_key(bytes([3]))], context)
    manager.complete_store(third, context)
    told = list(manager.take_events())
    manager.shutdown()
    return [([key[0] for key in each.keys], each.removed, getattr(each, "metadata_only", False)) for each in told]
