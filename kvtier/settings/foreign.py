"""Text of other programs and of people, in JSON or TOML: malformed in any way, it is a `ValueError`."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def foreign(decode: Callable[[Any], T], text: str | bytes) -> T:
    """Decode text that others wrote, with `json.loads`, `tomllib.loads` or a decoder of msgspec's.

    Raises `ValueError` alone, also for text that is nested too deeply.
    """
    try:
        return decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
