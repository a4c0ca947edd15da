"""Sides measured in turn, round after round, in an order that changes: neighbours and drift then hit all alike."""

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

ROUNDS = 7
ROUNDS_MIN = 1
ROUNDS_MAX = 10_000  # The figures of all of them are kept, and one takes a tenth of a second at the least.

Measure = Callable[[], float]
"""Do the work once and return the figure: a rate, or a time."""


class Side(NamedTuple):
    """One thing to measure. `prepare` and `tidy` run before and after it, unmeasured."""

    name: str
    measure: Measure
    prepare: Callable[[], None] = lambda: None
    tidy: Callable[[], None] = lambda: None


def interleaved(
    sides: list[Side], rounds: int, *, seed: int = 0, step: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Measure each side once a round and return its figures in order of rounds.

    A first round is not counted: it touches memory, starts threads and fills caches. `step` is called after each side.
    """
    dice = random.Random(seed)
    measured: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in dice.sample(sides, len(sides)):
            side.prepare()
            try:
                figure = side.measure()
            finally:
                side.tidy()
            if number:
                measured[side.name].append(figure)
            step()
    return measured


def steps_of(sides: int, rounds: int) -> int:
    """Return how often `interleaved` calls its `step`."""
    return sides * (rounds + 1)


def joined(measured: Mapping[str, list[float]], *others: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Put measurements of several runs side by side, by their names."""
    whole = dict(measured)
    for other in others:
        assert not whole.keys() & other.keys(), whole.keys() & other.keys()
        whole.update(other)
    return whole
