"""What happened to chunks, in vLLM's words: stored and removed, with medium, locality and the tier that says so."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.config import PRIMARY_NAME
from kvtier.events import Event, EventKind
from kvtier.keys import OffloadKey
from kvtier.tier import Tier, TierSpec

_TELLS_WHAT_DID_NOT_COME = "metadata_only" in {field.name for field in fields(OffloadingEvent)}  # From vLLM 0.33 on.
_SOURCES = {Medium.CPU: CacheHitSource.HOST, Medium.STORAGE: CacheHitSource.DISK}


class Media:
    """The tiers' media and localities, as vLLM names them."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = {tier.spec.name: tier for tier in tiers}

    def source(self, tier: TierSpec | None) -> CacheHitSource:
        """Say where a hit came from: the primary if no tier is given."""
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
            removal_expected=tier.reports,  # Else vLLM would keep the chunk's description for ever.
        )


def offloading_events(
    events: Iterable[Event], media: Media, *, absent: Callable[[OffloadKey], bool] | None = None
) -> Iterator[OffloadingEvent]:
    """Translate events.

    Of failures vLLM hears which chunks are still `absent` from the primary: it keeps a description of each that it has
    sent for. The rest stays kvtier's own, since nothing that was announced became untrue.
    """
    for event in events:
        if event.kind is not EventKind.FAILED:
            yield media.event(event)
        elif _TELLS_WHAT_DID_NOT_COME and absent is not None and (keys := list(filter(absent, event.keys))):
            yield OffloadingEvent(keys, Medium.CPU, True, metadata_only=True)
