"""Events and facts in vLLM's words: what was stored and removed, and where; the labels that never change."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier import __version__
from kvtier.backend import FileMapper, OffloadKey
from kvtier.config import PRIMARY_NAME, EngineConfig
from kvtier.engine.answers import Event, EventKind
from kvtier.engine.tier import Tier, TierSpec

_TELLS_WHAT_DID_NOT_COME = "metadata_only" in {field.name for field in fields(OffloadingEvent)}  # From vLLM 0.33 on.
_SOURCES = {Medium.CPU: CacheHitSource.HOST, Medium.STORAGE: CacheHitSource.DISK}

INFO_KEYS = ("tier", "type", "kvtier_version", "eviction_policy", "rows", "row_bytes", "namespace", "sharing")
"""The labels of vLLM's info metric (`vllm:kv_offload_config_info`)."""


class Media:
    """The tiers' media and localities, as vLLM names them."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = {tier.spec.name: tier for tier in tiers}

    def source(self, tier: TierSpec | None) -> CacheHitSource:
        """Return the source of a hit: the primary if no tier is given."""
        return _SOURCES[Medium.CPU if tier is None else self.medium(tier)]

    def medium(self, tier: TierSpec) -> Medium:
        return Medium.STORAGE if tier.medium is None else Medium(tier.medium)

    def locality(self, tier: TierSpec) -> Locality | None:
        return None if tier.locality is None else Locality(tier.locality)

    def event(self, event: Event) -> OffloadingEvent:
        """Translate a stored or removed event."""
        removed = event.kind is EventKind.REMOVED
        if event.tier == PRIMARY_NAME:
            return OffloadingEvent(list(event.keys), Medium.CPU, removed)
        tier = self._tiers[event.tier]
        return OffloadingEvent(
            list(event.keys),
            self.medium(tier.spec),
            removed,
            locality=self.locality(tier.spec),
            ownership=event.tier,
            removal_expected=tier.reports,  # Otherwise vLLM would keep the chunk's description for ever.
        )


def offloading_events(
    events: Iterable[Event], media: Media, *, absent: Callable[[OffloadKey], bool] | None = None
) -> Iterator[OffloadingEvent]:
    """Translate events.

    A failure is passed on for the chunks that are still `absent` from the primary: vLLM keeps a description of each
    chunk whose load it asked for. For other chunks nothing that was announced became untrue.
    """
    for event in events:
        if event.kind is not EventKind.FAILED:
            yield media.event(event)
        elif _TELLS_WHAT_DID_NOT_COME and absent is not None and (keys := list(filter(absent, event.keys))):
            # pyright reads vLLM 0.32, which does not know the field.
            yield OffloadingEvent(keys, Medium.CPU, True, metadata_only=True)  # pyright: ignore[reportCallIssue]


def config_info(config: EngineConfig) -> list[dict[str, str | int]]:
    """Return the labels of the primary and of each tier behind it; labels that do not apply are left out."""
    mapper = FileMapper(config.namespace)
    common: dict[str, str | int] = {
        "kvtier_version": __version__,
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
