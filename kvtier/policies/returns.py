"""Returns: the chance that keys are used again, by label and age, learned from returns; and what waiting is worth.

Ages are counted in requests and grouped in steps: 0, 1, 2 to 3, 4 to 7 and so on. Labels are the leaves of a tree; the
figures of a label are completed by those of its parent. Parts of hints are labels, too: none need be true. A class name
must come several times among the last few; their number is limited, and an unused one is replaced.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvtier.settings.hints import Hint

STEPS = 17
LABELS_MAX = 2_048  # Labels with hints; further ones are ignored. A few MB, and some milliseconds a halving.
_WIDTHS = (1, *(1 << step for step in range(STEPS - 1)))  # Requests that a step lasts.
_PRIOR = 0.05  # The chance of a return in a step before anything is known: an LRU's, 1 / age.
_PRIOR_RUNS = 500  # Runs that the prior counts for.
_CHANCE_MAX = 0.9  # The most that a branch's factor makes of its parent's chance.
_FRESH_REQUESTS = 128  # A label's worth is not computed again for this long.
_HALVING_REQUESTS = 4_096  # Counts are halved this often, because workloads drift.
_DIGITS = 12  # Of an index: labels with the same counts are equal, whatever the order of computing.

CLASSES_MAX = 64
OFTEN = 8  # Occurrences that make a name a class: fewer runs tell nothing.
SEEN_MAX = 256  # Names that may become classes.
IDLE_HINTS = 4_096  # A class may be replaced after this many hints of other classes.
_CLASS_RUNS = 50
_FUTURE_RUNS = 10  # A hint of the future tells so much more than the past that few runs outweigh it.
_BUCKETS_PER_E = 2  # Expected times are told apart by a factor of e^0.5.
_EXPECTED_S_MAX = 1e6


class Branch(NamedTuple):
    """A step down the tree of labels: its name, and how far it is believed to resemble its parent."""

    name: Hashable
    trust_runs: int  # Runs that the parent's chances count for.
    factor: float = 1.0  # By which the chances probably differ from the parent's.
    is_hint: bool = False  # Labels without hints are a few hundred at most; with hints, clients make them up.


class Label:
    """A node of the tree. Its counts hold those of all nodes below it."""

    __slots__ = ("branch", "chances", "children", "computed_at", "first_cell", "hits", "parent", "ranked_at", "risks")

    def __init__(self, parent: "Label | None", branch: Branch, first_cell: int) -> None:
        self.parent = parent
        self.branch = branch
        self.first_cell = first_cell  # The cell of step 0; those of the other steps follow.
        self.children: dict[Hashable, Label] = {}
        self.hits = [0.0] * STEPS  # Keys that were used again in each step,
        self.risks = [0.0] * STEPS  # of those that could have been.
        self.chances: Sequence[float] = ()
        self.computed_at = self.ranked_at = -_FRESH_REQUESTS


class Returns:
    """All labels, and the worth of every cell: of the runs of one label that have reached one step."""

    def __init__(self) -> None:
        self.now = 0  # In requests.
        self.worth: list[float] = []  # By cell.
        self._labels: list[Label] = []
        self._root = self._new_label(None, Branch(None, _PRIOR_RUNS))
        self._runs = self._keys = 0.0

    def label(self, path: Sequence[Branch]) -> Label:
        """Return the label at the end of a path from the root, or the last one on it if no more may be added."""
        label = self._root
        for branch in path:
            if branch.name not in label.children and path[0].is_hint and len(self._labels) >= LABELS_MAX:
                return label
            label = label.children.get(branch.name) or self._new_label(label, branch)
        return label

    def forget(self, name: Hashable) -> None:
        """Forget the counts of a branch of the root, which gets another meaning."""
        labels = [self._root.children[name]] if name in self._root.children else []
        while labels:
            label = labels.pop()
            label.hits, label.risks = [0.0] * STEPS, [0.0] * STEPS
            label.computed_at = label.ranked_at = -_FRESH_REQUESTS
            labels += label.children.values()

    def began(self, label: Label, keys: int) -> None:
        """Count a new run of `keys` keys, and refresh its label's worth."""
        self._runs += 1
        self._keys += keys
        if self.now - label.ranked_at >= _FRESH_REQUESTS:
            label.ranked_at = self.now
            first = label.first_cell
            self.worth[first : first + STEPS] = _indexes(self._chances(label))

    def returned(self, label: Label | None, step: int, keys: int) -> None:
        while label is not None:
            label.hits[step] += keys
            label.risks[step] += keys
            label = label.parent

    def outlived(self, label: Label | None, step: int, keys: int) -> None:
        while label is not None:
            label.risks[step] += keys
            label = label.parent

    def tick(self) -> int:
        """Count the end of a request; return the number of ended requests."""
        self.now += 1
        if self.now % _HALVING_REQUESTS == 0:
            self._runs /= 2
            self._keys /= 2
            for label in self._labels:
                label.hits = [count / 2 for count in label.hits]
                label.risks = [count / 2 for count in label.risks]
        return self.now

    def _new_label(self, parent: Label | None, branch: Branch) -> Label:
        label = Label(parent, branch, len(self.worth))
        self.worth += [0.0] * STEPS
        self._labels.append(label)
        if parent is not None:
            parent.children[branch.name] = label
        return label

    def _chances(self, label: Label) -> Sequence[float]:
        """Return the chance of a return in each step: the counts, completed by the parent's (empirical Bayes)."""
        if self.now - label.computed_at >= _FRESH_REQUESTS:
            label.computed_at = self.now
            trust = label.branch.trust_runs * (self._keys / self._runs)
            seen = zip(_smooth(label.hits), _smooth(label.risks), self._expected(label), strict=True)
            label.chances = [(hits + trust * above) / (risks + trust) for hits, risks, above in seen]
        return label.chances

    def _expected(self, label: Label) -> Sequence[float]:
        if label.parent is None:
            return (_PRIOR,) * STEPS
        above, factor = self._chances(label.parent), label.branch.factor
        return above if factor == 1.0 else [min(_CHANCE_MAX, chance * factor) for chance in above]


def _smooth(counts: Sequence[float]) -> list[float]:
    before, after = (counts[0], *counts[:-1]), (*counts[1:], counts[-1])
    return [(left + 2 * here + right) / 4 for left, here, right in zip(before, counts, after, strict=True)]


def _indexes(chances: Sequence[float]) -> list[float]:
    """Return each step's Gittins index: the best ratio of expected hits to expected waiting, over all horizons.

    Gittins, "Bandit processes and dynamic allocation indices", 1979. A horizon ends where the later steps are worth
    less than the earlier ones. One pass from the last step finds them, with a stack of steps that may still be joined.
    """
    indexes = [0.0] * len(chances)
    later: list[tuple[float, float, float]] = []  # Expected hits, expected waiting, and the chance to survive them.
    for step in range(len(chances) - 1, -1, -1):
        hits = chances[step]
        wait, survival = _WIDTHS[step] * (1 - hits / 2), 1 - hits
        while later and later[-1][0] * wait > hits * later[-1][1]:
            more_hits, more_wait, beyond = later.pop()
            hits += survival * more_hits
            wait += survival * more_wait
            survival *= beyond
        later.append((hits, wait, survival))
        indexes[step] = round(hits / wait, _DIGITS)
    return indexes


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
