"""What a user may write into `kv_connector_extra_config`, and the engine's configuration that follows from it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvtier.config import Checked, EngineConfig, EngineLimits, PositiveSize, TierConfig
from kvtier.fields import decode
from kvtier.integrations.vllm.rows import RowPlan
from kvtier.namespace import Namespace

Text = Annotated[str, msgspec.Meta(min_length=1)]

WHERE = "kv_connector_extra_config"


class VllmOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """kvtier's options, under vLLM's names where vLLM has one, beside those that vLLM reads itself."""

    cpu_bytes_to_use: PositiveSize
    """Host memory of the primary, for all workers of this engine together."""

    eviction_policy: Text = "lru"
    secondary_tiers: tuple[TierConfig, ...] = ()
    limits: EngineLimits = EngineLimits()

    runner: Literal["process", "thread"] = "process"
    """Where the tiers' I/O runs. vLLM's scheduler is busy in Python: a thread beside it would wait for the GIL."""

    canonical_layout: bool | None = None
    """Whether rows hold canonical pages, which are the same at every tensor-parallel size. None: where vLLM vouches
    for them. True: vLLM decides more widely, and refuses to start where it cannot. False: each worker's own pages."""

    interop: Literal["vllm"] | None = None
    """`vllm`: chunks are named as vLLM's own file tier names them even where only its naming, not its rows, is the
    same for every tensor-parallel size. For one worker only."""

    revision: Text | None = None
    """Of the weights. vLLM does not pass its own on."""

    shared_memory_dir: Text = "/dev/shm"  # noqa: S108  # Where Linux has its shared memory.
    """A tmpfs in which scheduler and workers meet; nothing is left there once they have."""

    # vLLM's own.
    spec_name: Text | None = None
    spec_module_path: Text | None = None
    block_size: int | None = None
    blocks_per_chunk: int | None = None
    offload_prompt_only: bool = True
    self_describing_kv_events: bool = False
    sync_load_budget_bytes: int = 0


def read_options(extra_config: Mapping[str, Any]) -> VllmOptions:
    """Decode `kv_connector_extra_config`; `ConfigError` names the path of what is wrong in it."""
    return decode(VllmOptions, dict(extra_config), WHERE)


def engine_config(options: VllmOptions, plan: RowPlan, namespace: Namespace, *, events: bool) -> EngineConfig:
    """Return the configuration of the engine that these options describe."""
    given: dict[str, Any] = {
        "cpu_bytes_to_use": options.cpu_bytes_to_use,
        "chunk_bytes": plan.chunk_bytes,
        "eviction_policy": options.eviction_policy,
        "secondary_tiers": options.secondary_tiers,
        "runner": options.runner,
        "namespace": namespace,
        "limits": options.limits,
        "events": events,
    }
    return decode(EngineConfig, given, WHERE)
