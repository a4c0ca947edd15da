"""kvtier's configuration: plain data, with each number's unit and reason, checked before anything is allocated."""

import json
import os
import re
import sys
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec.structs import force_setattr, replace

from kvtier.backend import BUILT_IN_TYPES, Namespace, backend_class
from kvtier.errors import ConfigError
from kvtier.memory import PAGE_BYTES
from kvtier.policies import require_policy
from kvtier.settings import (
    Checked,
    Count,
    Duration,
    PositiveDuration,
    PositiveSize,
    Share,
    SlowDuration,
    decode,
    foreign,
    names_a_path,
    option_fields,
    read_toml,
    struct_fields,
    struct_paths,
)
from kvtier.settings.fields import is_secret

__version__ = "0.2.0"

PRIMARY_NAME = "cpu"  # The primary's name among those of tiers.
ROWS_MAX = (1 << 32) - 1  # Row numbers travel between processes as 32-bit integers.
CHUNKS_IN_FLIGHT_MAX = 1 << 24  # Some gigabytes of bookkeeping: a larger limit would be none.
LOADS_IN_FLIGHT_MAX = 4_096  # Chunks of one tier. Bounds bookkeeping where chunks are small: a megabyte of it.
PROBES_IN_FLIGHT_MAX = 65_536  # Keys of one tier: some megabytes. Beyond it a request computes.
ACTION_CHUNKS_MAX = 1 << 16  # An action is one message to the runner, of 40 bytes a chunk.
QUEUED_ACTIONS_MAX = 1_024  # Towards the runner: seconds of work. Beyond it a tier is not keeping up.
EVENTS_MAX = 65_536  # Kept until taken, the oldest dropped first: 4 MB of them.
OPEN_S = 60.0  # For each tier to open: a mount that is away answers at once, or never.
TOKENS_PER_S_MAX = 1e9  # Ten thousand times one GPU: a mistyped unit.
PLACES = ("dp_rank", "engine_id")  # Names allowed as `{name}` in a tier's paths, inside vLLM.
LATE_MARGIN_MAX = 100.0  # Times what computing takes: beyond it waiting has no bound worth the name.

ChunksInFlight = Annotated[int, msgspec.Meta(ge=1, le=CHUNKS_IN_FLIGHT_MAX)]
ActionChunks = Annotated[int, msgspec.Meta(ge=1, le=ACTION_CHUNKS_MAX)]
TokensPerSecond = Annotated[float, msgspec.Meta(gt=0, le=TOKENS_PER_S_MAX)]
LateMargin = Annotated[float, msgspec.Meta(ge=1, le=LATE_MARGIN_MAX)]

Part = Annotated[float, msgspec.Meta(ge=0, le=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class TierLimits(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits of one tier: time, memory and failures."""

    deadline_s: PositiveDuration = 30.0  # Longest wait of a batch for its budget, and longest duration of its call.
    load_bytes_in_flight: PositiveSize = 256 << 20  # Bytes being loaded at once, at least one row; more adds latency.
    store_bytes_in_flight: PositiveSize = 256 << 20  # Bytes queued or being stored at once, at least one row.
    store_chunks_in_flight: ChunksInFlight = 4_096  # Chunks queued or being stored at once.
    breaker_failures: Count = 5  # Failed transfers in a row that open the breaker: no request uses the tier then.
    breaker_cooldown_s: Duration = 5.0  # Time until one batch tries the tier again.
    answer_ttl_s: PositiveDuration = 10.0  # Age up to which a look-up's answer counts, if the tier reports no contents.


class EngineLimits(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The limits of a kvtier engine: shares of the primary, and how long it waits."""

    cascade_share: Share = 0.5  # Share of the rows that cascades may pin; further cascades are dropped.
    leaving_share: Share = 0.05  # Share of the rows kept free, or written, ahead of demand; for `cascade = "evict"`.
    lease_share: Share = 0.5  # Share of the rows leased to waiting requests: at most this much is promoted for one.
    retained_share: Part = 0.25  # Share of the primary, and of each tier, that hints may retain; 0: none.
    lease_s: Duration = 10.0  # Duration of a lease if its request neither loads nor ends.
    action_chunks: ActionChunks = 64  # Chunks in one call to a tier. More would free rows later.
    quarantine_share: Share = 0.1  # Share of the rows stuck in hung calls beyond which the runner is replaced.
    heartbeat_s: SlowDuration = 2.0  # Interval of the runner's sign of life; after three without one it is replaced.
    close_s: Duration = 10.0  # Deadline of calls that close, drain or reset, unless the call names one.


class TierConfig(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One secondary tier, written flat: every key without a field here is one of the backend's own options."""

    rest: ClassVar[str | None] = "options"
    meant: ClassVar[Mapping[str, str]] = {"backend": "'type'"}

    @classmethod
    def known_rest(cls) -> Iterable[str]:
        """Return the options of every built-in type, for suggestions."""
        for type_name in BUILT_IN_TYPES:
            with suppress(ConfigError):  # A dependency is not installed.
                yield from struct_fields(backend_class(type_name).options_type)

    type: Text
    """`"fs"`, `"redis"`, `"object"`, `"mooncake"`, `"dummy"`, an entry point in the group `kvtier.backends`, or
    `"module:Class"`; the module may be next to the configuration file."""

    name: str = ""  # Name in metrics, events and messages; empty: `"<index>:<type>"`.
    limits: TierLimits = TierLimits()  # The tier's limits.
    cascade: Literal["store", "evict", "second_use"] = "store"
    """When a chunk is written to the tier: `store`: when it is stored; `evict`: when it leaves the primary;
    `second_use`: when it is used for the second time."""

    medium: Literal["CPU", "STORAGE"] | None = None  # For requests that choose tiers; unset matches any choice.
    locality: Literal["LOCAL", "REMOTE"] | None = None  # For the same requests; unset: as the tier's type declares.
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Of builtin types, as they were given; `tier_options` decodes them."""


class EngineConfig(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole kvtier engine. The names are vLLM's own where the meaning is the same."""

    facts: ClassVar[frozenset[str]] = frozenset({"chunk_tokens"})
    meant: ClassVar[Mapping[str, str]] = {
        "tiers": "'secondary_tiers'",
        "primary": "'cpu_bytes_to_use'",
        **dict.fromkeys(("block_size", "blocks_per_chunk"), "'chunk_bytes'"),
        **dict.fromkeys(("cpu_bytes", "memory", "num_cpu_blocks"), "'cpu_bytes_to_use'"),
        "kv_connector_extra_config": "the fields in it, at the top level",
    }

    cpu_bytes_to_use: PositiveSize  # Memory of the primary, for all workers together; it holds as many rows as fit.
    chunk_bytes: PositiveSize  # Size of a chunk, of all workers together; a row is padded to 4,096 bytes.
    eviction_policy: Text = "lru"  # Which chunk leaves a full primary; a policy by name, or `"module:Class"`.
    secondary_tiers: tuple[TierConfig, ...] = ()  # The tiers, in the order in which they are asked.
    runner: Literal["inline", "process"] | None = None
    """Where transfers run: on the caller's event loop, or in a separate process, which a `mooncake` tier needs. Unset:
    inline for an asyncio program, a process for an engine that steps."""

    namespace: Namespace = Namespace(model_name="default")  # The meaning of a chunk's bytes.
    limits: EngineLimits = EngineLimits()  # The engine's limits.
    events: bool = False  # Report stored, removed and failed chunks.
    prefill_tokens_per_s: TokensPerSecond | None = None
    """Prompt tokens that the LLM engine computes in a second. Unset: learned from `note_prefill`; every hit is loaded
    until then."""

    chunk_tokens: Count | None = None  # Tokens whose KV a chunk holds; None: as the namespace says.
    late_margin: LateMargin = 1.5
    """How long a load may take, as a multiple of the time to compute the same tokens; then the request computes."""

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], where: str = "") -> Self:
        """Make a configuration of a mapping, as strictly as of a file; `where` begins the path in messages.

        Tiers' own options are checked by their backends, which this imports. Raises
        `ConfigError("<path>: <what was given>, <what is> accepted")`.
        """
        config = decode(cls, mapping, where)
        _check(config, where)
        return config

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "EngineConfig":
        """Read a configuration from a `.toml` or `.json` file; `ConfigError` names the file and the place in it.

        `type` and `eviction_policy` may name a class of a module beside the file, as `module:Class`.
        """
        config = read_config(path)
        with _named_in_errors(path):
            _check(config)
        return config

    def __post_init__(self) -> None:
        """Check rules between fields; name the tiers, and set the namespace's row length."""
        super().__post_init__()
        if not 1 <= self.rows <= ROWS_MAX:
            raise ConfigError(
                f"cpu_bytes_to_use: {self.cpu_bytes_to_use:,} bytes given, which hold {self.rows:,} rows of "
                f"{self.row_bytes:,}; at least 1 row and at most {ROWS_MAX:,} accepted"
            )
        if self.namespace.row_bytes not in (None, self.row_bytes):
            raise ConfigError(
                f"namespace.row_bytes: {self.namespace.row_bytes:,} given, but chunk_bytes makes rows of "
                f"{self.row_bytes:,}"
            )
        force_setattr(self, "namespace", replace(self.namespace, row_bytes=self.row_bytes))
        force_setattr(self, "secondary_tiers", _named(self.secondary_tiers))
        for index, tier in enumerate(self.secondary_tiers):
            for field in ("load_bytes_in_flight", "store_bytes_in_flight"):
                if getattr(tier.limits, field) < self.row_bytes:
                    raise ConfigError(
                        f"secondary_tiers[{index}].limits.{field}: {getattr(tier.limits, field):,} bytes given, at "
                        f"least one row of {self.row_bytes:,} accepted: nothing could ever move"
                    )

    @property
    def row_bytes(self) -> int:
        """Length of a row: a chunk, padded so that it can be read and written directly."""
        return -(-self.chunk_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def tokens_per_chunk(self) -> int:
        return self.chunk_tokens or self.namespace.tokens_per_hash * self.namespace.blocks_per_chunk

    @property
    def rows(self) -> int:
        return self.cpu_bytes_to_use // self.row_bytes


def read_config(path: str | os.PathLike[str]) -> EngineConfig:
    """Read a configuration as `load` does, whose tiers' own options may be incomplete: they are not checked."""
    with _named_in_errors(path):
        config = decode(EngineConfig, read_tables(path))
        _find_modules_beside(config, path)
        return config


def tier_options(tier: TierConfig, where: str) -> msgspec.Struct:
    """Decode a tier's own options against its backend, which this imports. `where` is the tier's path."""
    try:
        options = backend_class(tier.type).options_type
    except ConfigError as error:
        raise ConfigError(f"{where}.type: {error}") from error
    common = option_fields(TierConfig).keys()
    for name in _paths(options).intersection(tier.options):
        if (place := re.search(r"\{[A-Za-z_]\w*\}", str(tier.options[name]))) is not None:
            accepted = " and ".join(f"{{{each}}}" for each in PLACES)
            given = "a place" if is_secret(struct_fields(options)[name].type) else repr(place[0])
            raise ConfigError(f"{where}.{name}: {given} given in a path, {accepted} accepted, inside vLLM alone")
    if taken := sorted(common & struct_fields(options).keys()):
        raise ConfigError(f"{where}.type: {tier.type!r} has options named like fields of every tier: {taken}")
    places = partial(struct_paths, EngineConfig, where.rpartition("secondary_tiers")[0].rstrip("."))
    return decode(options, tier.options, where, siblings=common, places=places)


def tier_fields(options: msgspec.Struct) -> Collection[str]:
    """Return the fields that a tier with these options of its own may have."""
    return option_fields(TierConfig).keys() | struct_fields(type(options)).keys()


def placed(tier: TierConfig, places: Mapping[str, str]) -> TierConfig:
    """Return the tier with `{name}` in its paths replaced by the place of this name; `tier_options` refuses others."""
    options = dict(tier.options)
    try:
        paths = _paths(backend_class(tier.type).options_type)
    except ConfigError:
        return tier  # `tier_options` says at which path.
    for name in paths.intersection(options):
        for place, value in places.items():
            if isinstance(given := options[name], str):
                options[name] = given.replace(f"{{{place}}}", value)
    return replace(tier, options=options)


def _paths(options: type[msgspec.Struct]) -> set[str]:
    return {name for name, field in struct_fields(options).items() if names_a_path(field.type)}


def settled(config: EngineConfig, where: str = "") -> EngineConfig:
    """Fill in the tiers' defaults, for runners that start later: absolute paths, the backends' own localities.

    Raises `ConfigError` as `tier_options` does, and for a runner in which a tier's client must not run.
    """
    top = f"{where}." if where else ""
    tiers = enumerate(config.secondary_tiers)
    return replace(config, secondary_tiers=tuple(_settled(tier, index, config.runner, top) for index, tier in tiers))


def _settled(tier: TierConfig, index: int, runner: str | None, top: str) -> TierConfig:
    options = tier_options(tier, f"{top}secondary_tiers[{index}]")
    needed = backend_class(tier.type).runner
    if None not in (needed, runner) and needed != runner:
        raise ConfigError(
            f"{top}runner: {runner!r} given, {needed!r} accepted with secondary_tiers[{index}] of type {tier.type!r}: "
            "its client may crash, or write into memory that it was lent, and needs a separate process"
        )
    fields = struct_fields(type(options))
    own = {name: getattr(options, fields[name].name) for name in _paths(type(options)).intersection(tier.options)}
    return replace(tier, options=tier.options | own, locality=tier.locality or backend_class(tier.type).locality)


def _check(config: EngineConfig, where: str = "") -> None:
    """Raise `ConfigError` for an unknown policy, and as `settled` does."""
    try:
        require_policy(config.eviction_policy)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}" if where else str(error)) from error
    settled(config, where)


def _find_modules_beside(config: EngineConfig, path: str | os.PathLike[str]) -> None:
    """Let `module:Class` name a module in the file's directory, unless another one has this name."""
    folder = os.path.dirname(os.path.abspath(path))
    names = [config.eviction_policy, *(tier.type for tier in config.secondary_tiers)]
    if any(":" in name for name in names) and folder not in sys.path:
        sys.path.append(folder)  # The runner's process gets it, too.


@contextmanager
def _named_in_errors(path: str | os.PathLike[str]) -> Generator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from error


def read_tables(path: str | os.PathLike[str]) -> object:
    """Read a `.toml` or `.json` file as untyped data. Raises `ConfigError`, without the file's name."""
    name = os.fspath(path)
    if not name.endswith((".toml", ".json")):
        raise ConfigError("the file's name ends neither in .toml nor in .json")
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read()
        return read_toml(text) if name.endswith(".toml") else read_json(text)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 at byte {error.start:,}") from error
    except ValueError as error:  # Both parsers say at which line.
        raise ConfigError(f"is malformed: {error}") from error


def read_json(text: str) -> object:
    """Decode JSON in which no name is given twice. Raises `ValueError`."""
    return foreign(partial(json.loads, object_pairs_hook=_without_repeats), text)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"given twice: {', '.join(sorted({key for key in keys if keys.count(key) > 1}))}")
    return table


def _named(tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
    """Give every tier a unique name."""
    named = tuple(tier if tier.name else replace(tier, name=f"{index}:{tier.type}") for index, tier in enumerate(tiers))
    names = [PRIMARY_NAME, *(tier.name for tier in named)]
    for index, tier in enumerate(named):
        if tier.name in names[: index + 1]:
            raise ConfigError(f"secondary_tiers[{index}].name: {tier.name!r} given, a unique name accepted")
    return named
