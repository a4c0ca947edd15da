"""What the engine counts, through vLLM's own stats: the same names as in kvtier's registry, on vLLM's `/metrics`.

vLLM carries observations, not totals: counters leave as what was added since the last call, gauges when they change.
It asks once a step, so that nothing here may cost more than some dozen comparisons.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.integrations.vllm.tier_client import TierClient
from kvtier.limits import BreakerState
from kvtier.manager import TieringOffloadingManager
from kvtier.metrics import PRIMARY_COUNTERS, SECONDS, TIER_COUNTERS
from kvtier.tier import Tier

Labels = tuple[str, ...]


class Reading(NamedTuple):
    """One number of the engine's, now."""

    name: str
    labels: Labels
    value: float


_COUNTERS: dict[str, tuple[str, Labels]] = {
    **{f"kvtier_primary_{name}": (text, ()) for name, text in PRIMARY_COUNTERS.items()},
    "kvtier_primary_evictions": ("Chunks evicted for room.", ()),
    "kvtier_runners_lost": ("Runners that ended too early.", ()),
    "kvtier_events_dropped": ("Events that nobody took in time.", ()),
    **{f"kvtier_tier_{name}": (text, ("tier",)) for name, text in TIER_COUNTERS.items()},
    "kvtier_tier_breaker_opened": ("How often the breaker opened.", ("tier",)),
    "kvtier_tier_bytes": ("Bytes moved.", ("tier", "operation")),
    "kvtier_tier_dropped": ("Chunks that were never sent to the tier.", ("tier", "reason")),
    "kvtier_tier_failed": ("Chunks that did not move.", ("tier", "reason")),
    "kvtier_tier_noted": ("What the tier itself has counted.", ("tier", "what")),
}
_GAUGES: dict[str, tuple[str, Labels]] = {
    "kvtier_primary_rows": ("Rows by state.", ("state",)),
    "kvtier_primary_row_bytes": ("Length of a row.", ()),
    "kvtier_tier_loading": ("Chunks being loaded.", ("tier",)),
    "kvtier_tier_storing": ("Chunks queued or being stored.", ("tier",)),
    "kvtier_tier_chunks": ("Chunks held.", ("tier",)),
    "kvtier_tier_used_bytes": ("Bytes held.", ("tier",)),
    "kvtier_tier_capacity_bytes": ("Bytes that may be held.", ("tier",)),
    "kvtier_tier_reserved_bytes": ("Bytes promised.", ("tier",)),
    "kvtier_tier_breaker": ("1 for the breaker's state.", ("tier", "state")),
}
_TRANSFER_SECONDS = "kvtier_transfer_seconds"


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare every metric that `Stats` may report; needs no engine."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for name, (text, labels) in _COUNTERS.items():
        definitions[name] = OffloadingCounterMetadata(documentation=text, labelnames=labels)
    for name, (text, labels) in _GAUGES.items():
        definitions[name] = OffloadingGaugeMetadata(documentation=text, labelnames=labels)
    definitions[_TRANSFER_SECONDS] = OffloadingHistogramMetadata(
        documentation="From an action's arrival at the runner to its outcome.",
        labelnames=("tier", "operation"),
        buckets=SECONDS,
    )
    return definitions


def tier_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare what one tier behind vLLM's own manager reports: of hits, in kvtier's sense, only vLLM knows there."""
    left_out = {"kvtier_tier_hits"}
    of_runner = {"kvtier_runners_lost", "kvtier_events_dropped"}
    return {
        name: each
        for name, each in metric_definitions().items()
        if name in of_runner or ("tier" in each.labelnames and name not in left_out)
    }


class TransferTimes:
    """The durations of transfers since the last `take`; `observe` is an engine's observer."""

    def __init__(self) -> None:
        self._seconds: list[tuple[Labels, float]] = []

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        self._seconds.append(((tier, operation), seconds))

    def take(self) -> list[tuple[Labels, float]]:
        taken, self._seconds = self._seconds, []
        return taken


class Stats:
    """Observations since the last `take`, of what the two readers read."""

    def __init__(
        self, counters: Callable[[], Iterator[Reading]], gauges: Callable[[], Iterator[Reading]], times: TransferTimes
    ) -> None:
        self._counters = counters
        self._gauges = gauges
        self._times = times
        self._last: dict[tuple[str, Labels], float] = {}

    def take(self) -> OffloadingConnectorStats | None:
        """Return what has changed; None if nothing has."""
        stats = OffloadingConnectorStats()
        for name, labels, value in self._counters():
            added = value - self._last.get((name, labels), 0)
            if added:
                self._last[name, labels] = value
                stats.increase_counter(name, added, labels)
        for name, labels, value in self._gauges():
            if self._last.get((name, labels)) != value:
                self._last[name, labels] = value
                stats.set_gauge(name, value, labels)
        for labels, seconds in self._times.take():
            stats.observe_histogram(_TRANSFER_SECONDS, seconds, labels)
        return None if stats.is_empty() else stats


def engine_counters(engine: TieringOffloadingManager) -> Iterator[Reading]:
    ledger = engine.ledger
    for name in PRIMARY_COUNTERS:
        yield Reading(f"kvtier_primary_{name}", (), getattr(ledger.counters, name))
    yield Reading("kvtier_primary_evictions", (), ledger.primary.evictions)
    yield Reading("kvtier_runners_lost", (), engine.runners_lost)
    yield Reading("kvtier_events_dropped", (), engine.events_dropped)
    for tier in ledger.tiers:
        yield from tier_counters(tier, engine.config.row_bytes)


def client_counters(client: TierClient, row_bytes: int) -> Iterator[Reading]:
    yield Reading("kvtier_runners_lost", (), client.runners_lost)
    yield Reading("kvtier_events_dropped", (), client.events_dropped)
    yield from tier_counters(client.tier, row_bytes)


def tier_counters(tier: Tier, row_bytes: int) -> Iterator[Reading]:
    label, counters = tier.spec.name, tier.counters
    for name in TIER_COUNTERS:
        yield Reading(f"kvtier_tier_{name}", (label,), getattr(counters, name))
    yield Reading("kvtier_tier_bytes", (label, "load"), counters.loaded * row_bytes)
    yield Reading("kvtier_tier_bytes", (label, "store"), counters.stored * row_bytes)
    yield Reading("kvtier_tier_breaker_opened", (label,), tier.breaker.opened)
    for what, times in counters.noted.items():
        yield Reading("kvtier_tier_noted", (label, what), times)
    for reason, chunks in counters.dropped.items():
        yield Reading("kvtier_tier_dropped", (label, reason), chunks)
    for reason, chunks in counters.failures.items():
        yield Reading("kvtier_tier_failed", (label, reason), chunks)


def engine_gauges(engine: TieringOffloadingManager) -> Iterator[Reading]:
    ledger, primary = engine.ledger, engine.ledger.primary
    rows = {
        "ready": len(primary.ready),
        "filling": len(primary.filling),
        "free": primary.rows_free,
        "quarantined": len(primary.quarantined),
        "leased": ledger.leases.rows,
        "cascading": len(ledger.transfers.cascade_rows),
    }
    for state, count in rows.items():
        yield Reading("kvtier_primary_rows", (state,), count)
    yield Reading("kvtier_primary_row_bytes", (), engine.config.row_bytes)
    for tier in ledger.tiers:
        yield from tier_gauges(tier)


def tier_gauges(tier: Tier) -> Iterator[Reading]:
    label = (tier.spec.name,)
    yield Reading("kvtier_tier_loading", label, tier.loading)
    yield Reading("kvtier_tier_storing", label, len(tier.storing))
    yield Reading("kvtier_tier_chunks", label, tier.chunks)
    yield Reading("kvtier_tier_used_bytes", label, tier.used_bytes)
    yield Reading("kvtier_tier_reserved_bytes", label, tier.reserved_bytes)
    if tier.capacity_bytes is not None:
        yield Reading("kvtier_tier_capacity_bytes", label, tier.capacity_bytes)
    for state in BreakerState:
        yield Reading("kvtier_tier_breaker", (*label, state.value), float(tier.breaker.state is state))
