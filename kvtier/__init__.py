"""An LLM engine's KV cache, tiered over host memory, file systems and slower tiers: kvtier's names for its users.

`kvtier.backend` has the names for authors of tiers, `kvtier.errors` every error. Each name is imported on first use:
`import kvtier` alone is fast, and loads neither a tier nor torch.
"""

TYPE_CHECKING = False  # Type checkers know the name; importing `typing` would take longer than all the rest.
if TYPE_CHECKING:
    from kvtier.backend import Group as Group
    from kvtier.backend import Namespace as Namespace
    from kvtier.backend import OffloadKey as OffloadKey
    from kvtier.backend import make_offload_key as make_offload_key
    from kvtier.config import EngineConfig as EngineConfig
    from kvtier.config import EngineLimits as EngineLimits
    from kvtier.config import TierConfig as TierConfig
    from kvtier.config import TierLimits as TierLimits
    from kvtier.config import __version__ as __version__
    from kvtier.engine.answers import Event as Event
    from kvtier.engine.answers import EventKind as EventKind
    from kvtier.engine.answers import LookupResult as LookupResult
    from kvtier.engine.answers import StorePlan as StorePlan
    from kvtier.engine.manager import TieringOffloadingManager as TieringOffloadingManager
    from kvtier.engine.metrics import EngineStats as EngineStats
    from kvtier.engine.metrics import PrimaryStats as PrimaryStats
    from kvtier.engine.metrics import TierStats as TierStats
    from kvtier.engine.steps import StepManager as StepManager
    from kvtier.engine.tier import TierMatcher as TierMatcher
    from kvtier.errors import BackendUnavailable as BackendUnavailable
    from kvtier.errors import ConfigError as ConfigError
    from kvtier.errors import EngineClosed as EngineClosed
    from kvtier.errors import KVTierError as KVTierError
    from kvtier.errors import RowsStillRead as RowsStillRead
    from kvtier.errors import WrongLoop as WrongLoop
    from kvtier.settings.hints import Hint as Hint

_NAMES_BY_MODULE = {
    "kvtier.backend.namespace": "Group Namespace OffloadKey make_offload_key",
    "kvtier.config": "EngineConfig EngineLimits TierConfig TierLimits __version__",
    "kvtier.engine.answers": "Event EventKind LookupResult StorePlan",
    "kvtier.engine.manager": "TieringOffloadingManager",
    "kvtier.engine.metrics": "EngineStats PrimaryStats TierStats",
    "kvtier.engine.steps": "StepManager",
    "kvtier.engine.tier": "TierMatcher",
    "kvtier.errors": "BackendUnavailable ConfigError EngineClosed KVTierError RowsStillRead WrongLoop",
    "kvtier.settings.hints": "Hint",
}

if not TYPE_CHECKING:  # Type checkers read the imports above, and would accept every name.
    __all__ = sorted(name for names in _NAMES_BY_MODULE.values() for name in names.split())

    def __getattr__(name: str) -> object:
        for module_name, names in _NAMES_BY_MODULE.items():
            if name in names.split():
                from importlib import import_module

                globals()[name] = getattr(import_module(module_name), name)
                return globals()[name]
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
