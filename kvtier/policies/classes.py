"""Classes: which opaque names in hints are told apart. A client that makes up a name a request is told from nobody.

A name must come several times among the last few before it is one. There are so many at most; one that nobody has used
for long makes place for another. Time is the count of hints that name a class.
"""

from collections import OrderedDict

CLASSES_MAX = 64
OFTEN = 8  # Times before a name is told apart: fewer runs than that say nothing.
SEEN_MAX = 256  # Names that may become one.
IDLE_HINTS = 4_096  # After so many others a class that did not come makes place.


class Classes:
    """Numbers of classes, from 0."""

    def __init__(self) -> None:
        self._hints = 0
        self._numbers: OrderedDict[str, tuple[int, int]] = OrderedDict()  # With when it came last, oldest first.
        self._seen: OrderedDict[str, int] = OrderedDict()  # How often, the oldest first.

    def number(self, name: str) -> tuple[int | None, bool]:
        """Return a class's number, None if it is not told apart; and whether it was another's before."""
        self._hints += 1
        if name in self._numbers:
            number, _ = self._numbers[name]
            self._note(name, number)
            return number, False
        if not self._is_often(name):
            return None, False
        if len(self._numbers) < CLASSES_MAX:
            number = len(self._numbers)
            self._note(name, number)
            return number, False
        number, came = next(iter(self._numbers.values()))
        if self._hints - came <= IDLE_HINTS:
            return None, False
        self._numbers.popitem(last=False)
        self._note(name, number)
        return number, True

    def _note(self, name: str, number: int) -> None:
        self._seen.pop(name, None)
        self._numbers[name] = number, self._hints
        self._numbers.move_to_end(name)

    def _is_often(self, name: str) -> bool:
        times = self._seen[name] = self._seen.pop(name, 0) + 1
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        return times >= OFTEN
