"""Statistics: what an engine has counted, and what it holds, at one moment.

They are for programs; `metrics` is for Prometheus.
"""

import msgspec

from kvtier.engine.ledger import Ledger
from kvtier.engine.tier import Tier


class PrimaryStats(msgspec.Struct, frozen=True, kw_only=True):
    """The primary: chunks counted since the start, and its rows now."""

    hits: int  # Loaded from where they lay in the primary.
    misses: int  # Looked up and found nowhere, once a request and chunk.
    stores: int  # Stored by the engine.
    stores_refused: int  # Offered when there was no room.
    promotions_refused: int  # Had by a tier, but there was no row for them.
    evictions: int
    rows_ready: int  # Each holds a chunk that can be loaded.
    rows_filling: int  # Reserved for a store or a promotion.
    rows_free: int
    rows_quarantined: int  # Lent to transfers that hung.
    rows_leased: int  # Kept for requests that wait.
    rows_in_use: int  # Given to the engine to read or write, and not yet given back.


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One secondary tier: chunks counted since the start unless a name says otherwise, and what it holds now."""

    name: str
    hits: int  # Loaded by the request whose look-up promoted them from here.
    misses: int  # Looked up here and not had, once a request and chunk.
    promoted: int  # Sent for.
    loaded: int  # Came.
    stored: int  # The tier said so.
    dropped: dict[str, int]  # Never sent to it, by reason.
    failed: dict[str, int]  # Did not move, by reason.
    transfers_failed: int  # By the tier's fault.
    probes_failed: int  # Questions that it did not answer.
    causes: dict[str, int]  # Calls of which something failed, by what lay behind it.
    loading: int  # On their way.
    storing: int  # Queued, or on their way.
    chunks: int  # Held, as far as the tier has said.
    used_bytes: int
    reserved_bytes: int  # Promised to stores under way.
    capacity_bytes: int | None
    breaker: str  # Its state.


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A whole engine."""

    primary: PrimaryStats
    tiers: tuple[TierStats, ...]  # In the configuration's order.
    runners_lost: int  # Ended, or were killed, before they were closed.
    events_dropped: int  # Lost because nobody took them.


def primary_stats(ledger: Ledger) -> PrimaryStats:
    counters, primary = ledger.counters, ledger.primary
    return PrimaryStats(
        hits=counters.hits,
        misses=counters.misses,
        stores=counters.stores,
        stores_refused=counters.stores_refused,
        promotions_refused=counters.promotions_refused,
        evictions=primary.evictions,
        rows_ready=len(primary.ready),
        rows_filling=len(primary.filling),
        rows_free=primary.rows_free,
        rows_quarantined=len(primary.quarantined),
        rows_leased=ledger.leases.rows,
        rows_in_use=ledger.rows_in_use,
    )


def tier_stats(tier: Tier) -> TierStats:
    counters = tier.counters
    return TierStats(
        name=tier.spec.name,
        hits=counters.hits,
        misses=counters.misses,
        promoted=counters.promoted,
        loaded=counters.loaded,
        stored=counters.stored,
        dropped=dict(counters.dropped),
        failed=dict(counters.failures),
        transfers_failed=counters.transfers_failed,
        probes_failed=counters.probes_failed,
        causes=dict(counters.causes),
        loading=tier.loading,
        storing=len(tier.storing),
        chunks=tier.chunks,
        used_bytes=tier.used_bytes,
        reserved_bytes=tier.reserved_bytes,
        capacity_bytes=tier.capacity_bytes,
        breaker=tier.breaker.state.value,
    )
