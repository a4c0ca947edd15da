"""Hit density: evicts the keys with the fewest expected hits for the time waited, learned from what returns.

Keys that one request used last share one future. So they are one run, with one age, label and statistics: the cost is
by request more than by key. A run of a conversation goes tail first. Each evicted run leaves a ghost; otherwise only
short returns would be seen. Time is the count of ended requests, so the same calls give the same victims.
"""

from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop
from itertools import chain, filterfalse, islice
from typing import Any

from kvtier.policies.policy import K, Policy
from kvtier.policies.returns import STEPS, Branch, HintLabels, Label, Returns
from kvtier.settings.hints import Hint

WARM_UP_REQUESTS = 512  # Until then it is an LRU: nothing is known yet.
_WARM_UP_HINTED_REQUESTS = 128  # With hints, something is.
_GHOST_KEYS = 4  # Ghosts remember up to this many times the capacity.
_OPEN_REQUESTS = 1_024  # A request is given up when this many others have ended since it began.
_OPEN_RUNS = 4_096  # Open runs at most; when as many were given up, time goes on.
_REST_KEYS = 1  # A conversation goes on without its last chunk, which was only partly filled.

_AGING = (  # Steps, and how many requests apart they are looked after: old runs need not age on time.
    (range(5), 1),
    (range(5, 9), 8),
    (range(9, STEPS - 1), 64),
)

_NO_KEYS = array("I")
_NOBODY = 0  # The run of a key that is not resident.
_PAUSE_UNKNOWN = 0
_PAUSE_STEPS_MAX = 6

_SHARED = 5
_KIND_OF_TURN = (0, 1, 2, 3, 3, 3, 4)
_KINDS = tuple(Branch(kind, 100, factor) for kind, factor in enumerate((1.0, 2.0, 2.0, 2.0, 2.0, 4.0)))
_PAUSES = tuple(Branch(pause, 50) for pause in range(2 + _PAUSE_STEPS_MAX))
_LENGTHS = tuple(Branch(length, 50) for length in range(5))
_PATH_UNKNOWN = (_KINDS[0], _PAUSES[_PAUSE_UNKNOWN], _LENGTHS[0])
_PATH_SUPERSEDED = (Branch("superseded", 50, 0.1),)
_FEW = 8  # For up to this many runs, counting each run's keys in turn is faster than counting all at once.

_Part = tuple["_KeyRun", "array[int]"]  # A run, and those of its keys that go.
_PartOf = Callable[["array[int]", int, Callable[[int], int]], "array[int]"]


class Density(Policy[K]):
    """Hit density, an order of runs (see `DensityOrder`): an LRU until `warm_up_requests` have ended."""

    learns_hints = True

    def __init__(self, capacity: int, *, warm_up_requests: int = WARM_UP_REQUESTS) -> None:
        self._capacity = capacity
        self._warm_up_requests = warm_up_requests
        self._numbers: dict[K, int] = {}
        self._keys: list[Any] = []
        self._unused: list[int] = []
        self._order = self.numbered(0, self._keys)

    def numbered(self, numbers: int, keys: Sequence[K | None]) -> "DensityOrder":
        """Return the same policy, empty, for an owner whose keys have numbers below `numbers`."""
        return DensityOrder(self._capacity, keys, numbers=numbers, warm_up_requests=self._warm_up_requests)

    def insert(self, keys: Sequence[K]) -> None:
        self._order.insert(list(map(self._number, keys)))

    def touch(self, keys: Sequence[K]) -> None:
        self._order.touch(self._numbers_of(keys))

    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None:
        self._order.rank(self._numbers_of(keys), hint)

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        keys = self._keys
        numbers = self._order.evict(count, lambda number: keep(keys[number]), incoming)
        if numbers is None:
            return None
        victims = [keys[number] for number in numbers]
        self._forget(victims)
        return victims

    def remove(self, keys: Sequence[K]) -> None:
        self._order.remove(self._numbers_of(keys))
        self._forget(keys)

    def _numbers_of(self, keys: Sequence[K]) -> list[int]:
        return list(map(self._numbers.__getitem__, keys))

    def _number(self, key: K) -> int:
        if not self._unused:
            self._unused.append(len(self._keys))
            self._keys.append(None)
            self._order.grow(len(self._keys))
        number = self._numbers[key] = self._unused.pop()
        self._keys[number] = key
        return number

    def _forget(self, keys: Sequence[K]) -> None:
        for key in keys:
            number = self._numbers.pop(key)
            self._keys[number] = None
            self._unused.append(number)


class _KeyRun:
    """Keys that one request used last, head first; labelled when it ends. A ghost once its last key is evicted."""

    __slots__ = ("born", "keys", "label", "live", "number", "pause", "shared", "size", "step", "turn")

    def __init__(self, number: int, born: int) -> None:
        self.number = number
        self.born = born  # When it was opened, or began to age.
        self.keys = _NO_KEYS  # Some of these may be another run's by now.
        self.live = 0  # Keys that it still owns.
        self.size = 0  # The same with evicted keys, which would have shared the fate of the others.
        self.label: Label | None = None
        self.step = 0
        self.turn = 0
        self.pause = _PAUSE_UNKNOWN
        self.shared = 0  # How many of its keys others use, too: its request's first ones, until that ends.

    def follow(self, earlier: "_KeyRun") -> None:
        """Continue the conversation that ended with `earlier` before."""
        self.turn = earlier.turn + 1
        self.pause = 1 + min(_PAUSE_STEPS_MAX, earlier.step // 2)


class DensityOrder:
    """The policy among small numbers: a key's owner takes 4 bytes, and its place in a run, too. See `NumberOrder`."""

    learns_hints = True

    def __init__(
        self, capacity: int, names: Sequence[Hashable | None], *, numbers: int, warm_up_requests: int = WARM_UP_REQUESTS
    ) -> None:
        """`names`: the key of each number, which names its ghost. `numbers`: how many there are at first."""
        self._names = names
        self._warm_up_requests = warm_up_requests
        self._ghost_keys_max = _GHOST_KEYS * capacity
        self._owner = array("I", [_NOBODY]) * numbers  # The number of each key's run.
        self._runs: dict[int, _KeyRun] = {}  # By number, from 1.
        self._unused: list[int] = []  # Numbers of ended runs.
        self._open: OrderedDict[_KeyRun, None] = OrderedDict()  # Oldest first, as all of these.
        self._given_up = 0  # Open runs since the last tick: an owner need not rank.
        self._settled: OrderedDict[_KeyRun, None] = OrderedDict()  # Resident runs that age.
        self._cells: defaultdict[int, OrderedDict[_KeyRun, None]] = defaultdict(OrderedDict)
        """Resident runs, by label and step; no cell is empty."""
        self._aging: list[deque[_KeyRun]] = [deque() for _ in range(STEPS)]  # Runs and ghosts; some have ended.
        self._ghosts: OrderedDict[Hashable, _KeyRun] = OrderedDict()  # By the name of the last key evicted.
        self._ghost_keys = 0
        self._returns = Returns()
        self._hints = HintLabels(self._returns)

    def insert(self, keys: Sequence[int], after: int | None = None, /) -> None:  # A run has one place.
        if not keys:
            return
        run = self._new_run()
        if self._ghosts:
            self._recognise(keys, run)
        self._open_run(run, keys)

    def touch(self, keys: Sequence[int], /) -> None:
        if not keys:
            return
        run, deepest = self._new_run(), self._runs[self._owner[keys[-1]]]
        settled = deepest.label is not None
        taken = self._take(keys, used=True)
        if settled and deepest.live <= _REST_KEYS and not deepest.shared:
            run.follow(deepest)
            run.shared = len(keys) - taken[deepest.number]
            if deepest.live:
                self._supersede(deepest)
        else:
            run.shared = len(keys)
        self._open_run(run, keys)

    def rank(self, keys: Sequence[int], hint: Hint | None = None, /) -> None:
        if hint is None:
            self._end(keys, ())
            return
        if branches := self._hints.branches(hint):
            self._warm_up_requests = min(self._warm_up_requests, _WARM_UP_HINTED_REQUESTS)
        self._end(keys, branches, has_future=hint.over or hint.returns_in_s is not None)

    def move(self, old: int, new: int, /) -> None:
        run = self._runs[self._owner[old]]
        run.keys[run.keys.index(old)] = new
        self._owner[old], self._owner[new] = _NOBODY, run.number
        self.touch((new,))

    def evict(self, count: int, keep: Callable[[int], int], incoming: Sequence[Any] = (), /) -> list[int] | None:
        parts = self._choose(count, keep, _tail, self._coldest_first())
        if parts is None:  # Then also keys before kept ones, and keys of requests that have not ended.
            parts = self._choose(count, keep, _anywhere, chain(self._coldest_first(), self._open))
        if parts is None:
            return None
        victims: list[int] = []
        for run, gone in parts:
            victims += reversed(gone)
            self._retire(run, gone)
        while self._ghost_keys > self._ghost_keys_max:
            self._forget_ghost(next(iter(self._ghosts)))
        return victims

    def remove(self, keys: Sequence[int], /) -> None:
        self._take(keys, used=False)
        for key in keys:
            self._owner[key] = _NOBODY

    def grow(self, capacity: int, /) -> None:
        self._owner.extend(array("I", [_NOBODY]) * (capacity - len(self._owner)))

    def _new_run(self) -> _KeyRun:
        number = self._unused.pop() if self._unused else len(self._runs) + 1
        run = self._runs[number] = _KeyRun(number, self._returns.now)
        return run

    def _own(self, run: _KeyRun, keys: Sequence[int]) -> None:
        owner, number = self._owner, run.number
        run.keys = array("I", keys)
        run.live = run.size = len(keys)
        for key in keys:
            owner[key] = number

    def _open_run(self, run: _KeyRun, keys: Sequence[int]) -> None:
        self._own(run, keys)
        self._open[run] = None
        if len(self._open) > _OPEN_RUNS:
            self._give_up_open()
            if self._given_up >= _OPEN_RUNS:
                self._warm_up_requests += 1  # Nothing was learned from a request.
                self._tick()

    def _owners(self, keys: Sequence[int]) -> Mapping[int, int]:
        """Count the keys by the run that owns them."""
        numbers = list(map(self._owner.__getitem__, keys))
        whose = set(numbers)
        if len(whose) > _FEW:
            return Counter(numbers)
        return {number: numbers.count(number) for number in whose}

    def _take(self, keys: Sequence[int], *, used: bool) -> Mapping[int, int]:
        """Take the keys from their runs; return how many each had. The caller gives them another owner."""
        taken = self._owners(keys)
        for number, count in taken.items():
            run = self._runs[number]
            run.live -= count
            if used and run.label is not None:
                self._returns.returned(run.label, run.step, count if run.live else run.size)
            run.size -= count
            if not run.live:
                self._close(run)
                run.label = None
        return taken

    def _supersede(self, run: _KeyRun) -> None:
        """Label what is left of a run whose conversation went on: its last chunk, which was only partly filled."""
        self._leave_cell(run)
        run.label, run.size = self._returns.label(_PATH_SUPERSEDED), run.live
        self._returns.began(run.label, run.live)
        self._enter_cell(run)

    def _keys(self, run: _KeyRun) -> "array[int]":
        """Return the keys that a run owns, head first, and drop others from its list."""
        if len(run.keys) > run.live:
            owner, number = self._owner, run.number
            run.keys = array("I", [key for key in run.keys if owner[key] == number])
        return run.keys

    def _close(self, run: _KeyRun) -> None:
        """End a run that owns no keys."""
        if run.label is None:
            del self._open[run]
        else:
            self._leave_cell(run)
            del self._settled[run]
        run.keys = _NO_KEYS
        del self._runs[run.number]
        self._unused.append(run.number)

    def _end(self, keys: Sequence[int], hints: Sequence[Branch], *, has_future: bool = False) -> None:
        """Make two runs of a request's keys: shared ones and the rest. `has_future`: the hints suffice as a label."""
        if not keys:
            return
        runs = list(map(self._runs.__getitem__, self._owners(keys)))
        opened = [run for run in runs if run.label is None]
        if not opened and not hints and not any(run.step for run in runs):
            return  # It was ranked already, and not used since.
        self._tick()
        turn, pause = max((run.turn, run.pause) for run in opened or runs)
        shared = max(run.shared for run in opened) if opened else sum(run.live for run in runs if run.shared)
        length = min(len(_LENGTHS) - 1, (len(keys).bit_length() - 1) // 2)
        past = () if has_future else (_PAUSES[pause], _LENGTHS[length])
        if shared < len(keys):
            kind = _KINDS[_KIND_OF_TURN[min(turn, len(_KIND_OF_TURN) - 1)]]
            self._settle(keys[shared:], turn, pause, 0, (*hints, kind, *past))
        if shared:
            self._settle(keys[:shared], turn, pause, len(keys), (*hints, _KINDS[_SHARED], *past))

    def _settle(self, keys: Sequence[int], turn: int, pause: int, shared: int, path: Sequence[Branch]) -> None:
        """Make a run of the keys that ages: the open run that owns exactly these, or a new one."""
        run = self._runs[self._owner[keys[0]]]
        if run.label is None and run.live == run.size == len(keys) and self._keys(run) == array("I", keys):
            del self._open[run]
        else:
            self._take(keys, used=False)
            run = self._new_run()
            self._own(run, keys)
        run.turn, run.pause, run.shared = turn, pause, shared
        self._begin_to_age(run, path)

    def _begin_to_age(self, run: _KeyRun, path: Sequence[Branch]) -> None:
        run.born = self._returns.now
        run.label = self._returns.label(path)
        self._returns.began(run.label, run.size)
        self._enter_cell(run)
        self._settled[run] = None
        self._aging[0].append(run)

    def _tick(self) -> None:
        now = self._returns.tick()
        self._given_up = 0
        self._give_up_open()
        for steps, every in _AGING:
            if now % every == 0:
                for step in steps:
                    self._outgrow(step, now)

    def _outgrow(self, step: int, now: int) -> None:
        """Move runs that have been in a step for its duration to the next one."""
        aging, older, born_before = self._aging[step], self._aging[step + 1], now - (1 << step)
        outlived = self._returns.outlived
        while aging and aging[0].born <= born_before:
            run = aging.popleft()
            if run.label is None:
                continue
            outlived(run.label, step, run.size)
            if run.live:
                self._leave_cell(run)
            run.step = step + 1
            if run.live:
                self._enter_cell(run)
            if run.step < STEPS - 1:
                older.append(run)

    def _give_up_open(self) -> None:
        """Begin to age the runs of requests that should have ended by now."""
        oldest_born = self._returns.now - _OPEN_REQUESTS
        while self._open and (len(self._open) > _OPEN_RUNS or next(iter(self._open)).born < oldest_born):
            run, _ = self._open.popitem(last=False)
            self._given_up += 1
            run.shared = 0
            self._begin_to_age(run, _PATH_UNKNOWN)

    def _enter_cell(self, run: _KeyRun) -> None:
        assert run.label is not None
        cell = run.label.first_cell + run.step
        self._cells[cell][run] = None

    def _leave_cell(self, run: _KeyRun) -> None:
        assert run.label is not None
        cell = run.label.first_cell + run.step
        runs = self._cells[cell]
        del runs[run]
        if not runs:
            del self._cells[cell]

    def _coldest_first(self) -> Iterator[_KeyRun]:
        """Iterate over the runs in eviction order, except open ones."""
        if self._returns.now < self._warm_up_requests:
            yield from self._settled
        else:
            # Equal cells go by number: labels without counts are worth as much as their parents.
            cells = list(zip(map(self._returns.worth.__getitem__, self._cells), self._cells, strict=True))
            heapify(cells)  # Most calls need only the first few.
            while cells:
                yield from self._cells[heappop(cells)[1]]

    def _choose(
        self, count: int, keep: Callable[[int], int], part_of: _PartOf, runs: Iterable[_KeyRun]
    ) -> list[_Part] | None:
        """Choose `count` keys of these runs, as `part_of` chooses up to that many of one run; None if too few."""
        parts: list[_Part] = []
        for run in runs if count else ():
            if part := part_of(self._keys(run), count, keep):
                parts.append((run, part))
                count -= len(part)
                if not count:
                    break
        return None if count else parts

    def _retire(self, run: _KeyRun, gone: "array[int]") -> None:
        """Evict keys of a run, which owns all of its `keys`. The last key to go names the ghost."""
        owner, keys = self._owner, self._keys(run)
        for key in gone:
            owner[key] = _NOBODY
        run.live -= len(gone)
        if run.live:
            if keys[-len(gone) :] == gone:
                del keys[-len(gone) :]
            return
        name = self._names[keys[0]]
        self._close(run)
        if name is None:
            run.label = None
        elif run.label is not None:
            self._ghosts[name] = run
            self._ghost_keys += run.size

    def _recognise(self, keys: Sequence[int], run: _KeyRun) -> None:
        """Count the returns of ghosts among the keys; the new run continues them."""
        ghosts, names = self._ghosts, self._names
        if ghosts.keys().isdisjoint(map(names.__getitem__, keys)):
            return
        for name in [name for key in keys if (name := names[key]) in ghosts]:
            ghost = ghosts[name]
            self._returns.returned(ghost.label, ghost.step, ghost.size)
            run.follow(ghost)
            self._forget_ghost(name)

    def _forget_ghost(self, name: Hashable) -> None:
        ghost = self._ghosts.pop(name)
        self._ghost_keys -= ghost.size
        ghost.label = None


def _tail(keys: "array[int]", count: int, keep: Callable[[int], int]) -> "array[int]":
    """Return up to `count` keys from a run's tail up to a kept one, head first."""
    tail = keys[-count:]
    if any(map(keep, reversed(tail))):
        kept = next(place for place in range(len(tail) - 1, -1, -1) if keep(tail[place]))
        tail = tail[kept + 1 :]
    return tail


def _anywhere(keys: "array[int]", count: int, keep: Callable[[int], int]) -> "array[int]":
    """Return up to `count` of a run's keys that are not kept, the last ones, head first."""
    gone = list(islice(filterfalse(keep, reversed(keys)), count))
    return array("I", reversed(gone))
