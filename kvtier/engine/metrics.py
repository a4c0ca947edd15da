"""Metrics, for Prometheus, and statistics, for programs: what a kvtier engine has counted, and what it holds now.

Both are read from the ledger when they are asked for, so that counting costs a step nothing. Only latencies are
observed as they happen, once a transfer, and waits, once a request.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter

import msgspec
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvtier import __version__
from kvtier.engine.answers import EventLog
from kvtier.engine.ledger import Ledger
from kvtier.engine.primary import Primary
from kvtier.engine.tier import BreakerState, Tier

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

TIER_COUNTERS = {
    "hits": "Chunks loaded by the request whose look-up promoted them from this tier.",
    "misses": "Chunks looked up in this tier and not had, once a request and chunk.",
    "promoted": "Chunks sent for.",
    "loaded": "Chunks that came.",
    "stored": "Chunks that the tier said were stored.",
    "transfers_failed": "Transfers that failed by the tier's fault.",
    "probes_failed": "Questions about chunks that the tier did not answer.",
    "declined": "Chunks that were not sent for, because computing them was expected to be faster.",
    "declined_requests": "Requests of which chunks were declined.",
    "declined_seconds": "Seconds that the declined loads were expected to take.",
    "explored": "Chunks sent for to see how fast the tier is, for which nobody waits.",
    "given_up": "Requests that computed because a load was late.",
    "expected_seconds": "Seconds that the loads which came were expected to take.",
    "loaded_seconds": "Seconds that these loads took.",
}
SKIPPED_HELP = "Chunks that were not to be written to the tier, or not any more."
CAUSES_HELP = "Calls of which something failed, by what lay behind it."
PRIMARY_COUNTERS = {
    "hits": "Chunks loaded from where they lay in the primary.",
    "misses": "Chunks looked up and found nowhere, once a request and chunk.",
    "stores": "Chunks stored by the LLM engine.",
    "stores_refused": "Chunks offered when there was no room.",
    "promotions_refused": "Chunks that a tier had, for which there was no row.",
    "rows_kept": "Rows that something still read when their fetch was over.",
}
RETENTIONS_CUT_HELP = "Chunks that hints were to retain and did not, or not for all their time."
SAVED_HELP = "Seconds that computing what was loaded would have taken, while the prefill speed was known."
WAIT_HELP = "For how long a request waited for loads, from the first step that found one on its way."
HINTS_IGNORED_HELP = "Hints, or parts of them, that could not be heeded."
BUILD_HELP = "1; what runs is in the labels."
BUILD_LABELS = ("version", "python", "vllm")
ROWS_HELP = "Rows by state: each row is in exactly one."
ROW_STATES: dict[str, Callable[[Primary], int]] = {
    "ready": lambda primary: len(primary.ready),
    "filling": lambda primary: len(primary.filling),
    "free": lambda primary: primary.rows_free,
    "quarantined": lambda primary: primary.rows_quarantined,
}
HELD_HELP = "Rows that stay for a reason when room is made; a row may have several."
HELD_REASONS: dict[str, Callable[[Ledger], int]] = {
    "leased": lambda ledger: ledger.leases.rows,
    "cascading": lambda ledger: len(ledger.transfers.cascade_rows),
    "kept": lambda ledger: len(ledger.kept),
    "retained": lambda ledger: ledger.primary.retained,
}
PREFILL_HELP = "Tokens of prompts that the LLM engine computes in a second, where that is known."
RUNNER_UP_HELP = "1 while there is a runner that takes work, else 0."
PRIMARY_GAUGES: dict[str, tuple[str, Callable[[Primary, int], int]]] = {
    "rows_evictable": ("Ready rows that nothing holds.", lambda primary, _: primary.rows_evictable),
    "row_bytes": ("Length of a row.", lambda _, row_bytes: row_bytes),
    "capacity_bytes": ("Bytes of all rows.", lambda primary, row_bytes: primary.rows * row_bytes),
    "used_bytes": (
        "Bytes of the rows that are not free.",
        lambda primary, row_bytes: (primary.rows - primary.rows_free) * row_bytes,
    ),
}
"""Without labels; each is read from the primary and the length of a row."""


class PrimaryStats(msgspec.Struct, frozen=True, kw_only=True):
    """The primary: chunks counted since the start, and its rows now."""

    hits: int  # Loaded from where they lay in the primary.
    misses: int  # Looked up and found nowhere, once a request and chunk.
    stores: int  # Stored by the LLM engine.
    stores_refused: int  # Offered when there was no room.
    promotions_refused: int  # Had by a tier, but there was no row for them.
    evictions: int
    rows_ready: int  # Each holds a chunk that can be loaded.
    rows_filling: int  # Reserved for a store or a promotion.
    rows_free: int
    rows_quarantined: int  # Lent to transfers that hung; with the three above, all rows.
    rows_evictable: int  # Of the ready ones: nothing holds them.
    rows_leased: int  # Kept for requests that wait.
    rows_retained: int  # Passed over for hints when room is made.
    retentions_cut: int  # Chunks that were to be retained and were not, or not for all their time.
    rows_in_use: int  # Given to the LLM engine to read or write, and not yet given back.
    saved_s: float  # That computing what was loaded would have taken, while the prefill speed was known.


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One secondary tier: chunks counted since the start unless a name says otherwise, and what it holds now."""

    name: str
    hits: int  # Loaded by the request whose look-up promoted them from here.
    misses: int  # Looked up here and not had, once a request and chunk.
    promoted: int  # Sent for.
    loaded: int  # Came.
    stored: int  # The tier said so.
    dropped: dict[str, int]  # Never sent to it, by reason.
    skipped: dict[str, int]  # Not to be sent to it, or not any more, by reason.
    failed: dict[str, int]  # Did not move, by reason.
    transfers_failed: int  # By the tier's fault.
    probes_failed: int  # Questions that it did not answer.
    causes: dict[str, int]  # Calls of which something failed, by what lay behind it.
    declined: int  # Not sent for: computing them was expected to be faster.
    declined_requests: int  # Of which chunks were declined.
    declined_seconds: float  # That the declined loads were expected to take.
    explored: int  # Sent for to see how fast the tier is; nobody waited for them.
    given_up: int  # Requests that computed because a load was late.
    expected_seconds: float  # That the loads which came were expected to take, where anything was expected.
    loaded_seconds: float  # That these took.
    loading: int  # On their way.
    storing: int  # Queued, or on their way.
    chunks: int  # Held, as far as the tier has said.
    used_bytes: int
    reserved_bytes: int  # Promised to stores under way.
    capacity_bytes: int | None
    breaker: str  # Its state.


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A whole kvtier engine."""

    primary: PrimaryStats
    tiers: tuple[TierStats, ...]  # In the configuration's order.
    runners_lost: int  # Ended, or were killed, before they were closed.
    events_dropped: int  # Lost because nobody took them.
    hints_ignored: dict[str, int]  # Hints, or parts of them, by reason.


class Metrics(Collector):
    """A kvtier engine's metrics in a registry of its own; several of one process do not collide."""

    def __init__(self, ledger: Ledger, row_bytes: int, events: EventLog | None = None) -> None:
        self.registry = CollectorRegistry()
        self.runners_lost = 0  # Counted by the manager: the ledger also settles a runner that was closed as it should.
        self._ledger = ledger
        self._row_bytes = row_bytes
        self._events = events or EventLog()
        latency = Histogram(
            "kvtier_transfer_seconds",
            "From an action's arrival at the runner to its outcome.",
            ("tier", "operation"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._waits = Histogram("kvtier_load_wait_seconds", WAIT_HELP, buckets=SECONDS, registry=self.registry)
        self._latency = {
            (tier.spec.name, operation): latency.labels(tier.spec.name, operation)
            for tier in ledger.tiers
            for operation in ("load", "store", "probe", "delete")
        }
        self.registry.register(self)

    def stats(self) -> EngineStats:
        return EngineStats(
            primary=_primary_stats(self._ledger),
            tiers=tuple(map(_tier_stats, self._ledger.tiers)),
            runners_lost=self.runners_lost,
            events_dropped=self._events.dropped,
            hints_ignored=dict(self._ledger.hints_ignored.counts),
        )

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        self._latency[tier, operation].observe(seconds)

    def observe_wait(self, seconds: float) -> None:
        self._waits.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._primary()
        yield from self._tiers()

    def _engine(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("kvtier_build_info", BUILD_HELP, labels=BUILD_LABELS)
        build.add_metric(build_values(), 1)
        yield build
        yield GaugeMetricFamily("kvtier_runner_up", RUNNER_UP_HELP, float(self._ledger.runner_up))
        prefill = GaugeMetricFamily("kvtier_prefill_tokens_per_second", PREFILL_HELP)
        if (speed := self._ledger.prefill.tokens_per_s) is not None:
            prefill.add_metric((), speed)
        yield prefill
        yield CounterMetricFamily("kvtier_computing_saved_seconds", SAVED_HELP, self._ledger.counters.saved_s)

    def _primary(self) -> Iterator[Metric]:
        ledger, primary = self._ledger, self._ledger.primary
        for name, help_text in PRIMARY_COUNTERS.items():
            yield CounterMetricFamily(f"kvtier_primary_{name}", help_text, getattr(ledger.counters, name))
        yield CounterMetricFamily("kvtier_primary_evictions", "Chunks evicted for room.", primary.evictions)
        yield CounterMetricFamily("kvtier_runners_lost", "Runners that ended too early.", self.runners_lost)
        yield CounterMetricFamily("kvtier_events_dropped", "Events that nobody took in time.", self._events.dropped)
        yield CounterMetricFamily("kvtier_primary_retentions_cut", RETENTIONS_CUT_HELP, primary.retentions_cut)
        ignored = CounterMetricFamily("kvtier_hints_ignored", HINTS_IGNORED_HELP, labels=("reason",))
        for reason, times in ledger.hints_ignored.counts.items():
            ignored.add_metric((reason,), times)
        yield ignored
        rows = GaugeMetricFamily("kvtier_primary_rows", ROWS_HELP, labels=("state",))
        for state, count in ROW_STATES.items():
            rows.add_metric((state,), count(primary))
        yield rows
        held = GaugeMetricFamily("kvtier_primary_rows_held", HELD_HELP, labels=("reason",))
        for reason, count_held in HELD_REASONS.items():
            held.add_metric((reason,), count_held(ledger))
        yield held
        for name, (help_text, read) in PRIMARY_GAUGES.items():
            yield GaugeMetricFamily(f"kvtier_primary_{name}", help_text, read(primary, self._row_bytes))

    def _tiers(self) -> Iterator[Metric]:
        for name, help_text in TIER_COUNTERS.items():
            yield self._each(CounterMetricFamily, name, help_text, attrgetter(f"counters.{name}"))
        gauge = partial(self._each, GaugeMetricFamily)
        yield gauge("loading", "Chunks being loaded.", lambda tier: tier.loading)
        yield gauge("storing", "Chunks queued or being stored.", lambda tier: len(tier.storing))
        yield gauge("chunks", "Chunks held.", lambda tier: tier.chunks)
        yield gauge("used_bytes", "Bytes held.", lambda tier: tier.used_bytes)
        yield gauge("reserved_bytes", "Bytes promised.", lambda tier: tier.reserved_bytes)
        yield gauge("capacity_bytes", "Bytes that may be held.", lambda tier: tier.capacity_bytes)
        yield gauge("breaker", "1 for the breaker's state.", _breaker_states, "state")
        counter = partial(self._each, CounterMetricFamily)
        yield counter("breaker_opened", "How often the breaker opened.", lambda tier: tier.breaker.opened)
        yield counter("bytes", "Bytes moved.", self._bytes, "operation")
        yield counter(
            "dropped", "Chunks that were never sent to the tier.", lambda tier: tier.counters.dropped, "reason"
        )
        yield counter("skipped", SKIPPED_HELP, lambda tier: tier.counters.skipped, "reason")
        yield counter("failed", "Chunks that did not move.", lambda tier: tier.counters.failures, "reason")
        yield counter("causes", CAUSES_HELP, lambda tier: tier.counters.causes, "cause")
        yield counter("reported", "What the tier itself has counted.", lambda tier: tier.counters.reported, "what")

    def _bytes(self, tier: Tier) -> Mapping[str, float]:
        return {"load": tier.counters.loaded * self._row_bytes, "store": tier.counters.stored * self._row_bytes}

    def _each(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        help_text: str,
        of: Callable[[Tier], Mapping[str, float] | float | None],
        label: str | None = None,
    ) -> Metric:
        """Return a metric of every tier: one number, if there is one, or with a further `label` one for each value."""
        metric = family(f"kvtier_tier_{name}", help_text, labels=("tier",) if label is None else ("tier", label))
        for tier in self._ledger.tiers:
            numbers = of(tier)
            if isinstance(numbers, Mapping):
                for value, number in numbers.items():
                    metric.add_metric((tier.spec.name, value), number)
            elif numbers is not None:
                metric.add_metric((tier.spec.name,), numbers)
        return metric


def build_values(vllm: str = "") -> tuple[str, str, str]:
    """Return the labels' values of `kvtier_build_info`; `vllm` is its version, inside vLLM."""
    return __version__, platform.python_version(), vllm


def _breaker_states(tier: Tier) -> Mapping[str, float]:
    return {state.value: float(tier.breaker.state is state) for state in BreakerState}


def _primary_stats(ledger: Ledger) -> PrimaryStats:
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
        rows_quarantined=primary.rows_quarantined,
        rows_evictable=primary.rows_evictable,
        rows_leased=ledger.leases.rows,
        rows_retained=primary.retained,
        retentions_cut=primary.retentions_cut,
        rows_in_use=ledger.rows_in_use,
        saved_s=counters.saved_s,
    )


def _tier_stats(tier: Tier) -> TierStats:
    counters = tier.counters
    return TierStats(
        name=tier.spec.name,
        hits=counters.hits,
        misses=counters.misses,
        promoted=counters.promoted,
        loaded=counters.loaded,
        stored=counters.stored,
        dropped=dict(counters.dropped),
        skipped=dict(counters.skipped),
        failed=dict(counters.failures),
        transfers_failed=counters.transfers_failed,
        probes_failed=counters.probes_failed,
        causes=dict(counters.causes),
        declined=counters.declined,
        declined_requests=counters.declined_requests,
        declined_seconds=counters.declined_seconds,
        explored=counters.explored,
        given_up=counters.given_up,
        expected_seconds=counters.expected_seconds,
        loaded_seconds=counters.loaded_seconds,
        loading=tier.loading,
        storing=len(tier.storing),
        chunks=tier.chunks,
        used_bytes=tier.used_bytes,
        reserved_bytes=tier.reserved_bytes,
        capacity_bytes=tier.capacity_bytes,
        breaker=tier.breaker.state.value,
    )
