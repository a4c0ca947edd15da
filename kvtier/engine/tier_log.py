"""The tiers' log: breakers that open and close, with the cause, and once a minute dropped and failed chunks.

It compares the ledger's counters with those of its last line.
"""

import errno
import logging
import math
import os
from collections.abc import Mapping, Sequence

from kvtier.engine.tier import CLOSED, PRESSURE, Tier
from kvtier.errors import Remedy

LOOK_EVERY_S = 1.0  # Without messages: drops alone make none.
LOSSES_EVERY_S = 60.0  # Between two lines of losses of one tier.

logger = logging.getLogger(__name__)


class TierLog:
    """Logs what has changed since the last line."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.due = -math.inf
        """When to look again without a message."""
        self._told = [_Told(tier) for tier in tiers]

    def look(self, now: float, *, last: bool = False) -> None:
        """Log changes; `last`: also losses that would wait for their minute."""
        self.due = now + LOOK_EVERY_S
        for told in self._told:
            told.breaker(now)
            told.losses(now, last=last)


class _Told:
    """The state of one tier at its last line."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._name = tier.spec.name
        self._open = False
        self._opened = 0
        self._dropped: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._unwritten = 0
        self._unanswered = 0
        self._losses_at = -math.inf

    def breaker(self, now: float) -> None:
        """Log that the breaker opened or closed; a failed trial is no new opening."""
        breaker = self._tier.breaker
        if breaker.opened != self._opened:
            self._opened = breaker.opened
            if not self._open:
                self._tell_opening(now)
            self._open = True
        if self._open and breaker.state is CLOSED:
            self._open = False
            logger.info("tier %s: the breaker is closed again", self._name)

    def losses(self, now: float, *, last: bool) -> None:
        """Log dropped and failed chunks, if it is time."""
        if now < self._losses_at and not last:
            return
        counters = self._tier.counters
        unwritten, unanswered = counters.skipped.get(PRESSURE, 0), counters.probes_failed
        told = (self._dropped, self._failed, self._unwritten, self._unanswered)
        if (counters.dropped, counters.failed, unwritten, unanswered) == told:
            return
        if losses := self._losses(now):
            logger.warning("tier %s: since the last line %s; see %s", self._name, losses, Remedy.LOSSES)

    def _tell_opening(self, now: float) -> None:
        logger.warning(
            "tier %s: the breaker is open after %d failures in a row; the last cause is %s; it is tried again every"
            " %g s; since the last line %s; see %s",
            self._name,
            self._tier.breaker.failures,
            _in_words(self._tier.counters.last_cause),
            self._tier.spec.breaker_cooldown_s,
            self._losses(now, cause=False) or "no chunk failed",
            Remedy.BREAKER,
        )

    def _losses(self, now: float, *, cause: bool = True) -> str:
        """Describe the losses since the last call."""
        counters = self._tier.counters
        dropped, self._dropped = _grown(self._dropped, counters.dropped), dict(counters.dropped)
        failed, self._failed = _grown(self._failed, counters.failed), dict(counters.failed)
        unwritten = counters.skipped.get(PRESSURE, 0)
        skipped, self._unwritten = {PRESSURE: unwritten - self._unwritten}, unwritten
        losses = ((dropped, "were dropped"), (skipped, "left the primary unwritten"), (failed, "failed"))
        parts = [_counted(chunks, verb) for chunks, verb in losses if any(chunks.values())]
        unanswered, self._unanswered = counters.probes_failed - self._unanswered, counters.probes_failed
        if unanswered:
            parts.append(f"questions not answered: {unanswered:,}")
        if parts:
            self._losses_at = now + LOSSES_EVERY_S
        if (failed or unanswered) and cause and counters.last_cause:
            parts.append(f"the last cause is {_in_words(counters.last_cause)}")
        return "; ".join(parts)


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}


def _counted(chunks: Mapping[str, int], verb: str) -> str:
    reasons = ", ".join(f"{name} {count:,}" for name, count in chunks.items())
    return f"{sum(chunks.values()):,} chunks {verb} ({reasons})"


def _in_words(cause: str) -> str:
    """Return a cause, with the system's message if it is an errno."""
    number = getattr(errno, cause, None)
    return f"{cause} ({os.strerror(number)})" if isinstance(number, int) else cause or "unknown"
