"""What one tier was asked and what it said, over all lives of an engine: what the end is held against."""

from collections import Counter
from collections.abc import Iterable
from enum import Enum

from kvtier.backend import OffloadKey

CHUNK_UNIT_BYTES = 8


class Truth(Enum):
    """What a tier's own words make of a key."""

    PRESENT = "present"  # It said that the chunk is stored, or loaded it.
    GONE = "gone"  # It said that it is not there, or that it was deleted.
    DOUBTFUL = "doubtful"  # Calls crossed, came late, or were given up: both may be true.


class Book:
    """One tier's. Violations are written down, not raised: a runner takes what a tier raises for the tier's fault."""

    def __init__(self) -> None:
        self.truth: dict[OffloadKey, Truth] = {}
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self._under_way: Counter[OffloadKey] = Counter()
        self._crossed: set[OffloadKey] = set()

    def begin(self, keys: Iterable[OffloadKey]) -> None:
        """Note a call over these keys; two at a time leave both in doubt."""
        for key in keys:
            if self._under_way[key]:
                self._crossed.add(key)
            self._under_way[key] += 1

    def end(self, key: OffloadKey, truth: Truth | None) -> None:
        """Note what a call that ended says of one of its keys; None: nothing new."""
        self._under_way[key] -= 1
        if key in self._crossed:
            truth = Truth.DOUBTFUL
        if not self._under_way[key]:
            del self._under_way[key]
            self._crossed.discard(key)
        if truth is not None:
            self.truth[key] = truth

    def give_up(self) -> None:
        """Note that the engine does not wait any more for what is under way."""
        self._crossed.update(self._under_way)

    def report(self, keys: Iterable[OffloadKey], truth: Truth) -> None:
        """Note what the tier reports unasked."""
        for key in keys:
            self.truth[key] = Truth.DOUBTFUL if self._under_way[key] else truth

    def keys(self, truth: Truth) -> list[OffloadKey]:
        return [key for key, said in self.truth.items() if said is truth]

    def wrong(self, what: str) -> None:
        self.violations.append(what)


def chunk_of(key: OffloadKey, size_bytes: int) -> bytes:
    """Make the chunk that belongs to a key: it says in each of its parts whose it is."""
    unit = key[:CHUNK_UNIT_BYTES].ljust(CHUNK_UNIT_BYTES, b"\0")
    return (unit * (size_bytes // CHUNK_UNIT_BYTES + 1))[:size_bytes]
