"""An LLM engine's KV cache, tiered over host memory, file systems and slower tiers: kvtier's names for its users.

`kvtier.backend` has the names for authors of tiers, `kvtier.errors` every error. Each name is imported on first use:
`import kvtier` alone is fast, and loads neither a tier nor torch.
"""

TYPE_CHECKING = False  # Type checkers know the name; importing `typing` would take longer than all the rest.
if TYPE_CHECKING:
    from kvtier.backend import Group, Namespace, OffloadKey, make_offload_key
    from kvtier.config import EngineConfig, EngineLimits, TierConfig, TierLimits
    from kvtier.engine.answers import Event, EventKind, LookupResult, StorePlan
    from kvtier.engine.manager import TieringOffloadingManager
    from kvtier.engine.metrics import EngineStats, PrimaryStats, TierStats
    from kvtier.engine.steps import StepManager
    from kvtier.engine.tier import TierMatcher
    from kvtier.errors import BackendUnavailable, ConfigError, EngineClosed, KVTierError, RowsStillRead, WrongLoop
    from kvtier.settings.hints import Hint

__version__ = "0.2.0"

__all__ = [
    "BackendUnavailable",
    "ConfigError",
    "EngineClosed",
    "EngineConfig",
    "EngineLimits",
    "EngineStats",
    "Event",
    "EventKind",
    "Group",
    "Hint",
    "KVTierError",
    "LookupResult",
    "Namespace",
    "OffloadKey",
    "PrimaryStats",
    "RowsStillRead",
    "StepManager",
    "StorePlan",
    "TierConfig",
    "TierLimits",
    "TierMatcher",
    "TierStats",
    "TieringOffloadingManager",
    "WrongLoop",
    "__version__",
    "make_offload_key",
]

_NAMES_BY_MODULE = {
    "kvtier.backend.namespace": "Group Namespace OffloadKey make_offload_key",
    "kvtier.config": "EngineConfig EngineLimits TierConfig TierLimits",
    "kvtier.engine.answers": "Event EventKind LookupResult StorePlan",
    "kvtier.engine.manager": "TieringOffloadingManager",
    "kvtier.engine.metrics": "EngineStats PrimaryStats TierStats",
    "kvtier.engine.steps": "StepManager",
    "kvtier.engine.tier": "TierMatcher",
    "kvtier.errors": "BackendUnavailable ConfigError EngineClosed KVTierError RowsStillRead WrongLoop",
    "kvtier.settings.hints": "Hint",
}

if not TYPE_CHECKING:  # Type checkers would accept every name.

    def __getattr__(name: str) -> object:
        for module_name, names in _NAMES_BY_MODULE.items():
            if name in names.split():
                from importlib import import_module

                globals()[name] = getattr(import_module(module_name), name)
                return globals()[name]
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
