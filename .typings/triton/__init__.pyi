"""What is used of Triton, which is not installed where types are checked."""

from collections.abc import Callable, Sequence
from typing import Any

def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Any]: ...
