"""Settings: fields of configuration structs, their units, words for errors, and plug-ins."""

from kvtier.settings.fields import Checked, decode, struct_fields
from kvtier.settings.plugins import find_class, known_names
from kvtier.settings.units import (
    AGE_S_MAX,
    SIZE_BYTES_MAX,
    Age,
    Count,
    Duration,
    Index,
    Path,
    PositiveDuration,
    PositiveSize,
    Share,
    Size,
    SlowDuration,
    parse_duration,
    parse_size,
    shown_age,
    shown_bytes,
)
from kvtier.settings.words import names_a_path

__all__ = [
    "AGE_S_MAX",
    "SIZE_BYTES_MAX",
    "Age",
    "Checked",
    "Count",
    "Duration",
    "Index",
    "Path",
    "PositiveDuration",
    "PositiveSize",
    "Share",
    "Size",
    "SlowDuration",
    "decode",
    "find_class",
    "known_names",
    "names_a_path",
    "parse_duration",
    "parse_size",
    "shown_age",
    "shown_bytes",
    "struct_fields",
]
