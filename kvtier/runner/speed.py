"""A tier's speed: how long its loads take, learned from those that ended, and what a load to come will take.

    seconds = fixed + loads * (bytes of loads before it and its own) + stores * (bytes of stores that were under way)

The three factors, none below zero, are those that fit best what was seen, the latest most. What a straight line cannot
say (few bytes use few of a tier's lanes) is a correction for each class of sizes.

An error counts as a share of what was seen and of what was predicted alike. So a tier that has become twenty times as
slow shows as soon as one that has become twenty times as fast.
"""

import math
from itertools import combinations
from typing import NamedTuple

KEPT = 0.95  # Of the weight of what was seen before, after each load: the last twenty count most.
DRIFT = 0.5  # Of the last load in the average of surprises, as logarithms: chance evens out, a change does not.
CALM = 0.35  # Of that average: forty percent more or less, no change yet. Beyond it, what was seen before is forgotten.
HALF_LIFE_S = 20.0  # And of its age: what was seen before a pause gives way to what is seen after it.
SURPRISE_MAX = 8.0  # Times what was predicted: one load that hung a while says no more than that, two in a row do.
CLASSES = 16  # Of sizes, each four times the one before it.
LEAST_BITS = 16  # Of the first class: 64 KiB; smaller sizes are as slow as it.
CORRECTED = 0.3  # Of what a correction is still wrong by, with each load.
CORRECTION_MAX = 4.0  # Either way. More is no matter of size.
LEARN_EVERY_S = 0.002  # Learning takes a twentieth of it; loads that end sooner after another one say the same.
LEAST_S = 1e-7  # Less is the clock's own time.
RIDGE = 1e-6  # Of the weight on the diagonal: sizes that are all alike have a solution, too.


class Speed(NamedTuple):
    """What loads of a tier take, as far as is known."""

    fixed_s: float
    load_s_per_byte: float
    store_s_per_byte: float
    corrections: tuple[float, ...] = ()  # By class of size; absent ones are 1.

    def seconds(self, load_bytes: int, storing_bytes: int) -> float:
        """Return how long a load takes: `load_bytes` are its own and those of loads that come before it."""
        size = size_class(load_bytes)
        correction = self.corrections[size] if size < len(self.corrections) else 1.0
        return correction * self.linear_s(load_bytes, storing_bytes)

    def linear_s(self, load_bytes: int, storing_bytes: int) -> float:
        """Return the same without the correction for its size."""
        return max(LEAST_S, self.fixed_s + self.load_s_per_byte * load_bytes + self.store_s_per_byte * storing_bytes)


def size_class(size_bytes: int) -> int:
    return min(CLASSES - 1, max(0, size_bytes.bit_length() - LEAST_BITS) // 2)


class Begun(NamedTuple):
    """A load that has begun, as its meter must remember it."""

    at: float
    moved_bytes: int  # By loads of the tier, until then.
    storing_bytes: int


class SpeedMeter:
    """One tier's speed, measured where its transfers run; pure, with the time as an argument.

    A load's size is the bytes that the tier's loads moved while it was under way. If loads come one after the other,
    these are the bytes of the loads before it, and its own. If loads share the tier, these are the bytes that the tier
    can move meanwhile.
    """

    def __init__(self) -> None:
        self.speed: Speed | None = None
        """None: no load has ended yet."""
        self._moved_bytes = 0
        self._storing_bytes = 0
        self._matrix = [[0.0] * 3 for _ in range(3)]
        self._vector = [0.0] * 3
        self._corrections = [0.0] * CLASSES  # Logarithms.
        self._drift = 0.0
        self._noted_at = -math.inf

    def begin_load(self, now: float) -> Begun:
        return Begun(now, self._moved_bytes, self._storing_bytes)

    def end_load(self, begun: Begun, size_bytes: int, now: float, *, moved: bool = True) -> None:
        """Learn from a load that has ended, or that has run out of time; one that did not move all says nothing."""
        self._moved_bytes += size_bytes
        if moved and now - self._noted_at >= LEARN_EVERY_S:
            self._learn(self._moved_bytes - begun.moved_bytes, begun.storing_bytes, now - begun.at, now)

    def begin_store(self, size_bytes: int) -> None:
        self._storing_bytes += size_bytes

    def end_store(self, size_bytes: int) -> None:
        self._storing_bytes -= size_bytes

    def _learn(self, load_bytes: int, storing_bytes: int, seconds: float, now: float) -> None:
        seen = max(LEAST_S, seconds)
        before = None if self.speed is None else self.speed.seconds(load_bytes, storing_bytes)
        predicted = seen if before is None else before
        seen = min(max(seen, predicted / SURPRISE_MAX), predicted * SURPRISE_MAX)
        self._drift += DRIFT * (math.log(seen / predicted) - self._drift)
        self._forget(now)
        self._weigh((1.0, float(load_bytes), float(storing_bytes)), seen, 1.0 / (seen * predicted))
        fixed_s, load_s_per_byte, store_s_per_byte = self._solved()
        speed = Speed(fixed_s, load_s_per_byte, store_s_per_byte)
        size = size_class(load_bytes)
        wrong = math.log(seen / speed.linear_s(load_bytes, storing_bytes)) - self._corrections[size]
        most = math.log(CORRECTION_MAX)
        self._corrections[size] = min(most, max(-most, self._corrections[size] + CORRECTED * wrong))
        self.speed = speed._replace(corrections=tuple(map(math.exp, self._corrections)))

    def _forget(self, now: float) -> None:
        """Let what was seen before count less: for its age, for one load more, and for the change since then."""
        kept = KEPT * 0.5 ** ((now - self._noted_at) / HALF_LIFE_S) * math.exp(-max(0.0, abs(self._drift) - CALM))
        self._noted_at = now
        self._vector = [kept * value for value in self._vector]
        self._matrix = [[kept * value for value in row] for row in self._matrix]
        if abs(self._drift) > CALM:
            self._corrections = [kept * value for value in self._corrections]

    def _weigh(self, row: tuple[float, float, float], seen: float, weight: float) -> None:
        """Add an equation to those that the factors solve."""
        for i in range(3):
            self._vector[i] += weight * row[i] * seen
            for j in range(3):
                self._matrix[i][j] += weight * row[i] * row[j]

    def _solved(self) -> list[float]:
        """Return the factors, none below zero, with the least squared error: the best of what any of them give."""
        best, least = [0.0] * 3, 0.0
        scale = [math.sqrt(self._matrix[i][i]) or 1.0 for i in range(3)]
        matrix = [[self._matrix[i][j] / (scale[i] * scale[j]) + RIDGE * (i == j) for j in range(3)] for i in range(3)]
        vector = [self._vector[i] / scale[i] for i in range(3)]
        for count in (1, 2, 3):
            for chosen in combinations(range(3), count):
                part = _solution([[matrix[i][j] for j in chosen] for i in chosen], [vector[i] for i in chosen])
                if part is None or min(part) < 0.0:
                    continue
                error = -sum(factor * vector[i] for factor, i in zip(part, chosen, strict=True))
                if error < least:
                    least, best = error, [0.0] * 3
                    for factor, i in zip(part, chosen, strict=True):
                        best[i] = factor / scale[i]
        return best


def _solution(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Solve a few linear equations by elimination; None if they have no one solution."""
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    size = len(rows)
    for pivot in range(size):
        if abs(rows[pivot][pivot]) < RIDGE / 2:
            return None
        for below in range(pivot + 1, size):
            share = rows[below][pivot] / rows[pivot][pivot]
            rows[below] = [a - share * b for a, b in zip(rows[below], rows[pivot], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        solution[i] = (rows[i][size] - sum(rows[i][j] * solution[j] for j in range(i + 1, size))) / rows[i][i]
    return solution
