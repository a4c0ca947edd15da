"""A tier's speed: how long its loads take, learned from those that ended.

    seconds = fixed + load_bytes * (bytes of loads before it and its own)

Both factors, never below zero, fit what was seen by least squares; recent loads count most. A factor for all sizes
follows changes that several loads in a row have shown, and the fit comes after it.

An error counts as a share of both the observed and the predicted time. So a tier that has become twenty times as slow
shows as soon as one that has become twenty times as fast.
"""

import math
from typing import NamedTuple

KEPT = 0.9  # Weight of the earlier loads after each further one: the last ten count most.
HALF_LIFE_S = 20.0  # Of that weight, by age: what was seen before a pause gives way to what is seen after it.
DRIFT = 0.3  # Weight of the newest load in the factor for all sizes.
SURPRISE_MAX = 8.0  # Limit on observed over predicted: one hung load says no more than that, two in a row do.
LEARN_EVERY_S = 0.002  # Learning takes a fraction of it; loads that end sooner after another one say the same.
LEAST_S = 1e-7  # Shorter times are the clock's own.
RIDGE = 1e-6  # Added to the diagonal, as a share: sizes that are all alike have a solution, too.


class Speed(NamedTuple):
    """How long loads of a tier take."""

    fixed_s: float
    s_per_byte: float

    def seconds(self, load_bytes: int) -> float:
        """Return how long a load takes: `load_bytes` are its own and those of loads that come before it."""
        return max(LEAST_S, self.fixed_s + self.s_per_byte * load_bytes)


class BegunLoad(NamedTuple):
    """What a meter must remember of a load in flight."""

    at: float
    moved_bytes: int  # By loads of the tier, until then.


class SpeedMeter:
    """One tier's speed, measured where its transfers run; pure, with the time as an argument.

    A load's size is the bytes that the tier's loads moved while it was in flight. If loads come one after the other,
    these are the bytes of the loads before it, and its own. If loads share the tier, these are the bytes that the tier
    can move meanwhile.
    """

    def __init__(self) -> None:
        self.speed: Speed | None = None
        """None: no load has ended yet."""
        self._moved_bytes = 0
        self._sums = [0.0] * 5  # Weighted: of 1, sizes, squared sizes, seconds, sizes times seconds.
        self._drift = 0.0  # Logarithm of the factor for all sizes.
        self._learned_at = -math.inf

    def begin_load(self, now: float) -> BegunLoad:
        return BegunLoad(now, self._moved_bytes)

    def end_load(self, begun: BegunLoad, size_bytes: int, now: float, *, moved: bool = True) -> None:
        """Learn from a load that has ended, or that missed its deadline; a failed one says nothing."""
        self._moved_bytes += size_bytes
        if moved and now - self._learned_at >= LEARN_EVERY_S:
            self._learn(self._moved_bytes - begun.moved_bytes, max(LEAST_S, now - begun.at), now)

    def _learn(self, size: int, seen: float, now: float) -> None:
        size = max(1, size)  # The fit divides by the sizes.
        predicted = seen if self.speed is None else self.speed.seconds(size)
        seen = min(max(seen, predicted / SURPRISE_MAX), predicted * SURPRISE_MAX)
        kept = KEPT * 0.5 ** ((now - self._learned_at) / HALF_LIFE_S)
        weight = 1.0 / (seen * predicted)
        terms = (1.0, size, size * size, seen, size * seen)
        self._sums = [kept * total + weight * term for total, term in zip(self._sums, terms, strict=True)]
        self._learned_at = now
        fit = self._fitted()
        self._drift += DRIFT * (math.log(seen / fit.seconds(size)) - self._drift)
        factor = math.exp(self._drift)
        self.speed = Speed(factor * fit.fixed_s, factor * fit.s_per_byte)

    def _fitted(self) -> Speed:
        """Return the factors, none below zero, with the least squared error."""
        ones, sizes, squares, seconds, products = self._sums
        ones, squares = ones * (1 + RIDGE), squares * (1 + RIDGE)
        determinant = ones * squares - sizes * sizes
        fixed = (seconds * squares - products * sizes) / determinant
        slope = (products * ones - seconds * sizes) / determinant
        if slope < 0.0:
            return Speed(seconds / ones, 0.0)
        if fixed < 0.0:
            return Speed(0.0, products / squares)
        return Speed(fixed, slope)
