from vllm.v1.kv_offload.base import OffloadingManager

class OffloadingConnectorScheduler:
    manager: OffloadingManager
