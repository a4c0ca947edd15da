"""Orders that take hints, whatever their policy: what is over goes first, and what is retained is passed over.

An order is wrapped when the first hint comes: until then hints cost nothing. What was there before counts as used by
others, because nobody has looked.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, filterfalse, islice
from typing import Any, Generic, Protocol, TypeVar

from kvtier.hints import Advice, Hint
from kvtier.policies.policy import Hinted

_REST_KEYS = 1  # A conversation goes on without the chunk that was filled in part only.
_NEW = 0  # As a session: the key came since the first hint, and no request that used it has ended.
_STALE_MIN = 1_024  # Fewer outdated entries than this are not worth a new heap.

K = TypeVar("K", bound=Hashable)


class Order(Protocol[K]):
    """What is wrapped: a `Policy`, or a `NumberOrder`."""

    def insert(self, keys: Sequence[K], /) -> None: ...
    def touch(self, keys: Sequence[K], /) -> None: ...
    def rank(self, keys: Sequence[K], /) -> None: ...
    def remove(self, keys: Sequence[K], /) -> None: ...
    def evict(self, count: int, keep: Callable[[K], Any], incoming: Sequence[Any] = (), /) -> list[K] | None: ...


class Evict(Protocol[K]):
    """`Policy.evict`."""

    def __call__(self, count: int, keep: Callable[[K], Any], incoming: Sequence[Any], /) -> list[K] | None: ...


class Sessions(Generic[K]):
    """The sessions of resident keys: which ones several have used, and which are one session's own.

    A request continues the session whose last request used its deepest known key, if nothing of that one is left out.
    What it finds before that, and all that it finds of a session that it branches off from, several have used.
    """

    def __init__(self) -> None:
        self._session: dict[K, int] = {}  # The last request that used a key; a key that is not in here is others'.
        self._keys: dict[int, int] = {}  # How many keys a request was the last one to use.
        self._numbers = count(_NEW + 1)
        self._shared: set[K] = set()

    def came(self, keys: Iterable[K]) -> None:
        self._session.update(dict.fromkeys(keys, _NEW))

    def gone(self, keys: Iterable[K]) -> None:
        for key in keys:
            self._take(key)
            self._shared.discard(key)

    def moved(self, old: K, new: K) -> None:
        """Take note that a key has another name now."""
        if old in self._session:
            self._session[new] = self._session.pop(old)
        if old in self._shared:
            self._shared.discard(old)
            self._shared.add(new)

    def ended(self, keys: Sequence[K]) -> list[K]:
        """Take note of a request's end; return which of its keys no other session has used."""
        if not keys:  # All that it used has gone meanwhile.
            return []
        before = [self._take(key) for key in keys]
        known = next((place for place in range(len(keys) - 1, -1, -1) if before[place] != _NEW), -1)
        if known >= 0:
            session = before[known]
            goes_on = session is not None and self._keys.get(session, 0) <= _REST_KEYS
            own = {_NEW, session} if goes_on else {_NEW}
            self._shared.update(key for key, user in zip(keys[: known + 1], before, strict=False) if user not in own)
        number = next(self._numbers)
        self._session.update(dict.fromkeys(keys, number))
        self._keys[number] = len(keys)
        return list(filterfalse(self._shared.__contains__, keys))

    def _take(self, key: K) -> int | None:
        """Take a key from who used it last; None if nobody knows."""
        number = self._session.pop(key, None)
        if number:
            left = self._keys[number] - 1
            if left:
                self._keys[number] = left
            else:
                del self._keys[number]
        return number


class Retained(Generic[K]):
    """Keys that are passed over until their time is over: at most `keys_max`, those of low priority first to go.

    Time is an argument. The same key retained again stays until the later of both times, with the higher priority.
    """

    def __init__(self, keys_max: int) -> None:
        self.keys_max = keys_max
        self.cut = 0  # Keys that were not retained, or not for all of their time: beyond the share, or for room.
        self._terms: dict[K, tuple[float, int]] = {}  # Until when, and with which priority.
        self._by_priority: dict[int, OrderedDict[K, None]] = {}  # The first to be let go first; none is empty.
        self._ends: list[tuple[float, int, K]] = []  # A heap; some are outdated.
        self._numbers = count()  # Keys need not be comparable.

    def __len__(self) -> int:
        return len(self._terms)

    def __contains__(self, key: object) -> bool:
        return key in self._terms

    def __iter__(self) -> Iterator[K]:
        return iter(self._terms)

    def retain(self, keys: Sequence[K], until: float, priority: int) -> None:
        """Retain keys, in prefix order, or as many leading ones as there is room for; lower priorities give way."""
        room = self.keys_max - len(self._terms)
        taken: list[K] = []
        for key in keys:
            if key in self._terms:
                until_then, had = self._terms[key]
                self._enter(key, max(until, until_then), max(priority, had))
            elif room > 0 or self._displace(priority):
                room -= 1
                taken.append(key)
            else:
                self.cut += 1
        for key in reversed(taken):
            self._enter(key, until, priority)
        if len(self._ends) > 2 * len(self._terms) + _STALE_MIN:
            self._ends = [(until, next(self._numbers), key) for key, (until, _) in self._terms.items()]
            self._ends.sort()

    def expire(self, now: float) -> None:
        """Let go of what has had its time."""
        while self._ends and self._ends[0][0] <= now:
            until, _, key = heappop(self._ends)
            if key in self._terms and self._terms[key][0] <= until:
                self.discard((key,))

    def let_go(self, keys: int) -> None:
        """Let go of so many keys before their time, the lowest priority first."""
        for _ in range(min(keys, len(self._terms))):
            self._let_go(min(self._by_priority))

    def discard(self, keys: Iterable[K]) -> None:
        for key in keys:
            if key in self._terms:
                self._leave(key, self._terms.pop(key)[1])

    def moved(self, old: K, new: K) -> None:
        """Take note that a key has another name now."""
        if old in self._terms:
            until, priority = self._terms[old]
            self.discard((old,))
            self._enter(new, until, priority)

    def _enter(self, key: K, until: float, priority: int) -> None:
        if key in self._terms:
            self._leave(key, self._terms[key][1])
        self._terms[key] = until, priority
        self._by_priority.setdefault(priority, OrderedDict())[key] = None
        heappush(self._ends, (until, next(self._numbers), key))

    def _leave(self, key: K, priority: int) -> None:
        level = self._by_priority[priority]
        del level[key]
        if not level:
            del self._by_priority[priority]

    def _displace(self, priority: int) -> bool:
        """Make room for one key of this priority; False if nothing has a lower one."""
        lowest = min(self._by_priority, default=priority)
        if lowest >= priority:
            return False
        self._let_go(lowest)
        return True

    def _let_go(self, priority: int) -> None:
        self.discard((next(iter(self._by_priority[priority])),))
        self.cut += 1


class HintedOrder(Generic[K]):
    """An order with hints: it evicts what was demoted first, and what is retained only when there is nothing else.

    A policy that is `Hinted` learns how much a hint at a request's end is worth. For any other policy, the keys of a
    session that is over are demoted, unless another session has used them. A demoted key that is used again is as any
    other.
    """

    def __init__(self, order: Order[K], retained_max: int, clock: Callable[[], float] | None = None) -> None:
        """Wrap an order that may have keys by now. `retained_max`: how many keys may be retained at once.

        `clock`: whose times `until` are of; None: the owner lets go of what is `retained` for its time.
        """
        self._clock = clock
        self.retained = Retained[K](retained_max)
        self._order: Any = order
        self._sessions = None if isinstance(order, Hinted) else Sessions[K]()
        self._demoted: OrderedDict[K, None] = OrderedDict()  # The first to go first.

    # What says that a key is used, comes or goes.

    def insert(self, keys: Sequence[K], after: K | None = None, /) -> None:
        if after is None:
            self._order.insert(keys)
        else:
            self._order.insert(keys, after)
        if self._sessions is not None:
            self._sessions.came(keys)

    def insert_coldest(self, keys: Iterable[K], /) -> None:
        self._order.insert_coldest(keys)

    def touch(self, keys: Sequence[K], /) -> None:
        self._use(keys)
        self._order.touch(keys)

    def rank(self, keys: Sequence[K], /) -> None:
        self._use(keys)
        self._order.rank(keys)

    def move(self, old: K, new: K, /) -> None:
        self._use((old,))
        self._order.move(old, new)
        self.retained.moved(old, new)
        if self._sessions is not None:
            self._sessions.moved(old, new)

    def remove(self, keys: Sequence[K], /) -> None:
        self._order.remove(keys)
        self._forget(keys)

    def grow(self, capacity: int, /) -> None:
        self._order.grow(capacity)

    # Hints.

    def advise(self, advice: Advice[K], now: float) -> None:
        """Apply advice to keys of this order; `now` by the same clock as the times of what is retained."""
        match advice.kind:
            case "rank" if advice.hint is None:
                self.rank(advice.keys)
            case "rank":
                self.end(advice.keys, advice.hint)
            case "demote":
                self.demote(advice.keys)
            case "retain":
                self.retained.expire(now)
                self.retain(advice.keys, now + advice.seconds, advice.priority)

    def end(self, keys: Sequence[K], hint: Hint | None = None) -> Sequence[K]:
        """Rank the keys of a request that ends, all that it used, with what was said of it.

        Return what no other session has used, if its session is over: that is demoted.
        """
        self._use(keys)
        if self._sessions is None:
            if hint is None:
                self._order.rank(keys)
            else:
                self._order.rank_hinted(keys, hint)
            return ()
        self._order.rank(keys)
        own = self._sessions.ended(keys)
        if hint is None or not hint.over:
            return ()
        self.demote(own)
        return own

    def demote(self, keys: Sequence[K]) -> None:
        """Have these keys go before all others, tail first, unless they are used again."""
        self.retained.discard(keys)
        for key in reversed(keys):
            self._demoted[key] = None
            self._demoted.move_to_end(key)

    def spare(self, keys: Iterable[K]) -> None:
        """Take back that these keys were demoted; that counts as no access."""
        self._use(keys)

    def retain(self, keys: Sequence[K], until: float, priority: int) -> None:
        """Pass over these keys until then, as far as the share of what is retained allows."""
        self._use(keys)
        self.retained.retain(keys, until, priority)

    # Victims.

    def evict(self, count: int, keep: Callable[[K], Any], incoming: Sequence[Any] = (), /) -> list[K] | None:
        victims = self.leave(count, keep, incoming)
        if victims is not None:
            self.gone(victims)
        return victims

    def leave(self, count: int, keep: Callable[[K], Any], incoming: Sequence[Any] = (), /) -> list[K] | None:
        """Choose victims that may `come_back`; until then, or until they have `gone`, their sessions are known."""
        if self.retained and self._clock is not None:
            self.retained.expire(self._clock())
        victims: list[K] = []
        let_go = 1
        while True:
            part = self._evict(count - len(victims), self._keeping(keep), incoming)
            victims += part or ()
            if len(victims) >= count or not self.retained:
                break
            self.retained.let_go(let_go)
            let_go *= 2
        self._use(victims)
        self.retained.discard(victims)
        return None if part is None else victims

    def come_back(self, keys: Sequence[K]) -> None:
        """Take back in what has left, as the same as before."""
        self._order.insert(keys)

    def gone(self, keys: Iterable[K]) -> None:
        """Forget what has left and does not come back."""
        if self._sessions is not None:
            self._sessions.gone(keys)

    def _keeping(self, keep: Callable[[K], Any]) -> Callable[[K], Any]:
        retained = self.retained
        return (lambda key: key in retained or keep(key)) if retained else keep

    def _evict(self, count: int, keep: Callable[[K], Any], incoming: Sequence[Any]) -> list[K] | None:
        evict: Evict[K] = self._order.evict
        demoted = list(islice(filterfalse(keep, self._demoted), count))
        if not demoted:
            return evict(count, keep, incoming)
        chosen, others = set(demoted), list[K]()
        if len(demoted) < count:
            evicted = evict(count - len(demoted), lambda key: key in chosen or keep(key), incoming)
            if evicted is None:
                return None
            others = evicted
        self._order.remove(demoted)
        return demoted + others

    def _use(self, keys: Iterable[K]) -> None:
        if self._demoted:
            for key in keys:
                self._demoted.pop(key, None)

    def _forget(self, keys: Sequence[K]) -> None:
        self._use(keys)
        self.retained.discard(keys)
        self.gone(keys)
