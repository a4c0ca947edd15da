"""Hints as labels: the parts of a hint that tell runs apart. What they are worth is learned, so none need be true.

Clients make up class names. A name must come several times among the last few before it is a class. The number of
classes is limited; one that has been unused for long is replaced. Time is the count of hints that name a class.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from kvtier.policies.returns import Branch, Returns
from kvtier.settings.hints import Hint

CLASSES_MAX = 64
OFTEN = 8  # Occurrences that make a name a class: fewer runs tell nothing.
SEEN_MAX = 256  # Names that may become classes.
IDLE_HINTS = 4_096  # A class may be replaced after this many hints of other classes.
_CLASS_RUNS = 50
_FUTURE_RUNS = 10  # A hint of the future tells so much more than the past that few runs outweigh it.
_BUCKETS_PER_E = 2  # Expected times are told apart by a factor of e^0.5.
_EXPECTED_S_MAX = 1e6


class HintLabels:
    """The branches of labels that hints stand for."""

    def __init__(self, returns: Returns) -> None:
        self._returns = returns
        self._classes = Classes()

    def branches(self, hint: Hint) -> Sequence[Branch]:
        branches: list[Branch] = []
        if hint.class_:
            number, was_anothers = self._classes.number(hint.class_)
            if number is not None:
                branches.append(Branch(("class", number), _CLASS_RUNS, is_hint=True))
            if was_anothers:
                self._returns.forget(branches[0].name)
        if hint.over:
            branches.append(Branch("over", _FUTURE_RUNS, is_hint=True))
        elif hint.returns_in_s is not None:
            expected_s = min(max(1.0, hint.returns_in_s), _EXPECTED_S_MAX)
            bucket = round(_BUCKETS_PER_E * math.log(expected_s))
            branches.append(Branch(("returns", bucket), _FUTURE_RUNS, is_hint=True))
        return branches


class Classes:
    """Class names, numbered from 0."""

    def __init__(self) -> None:
        self._hints = 0
        self._numbers: OrderedDict[str, tuple[int, int]] = OrderedDict()  # With the last hint's time, oldest first.
        self._seen: OrderedDict[str, int] = OrderedDict()  # Occurrences, oldest first.

    def number(self, name: str) -> tuple[int | None, bool]:
        """Return a class's number, None if the name is no class; and True if another class had the number before."""
        self._hints += 1
        replaces = False
        if name in self._numbers:
            number, _ = self._numbers.pop(name)
        elif not self._is_often(name):
            return None, False
        elif len(self._numbers) < CLASSES_MAX:
            number = len(self._numbers)
        else:
            oldest, (number, used_at) = next(iter(self._numbers.items()))
            if self._hints - used_at <= IDLE_HINTS:
                return None, False
            del self._numbers[oldest]
            replaces = True
        self._seen.pop(name, None)
        self._numbers[name] = number, self._hints
        return number, replaces

    def _is_often(self, name: str) -> bool:
        times = self._seen[name] = self._seen.pop(name, 0) + 1
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        return times >= OFTEN
