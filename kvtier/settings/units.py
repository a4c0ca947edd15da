"""Units of a configuration: quantities are plain numbers in the program, text with a unit in a file.

`Size` and `Duration` are annotations: a field is an int or a float to code, and `kvtier.settings.fields` reads text.
"""

import os
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, NamedTuple

import msgspec

SIZE_BYTES_MAX = 1 << 60  # 1 EiB. No tier is larger; a mistyped unit is.
DURATION_S_MIN = 0.001  # The precision of a timer; less is no wait at all.
DURATION_S_MAX = 86_400.0  # A day; longer waits are mistakes, and the kernel refuses a timeout of 25 days.
SLOW_S_MIN = 0.1  # A healthy process or mount on a busy machine takes tens of milliseconds to answer.
AGE_S_MAX = 10 * 365 * 86_400.0  # Ten years: no chunk is kept as long.

_UNIT = "kvtier_unit"  # Key in `Meta.extra` of the `Unit` of an annotation.

_POWERS = {letter: power for power, letter in enumerate("KMGTP", 1)}
SIZE_UNITS: dict[str, Decimal] = {
    "B": Decimal(1),
    "kB": Decimal(1_000),
    **{f"{letter}B": Decimal(1_000) ** power for letter, power in _POWERS.items()},
    **{f"{letter}{end}": Decimal(1_024) ** power for end in ("iB", "i", "") for letter, power in _POWERS.items()},
}
_DURATION_UNITS: dict[str, Decimal] = {
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3_600),
    "d": Decimal(86_400),
}
_QUANTITY = re.compile(r"([0-9][0-9_]{0,24}(?:\.[0-9]{1,12})?) ?([A-Za-z]+)")
_ALMOST = re.compile(r"([0-9][0-9_]{0,24}(?:\.[0-9]{1,12})?) *([A-Za-z]{0,12})")
_SIZE_WORDS = {"": "B", "byte": "B", "bytes": "B", "gig": "GiB", "gigs": "GiB", "gigabytes": "GB", "megabytes": "MB"}
_DURATION_WORDS = {
    "": "s",
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "mins", "minute", "minutes"), "min"),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("day", "days"), "d"),
    **dict.fromkeys(("msec", "millis", "milliseconds"), "ms"),
}
"""Units that people write, in small letters, and the ones that are meant."""


def parse_size(text: str) -> int:
    """Read `"10GiB"`, `"1.5GB"`, or `"10G"` and `"10Gi"` (powers of 1,024) as bytes, rounded down, or ValueError."""
    return int(_quantity(text, SIZE_UNITS))


def parse_duration(text: str) -> float:
    """Read `"30s"`, `"500 ms"` or `"1.5h"` as seconds; ValueError for anything else."""
    return float(_quantity(text, _DURATION_UNITS))


def parse_path(text: str) -> str:
    """Read a path as an absolute one, `~` as the user's home. ValueError if it is empty or has a zero byte."""
    if not text or "\0" in text:
        raise ValueError("no path")
    path = os.path.expanduser(text)
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except FileNotFoundError as error:
        raise ValueError("the working directory is gone") from error


class Unit(NamedTuple):
    """A unit of text: how an annotated quantity is read, and what a message says is accepted."""

    parse: Callable[[str], int] | Callable[[str], float] | Callable[[str], str]
    accepted: str  # Ends the sentence "… accepted".
    units: Mapping[str, Decimal] = {}
    words: Mapping[str, str] = {}
    hidden: bool = False  # No message shows a value of it: the commonest slip puts a secret itself there.

    def respelled(self, text: str) -> str | None:
        """Return text with the unit that was probably meant, such as `10GB` for `10gb`; None if unknown."""
        if (match := _ALMOST.fullmatch(text.strip())) is None:
            return None
        written = match[2].lower()
        unit = self.words.get(written) or next((unit for unit in self.units if unit.lower() == written), None)
        return None if unit in (None, match[2]) else f"{match[1]}{unit}"


_SIZE = Unit(
    parse_size,
    'bytes as an integer, or text such as "10GiB" or "1.5 GB" (B, kB to PB, KiB to PiB; K to P and Ki to Pi too)',
    SIZE_UNITS,
    _SIZE_WORDS,
)
_DURATION = Unit(
    parse_duration,
    'seconds as a number, or text such as "30s" or "500ms" (us, ms, s, min, h, d)',
    _DURATION_UNITS,
    _DURATION_WORDS,
)
_SECRET_PATH = Unit(parse_path, "the path of a file with it", hidden=True)
_SECRET_NAME = Unit(str, "the name of an environment variable with it", hidden=True)

Size = Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX, extra={_UNIT: _SIZE})]
"""Bytes: an int, or text with a unit. Decimal units are powers of 1,000, binary ones of 1,024."""

Duration = Annotated[float, msgspec.Meta(ge=0, le=DURATION_S_MAX, extra={_UNIT: _DURATION})]
"""Seconds, a day of them at most: a number, or text with a unit."""

PositiveSize = Annotated[int, msgspec.Meta(ge=1, le=SIZE_BYTES_MAX, extra={_UNIT: _SIZE})]
"""A `Size` of at least one byte."""

PositiveDuration = Annotated[float, msgspec.Meta(ge=DURATION_S_MIN, le=DURATION_S_MAX, extra={_UNIT: _DURATION})]
"""A `Duration` of at least a millisecond."""

SlowDuration = Annotated[float, msgspec.Meta(ge=SLOW_S_MIN, le=DURATION_S_MAX, extra={_UNIT: _DURATION})]
"""A `Duration` of at least a tenth of a second: how long a process or a mount may be silent."""

Age = Annotated[float, msgspec.Meta(ge=DURATION_S_MIN, le=AGE_S_MAX, extra={_UNIT: _DURATION})]
"""An age in seconds, a millisecond to ten years; written as a `Duration`."""

Path = Annotated[str, msgspec.Meta(min_length=1, extra={_UNIT: Unit(parse_path, "a path")})]
"""A path in the file system, made absolute once, so that it survives a change of directory."""

SecretPath = Annotated[str, msgspec.Meta(min_length=1, extra={_UNIT: _SECRET_PATH})]
"""A `Path` of a file with a secret; no message shows it."""

SecretName = Annotated[str, msgspec.Meta(min_length=1, extra={_UNIT: _SECRET_NAME})]
"""The name of an environment variable with a secret; no message shows it either."""

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
"""A part of a whole: more than 0, at most 1."""

Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
"""A number of things, at least one."""

Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""A number from zero."""


def unit_of(meta: msgspec.Meta) -> Unit | None:
    """Return the unit of an annotation of this module; None for any other."""
    found = (meta.extra or {}).get(_UNIT)
    return found if isinstance(found, Unit) else None


def shown_bytes(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1_024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1_024
    return f"{size:.1f} PiB"


def shown_age(age_s: float) -> str:
    for unit, seconds in (("y", 365 * 86_400), ("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.1f} {unit}"
    return f"{age_s:.0f} s"


def _quantity(text: str, units: dict[str, Decimal]) -> Decimal:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"not a number and one of {', '.join(units)}")
    return Decimal(match[1].replace("_", "")) * units[match[2]]
