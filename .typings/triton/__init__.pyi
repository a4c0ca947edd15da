"""What is used of Triton, which is not installed where types are checked."""

from collections.abc import Callable
from typing import Any

def jit(fn: Callable[..., Any]) -> Any: ...
