"""The miss-ratio curve as a picture. Needs matplotlib, so it is imported only when a picture is asked for."""

# matplotlib leaves the types of its keyword arguments out:
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping

from matplotlib.figure import Figure

from kvtier.replay.outputs import picture_format, replacing
from kvtier.replay.study import Extent


def write_miss_ratio_curve(
    path: str, title: str, extent: Extent, shares: Mapping[str, float], ratios: Mapping[str, Mapping[str, float]]
) -> None:
    """Draw one line a policy: which part of the block references misses, over the size of the cache."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    sizes = sorted(shares, key=shares.__getitem__)
    for name, row in ratios.items():
        axes.plot([shares[size] for size in sizes], [1 - row[size] for size in sizes], marker="o", label=name)
    axes.axhline(1 - extent.hit_ratio(extent.best_hits), color="grey", linestyle="--", label="best possible")
    axes.set_xscale("log")
    axes.set_xticks([shares[size] for size in sizes], labels=sizes)
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel(f"cache size, as a share of {extent.unique_blocks:,} unique blocks")
    axes.set_ylabel("miss ratio")
    axes.set_title(title, parse_math=False)  # A file's name may have dollar signs.
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, format=picture_format(path), dpi=150)
