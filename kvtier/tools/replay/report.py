"""The report of a replay: one struct, which is the JSON that `kvtier replay --json` writes, and its tables.

However long a replay is, its report stays small: its course is told in some tens of slices, and how long things took in
bins whose bounds are the same in every report, so that two reports can be laid over each other.
"""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from kvtier import __version__
from kvtier.config import PRIMARY_NAME, EngineConfig
from kvtier.settings import shown_bytes
from kvtier.tools.outputs import counted, plain_table
from kvtier.tools.replay.replay import GPU_NAME, Sample, Tally, TierTotals
from kvtier.tools.replay.study import Extent, too_long

COMMAND = "kvtier replay"
FORMAT = 1  # Of the JSON. Another number is for fields that mean something else.
SLICES_MAX = 60  # Of a replay's course: a picture shows no more, and fewer than this say too little.
BINS_PER_DECADE = 20  # The bounds of a bin lie 12 % apart.
SECONDS_MIN, SECONDS_MAX = 1e-7, 1e6  # Of the bins' bounds: the first one has all that took no time, too.
_NO_TOTALS = TierTotals(0, 0, 0)

Figure = int | float | str | bool | None | Sequence[str]


class ModelPart(msgspec.Struct, frozen=True):
    """One thing that is modelled. A figure that is null is no limit."""

    what: str
    figures: Mapping[str, Figure]
    source: str


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of how long something took, in seconds."""

    p50: float
    p99: float
    mean: float
    samples: int


class Bin(msgspec.Struct, frozen=True, array_like=True):
    """How many took no longer than this, and longer than the bin below: its bound is less by the 20th root of 10."""

    at_most_s: float
    samples: int


class Distribution(Quantiles, frozen=True):
    """How long something took, in seconds. Bins with nothing in them are left out."""

    bins: Sequence[Bin]

    def quantiles(self) -> Quantiles:
        return Quantiles(self.p50, self.p99, self.mean, self.samples)


class TierSlice(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's part in a slice of time."""

    hits: int
    bytes_loaded: int
    bytes_stored: int
    dropped: int
    failed: int


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """What came between the end of the slice before and `until_s`, since the replay began."""

    until_s: float
    requests: int
    chunk_references: int
    tiers: Mapping[str, TierSlice]


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's part. `chunks` are moved ones; the primary's are those that were read and those that were put."""

    hits: int
    chunks_loaded: int
    chunks_stored: int
    bytes_loaded: int
    bytes_stored: int
    dropped: Mapping[str, int]  # Cascades that were never sent, by reason.
    failed: Mapping[str, int]  # Chunks that did not move, by what was wrong.
    skipped: Mapping[str, int]  # Chunks that were not to be sent, or not any more, by reason.
    refused: Mapping[str, int]  # Chunks that found no row in the primary: `stores` and `promotions`.


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A replay's figures. Chunks are counted unless a name says otherwise; tiers are by name, the primary is `cpu`.

    `gpu` is the LLM engine's own prefix cache, in virtual time: what it has, kvtier is never asked for.
    """

    command: str = COMMAND
    format: int = FORMAT
    kvtier: str = __version__
    trace: str
    seed: int
    interrupted: bool  # The figures are those of the requests that had ended by then.
    requests: int
    chunk_references: int
    hit_ratio: float
    best_hit_ratio: float  # Of a cache that keeps everything, over the whole trace.
    hits: Mapping[str, int]  # Of the leading runs, by where they lay when they were looked up.
    bytes_moved: Mapping[str, int] = msgspec.field(name="bytes")  # In and out.
    wrong_chunks: int
    wrong_keys: list[str]  # Some of them, in hexadecimal.
    cascades: int  # That reached a tier.
    promotions: int  # That came.
    dropped: int  # Cascades that were never sent.
    failed: int  # Cascades and promotions.
    drained: bool  # Whether all that was stored had reached the tiers at the end.
    seconds: float
    requests_per_s: float
    latency_s: Mapping[str, Distribution]
    tiers: Mapping[str, TierReport]
    over_time: Sequence[Slice]  # They add up to the totals.
    engine: Mapping[str, Any]  # The configuration, as far as it says what was replayed against.
    ttft_s: Mapping[str, Distribution] | None  # Times to first token, in virtual time only.
    model: Sequence[ModelPart] | None  # What was modelled, with which figures and from where, in virtual time only.
    warnings: Sequence[str]  # Limits of the configuration that cost hits: how many chunks, and the remedy.


def make_report(
    tally: Tally,
    *,
    trace: str,
    seed: int,
    extent: Extent,
    config: EngineConfig,
    engine: Mapping[str, Any],
    interrupted: bool,
    ttft_s: Mapping[str, "array[float]"] | None,
    model: Sequence[ModelPart] | None = None,
) -> Report:
    """Sum up what was counted until the last sample. `config` has the sizes of the real engine."""
    totals = tally.samples[-1].tiers if tally.samples else {PRIMARY_NAME: _NO_TOTALS}
    tiers = {name: _tier_report(tier, config.row_bytes) for name, tier in totals.items()}
    secondaries = [tier for name, tier in tiers.items() if name not in (PRIMARY_NAME, GPU_NAME)]
    return Report(
        trace=trace,
        seed=seed,
        interrupted=interrupted,
        requests=tally.requests,
        chunk_references=tally.chunk_references,
        hit_ratio=tally.hit_ratio,
        best_hit_ratio=extent.hit_ratio(extent.best_hits),
        hits={name: tier.hits for name, tier in tiers.items()},
        bytes_moved={name: tier.bytes_loaded + tier.bytes_stored for name, tier in tiers.items()},
        wrong_chunks=tally.wrong_chunks,
        wrong_keys=[key.hex() for key in tally.wrong_keys],
        cascades=sum(tier.chunks_stored for tier in secondaries),
        promotions=sum(tier.chunks_loaded for tier in secondaries),
        dropped=sum(sum(tier.dropped.values()) for tier in secondaries),
        failed=sum(sum(tier.failed.values()) for tier in secondaries),
        drained=tally.drained,
        seconds=tally.seconds,
        requests_per_s=tally.requests / tally.seconds if tally.seconds else 0.0,
        latency_s={name: distribution(samples) for name, samples in sorted(tally.latencies_s.items())},
        tiers=tiers,
        over_time=slices(tally.samples, config.row_bytes),
        engine=engine,
        ttft_s=None if ttft_s is None else {name: distribution(samples) for name, samples in ttft_s.items()},
        model=model,
        warnings=[*too_long(extent, config.rows, "the primary"), *_warnings(config, tiers)],
    )


def _warnings(config: EngineConfig, tiers: Mapping[str, TierReport]) -> Iterator[str]:
    """Name the limits for which chunks were dropped on their way to a tier, with the remedy."""
    for index, tier in enumerate(config.secondary_tiers):
        limits = tier.limits
        by_bytes = limits.store_bytes_in_flight // config.row_bytes <= limits.store_chunks_in_flight
        field = "store_bytes_in_flight" if by_bytes else "store_chunks_in_flight"
        was = shown_bytes(limits.store_bytes_in_flight) if by_bytes else f"{limits.store_chunks_in_flight:,}"
        for reason, path, limit in (
            ("budget", f"secondary_tiers[{index}].limits.{field}", was),
            ("pinned", "limits.cascade_share", f"{config.limits.cascade_share:g}"),
        ):
            chunks = tiers[tier.name].dropped.get(reason) if tier.name in tiers else None
            if chunks:
                were = f"{counted(chunks, 'chunk')} {'was' if chunks == 1 else 'were'}"
                yield f"tier {tier.name}: {were} never stored in it; {path} was {limit}: raise it"


def quantiles(seconds: "array[float]") -> Quantiles:
    """Return the median, the 99th percentile and the mean; all 0 without samples."""
    if not seconds:
        return Quantiles(0.0, 0.0, 0.0, 0)
    p50, p99 = np.percentile(seconds, (50, 99))
    return Quantiles(float(p50), float(p99), float(np.mean(seconds)), len(seconds))


def distribution(seconds: "array[float]") -> Distribution:
    """Return the same with how many took how long."""
    exponents = np.ceil(np.log10(np.clip(seconds, SECONDS_MIN, SECONDS_MAX)) * BINS_PER_DECADE)
    bounds, counts = np.unique(exponents, return_counts=True)
    bins = [
        Bin(float(f"{math.pow(10, bound / BINS_PER_DECADE):.4g}"), int(count))
        for bound, count in zip(bounds.tolist(), counts.tolist(), strict=True)
    ]
    found = quantiles(seconds)
    return Distribution(found.p50, found.p99, found.mean, found.samples, bins)


def slices(samples: Sequence[Sample], row_bytes: int) -> list[Slice]:
    """Cut a replay's course into slices of about equal time, each of which ends with a sample."""
    cuts = [Sample(0.0, 0, 0, {}), *_cuts(samples)]
    return [_slice(before, after, row_bytes) for before, after in pairwise(cuts)]


def _cuts(samples: Sequence[Sample]) -> list[Sample]:
    """Return the last sample, and before it some that lie far enough apart: rates over a moment say nothing."""
    if not samples:
        return []
    width_s = samples[-1].seconds / SLICES_MAX
    cuts: list[Sample] = []
    for sample in samples[:-1]:
        begun_s = cuts[-1].seconds if cuts else 0.0
        if sample.seconds > begun_s and sample.seconds - begun_s >= width_s <= samples[-1].seconds - sample.seconds:
            cuts.append(sample)
    return [*cuts, samples[-1]]


def _slice(before: Sample, after: Sample, row_bytes: int) -> Slice:
    return Slice(
        until_s=after.seconds,
        requests=after.requests - before.requests,
        chunk_references=after.chunk_references - before.chunk_references,
        tiers={
            name: _tier_slice(before.tiers.get(name, _NO_TOTALS), totals, row_bytes)
            for name, totals in after.tiers.items()
        },
    )


def _tier_slice(before: TierTotals, after: TierTotals, row_bytes: int) -> TierSlice:
    return TierSlice(
        hits=after.hits - before.hits,
        bytes_loaded=(after.loaded - before.loaded) * row_bytes,
        bytes_stored=(after.stored - before.stored) * row_bytes,
        dropped=sum(after.dropped.values()) - sum(before.dropped.values()),
        failed=sum(after.failed.values()) - sum(before.failed.values()),
    )


def _tier_report(totals: TierTotals, row_bytes: int) -> TierReport:
    return TierReport(
        hits=totals.hits,
        chunks_loaded=totals.loaded,
        chunks_stored=totals.stored,
        bytes_loaded=totals.loaded * row_bytes,
        bytes_stored=totals.stored * row_bytes,
        dropped=totals.dropped,
        failed=totals.failed,
        skipped=totals.skipped,
        refused=totals.refused,
    )


def print_report(report: Report, console: Console) -> None:
    """Print the figures as tables, and before them in a line what matters most."""
    state = "[yellow]interrupted after[/]" if report.interrupted else "replayed"
    virtual = "" if report.ttft_s is None else " of virtual time"
    wrong = "[red]" if report.wrong_chunks else "[green]"
    console.print(
        f"{escape(report.trace)}: {state} {counted(report.requests, 'request')}, "
        f"{counted(report.chunk_references, 'chunk reference')}\n"
        f"in {report.seconds:,.1f} s{virtual} ({report.requests_per_s:,.0f} requests/s)\n"
        f"hit ratio [bold]{report.hit_ratio:.4f}[/] (best possible {report.best_hit_ratio:.4f}), "
        f"{wrong}{counted(report.wrong_chunks, 'wrong chunk')}[/]",
        highlight=False,
    )
    if not (report.drained or report.interrupted):
        console.print("[yellow]some of what was stored had not reached its tiers when the time for it was over[/]")
    for table in _tables(report):
        console.print()
        console.print(table)
    for warning in report.warnings:
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False)


def _tables(report: Report) -> Iterator[Table]:
    yield _tier_table(report)
    yield _time_table("latency", report.latency_s, 1_000, "ms")
    if report.ttft_s is not None:
        yield _time_table("time to first token", report.ttft_s, 1, "s")
    if report.model is not None:
        yield model_table(report.model)


def _tier_table(report: Report) -> Table:
    table = plain_table("tier")
    for heading in ("hits", "share", "read", "written", "refused", "dropped", "failed"):
        table.add_column(heading, justify="right")
    for name, tier in report.tiers.items():
        share = tier.hits / report.chunk_references if report.chunk_references else 0.0
        table.add_row(
            escape(name),
            f"{tier.hits:,}",
            f"{share:.4f}",
            shown_bytes(tier.bytes_loaded),
            shown_bytes(tier.bytes_stored),
            _reasons(tier.refused) if name == PRIMARY_NAME else "",
            _reasons(tier.dropped),
            _reasons(tier.failed),
        )
    return table


def _time_table(heading: str, times: Mapping[str, Quantiles], scale: int, unit: str) -> Table:
    table = plain_table(heading)
    for column in (f"p50, {unit}", f"p99, {unit}", f"mean, {unit}", "samples"):
        table.add_column(column, justify="right")
    for name, taken in times.items():
        seconds = (taken.p50, taken.p99, taken.mean)
        table.add_row(escape(name), *(f"{each * scale:,.2f}" for each in seconds), f"{taken.samples:,}")
    return table


def model_table(model: Sequence[ModelPart]) -> Table:
    """Return what was modelled as a table."""
    table = plain_table("modelled", "with", "from")
    for part in model:
        figures = ", ".join(shown_figure(name, value) for name, value in part.figures.items())
        table.add_row(escape(part.what), escape(figures), escape(part.source))
    return table


def shown_figure(name: str, value: Figure) -> str:
    """Write a figure for people: `store 4.0 GB/s`, `latency 0.1 ms`."""
    return " ".join(figure_words(name, value))


def figure_words(name: str, value: Figure) -> tuple[str, str]:
    """Write a figure's name and its value, by the unit that the name ends in."""
    words = name.replace("_bytes_", "_").replace("_per_s", "").replace("_per_day", "").removesuffix("_bytes")
    per = "/s" if name.endswith("_per_s") else "/day" if name.endswith("_per_day") else ""
    if value is None:
        shown, per = "no limit", ""
    elif "_bytes" in name and isinstance(value, int | float):
        shown = decimal(int(value)) if per else shown_bytes(int(value))  # Rates as drives' and links' makers give them.
    elif name.endswith("_s") and not per:
        words, shown = name.removesuffix("_s"), f"{value * 1_000:,.4g} ms" if isinstance(value, float) else str(value)
    elif isinstance(value, int | float):
        shown = f"{value:,g}" if isinstance(value, float) else f"{value:,}"
    else:
        shown = value if isinstance(value, str) else ", ".join(value)
    return words.replace("_", " "), f"{shown}{per}"


def _reasons(counts: Mapping[str, int]) -> str:
    """Give the sum, and under it what it is made of."""
    return "\n".join([f"{sum(counts.values()):,}", *(f"{reason} {chunks:,}" for reason, chunks in counts.items())])
