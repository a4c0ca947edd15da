"""Pictures: of replays, of curves over sizes, of benchmarks. Needs matplotlib; imported when asked for."""

from kvtier.tools.pictures.bench import limit_panels, write_figures_picture
from kvtier.tools.pictures.curves import write_miss_ratio_curve, write_size_picture
from kvtier.tools.pictures.drawing import svg
from kvtier.tools.pictures.replay import (
    draw_distributions,
    draw_hit_ratios,
    draw_hits,
    draw_traffic,
    one_panel,
    write_replay_picture,
)

__all__ = [
    "draw_distributions",
    "draw_hit_ratios",
    "draw_hits",
    "draw_traffic",
    "limit_panels",
    "one_panel",
    "svg",
    "write_figures_picture",
    "write_miss_ratio_curve",
    "write_replay_picture",
    "write_size_picture",
]
