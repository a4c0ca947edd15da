"""kvtier's log inside vLLM: through vLLM's own handlers, and a line every so often of how tiering goes.

vLLM's logger hands nothing on to the root, so that what kvtier logs would come out bare, or not at all.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence

import vllm.envs as envs
from typing_extensions import override

from kvtier.engine.tier import Tier
from kvtier.runner.wire import LOGGERS

logger = logging.getLogger(__name__)


class ToVllm(logging.Handler):
    """Gives records to whatever handlers vLLM's logger has, now or after it was configured anew."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("vllm").handle(record)


def log_as_vllm() -> None:
    """Have kvtier's loggers log as vLLM's does; one that somebody has configured, or vLLM's if nobody has, is left."""
    vllm = logging.getLogger("vllm")
    if not vllm.handlers:
        return
    for name in LOGGERS:
        own = logging.getLogger(name)
        if not own.handlers:
            own.addHandler(ToVllm())
            own.propagate = False
            if own.level == logging.NOTSET:
                own.setLevel(vllm.getEffectiveLevel())


class Summary:
    """Logs what changed since its last line, as often as vLLM logs its own figures; nothing while nothing changes."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        row_bytes: int,
        primary: Callable[[], tuple[int, int, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`primary` returns the chunks that it had, those that were nowhere, and its used share; None: it is vLLM's."""
        self._tiers = tiers
        self._row_bytes = row_bytes
        self._primary = primary
        self._clock = clock
        self._due = clock() + envs.VLLM_LOG_STATS_INTERVAL
        self._before = self._counts()

    def look(self) -> None:
        """Log a line, if it is time for one."""
        if (now := self._clock()) < self._due:
            return
        self._due = now + envs.VLLM_LOG_STATS_INTERVAL
        counts = self._counts()
        if counts == self._before:
            return
        hits, misses, loaded, stored, dropped = (
            count - before for count, before in zip(counts, self._before, strict=True)
        )
        self._before = counts
        parts = [f"loaded {_gib(loaded * self._row_bytes)}", f"stored {_gib(stored * self._row_bytes)}"]
        if self._primary is not None:
            if hits + misses:
                parts.insert(0, f"hit ratio {hits / (hits + misses):.1%}")
            parts.append(f"primary {self._primary()[2]:.1%} full")
        parts += [_holds(tier) for tier in self._tiers]
        if dropped:
            parts.append(f"{dropped:,} chunks dropped")
        logger.info("kvtier: %s", ", ".join(parts))

    def _counts(self) -> tuple[int, ...]:
        """Return hits, misses, and chunks loaded from tiers, stored in them and dropped on the way there."""
        hits, misses, _ = (0, 0, math.nan) if self._primary is None else self._primary()
        counters = [tier.counters for tier in self._tiers]
        return (
            hits + sum(each.hits for each in counters),
            misses,
            sum(each.loaded for each in counters),
            sum(each.stored for each in counters),
            sum(sum(each.dropped.values()) for each in counters),
        )


def _holds(tier: Tier) -> str:
    limit = "" if tier.capacity_bytes is None else f" of {_gib(tier.capacity_bytes)}"
    return f"{tier.spec.name} holds {_gib(tier.used_bytes)}{limit}"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"
