"""The report of a replay: one struct, which is the JSON that `kvtier replay --json` writes."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvtier.config import PRIMARY_NAME
from kvtier.tools.replay.replay import GPU_NAME, Tally, TierTotals
from kvtier.tools.replay.virtual import ModelPart

_NO_TOTALS = TierTotals(0, 0, 0)


class Quantiles(msgspec.Struct, frozen=True):
    """How long something took, in seconds."""

    p50: float
    p99: float
    mean: float
    samples: int


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's part. `chunks` are moved ones; the primary's are those that were read and those that were put."""

    hits: int
    chunks_loaded: int
    chunks_stored: int
    bytes_loaded: int
    bytes_stored: int
    dropped: Mapping[str, int]  # Cascades that were never sent, by reason.
    failed: Mapping[str, int]  # Chunks that did not move, by what was wrong.


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A replay's figures. Chunks are counted unless a name says otherwise; tiers are by name, the primary is `cpu`.

    `gpu` is the LLM engine's own prefix cache, in virtual time: what it has, kvtier is never asked for.
    """

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
    latency_s: Mapping[str, Quantiles]
    tiers: Mapping[str, TierReport]
    engine: Mapping[str, Any]  # The configuration, as far as it says what was replayed against.
    ttft_s: Mapping[str, Quantiles] | None  # Times to first token, in virtual time only.
    model: Sequence[ModelPart] | None  # What was modelled, with which figures and from where, in virtual time only.


def make_report(
    tally: Tally,
    *,
    trace: str,
    seed: int,
    best_hit_ratio: float,
    row_bytes: int,
    engine: Mapping[str, Any],
    interrupted: bool,
    ttft_s: Mapping[str, "array[float]"] | None,
    model: Sequence[ModelPart] | None = None,
) -> Report:
    """Sum up what was counted until the last sample."""
    totals = tally.samples[-1].tiers if tally.samples else {PRIMARY_NAME: _NO_TOTALS}
    tiers = {name: _tier_report(tier, row_bytes) for name, tier in totals.items()}
    secondaries = [tier for name, tier in tiers.items() if name not in (PRIMARY_NAME, GPU_NAME)]
    return Report(
        trace=trace,
        seed=seed,
        interrupted=interrupted,
        requests=tally.requests,
        chunk_references=tally.chunk_references,
        hit_ratio=tally.hit_ratio,
        best_hit_ratio=best_hit_ratio,
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
        latency_s={name: quantiles(samples) for name, samples in sorted(tally.latencies_s.items())},
        tiers=tiers,
        engine=engine,
        ttft_s=None if ttft_s is None else {name: quantiles(samples) for name, samples in ttft_s.items()},
        model=model,
    )


def quantiles(seconds: "array[float]") -> Quantiles:
    """Return the median, the 99th percentile and the mean; all 0 without samples."""
    if not seconds:
        return Quantiles(0.0, 0.0, 0.0, 0)
    p50, p99 = np.percentile(seconds, (50, 99))
    return Quantiles(float(p50), float(p99), float(np.mean(seconds)), len(seconds))


def report_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def _tier_report(totals: TierTotals, row_bytes: int) -> TierReport:
    return TierReport(
        hits=totals.hits,
        chunks_loaded=totals.loaded,
        chunks_stored=totals.stored,
        bytes_loaded=totals.loaded * row_bytes,
        bytes_stored=totals.stored * row_bytes,
        dropped=totals.dropped,
        failed=totals.failed,
    )
