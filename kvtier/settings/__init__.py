"""Settings: fields of configuration structs, their units, words for errors, and plug-ins."""

from kvtier.settings.fields import Checked, decode, option_fields, struct_fields, struct_paths
from kvtier.settings.foreign import foreign, read_toml
from kvtier.settings.plugins import find_class, known_names
from kvtier.settings.secrets import check_secret, open_secret, secret_variable
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
    SecretName,
    SecretPath,
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
    "SecretName",
    "SecretPath",
    "Share",
    "Size",
    "SlowDuration",
    "check_secret",
    "decode",
    "find_class",
    "foreign",
    "known_names",
    "names_a_path",
    "open_secret",
    "option_fields",
    "parse_duration",
    "parse_size",
    "read_toml",
    "secret_variable",
    "shown_age",
    "shown_bytes",
    "struct_fields",
    "struct_paths",
]
