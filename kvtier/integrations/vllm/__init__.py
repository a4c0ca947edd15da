"""kvtier inside vLLM: its plug-in names this package, as may `kv_connector_module_path` and its like.

vLLM's offloading interface is young and changes with every release. A version that differs in what kvtier uses is
refused here, in one sentence. It would fail anywhere else, or worse, not fail.
"""

from kvtier.integrations.vllm.signatures import TRIED_VERSIONS, VLLM

with VLLM.imported():
    from kvtier.integrations.vllm.connector import KVTierConnector
    from kvtier.integrations.vllm.manager import VllmManager
    from kvtier.integrations.vllm.secondary import KVTierSecondaryTier
    from kvtier.integrations.vllm.spec import KVTierOffloadingSpec
    from kvtier.integrations.vllm.worker import VllmWorker

OURS = (KVTierConnector, KVTierOffloadingSpec, VllmManager, VllmWorker, KVTierSecondaryTier)
VLLM.require(OURS)

__all__ = ["TRIED_VERSIONS", "KVTierConnector", "KVTierOffloadingSpec", "KVTierSecondaryTier"]
