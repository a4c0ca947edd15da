"""The facts of one engine that never change, as labels of vLLM's info metric (`vllm:kv_offload_config_info`)."""

from kvtier import __version__
from kvtier.config import PRIMARY_NAME, EngineConfig
from kvtier.namespace import FileMapper

INFO_KEYS = ("tier", "type", "kvtier_version", "runner", "eviction_policy", "rows", "row_bytes", "namespace", "sharing")


def config_info(config: EngineConfig) -> list[dict[str, str | int]]:
    """Return one mapping for the primary and one for each tier behind it; a label that says nothing there is empty."""
    mapper = FileMapper(config.namespace)
    common: dict[str, str | int] = {
        "kvtier_version": __version__,
        "runner": config.runner,
        "namespace": mapper.folder,
        "sharing": "any parallel size" if mapper.parallel_agnostic else f"this size only: {mapper.why}",
    }
    primary: dict[str, str | int] = {
        "tier": PRIMARY_NAME,
        "type": PRIMARY_NAME,
        "eviction_policy": config.eviction_policy,
        "rows": config.rows,
        "row_bytes": config.row_bytes,
    }
    return [
        {**common, **primary},
        *({**common, "tier": tier.name, "type": tier.type} for tier in config.secondary_tiers),
    ]
