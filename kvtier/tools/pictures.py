"""The picture of a replay. Needs matplotlib; imported only when a picture is asked for."""

# matplotlib leaves the types of its keyword arguments out:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from kvtier.tools.outputs import counted, picture_format, replacing
from kvtier.tools.replay.replay import ReplayTally, TierReport
from kvtier.tools.replay.report import Report

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#888888")
"""Okabe and Ito's: distinct for people who do not see all colours, on white and on black."""
LABEL_CHARACTERS_MAX = 24  # Of a name in a picture. The tables have the whole.
SLICES = 60  # Of a replay's time: a picture shows no more.

Numbers = npt.NDArray[np.float64]


def write_replay_picture(path: str, report: Report, tally: ReplayTally) -> None:
    """Draw hits and traffic of each tier over the time of a replay, and the latencies of its calls."""
    figure = Figure(figsize=(8.6, 9.6), layout="constrained")
    figure.suptitle(
        f"{_short(report.trace)}: hit ratio {report.hit_ratio:.4f} over {counted(report.requests, 'request')}",
        parse_math=False,  # A file's name may have dollar signs.
    )
    hits, traffic, latencies = figure.subplots(3, 1)
    _draw_course(hits, traffic, report, tally)
    for index, (name, samples) in enumerate(tally.latencies_s.items()):
        shares = np.linspace(0.0, 1.0, 200)  # Points of a latency curve.
        latencies.plot(
            1e3 * np.quantile(samples, shares), shares, color=COLOURS[index % len(COLOURS)], label=_short(name)
        )
    latencies.set_xscale("log")
    latencies.set_xlabel("ms, logarithmic")
    latencies.set_ylabel("share of the calls")
    for axes in (hits, traffic, latencies):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, ncols=2)
    with replacing(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # Letters that the font lacks become boxes.
        figure.savefig(file, format=picture_format(path), dpi=150)


def _draw_course(hits: Axes, traffic: Axes, report: Report, tally: ReplayTally) -> None:
    """Draw each tier's share of the chunk references, and its bytes a second, in slices of equal time."""
    edges = np.linspace(0.0, max(tally.seconds, 1e-9), SLICES + 1)
    width_s = edges[1]
    times = [0.0, *(sample.seconds for sample in tally.samples)]

    def grown(values: list[int]) -> Numbers:
        return np.diff(np.interp(edges, times, [0, *values]))

    def of_tier(name: str, value: Callable[[TierReport], int]) -> Numbers:
        return grown([value(sample.tiers[name]) for sample in tally.samples])

    references = np.maximum(grown([sample.chunk_references for sample in tally.samples]), 1e-9)
    below: Numbers = np.zeros(SLICES)
    for index, name in enumerate(report.tiers if tally.samples else ()):
        colour, label = COLOURS[index % len(COLOURS)], _short(name)
        above = below + of_tier(name, lambda tier: tier.hits) / references
        hits.stairs(above, edges, baseline=below, fill=True, color=colour, label=label)
        below = above
        read, written = of_tier(name, lambda tier: tier.bytes_loaded), of_tier(name, lambda tier: tier.bytes_stored)
        traffic.stairs(read / width_s, edges, color=colour, label=f"{label}, read")
        traffic.stairs(written / width_s, edges, color=colour, linestyle="dashed", label=f"{label}, written")
    hits.set_ylim(0.0, 1.0)
    hits.set_ylabel("hits / chunk references")
    traffic.set_ylabel("bytes moved a second")
    traffic.yaxis.set_major_formatter(EngFormatter(unit="B/s"))
    for axes in (hits, traffic):
        axes.set_xlabel("time since the replay began, s")


def _short(name: str) -> str:
    plain = name.encode("utf-8", "replace").decode()
    return plain if len(plain) <= LABEL_CHARACTERS_MAX else f"{plain[: LABEL_CHARACTERS_MAX - 1]}…"
