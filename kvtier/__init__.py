"""An LLM engine's KV cache, tiered over host memory, file systems and slower tiers: kvtier's public names.

Each is imported when it is first used: `import kvtier` alone costs next to nothing, and loads neither a tier nor torch.
"""

TYPE_CHECKING = False  # As type checkers know it by name; importing `typing` would take longer than all the rest.
if TYPE_CHECKING:
    from kvtier.backend import (
        Abandoned,
        Added,
        Backend,
        Durability,
        FileMapper,
        Group,
        Inventory,
        InventoryEvent,
        Measured,
        Namespace,
        Occupancy,
        OffloadKey,
        Outcome,
        Ranked,
        Read,
        Removed,
        ScanDone,
        TierContext,
        Write,
        chunk_hash,
        group_index,
        make_offload_key,
    )
    from kvtier.config import EngineConfig, EngineLimits, TierConfig, TierLimits, decode, load_config
    from kvtier.engine.answers import LookupResult, StorePlan
    from kvtier.engine.events import Event, EventKind
    from kvtier.engine.manager import TieringOffloadingManager
    from kvtier.engine.steps import StepManager
    from kvtier.engine.tier import TierMatcher
    from kvtier.errors import (
        BackendClosed,
        BackendError,
        BackendUnavailable,
        BlockCorrupt,
        BlockError,
        BlockMissing,
        ConfigError,
        EngineClosed,
        KVTierError,
        NoSpace,
        RowsStillRead,
        TraceError,
        TransferFailed,
    )
    from kvtier.policies.base import Policy

__version__ = "0.1.0"

__all__ = [
    "Abandoned",
    "Added",
    "Backend",
    "BackendClosed",
    "BackendError",
    "BackendUnavailable",
    "BlockCorrupt",
    "BlockError",
    "BlockMissing",
    "ConfigError",
    "Durability",
    "EngineClosed",
    "EngineConfig",
    "EngineLimits",
    "Event",
    "EventKind",
    "FileMapper",
    "Group",
    "Inventory",
    "InventoryEvent",
    "KVTierError",
    "LookupResult",
    "Measured",
    "Namespace",
    "NoSpace",
    "Occupancy",
    "OffloadKey",
    "Outcome",
    "Policy",
    "Ranked",
    "Read",
    "Removed",
    "RowsStillRead",
    "ScanDone",
    "StepManager",
    "StorePlan",
    "TierConfig",
    "TierContext",
    "TierLimits",
    "TierMatcher",
    "TieringOffloadingManager",
    "TraceError",
    "TransferFailed",
    "Write",
    "__version__",
    "chunk_hash",
    "decode",
    "group_index",
    "load_config",
    "make_offload_key",
]

_NAMES_BY_MODULE = {
    "kvtier.backend.contract": (
        "Abandoned Added Backend Durability Inventory InventoryEvent Measured Occupancy Outcome Ranked Read Removed "
        "ScanDone TierContext Write"
    ),
    "kvtier.config": "EngineConfig EngineLimits TierConfig TierLimits decode load_config",
    "kvtier.errors": (
        "BackendClosed BackendError BackendUnavailable BlockCorrupt BlockError BlockMissing ConfigError EngineClosed "
        "KVTierError NoSpace RowsStillRead TraceError TransferFailed"
    ),
    "kvtier.engine.events": "Event EventKind",
    "kvtier.backend.keys": "OffloadKey chunk_hash group_index make_offload_key",
    "kvtier.engine.answers": "LookupResult StorePlan",
    "kvtier.engine.manager": "TieringOffloadingManager",
    "kvtier.engine.steps": "StepManager",
    "kvtier.backend.namespace": "FileMapper Group Namespace",
    "kvtier.policies.base": "Policy",
    "kvtier.engine.tier": "TierMatcher",
}


if not TYPE_CHECKING:  # Type checkers would take every name for one that there is.

    def __getattr__(name: str) -> object:
        for module_name, names in _NAMES_BY_MODULE.items():
            if name in names.split():
                from importlib import import_module

                globals()[name] = getattr(import_module(module_name), name)
                return globals()[name]
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
