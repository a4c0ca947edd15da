"""Options inside vLLM, of both doors, and the engine's configuration that follows from them.

The first door is kvtier in the place of vLLM's manager: its options are vLLM's `kv_connector_extra_config`. The second
is one kvtier tier behind vLLM's own manager: its options are an element of vLLM's `secondary_tiers`. No module of
vLLM's is imported here, so `kvtier config check` reads them on any machine.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from kvtier.backend import Durability, Namespace, backend_class
from kvtier.config import (
    PLACES,
    ActionChunks,
    EngineConfig,
    EngineLimits,
    LateMargin,
    Part,
    TierConfig,
    TierLimits,
    TokensPerSecond,
    placed,
    settled,
    tier_options,
)
from kvtier.errors import ConfigError
from kvtier.policies import require_policy
from kvtier.settings import Checked, Duration, PositiveSize, Share, SlowDuration, decode, struct_fields
from kvtier.settings.fields import is_list, is_table, shown

if TYPE_CHECKING:  # `rows` imports vLLM; options can be checked without it.
    from kvtier.integrations.vllm.rows import RowPlan

Text = Annotated[str, msgspec.Meta(min_length=1)]

WHERE = "kv_connector_extra_config"
PACKAGE = "kvtier.integrations.vllm"
CONNECTOR = "KVTierConnector"
SPEC = "KVTierOffloadingSpec"
SECOND = "KVTierSecondaryTier"
TIER = "kvtier"  # The type of a secondary tier, as the plug-in registers it: `SECOND` is its class.
ANYWHERE: Mapping[str, str] = dict.fromkeys(PLACES, "0")
"""The places of no engine, to check options alone."""


class VllmOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first door's options: kvtier's own, under vLLM's names where it has one, and those that vLLM reads itself."""

    cpu_bytes_to_use: PositiveSize  # Host memory of the primary, for all workers together.
    eviction_policy: Text = "lru"
    secondary_tiers: tuple[TierConfig, ...] = ()  # Behind the primary, asked in this order.
    limits: EngineLimits = EngineLimits()

    # Canonical pages in rows, the same at every tensor-parallel size. None: where vLLM vouches for them. True: vLLM
    # decides more widely, and refuses to start where it cannot. False: each worker's own pages.
    canonical_layout: bool | None = None

    # `vllm`: chunks are named as vLLM's own file tier names them even where only its naming, not its rows, is the same
    # for every tensor-parallel size. For one worker only.
    interop: Literal["vllm"] | None = None

    revision: Text | None = None  # Of the weights: vLLM does not pass its own on.
    revision_file: Text | None = None  # A file with the revision of weights that change; each reset reads it again.
    prefill_tokens_per_s: TokensPerSecond | None = None  # None: as KVTierConnector measures it.
    late_margin: LateMargin = 1.5  # Times what computing takes, a load may take; then the request computes after all.
    shared_memory_dir: Text = "/dev/shm"  # noqa: S108  # A tmpfs in which scheduler and workers meet.

    # vLLM's own.
    spec_name: Text | None = None
    spec_module_path: Text | None = None
    block_size: int | None = None
    blocks_per_chunk: int | None = None
    offload_prompt_only: bool = True
    self_describing_kv_events: bool = False
    sync_load_budget_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse an unknown policy before vLLM has allocated anything."""
        super().__post_init__()
        require_policy(self.eviction_policy)


def read_options(extra_config: Mapping[str, Any]) -> VllmOptions:
    """Decode `kv_connector_extra_config`; `ConfigError` names the path of what is wrong in it."""
    return decode(VllmOptions, dict(extra_config), WHERE)


def read_mark(revision_file: str | None) -> bytes:
    """Return the mark of the revision in a file; empty without one. `ConfigError` for an unreadable or empty file."""
    if revision_file is None:
        return b""
    try:
        revision = Path(revision_file).read_bytes().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{WHERE}.revision_file: {shown(revision_file)} cannot be read: {error}") from error
    if not revision:
        raise ConfigError(f"{WHERE}.revision_file: {shown(revision_file)} is empty, a name of the weights accepted")
    return sha256(revision).digest()[:8]  # Two revisions of a model get the same one once in 2**64.


def is_line(given: object) -> bool:
    """Return True for the value of vLLM's `--kv-transfer-config`, False for a configuration of kvtier's own."""
    return is_table(given) and not {"kv_connector", WHERE}.isdisjoint(given)


def read_line(given: Any) -> "VllmOptions | tuple[SecondaryOptions, ...]":
    """Check the value of vLLM's `--kv-transfer-config`; return the options of its door. Raises `ConfigError`."""
    for name in sorted(given.keys() & struct_fields(VllmOptions).keys()):
        raise ConfigError(f"{name}: no such field; did you mean '{WHERE}.{name}'?")
    extra: Any = given.get(WHERE)
    if not is_table(extra):
        raise ConfigError(f"{WHERE}: missing, a table of fields required")
    extra = with_spec(extra) if given.get("kv_connector") == CONNECTOR else extra
    if extra.get("spec_name") == SPEC:
        _require_ours(given, "kv_connector_module_path", "")
        _require_ours(extra, "spec_module_path", f"{WHERE}.")
        return _checked_options(read_options(extra))
    tiers: Any = extra.get("secondary_tiers")
    ours = [one for one in tiers if is_table(one) and one.get("type") in (SECOND, TIER)] if is_list(tiers) else []
    if not ours:
        raise ConfigError(f"{WHERE}.spec_name: nothing of kvtier's given, {SPEC!r} accepted")
    for tier in ours:
        _require_ours(tier, "module_path", "secondary_tiers[].")
    return tuple(_second(tier) for tier in ours)


def with_spec(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return `kv_connector_extra_config` for `CONNECTOR`: kvtier's spec, by its module, unless it names another."""
    named = {"spec_name": SPEC, **extra}
    return {"spec_module_path": PACKAGE, **named} if named["spec_name"] == SPEC else named


def _require_ours(given: Mapping[str, Any], name: str, where: str) -> None:
    """Refuse another module's path; none is needed where the plug-in has registered the name."""
    if given.get(name, PACKAGE) != PACKAGE:
        raise ConfigError(f"{where}{name}: {shown(given.get(name))} given, {PACKAGE!r} accepted, or none")


def _checked_options(options: VllmOptions) -> VllmOptions:
    """Check tiers as an engine does; only vLLM knows the length of a row."""
    engine = {"cpu_bytes_to_use": options.cpu_bytes_to_use, "limits": options.limits, "chunk_bytes": 1}
    tiers = tuple(placed(tier, ANYWHERE) for tier in options.secondary_tiers)
    EngineConfig.from_dict({**engine, "secondary_tiers": tiers}, WHERE)
    return options


def _second(tier: Mapping[str, Any]) -> "SecondaryOptions":
    options = read_secondary_options({name: tier[name] for name in tier.keys() - {"type", "module_path"}})
    tier_options(placed(TierConfig(type=options.backend, options=options.options), ANYWHERE), "secondary_tiers[]")
    return options


def engine_config(
    options: VllmOptions, plan: "RowPlan", namespace: Namespace, places: Mapping[str, str], *, events: bool
) -> EngineConfig:
    given: dict[str, Any] = {
        "cpu_bytes_to_use": options.cpu_bytes_to_use,
        "chunk_bytes": plan.chunk_bytes,
        "eviction_policy": options.eviction_policy,
        "secondary_tiers": tuple(
            _with_medium(tier, places, f"{WHERE}.secondary_tiers[{index}]")
            for index, tier in enumerate(options.secondary_tiers)
        ),
        "runner": "process",
        "namespace": namespace,
        "limits": options.limits,
        "events": events,
        "prefill_tokens_per_s": options.prefill_tokens_per_s,
        "late_margin": options.late_margin,
    }
    return msgspec.structs.replace(EngineConfig.from_dict(given, WHERE), chunk_tokens=_chunk_tokens(namespace))


def _chunk_tokens(namespace: Namespace) -> int | None:
    finest = min((group.tokens_per_block for group in namespace.kv_cache_groups), default=None)
    return None if finest is None else finest * namespace.blocks_per_chunk


class SecondaryLimits(TierLimits, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits of a tier behind vLLM's own manager: a tier's, and its runner's."""

    action_chunks: ActionChunks = EngineLimits().action_chunks
    quarantine_share: Share = EngineLimits().quarantine_share
    heartbeat_s: SlowDuration = EngineLimits().heartbeat_s
    close_s: Duration = EngineLimits().close_s
    retained_share: Part = EngineLimits().retained_share


class SecondaryOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The second door's options, of one kvtier tier: every key without a field here is the tier's own."""

    rest: ClassVar[str | None] = "options"

    backend: Text
    """The tier's type, as `kvtier.backend.backend_class` knows it."""

    name: str = ""
    limits: SecondaryLimits = SecondaryLimits()
    medium: Literal["CPU", "STORAGE"] | None = None
    locality: Literal["LOCAL", "REMOTE"] | None = None
    enable_kv_events: bool = False
    interop: Literal["vllm"] | None = None
    revision: Text | None = None
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


def read_secondary_options(given: Mapping[str, Any]) -> SecondaryOptions:
    """Decode a tier's configuration, without vLLM's own fields; `ConfigError` names what is wrong in it."""
    return decode(SecondaryOptions, dict(given), "secondary_tiers[]")


def secondary_config(
    options: SecondaryOptions, namespace: Namespace, places: Mapping[str, str], *, rows: int, row_bytes: int
) -> EngineConfig:
    """Return the configuration of a runner with one tier, over rows that are vLLM's; its paths are absolute."""
    limits = msgspec.structs.asdict(options.limits)
    tier = TierConfig(
        type=options.backend,
        name=options.name or f"kvtier:{options.backend}",
        limits=TierLimits(**{name: limits[name] for name in struct_fields(TierLimits)}),
        medium=options.medium,
        locality=options.locality,
        options=options.options,
    )
    config = EngineConfig(
        cpu_bytes_to_use=rows * row_bytes,
        chunk_bytes=row_bytes,
        secondary_tiers=(_with_medium(tier, places, "secondary_tiers[]"),),
        runner="process",
        namespace=namespace,
        chunk_tokens=_chunk_tokens(namespace),
        limits=EngineLimits(**{name: limits[name] for name in struct_fields(EngineLimits).keys() & limits.keys()}),
    )
    return settled(config)


def _with_medium(tier: TierConfig, places: Mapping[str, str], where: str) -> TierConfig:
    """Check a tier's own options, with paths filled in, and name its medium, by which vLLM's requests choose."""
    tier = placed(tier, places)
    tier_options(tier, where)
    if tier.medium is not None:
        return tier
    memory = backend_class(tier.type).durability is Durability.PROCESS
    return msgspec.structs.replace(tier, medium="CPU" if memory else "STORAGE")
