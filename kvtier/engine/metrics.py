"""Metrics for Prometheus, statistics for programs, and the log of tiers.

The metrics are the tables below, read from the ledger on request, so counting costs a step nothing. Only durations are
observed as they happen: once a transfer, and once a wait. The log compares the counters with those of its last line.
"""

import errno
import logging
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from kvtier.config import __version__
from kvtier.engine.ledger import Ledger
from kvtier.engine.primary import Primary
from kvtier.engine.tier import CLOSED, PRESSURE, BreakerState, Tier
from kvtier.errors import Remedy

Labels = tuple[str, ...]
Reading = float | dict[str, int] | dict[str, float] | dict[Labels, float] | None
"""One number, one for each value of a metric's labels, or None while there is none."""

LOOK_EVERY_S = 1.0  # Without messages: drops alone make none.
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

logger = logging.getLogger(__name__)


class Metric(NamedTuple):
    """One metric, and how to read it from its subject. Prometheus appends `_total` to a counter's name."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[Any], Reading]
    labels: Labels = ()  # The labels whose values are the keys of what `read` returns.


class MetricTable(NamedTuple):
    prefix: str  # Of their names.
    labels: Labels  # The labels that all of them have.
    metrics: tuple[Metric, ...]


class Durations(NamedTuple):
    name: str
    help: str
    labels: Labels


def _metric(
    kind: Literal["counter", "gauge"], name: str, about: str, read: str | Callable[[Any], Reading], *labels: str
) -> Metric:
    """Describe a metric; `read` is the path of an attribute of the subject, or what computes the reading."""
    return Metric(name, kind, about, attrgetter(read) if isinstance(read, str) else read, labels)


_counter, _gauge = partial(_metric, "counter"), partial(_metric, "gauge")


def _counted(name: str, about: str, *labels: str) -> Metric:
    return _counter(name, about, f"counters.{name}", *labels)


def row_states(primary: Primary) -> dict[str, int]:
    return {
        "ready": len(primary.ready),
        "filling": len(primary.filling),
        "free": primary.rows_free,
        "quarantined": primary.rows_quarantined,
    }


def _rows_held(ledger: Ledger) -> dict[str, int]:
    return {
        "leased": ledger.leases.rows,
        "cascading": len(ledger.traffic.cascade_rows),
        "kept": len(ledger.kept),
        "retained": ledger.primary.retained,
    }


def _breaker_states(tier: Tier) -> dict[str, float]:
    return {state.value: float(tier.breaker.state is state) for state in BreakerState}


def _bytes_moved(tier: Tier) -> dict[str, int]:
    row_bytes = tier.spec.row_bytes
    return {"load": tier.counters.loaded * row_bytes, "store": tier.counters.stored * row_bytes}


def _build(_: object) -> dict[Labels, float]:
    return {(__version__, platform.python_version(), getattr(sys.modules.get("vllm"), "__version__", "")): 1.0}


TRANSFER_SECONDS = Durations(
    "kvtier_transfer_seconds", "Time of a `load`, `store`, `probe` or `delete` at the runner.", ("tier", "operation")
)
WAIT_SECONDS = Durations(
    "kvtier_load_wait_seconds", "Time a request waited for loads, once for each wait; prefetches do not count.", ()
)
RUNNER_METRICS = MetricTable(
    "kvtier_",
    (),
    (
        _gauge("build_info", "Always 1; the labels are the versions.", _build, "version", "python", "vllm"),
        _gauge("runner_up", "1 while a runner takes work. Without one nothing is loaded or stored.", "runner_up"),
        _counter("runners_lost", "Runners that ended too early.", "runners_lost"),
        _counter("events_dropped", "Events dropped before they were taken: 65,536 are kept.", "events.dropped"),
        _counter("hints_ignored", "Hints, or parts of them, ignored.", "hints_ignored.counts", "reason"),
    ),
)
LEDGER_METRICS = MetricTable(
    "kvtier_",
    (),
    (
        _gauge("prefill_tokens_per_second", "Speed of computing prompts; absent if unknown.", "prefill.tokens_per_s"),
        _counter(
            "computing_saved_seconds", "Time to compute the loaded chunks; waits not deducted.", "counters.saved_s"
        ),
    ),
)
PRIMARY_METRICS = MetricTable(
    "kvtier_primary_",
    (),
    (
        _counted("hits", "Chunks loaded that were in the primary."),
        _counted("misses", "Chunks looked up and found nowhere, once a request and chunk."),
        _counted("stores", "Chunks stored by the LLM engine."),
        _counted("stores_refused", "Chunks offered when there was no room."),
        _counted("promotions_refused", "Chunks in a tier for which there was no row."),
        _counted("rows_kept", "Rows still read when their `fetch` ended (`RowsStillRead`)."),
        _counter("evictions", "Chunks evicted for room.", "primary.evictions"),
        _counter("retentions_cut", "Chunks retained too short, or not, for hints.", "primary.retentions_cut"),
        _gauge("rows", "Rows by state.", lambda ledger: row_states(ledger.primary), "state"),
        _gauge("rows_held", "Rows that are not evicted, by reason; a row may have several.", _rows_held, "reason"),
        _gauge("rows_evictable", "Rows that can be evicted now.", "primary.rows_evictable"),
        _gauge("row_bytes", "Length of a row.", "row_bytes"),
        _gauge("capacity_bytes", "Bytes of all rows.", lambda ledger: ledger.primary.rows * ledger.row_bytes),
        _gauge(
            "used_bytes",
            "Bytes of the rows that are not free.",
            lambda of: (of.primary.rows - of.primary.rows_free) * of.row_bytes,
        ),
    ),
)
DECISION_METRICS = MetricTable(
    "kvtier_tier_",
    ("tier",),
    (
        _counted("hits", "Chunks loaded by the request whose look-up promoted them from this tier."),
        _counted("declined", "Chunks not loaded because computing them was expected to be faster."),
        _counted("declined_requests", "Requests with declined chunks."),
        _counted("declined_seconds", "Expected duration of the declined loads."),
        _counted("explored", "Chunks loaded for no request, to measure the tier's speed."),
        _counted("given_up", "Requests that computed because a load was late (`late_margin`)."),
        _counted("expected_seconds", "Expected duration of the loads that finished."),
        _counted("loaded_seconds", "Duration of the same loads."),
    ),
)
"""What a ledger decides for a tier. A tier behind another manager than kvtier's counts none of it."""

TIER_METRICS = MetricTable(
    "kvtier_tier_",
    ("tier",),
    (
        _counted("misses", "Chunks looked up in the tier and not found, once a request and chunk."),
        _counted("promoted", "Chunks whose load was begun."),
        _counted("loaded", "Chunks that were loaded."),
        _counted("stored", "Chunks that the tier reported as stored."),
        _counted("transfers_failed", "Transfers that failed by the tier's fault."),
        _counted("probes_failed", "Probes without an answer; their chunks count as absent for `answer_ttl_s`."),
        _gauge("loading", "Chunks being loaded.", "loading"),
        _gauge("storing", "Chunks queued or being stored.", lambda tier: len(tier.storing)),
        _gauge("chunks", "Chunks held, if the tier reports it.", "chunks"),
        _gauge("used_bytes", "Bytes held, if the tier reports it.", "used_bytes"),
        _gauge("reserved_bytes", "Bytes promised to stores in flight, by all processes.", "reserved_bytes"),
        _gauge("capacity_bytes", "Limit of the bytes held, if there is one.", "capacity_bytes"),
        _gauge("breaker", "1 for the breaker's state: `closed`, `open` or `half_open`.", _breaker_states, "state"),
        _counter("breaker_opened", "Times that the breaker opened.", "breaker.opened"),
        _counter("bytes", "Bytes moved, by `load` and `store`.", _bytes_moved, "operation"),
        _counted("dropped", "Chunks never sent to the tier, by reason.", "reason"),
        _counted("skipped", "Chunks not to be written to the tier, or no longer, by reason.", "reason"),
        _counted("failed", "Chunks that did not move, by reason.", "reason"),
        _counted("causes", "Calls with a failure, by the cause of the worst one.", "cause"),
        _counted("reported", "Counts of the tier itself, about once a second.", "what"),
    ),
)


class PrimaryStats(msgspec.Struct, frozen=True, kw_only=True):
    """The primary, as `PRIMARY_METRICS` describe it: chunks counted since the start, and its rows now."""

    hits: int
    misses: int
    stores: int
    stores_refused: int
    promotions_refused: int
    evictions: int
    rows_ready: int  # Each holds a chunk that can be loaded.
    rows_filling: int  # Reserved for a store or a promotion.
    rows_free: int
    rows_quarantined: int  # Lent to transfers that hung; with the three above, all rows.
    rows_evictable: int
    rows_leased: int  # Held for requests that wait.
    rows_retained: int  # Hints ask for them; they are evicted last.
    retentions_cut: int
    rows_in_use: int  # Lent to the LLM engine, which reads or writes them.
    saved_s: float  # `kvtier_computing_saved_seconds_total`.


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One secondary tier, as `TIER_METRICS` describe it: chunks counted since the start, and what it holds now."""

    name: str
    hits: int
    misses: int
    promoted: int
    loaded: int
    stored: int
    dropped: dict[str, int]
    skipped: dict[str, int]
    failed: dict[str, int]
    transfers_failed: int
    probes_failed: int
    causes: dict[str, int]
    reported: dict[str, int]
    declined: int
    declined_requests: int
    declined_seconds: float
    explored: int
    given_up: int
    expected_seconds: float
    loaded_seconds: float
    loading: int
    storing: int
    chunks: int
    used_bytes: int
    reserved_bytes: int
    capacity_bytes: int | None
    breaker: str  # Its state.


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A whole kvtier engine."""

    primary: PrimaryStats
    tiers: tuple[TierStats, ...]  # In the configuration's order.
    runners_lost: int
    events_dropped: int
    hints_ignored: dict[str, int]


class Series(NamedTuple):
    name: str
    metric: Metric
    labels: Labels  # The values of its table's labels.
    read: Callable[[], Reading]


class Metrics(Collector):
    """An engine's metrics in a registry of its own; several engines of one process do not collide."""

    def __init__(self, ledger: Ledger) -> None:
        self.registry = CollectorRegistry()
        self._ledger = ledger
        latency, self._waits = (
            Histogram(each.name, each.help, each.labels, buckets=SECONDS, registry=self.registry)
            for each in (TRANSFER_SECONDS, WAIT_SECONDS)
        )
        self._latency = {
            (tier.spec.name, operation): latency.labels(tier.spec.name, operation)
            for tier in ledger.tiers
            for operation in ("load", "store", "probe", "delete")
        }
        self.registry.register(self)

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        self._latency[tier, operation].observe(seconds)

    def observe_wait(self, seconds: float) -> None:
        self._waits.observe(seconds)

    def collect(self) -> Iterator[MetricFamily]:
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        families = {name: kinds[metric.kind](name, metric.help, labels=labels) for name, metric, labels in described()}
        for name, _, labels, read in ledger_series(self._ledger):
            for further, number in samples(read()):
                families[name].add_metric((*labels, *further), number)
        yield from families.values()

    def stats(self) -> EngineStats:
        return EngineStats(
            primary=_primary_stats(self._ledger),
            tiers=tuple(map(_tier_stats, self._ledger.tiers)),
            runners_lost=self._ledger.runners_lost,
            events_dropped=self._ledger.events.dropped,
            hints_ignored=dict(self._ledger.hints_ignored.counts),
        )


def described() -> Iterator[tuple[str, Metric, Labels]]:
    tables: tuple[MetricTable, ...] = (RUNNER_METRICS, LEDGER_METRICS, PRIMARY_METRICS, DECISION_METRICS, TIER_METRICS)
    for table in tables:
        for metric in table.metrics:
            yield table.prefix + metric.name, metric, (*table.labels, *metric.labels)


def ledger_series(ledger: Ledger) -> list[Series]:
    tables: tuple[MetricTable, ...] = (RUNNER_METRICS, LEDGER_METRICS, PRIMARY_METRICS)
    return [
        *(each for table in tables for each in series(table, ledger)),
        *(each for tier in ledger.tiers for each in series(DECISION_METRICS, tier, tier.spec.name)),
        *(each for tier in ledger.tiers for each in series(TIER_METRICS, tier, tier.spec.name)),
    ]


def series(table: MetricTable, subject: object, *labels: str) -> list[Series]:
    return [Series(table.prefix + each.name, each, labels, partial(each.read, subject)) for each in table.metrics]


def samples(reading: Reading) -> Iterator[tuple[Labels, float]]:
    """Yield each number of a reading with the values of its metric's labels."""
    if isinstance(reading, dict):
        for key, number in reading.items():
            yield (key if isinstance(key, tuple) else (key,)), number
    elif reading is not None:
        yield (), reading


def _readings(table: MetricTable, subject: object) -> dict[str, Any]:
    return {metric.name: metric.read(subject) for metric in table.metrics}


def _primary_stats(ledger: Ledger) -> PrimaryStats:
    readings = _readings(PRIMARY_METRICS, ledger)
    rows = {f"rows_{name}": number for name, number in (readings["rows"] | readings["rows_held"]).items()}
    further = {"rows_in_use": ledger.rows_in_use, "saved_s": ledger.counters.saved_s}
    return msgspec.convert(readings | rows | further, PrimaryStats)


def _tier_stats(tier: Tier) -> TierStats:
    readings = _readings(DECISION_METRICS, tier) | _readings(TIER_METRICS, tier)
    return msgspec.convert(readings | {"name": tier.spec.name, "breaker": tier.breaker.state.value}, TierStats)


class TierLog:
    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.due = -math.inf  # When to look again without a message.
        self._told = [_Told(tier) for tier in tiers]

    def look(self, now: float, *, last: bool = False) -> None:
        self.due = now + LOOK_EVERY_S
        for told in self._told:
            told.breaker(now)
            told.losses(now, last=last)


class _Told:
    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._open = False
        self._opened = 0
        self._lost = _lost(tier)
        self._total = self._lost.total()
        self._losses_at = -math.inf

    def breaker(self, now: float) -> None:
        """Log that the breaker opened or closed; a failed trial is no new opening."""
        breaker, name = self._tier.breaker, self._tier.spec.name
        if breaker.opened != self._opened:
            self._opened = breaker.opened
            if not self._open:
                logger.warning(
                    "tier %s: the breaker is open after %d failures in a row; the last cause is %s; it is tried again"
                    " every %g s; since the last line %s; see %s",
                    name,
                    breaker.failures,
                    _in_words(self._tier.counters.last_cause),
                    self._tier.spec.breaker_cooldown_s,
                    self._losses(now, cause=False) or "no chunk failed",
                    Remedy.BREAKER,
                )
            self._open = True
        if self._open and breaker.state is CLOSED:
            self._open = False
            logger.info("tier %s: the breaker is closed again", name)

    def losses(self, now: float, *, last: bool) -> None:
        counters = self._tier.counters
        lost = sum(counters.dropped.values()) + sum(counters.failed.values()) + counters.skipped.get(PRESSURE, 0)
        changed = lost + counters.probes_failed != self._total  # Runs at every message.
        if changed and (last or now >= self._losses_at) and (losses := self._losses(now)):
            logger.warning("tier %s: since the last line %s; see %s", self._tier.spec.name, losses, Remedy.LOSSES)

    def _losses(self, now: float, *, cause: bool = True) -> str:
        counters, before = self._tier.counters, self._lost
        self._lost = _lost(self._tier)
        self._total = self._lost.total()
        grown, parts = self._lost - before, list[str]()
        for verb in ("were dropped", "left the primary unwritten", "failed"):
            if chunks := {name: count for (each, name), count in grown.items() if each == verb}:
                reasons = ", ".join(f"{name} {count:,}" for name, count in chunks.items())
                parts.append(f"{sum(chunks.values()):,} chunks {verb} ({reasons})")
        if unanswered := grown["questions", ""]:
            parts.append(f"questions not answered: {unanswered:,}")
        if parts:
            self._losses_at = now + 60.0  # Between two lines of losses of one tier.
        if cause and counters.last_cause and any(verb in ("failed", "questions") for verb, _ in grown):
            parts.append(f"the last cause is {_in_words(counters.last_cause)}")
        return "; ".join(parts)


def _lost(tier: Tier) -> Counter[tuple[str, str]]:
    counters = tier.counters
    lost = Counter({("were dropped", name): count for name, count in counters.dropped.items()})
    lost.update({("failed", name): count for name, count in counters.failed.items()})
    lost["left the primary unwritten", PRESSURE] = counters.skipped.get(PRESSURE, 0)
    lost["questions", ""] = counters.probes_failed
    return lost


def _in_words(cause: str) -> str:
    number = getattr(errno, cause, None)
    return f"{cause} ({os.strerror(number)})" if isinstance(number, int) else cause or "unknown"
