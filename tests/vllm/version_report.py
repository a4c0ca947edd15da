"""What one version of vLLM says of kvtier, in one process: an import of vLLM takes longer than all that is asked.

    PYTHONPATH=SOURCES:KVTIER VLLM_CACHE_ROOT=EMPTY python version_report.py MODEL DISK

Prints a report as JSON.
"""

import inspect
import json
import sys
from collections.abc import Iterator

from tests.vllm import mini_engine  # First: it says on which platform vLLM is.

import vllm  # isort: skip
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector  # isort: skip
from vllm.v1.kv_offload import base  # isort: skip
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager  # isort: skip

from kvtier.config import EngineConfig  # isort: skip
from kvtier.integrations.vllm import KVTierConnector, KVTierOffloadingSpec, KVTierSecondaryTier  # isort: skip
from kvtier.integrations.vllm.manager import VllmManager  # isort: skip
from kvtier.integrations.vllm.stats import ObservedTimes  # isort: skip
from kvtier.integrations.vllm.worker import VllmWorker  # isort: skip
from kvtier.backend.keys import make_offload_key  # isort: skip
from kvtier.engine.steps import StepManager  # isort: skip

OURS = {
    KVTierConnector: OffloadingConnector,
    KVTierOffloadingSpec: base.OffloadingSpec,
    VllmManager: base.OffloadingManager,
    VllmWorker: base.OffloadingWorker,
    KVTierSecondaryTier: SecondaryTierManager,
}


def mismatches() -> Iterator[str]:
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


def told_of_failed_stores() -> list[tuple[list[int], bool, bool]]:
    """Fail two stores, try one of them again, and return what vLLM is told: keys, removed, of descriptions only."""
    config = EngineConfig(cpu_bytes_to_use=16_384, chunk_bytes=4_096, events=True)
    manager = VllmManager(StepManager.start(config), ObservedTimes())
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


def main(model: str, disk: str) -> dict[str, object]:
    return {
        "version": vllm.__version__,
        "mismatches": list(mismatches()),
        "failed stores": told_of_failed_stores(),
        "prefill noted": mini_engine.prefill_noted(model, f"{disk}/noted"),
        "doors": {door: mini_engine.run(model, f"{disk}/{door}", door) for door in ("first", "second")},
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
