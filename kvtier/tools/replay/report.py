"""The report of a replay, real or simulated: one struct, which is its JSON, and its tables."""

from array import array
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtier import __version__
from kvtier.config import PRIMARY_NAME, EngineConfig
from kvtier.settings import shown_bytes
from kvtier.tools import statuses
from kvtier.tools.outputs import counted, plain_table, write_json
from kvtier.tools.replay.replay import ReplayTally, TierReport, tier_report
from kvtier.tools.replay.study import Extent, too_long


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of durations, in seconds; all 0 without samples."""

    p50: float  # Median.
    p99: float  # 99th percentile.
    mean: float  # Mean.
    samples: int  # Number of samples.


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A replay's figures. Tiers are by name; the primary is `cpu`, the LLM engine's own prefix cache is `gpu`."""

    command: str  # `kvtier replay` or `kvtier simulate`.
    format: int = 2  # Number of the report's format. It changes with the meaning of a field.
    kvtier: str = __version__  # Version that wrote it.
    trace: str  # Name of the trace's file.
    seed: int  # The given seed.
    interrupted: bool  # The figures are those of the requests that had finished.
    requests: int  # Requests replayed.
    chunk_references: int  # Chunks that the requests asked for.
    hit_ratio: float  # Share of these chunks found in a leading run.
    best_hit_ratio: float  # The same for a cache that keeps everything, over the whole trace.
    hits: Mapping[str, int]  # Chunks found, by the tier that held them at the look-up.
    wrong_chunks: int  # Chunks that came back with other bytes than were stored.
    wrong_keys: list[str]  # Some of them, in hexadecimal.
    drained: bool  # All cascades had reached their tiers at the end.
    seconds: float  # Duration of the replay.
    requests_per_s: float  # Requests in a second.
    latency_s: Mapping[str, Quantiles]  # By operation: `fetch` and `put`, and each tier's load, store and probe.
    tiers: Mapping[str, TierReport]  # By tier.
    engine: Mapping[str, int | str]  # Rows, chunk size, eviction policy and runner.
    ttft_s: Mapping[str, Quantiles] | None  # Times to first token with and without tiers; null for real bytes.
    warnings: list[str]  # Limits of the configuration that cost hits, with the remedy.


def make_report(
    tally: ReplayTally,
    *,
    command: str,
    trace: str,
    seed: int,
    extent: Extent,
    config: EngineConfig,
    interrupted: bool = False,
    ttft_s: "Mapping[str, array[float]] | None" = None,
) -> Report:
    """Sum up the counts until the last sample. `config` has the sizes of the real engine."""
    tiers = tally.samples[-1].tiers if tally.samples else {PRIMARY_NAME: tier_report(0, 0, 0, 0)}
    return Report(
        command=command,
        trace=trace,
        seed=seed,
        interrupted=interrupted,
        requests=tally.requests,
        chunk_references=tally.chunk_references,
        hit_ratio=tally.hit_ratio,
        best_hit_ratio=extent.hit_ratio(extent.best_hits),
        hits={name: tier.hits for name, tier in tiers.items()},
        wrong_chunks=tally.wrong_chunks,
        wrong_keys=[key.hex() for key in tally.wrong_keys],
        drained=tally.drained,
        seconds=tally.seconds,
        requests_per_s=tally.requests / tally.seconds if tally.seconds else 0.0,
        latency_s={name: quantiles(samples) for name, samples in sorted(tally.latencies_s.items())},
        tiers=tiers,
        engine={
            "rows": config.rows,
            "chunk_bytes": config.chunk_bytes,
            "eviction_policy": config.eviction_policy,
            "runner": config.runner or "inline",
        },
        ttft_s=None if ttft_s is None else {name: quantiles(samples) for name, samples in ttft_s.items()},
        warnings=[*too_long(extent, config.rows, "the primary"), *_warnings(config, tiers)],
    )


def _warnings(config: EngineConfig, tiers: Mapping[str, TierReport]) -> Iterator[str]:
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
    if not seconds:
        return Quantiles(0.0, 0.0, 0.0, 0)
    p50, p99 = np.percentile(seconds, (50, 99))
    return Quantiles(float(p50), float(p99), float(np.mean(seconds)), len(seconds))


def deliver(report: Report, json_path: str | None) -> None:
    """Write and print a report; end the command with a status that tells an interrupt or wrong bytes."""
    print_report(report, write_json(json_path, report))
    if report.interrupted:
        raise typer.Exit(statuses.INTERRUPTED)
    if report.wrong_chunks:
        raise typer.Exit(statuses.DATA_WRONG)


def print_report(report: Report, console: Console) -> None:
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
        console.print("[yellow]some cascades had not reached their tiers when the deadline passed[/]")
    tables = [_tier_table(report), _time_table("latency", report.latency_s, 1_000, "ms")]
    if report.ttft_s is not None:
        tables.insert(0, _time_table("time to first token", report.ttft_s, 1, "s"))
    for table in tables:
        console.print()
        console.print(table)
    for warning in report.warnings:
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False)


def _tier_table(report: Report) -> Table:
    table = plain_table("tier", ">hits", ">share", ">read", ">written", ">refused", ">dropped", ">failed")
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


def _reasons(counts: Mapping[str, int]) -> str:
    """Format a sum, and its parts in the lines below."""
    return "\n".join([f"{sum(counts.values()):,}", *(f"{reason} {chunks:,}" for reason, chunks in counts.items())])


def _time_table(heading: str, times: Mapping[str, Quantiles], scale: int, unit: str) -> Table:
    table = plain_table(heading, f">p50, {unit}", f">p99, {unit}", f">mean, {unit}", ">samples")
    for name, taken in times.items():
        seconds = (taken.p50, taken.p99, taken.mean)
        table.add_row(escape(name), *(f"{each * scale:,.2f}" for each in seconds), f"{taken.samples:,}")
    return table
