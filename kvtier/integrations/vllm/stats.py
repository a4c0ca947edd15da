"""Reports in vLLM's words: events, metrics on vLLM's `/metrics`, log records, and facts.

The metrics are those of `kvtier.engine.metrics`. vLLM carries observations, not totals: counters are sent as what was
added since the last call, gauges when they change. A counter without further labels is first sent as it is, even if 0,
so that its series exists before it counts. vLLM asks once a step: some dozen comparisons are the limit.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.backend import FileMapper, OffloadKey
from kvtier.config import PRIMARY_NAME, EngineConfig, __version__
from kvtier.engine import metrics
from kvtier.engine.answers import Event, EventKind
from kvtier.engine.ledger import Ledger
from kvtier.engine.tier import Tier, TierSpec
from kvtier.runner.messages import LOGGERS

_TELLS_WHAT_DID_NOT_COME = "metadata_only" in {field.name for field in fields(OffloadingEvent)}  # From vLLM 0.33 on.
_SOURCES = {Medium.CPU: CacheHitSource.HOST, Medium.STORAGE: CacheHitSource.DISK}

INFO_KEYS = ("tier", "type", "kvtier_version", "eviction_policy", "rows", "row_bytes", "namespace", "sharing")
"""The labels of vLLM's info metric (`vllm:kv_offload_config_info`)."""

_CLIENT_TABLES: tuple[metrics.MetricTable, ...] = (metrics.RUNNER_METRICS, metrics.TIER_METRICS)
"""The metrics of a tier behind vLLM's own manager, which makes all decisions."""


def _queries(tier: Tier) -> int:
    return tier.counters.hits + tier.counters.misses + tier.counters.declined


VLLMS_NAMES = metrics.MetricTable(
    "vllm:kv_offload_tiering_",
    ("tier",),
    (
        metrics.Metric("chunk_queries", "counter", "kvtier's tier_hits, tier_misses and tier_declined.", _queries),
        metrics.Metric("chunk_hits", "counter", "kvtier's tier_hits.", attrgetter("counters.hits")),
    ),
)
"""Two metrics under the names of vLLM's own tiering, by which others' boards know them."""

_ENGINE_TABLES = (
    *_CLIENT_TABLES,
    metrics.LEDGER_METRICS,
    metrics.PRIMARY_METRICS,
    metrics.DECISION_METRICS,
    VLLMS_NAMES,
)
_METADATA = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare every metric that `Stats` may report; needs no engine."""
    return _definitions(_ENGINE_TABLES, (metrics.TRANSFER_SECONDS, metrics.WAIT_SECONDS))


def tier_metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Declare what one tier behind vLLM's own manager reports."""
    return _definitions(_CLIENT_TABLES, (metrics.TRANSFER_SECONDS,))


def engine_series(ledger: Ledger) -> list[metrics.Series]:
    """Return the series of all metrics that `metric_definitions` declares and `Stats` reads."""
    named = (each for tier in ledger.tiers for each in metrics.series(VLLMS_NAMES, tier, tier.spec.name))
    return [*metrics.ledger_series(ledger), *named]


def unregister_earlier() -> None:
    """Remove the metrics of this process's earlier engine from Prometheus's registry, or kvtier's would be duplicates.

    vLLM asks for definitions right before it registers metrics. It removes its own of an earlier engine by their name.
    """
    registered = REGISTRY._names_to_collectors  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    for collector in {registered[name] for name in metric_definitions() if name in registered}:
        REGISTRY.unregister(collector)


class Stats:
    """The statistics for vLLM: what has changed since the last `take`. An engine's observers are its methods."""

    def __init__(self) -> None:
        self._series: Sequence[metrics.Series] = ()
        self._last: list[metrics.Reading] = []
        self._seconds: list[tuple[metrics.Durations, metrics.Labels, float]] = []

    def watch(self, series: Sequence[metrics.Series]) -> None:
        """Report these series from now on."""
        self._series, self._last = series, [None] * len(series)

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        self._seconds.append((metrics.TRANSFER_SECONDS, (tier, operation), seconds))

    def observe_wait(self, seconds: float) -> None:
        self._seconds.append((metrics.WAIT_SECONDS, (), seconds))

    def take(self) -> OffloadingConnectorStats | None:
        """Return what has changed; None if nothing has."""
        stats = OffloadingConnectorStats()
        readings = [each.read() for each in self._series]
        if readings != self._last:
            for index, (reading, last) in enumerate(zip(readings, self._last, strict=True)):
                if reading != last:
                    _report(stats, self._series[index], reading, last)
                    self._last[index] = reading.copy() if isinstance(reading, dict) else reading  # Many are live.
        seconds, self._seconds = self._seconds, []
        for durations, labels, each in seconds:
            stats.observe_histogram(durations.name, each, labels)
        return None if stats.is_empty() else stats


class ToVllm(logging.Handler):
    """A handler that gives records to vLLM's handlers, as they are configured at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("vllm").handle(record)


def log_as_vllm() -> None:
    """Make unconfigured kvtier loggers log as vLLM's, if that is configured: it passes nothing on to the root."""
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


def _definitions(
    tables: Sequence[metrics.MetricTable], histograms: Sequence[metrics.Durations]
) -> dict[str, OffloadingMetricMetadata]:
    definitions: dict[str, OffloadingMetricMetadata] = {
        table.prefix + metric.name: _METADATA[metric.kind](
            documentation=metric.help, labelnames=(*table.labels, *metric.labels)
        )
        for table in tables
        for metric in table.metrics
    }
    for each in histograms:
        definitions[each.name] = OffloadingHistogramMetadata(
            documentation=each.help, labelnames=each.labels, buckets=metrics.SECONDS
        )
    return definitions


def _report(
    stats: OffloadingConnectorStats, series: metrics.Series, reading: metrics.Reading, last: metrics.Reading
) -> None:
    before = dict(metrics.samples(last))
    for further, number in metrics.samples(reading):
        if number == before.get(further):
            continue
        labels = (*series.labels, *further)
        if series.metric.kind == "counter":
            stats.increase_counter(series.name, number - before.get(further, 0), labels)
        else:
            stats.set_gauge(series.name, number, labels)


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
    """Translate events; of failures, those of chunks that are still `absent` from the primary.

    vLLM keeps a description of each chunk whose load it asked for. For others nothing announced became untrue.
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
