"""Stats and log of an engine inside vLLM: its metrics on vLLM's `/metrics`, and a line every so often in vLLM's log.

The metrics have the same names as in kvtier's registry. vLLM carries observations, not totals: counters leave as what
was added since the last call, gauges when they change. A counter without further labels leaves first as it is, if 0, so
that its series is there before it counts. vLLM asks once a step, so that nothing here may cost more than
some dozen comparisons.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import vllm.envs as envs
from prometheus_client import REGISTRY
from typing_extensions import override
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.engine.metrics import (
    BUILD_HELP,
    BUILD_LABELS,
    CAUSES_HELP,
    HELD_HELP,
    HELD_REASONS,
    HINTS_IGNORED_HELP,
    PREFILL_HELP,
    PRIMARY_COUNTERS,
    PRIMARY_GAUGES,
    RETENTIONS_CUT_HELP,
    ROW_STATES,
    ROWS_HELP,
    RUNNER_UP_HELP,
    SAVED_HELP,
    SECONDS,
    SKIPPED_HELP,
    TIER_COUNTERS,
    WAIT_HELP,
    build_values,
)
from kvtier.engine.steps import Inside, StepManager
from kvtier.engine.tier import Breaker, BreakerState, Tier
from kvtier.integrations.vllm.second_door import TierClient
from kvtier.runner.wire import LOGGERS
from kvtier.settings import shown_bytes

logger = logging.getLogger(__name__)

Labels = tuple[str, ...]
_TRANSFER_SECONDS = "kvtier_transfer_seconds"
_WAIT_SECONDS = "kvtier_load_wait_seconds"


class Series(NamedTuple):
    """A series: one number with its labels, and how to read it now."""

    name: str
    labels: Labels
    read: Callable[[], float]


class Table(NamedTuple):
    """A table of counters, one for each key; the key is the last label, and comes with its first count."""

    name: str
    labels: Labels
    numbers: Mapping[str, int]


class Readings(NamedTuple):
    """The readings that `Stats` compares with the last ones once a step; made once."""

    counters: Sequence[Series]
    tables: Sequence[Table]
    gauges: Sequence[Series]


_COUNTERS: dict[str, tuple[str, Labels]] = {
    **{f"kvtier_primary_{name}": (text, ()) for name, text in PRIMARY_COUNTERS.items()},
    "kvtier_primary_evictions": ("Chunks evicted for room.", ()),
    "kvtier_primary_retentions_cut": (RETENTIONS_CUT_HELP, ()),
    "kvtier_computing_saved_seconds": (SAVED_HELP, ()),
    "kvtier_runners_lost": ("Runners that ended too early.", ()),
    "kvtier_events_dropped": ("Events that nobody took in time.", ()),
    "kvtier_hints_ignored": (HINTS_IGNORED_HELP, ("reason",)),
    **{f"kvtier_tier_{name}": (text, ("tier",)) for name, text in TIER_COUNTERS.items()},
    "kvtier_tier_breaker_opened": ("How often the breaker opened.", ("tier",)),
    "kvtier_tier_bytes": ("Bytes moved.", ("tier", "operation")),
    "kvtier_tier_dropped": ("Chunks that were never sent to the tier.", ("tier", "reason")),
    "kvtier_tier_skipped": (SKIPPED_HELP, ("tier", "reason")),
    "kvtier_tier_failed": ("Chunks that did not move.", ("tier", "reason")),
    "kvtier_tier_causes": (CAUSES_HELP, ("tier", "cause")),
    "kvtier_tier_reported": ("What the tier itself has counted.", ("tier", "what")),
}
_GAUGES: dict[str, tuple[str, Labels]] = {
    "kvtier_build_info": (BUILD_HELP, BUILD_LABELS),
    "kvtier_runner_up": (RUNNER_UP_HELP, ()),
    "kvtier_prefill_tokens_per_second": (PREFILL_HELP, ()),
    "kvtier_primary_rows": (ROWS_HELP, ("state",)),
    "kvtier_primary_rows_held": (HELD_HELP, ("reason",)),
    **{f"kvtier_primary_{name}": (text, ()) for name, (text, _) in PRIMARY_GAUGES.items()},
    "kvtier_tier_loading": ("Chunks being loaded.", ("tier",)),
    "kvtier_tier_storing": ("Chunks queued or being stored.", ("tier",)),
    "kvtier_tier_chunks": ("Chunks held.", ("tier",)),
    "kvtier_tier_used_bytes": ("Bytes held.", ("tier",)),
    "kvtier_tier_capacity_bytes": ("Bytes that may be held.", ("tier",)),
    "kvtier_tier_reserved_bytes": ("Bytes promised.", ("tier",)),
    "kvtier_tier_breaker": ("1 for the breaker's state.", ("tier", "state")),
}


_VLLMS_TO_DECIDE = {
    f"kvtier_tier_{name}"
    for name in (
        "declined",
        "declined_requests",
        "declined_seconds",
        "expected_seconds",
        "explored",
        "given_up",
        "hits",
        "loaded_seconds",
    )
}
"""What a tier behind vLLM's own manager never counts."""
_OF_A_CLIENT = {
    "kvtier_build_info",
    "kvtier_events_dropped",
    "kvtier_hints_ignored",
    "kvtier_runner_up",
    "kvtier_runners_lost",
}
"""What is reported there beside the tier's own."""


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
    definitions[_WAIT_SECONDS] = OffloadingHistogramMetadata(documentation=WAIT_HELP, buckets=SECONDS)
    return definitions


def tier_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare what one tier behind vLLM's own manager reports: of hits, and of what is loaded at all, vLLM decides."""
    return {
        name: each
        for name, each in metric_definitions().items()
        if name in _OF_A_CLIENT or ("tier" in each.labelnames and name not in _VLLMS_TO_DECIDE)
    }


def unregister_earlier() -> None:
    """Have Prometheus's registry forget the metrics of an earlier engine of this process.

    vLLM asks for definitions right before it registers metrics. From an engine before it, vLLM removes its own by
    their name, and kvtier's would be refused as there already.
    """
    registered = REGISTRY._names_to_collectors  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    for collector in {registered[name] for name in metric_definitions() if name in registered}:
        REGISTRY.unregister(collector)


class TransferTimes:
    """The durations of transfers and waits since the last `take`, in seconds; an engine's observers are its methods."""

    def __init__(self) -> None:
        self._seconds: list[tuple[str, Labels, float]] = []

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        self._seconds.append((_TRANSFER_SECONDS, (tier, operation), seconds))

    def observe_wait(self, seconds: float) -> None:
        self._seconds.append((_WAIT_SECONDS, (), seconds))

    def take(self) -> list[tuple[str, Labels, float]]:
        """Return of each its metric, the labels' values and the seconds."""
        taken, self._seconds = self._seconds, []
        return taken


class Stats:
    """The statistics for vLLM: what has changed since the last `take`."""

    def __init__(self, readings: Readings, times: TransferTimes) -> None:
        self._readings = readings
        self._times = times
        self._counted: list[float] = [math.nan] * len(readings.counters)  # Different from any number.
        self._tables: list[dict[str, int]] = [{} for _ in readings.tables]
        self._gauged: list[float] = [math.nan] * len(readings.gauges)

    def take(self) -> OffloadingConnectorStats | None:
        """Return what has changed; None if nothing has."""
        stats = OffloadingConnectorStats()
        counters, tables, gauges = self._readings
        counted = [series.read() for series in counters]
        if counted != self._counted:
            for series, value, last in zip(counters, counted, self._counted, strict=True):
                if value != last:
                    stats.increase_counter(series.name, value if math.isnan(last) else value - last, series.labels)
            self._counted = counted
        for index, (name, labels, numbers) in enumerate(tables):
            last_numbers = self._tables[index]
            if numbers != last_numbers:
                for key, number in numbers.items():
                    if added := number - last_numbers.get(key, 0):
                        stats.increase_counter(name, added, (*labels, key))
                self._tables[index] = dict(numbers)
        gauged = [series.read() for series in gauges]
        if gauged != self._gauged:
            for series, value, last in zip(gauges, gauged, self._gauged, strict=True):
                if value != last and value >= 0:  # Below: there is no such number, or not yet.
                    stats.set_gauge(series.name, value, series.labels)
            self._gauged = gauged
        for name, labels, seconds in self._times.take():
            stats.observe_histogram(name, seconds, labels)
        return None if stats.is_empty() else stats


def engine_readings(engine: StepManager) -> Readings:
    """Return everything that an engine counts."""
    ledger = Inside(engine).ledger
    primary = ledger.primary
    counters = [
        *(Series(f"kvtier_primary_{name}", (), partial(getattr, ledger.counters, name)) for name in PRIMARY_COUNTERS),
        Series("kvtier_primary_evictions", (), lambda: primary.evictions),
        Series("kvtier_primary_retentions_cut", (), lambda: primary.retentions_cut),
        Series("kvtier_computing_saved_seconds", (), lambda: ledger.counters.saved_s),
        Series("kvtier_runners_lost", (), lambda: engine.runners_lost),
        Series("kvtier_events_dropped", (), lambda: engine.events_dropped),
    ]
    row_bytes = engine.config.row_bytes
    gauges = [
        *runner_gauges(lambda: ledger.runner_up),
        Series("kvtier_prefill_tokens_per_second", (), lambda: _given(ledger.prefill.tokens_per_s)),
        *(Series("kvtier_primary_rows", (state,), partial(read, primary)) for state, read in ROW_STATES.items()),
        *(
            Series("kvtier_primary_rows_held", (reason,), partial(read, ledger))
            for reason, read in HELD_REASONS.items()
        ),
        *(
            Series(f"kvtier_primary_{name}", (), partial(read, primary, row_bytes))
            for name, (_, read) in PRIMARY_GAUGES.items()
        ),
    ]
    tiers = [tier_readings(tier, row_bytes) for tier in ledger.tiers]
    return Readings(
        [*counters, *chain.from_iterable(tier.counters for tier in tiers)],
        [
            Table("kvtier_hints_ignored", (), ledger.hints_ignored.counts),
            *chain.from_iterable(tier.tables for tier in tiers),
        ],
        [*gauges, *chain.from_iterable(tier.gauges for tier in tiers)],
    )


def client_readings(client: TierClient, row_bytes: int) -> Readings:
    """Return everything that is counted of a tier behind vLLM's own manager, and of its runner."""
    runner = [
        Series("kvtier_runners_lost", (), lambda: client.runners_lost),
        Series("kvtier_events_dropped", (), lambda: client.events_dropped),
    ]
    counted, tables, gauges = tier_readings(client.tier, row_bytes)
    counters = [series for series in counted if series.name not in _VLLMS_TO_DECIDE]
    ignored = Table("kvtier_hints_ignored", (), client.hints_ignored.counts)
    return Readings([*runner, *counters], [ignored, *tables], [*runner_gauges(lambda: client.runner_up), *gauges])


def runner_gauges(is_up: Callable[[], bool]) -> list[Series]:
    """Return what is said of what runs, and whether its runner does."""
    return [
        Series("kvtier_build_info", build_values(vllm_version), lambda: 1.0),
        Series("kvtier_runner_up", (), lambda: float(is_up())),
    ]


def tier_readings(tier: Tier, row_bytes: int) -> Readings:
    """Return everything that is counted of one tier."""
    name, counters, breaker = tier.spec.name, tier.counters, tier.breaker
    label = (name,)
    return Readings(
        [
            *(Series(f"kvtier_tier_{each}", label, partial(getattr, counters, each)) for each in TIER_COUNTERS),
            Series("kvtier_tier_bytes", (name, "load"), lambda: counters.loaded * row_bytes),
            Series("kvtier_tier_bytes", (name, "store"), lambda: counters.stored * row_bytes),
            Series("kvtier_tier_breaker_opened", label, lambda: breaker.opened),
        ],
        [
            Table("kvtier_tier_reported", label, counters.reported),
            Table("kvtier_tier_dropped", label, counters.dropped),
            Table("kvtier_tier_skipped", label, counters.skipped),
            Table("kvtier_tier_failed", label, counters.failures),
            Table("kvtier_tier_causes", label, counters.causes),
        ],
        [
            Series("kvtier_tier_loading", label, lambda: tier.loading),
            Series("kvtier_tier_storing", label, lambda: len(tier.storing)),
            Series("kvtier_tier_chunks", label, lambda: tier.chunks),
            Series("kvtier_tier_used_bytes", label, lambda: tier.used_bytes),
            Series("kvtier_tier_reserved_bytes", label, lambda: tier.reserved_bytes),
            Series("kvtier_tier_capacity_bytes", label, lambda: _given(tier.capacity_bytes)),
            *(
                Series("kvtier_tier_breaker", (name, state.value), partial(_is_in, breaker, state))
                for state in BreakerState
            ),
        ],
    )


class Summary:
    """The line in the log: what has changed, as often as vLLM logs its own figures; none while nothing changes."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        row_bytes: int,
        primary: Callable[[], tuple[int, int, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`primary` returns the chunks that it had, those that were nowhere, and its used share; None: it is vLLM's."""
        self._tiers = tiers
        self._row_bytes = row_bytes
        self._primary = primary
        self._clock = clock
        self._due = clock() + envs.VLLM_LOG_STATS_INTERVAL
        self._before = self._counts()

    def look(self) -> None:
        """Log a line, if it is time for one."""
        if (now := self._clock()) < self._due:
            return
        self._due = now + envs.VLLM_LOG_STATS_INTERVAL
        counts = self._counts()
        if counts == self._before:
            return
        hits, misses, loaded, stored, dropped = (
            count - before for count, before in zip(counts, self._before, strict=True)
        )
        self._before = counts
        parts = [f"loaded {shown_bytes(loaded * self._row_bytes)}", f"stored {shown_bytes(stored * self._row_bytes)}"]
        if self._primary is not None:
            if hits + misses:
                parts.insert(0, f"hit ratio {hits / (hits + misses):.1%}")
            parts.append(f"primary {self._primary()[2]:.1%} full")
        parts += [_holds(tier) for tier in self._tiers]
        if dropped:
            parts.append(f"{dropped:,} chunks dropped")
        logger.info("kvtier: %s", ", ".join(parts))

    def _counts(self) -> tuple[int, ...]:
        """Return hits, misses, and chunks loaded from tiers, stored in them and dropped on the way there."""
        hits, misses, _ = (0, 0, math.nan) if self._primary is None else self._primary()
        counters = [tier.counters for tier in self._tiers]
        return (
            hits + sum(each.hits for each in counters),
            misses,
            sum(each.loaded for each in counters),
            sum(each.stored for each in counters),
            sum(sum(each.dropped.values()) for each in counters),
        )


class ToVllm(logging.Handler):
    """A handler that gives records to whatever handlers vLLM's logger has, now or after it was configured anew."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("vllm").handle(record)


def log_as_vllm() -> None:
    """Have kvtier's loggers log as vLLM's does; one that somebody has configured, or vLLM's if nobody has, is left.

    vLLM's own hands nothing on to the root, so that what kvtier logs would come out bare, or not at all.
    """
    vllm = logging.getLogger("vllm")
    if not vllm.handlers:
        return
    for name in LOGGERS:
        own = logging.getLogger(name)
        if not own.handlers:
            own.addHandler(ToVllm())
            own.propagate = False
            if own.level == logging.NOTSET:
                own.setLevel(vllm.getEffectiveLevel())


def _given(value: float | None) -> float:
    return -1.0 if value is None else value


def _is_in(breaker: Breaker, state: BreakerState) -> float:
    return float(breaker.state is state)


def _holds(tier: Tier) -> str:
    limit = "" if tier.capacity_bytes is None else f" of {shown_bytes(tier.capacity_bytes)}"
    return f"{tier.spec.name} holds {shown_bytes(tier.used_bytes)}{limit}"
