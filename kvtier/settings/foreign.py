"""JSON and TOML written by people and other programs: malformed text raises `ValueError`."""

import tomllib
from collections.abc import Callable
from typing import Any, TypeVar

DOTS_MAX = 4_096  # In a line. The parser takes 0.3 s for a key of so many parts, and 20 s for one of 100,000.

T = TypeVar("T")


def foreign(decode: Callable[[Any], T], text: str | bytes) -> T:
    """Decode text with `json.loads`, `tomllib.loads` or one of msgspec's decoders.

    Raises only `ValueError`, also for text that is nested too deeply.
    """
    try:
        return decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_toml(text: str) -> dict[str, Any]:
    """Decode TOML. Raises only `ValueError`."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > DOTS_MAX:
            raise ValueError(f"more than {DOTS_MAX:,} dots (at line {number:,})")
    return foreign(tomllib.loads, text)
