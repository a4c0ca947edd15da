"""Pictures of replays and of curves over sizes. Needs matplotlib; imported when asked for."""

from kvtier.tools.pictures.curves import write_miss_ratio_curve, write_size_picture
from kvtier.tools.pictures.replay import write_replay_picture

__all__ = ["write_miss_ratio_curve", "write_replay_picture", "write_size_picture"]
