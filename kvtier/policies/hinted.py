"""Orders around orders: hints for any policy, and eviction ahead of demand.

- With hints, demoted keys go first, and retained keys are passed over. An order is wrapped when the first hint comes;
  until then hints cost nothing. Keys inserted before that count as shared, because no session was tracked.
- Ahead of demand, victims are chosen early, so that their chunks are written before room is needed.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, filterfalse, islice
from typing import Any, Generic

from kvtier.policies.numbered import LinkedLRU, NumberOrder
from kvtier.policies.plain import LRU
from kvtier.policies.policy import K, Order, Policy
from kvtier.settings.hints import Advice, Hint

_REST_KEYS = 1  # A conversation goes on without its last chunk, which was only partly filled.
_NEW = 0  # The session of a key that came since the first hint and that no ended request has used.
_AT_ANY_TIME = (LRU, LinkedLRU)  # Choose the same victims before and after an insertion; subclasses need not.
_STALE_MIN = 1_024  # Fewer outdated entries than this are not worth a new heap.


class Sessions(Generic[K]):
    """The sessions of resident keys: which keys several sessions have used, and which only one.

    A request continues the session whose last request used its deepest known key, if at most the rest of that one is
    left out. Known keys before that, and all known keys of a session that it branches off from, are shared.
    """

    def __init__(self) -> None:
        self._session: dict[K, int] = {}  # The last request that used a key. A key without one is shared.
        self._keys: dict[int, int] = {}  # The number of keys that a request was the last to use.
        self._numbers = count(_NEW + 1)
        self._shared: set[K] = set()

    def came(self, keys: Iterable[K]) -> None:
        self._session.update(dict.fromkeys(keys, _NEW))

    def gone(self, keys: Iterable[K]) -> None:
        for key in keys:
            self._take(key)
            self._shared.discard(key)

    def moved(self, old: K, new: K) -> None:
        if old in self._session:
            self._session[new] = self._session.pop(old)
        if old in self._shared:
            self._shared.discard(old)
            self._shared.add(new)

    def ended(self, keys: Sequence[K]) -> list[K]:
        """Record the end of a request; return the keys used by its session alone."""
        if not keys:  # All of its keys have been evicted.
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
        """Remove a key from its last request and return that; None if it is not known."""
        if number := self._session.pop(key, None):
            if left := self._keys[number] - 1:
                self._keys[number] = left
            else:
                del self._keys[number]
        return number


class Retained(Generic[K]):
    """Keys to be passed over until their times: at most `keys_max`; low priorities are let go first.

    Time is an argument. A key that is retained again stays until the later of both times, with the higher priority.
    """

    def __init__(self, keys_max: int) -> None:
        self.keys_max = keys_max
        self.cut = 0  # Keys that were not retained, or not for all of their time: above the share, or for room.
        self._terms: dict[K, tuple[float, int]] = {}  # Until when, and with which priority.
        self._by_priority: dict[int, OrderedDict[K, None]] = {}  # The first to be let go first; none is empty.
        self._ends: list[tuple[float, int, K]] = []  # A heap; some entries are outdated.
        self._numbers = count()  # Keys need not be comparable.

    def __len__(self) -> int:
        return len(self._terms)

    def __contains__(self, key: object) -> bool:
        return key in self._terms

    def __iter__(self) -> Iterator[K]:
        return iter(self._terms)

    def retain(self, keys: Sequence[K], until: float, priority: int) -> None:
        """Retain keys in prefix order, as many leading ones as there is room for; lower priorities give way."""
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
        while self._ends and self._ends[0][0] <= now:
            until, _, key = heappop(self._ends)
            if key in self._terms and self._terms[key][0] <= until:
                self.discard((key,))

    def let_go(self, keys: int) -> None:
        """Let go of up to `keys` keys before their time, the lowest priority first."""
        for _ in range(min(keys, len(self._terms))):
            self._let_go(min(self._by_priority))

    def discard(self, keys: Iterable[K]) -> None:
        for key in keys:
            if key in self._terms:
                self._leave(key, self._terms.pop(key)[1])

    def moved(self, old: K, new: K) -> None:
        if old != new and old in self._terms:
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
        """Make room for one key of this priority; False if no retained key has a lower one."""
        if (lowest := min(self._by_priority, default=priority)) >= priority:
            return False
        self._let_go(lowest)
        return True

    def _let_go(self, priority: int) -> None:
        self.discard((next(iter(self._by_priority[priority])),))
        self.cut += 1


class HintedOrder(Generic[K]):
    """An order with hints: it evicts demoted keys first, and retained ones only if there are no others.

    A policy that learns hints is told them. For any other policy, the keys of a session that is over are demoted,
    unless another session has used them. A demoted key that is used again is like any other.
    """

    learns_hints = True

    def __init__(self, order: Order[K], retained_max: int, clock: Callable[[], float] | None = None) -> None:
        """Wrap an order, which may have keys. `clock`: of `until`; without it, the owner calls `retained.expire`."""
        self._clock = clock
        self.retained = Retained[K](retained_max)
        self._order: Any = order
        self._sessions = None if order.learns_hints else Sessions[K]()
        self._demoted: OrderedDict[K, None] = OrderedDict()  # The first to go first.

    def insert(self, keys: Sequence[K], after: K | None = None, /) -> None:
        if after is None:
            self._order.insert(keys)
        else:
            self._order.insert(keys, after)
        if self._sessions is not None:
            self._sessions.came(keys)

    def touch(self, keys: Sequence[K], /) -> None:
        self.spare(keys)
        self._order.touch(keys)

    def rank(self, keys: Sequence[K], hint: Hint | None = None, /) -> None:
        self.spare(keys)
        self._order.rank(keys, hint)

    def move(self, old: K, new: K, /) -> None:
        self.spare((old,))
        self._order.move(old, new)
        self.retained.moved(old, new)
        if self._sessions is not None:
            self._sessions.moved(old, new)

    def remove(self, keys: Sequence[K], /) -> None:
        self._order.remove(keys)
        self.spare(keys)
        self.retained.discard(keys)
        self.gone(keys)

    def grow(self, capacity: int, /) -> None:
        self._order.grow(capacity)

    def advise(self, advice: Advice[K], now: float) -> None:
        """Apply advice to resident keys. `now` and the times of retained keys are of one clock."""
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
        """Rank all keys of a request that ends; if its session is over, demote and return the keys of that alone."""
        if self._sessions is None:
            self.rank(keys, hint)
            return ()
        self.rank(keys)
        own = self._sessions.ended(keys)
        if hint is None or not hint.over:
            return ()
        self.demote(own)
        return own

    def demote(self, keys: Sequence[K]) -> None:
        """Evict these keys before all others, tail first, unless they are used again."""
        self.retained.discard(keys)
        for key in reversed(keys):
            self._demoted[key] = None
            self._demoted.move_to_end(key)

    def retain(self, keys: Sequence[K], until: float, priority: int) -> None:
        """Pass over these keys until then, as far as the share of retained keys allows."""
        self.spare(keys)
        self.retained.retain(keys, until, priority)

    def spare(self, keys: Iterable[K]) -> None:
        """Undo the demotion of keys, without an access."""
        if self._demoted:
            for key in keys:
                self._demoted.pop(key, None)

    def evict(self, count: int, keep: Callable[[K], Any], incoming: Sequence[Any] = (), /) -> list[K] | None:
        if (victims := self.leave(count, keep, incoming)) is not None:
            self.gone(victims)
        return victims

    def leave(self, count: int, keep: Callable[[K], Any], incoming: Sequence[Any] = (), /) -> list[K] | None:
        """Choose victims that may `come_back`. Their sessions are known until then, or until they are `gone`."""
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
        self.spare(victims)
        self.retained.discard(victims)
        return None if part is None else victims

    def come_back(self, keys: Sequence[K]) -> None:
        self._order.insert(keys)

    def gone(self, keys: Iterable[K]) -> None:
        """Forget the sessions of keys that left for good."""
        if self._sessions is not None:
            self._sessions.gone(keys)

    def _keeping(self, keep: Callable[[K], Any]) -> Callable[[K], Any]:
        retained = self.retained
        return (lambda key: key in retained or keep(key)) if retained else keep

    def _evict(self, count: int, keep: Callable[[K], Any], incoming: Sequence[Any]) -> list[K] | None:
        demoted = list(islice(filterfalse(keep, self._demoted), count))
        chosen, others = set(demoted), list[K]()
        if not demoted or len(demoted) < count:
            keeping: Callable[[K], Any] = (lambda key: key in chosen or keep(key)) if chosen else keep
            evicted: list[K] | None = self._order.evict(count - len(demoted), keeping, incoming)
            if evicted is None or not demoted:
                return evicted
            others = evicted
        self._order.remove(demoted)
        return demoted + others


class EvictionQueue(Generic[K]):
    """An order of numbers or of keys, behind a queue of the victims that it has chosen already.

    A key used meanwhile returns to the order as new: over an LRU, both are an LRU. One that must stay is put aside.
    """

    def __init__(self, order: "NumberOrder | Policy[K]", ahead: int) -> None:
        """`ahead`: the size of the queue when one key is evicted and another is chosen."""
        self._order: Any = order
        self.learns_hints = order.learns_hints
        self._later = type(order) in _AT_ANY_TIME  # The next `choose` makes up for evictions.
        self._hinted: HintedOrder[K] | None = None  # The same order, from the first hint on.
        self._ahead = ahead
        self._queue: OrderedDict[K, None] = OrderedDict()
        self.aside: dict[K, None] = {}
        """Keys that had to stay when their turn came."""
        self._news: list[K] = []

    def __iter__(self) -> Iterator[K]:
        yield from self.aside
        yield from self._queue

    def __len__(self) -> int:
        return len(self._queue) + len(self.aside)

    def among(self, keys: Iterable[K]) -> list[K]:
        queue, aside = self._queue, self.aside
        return [key for key in keys if key in queue or key in aside] if queue or aside else []

    def take_news(self) -> list[K]:
        """Return the keys that were chosen since the last call and are still here, the last one first."""
        news, self._news = self._news, []
        return self.among(dict.fromkeys(reversed(news)))

    def choose(self, count: int, keep: Callable[[K], int]) -> bool:
        """Choose further victims; return False, and change nothing, if there are fewer."""
        if (chosen := self._chosen(count, keep, ())) is None:
            return False
        self._enqueue(chosen)
        return True

    def reconsider(self, keep: Callable[[K], int]) -> bool:
        """Put keys that were aside and need not stay back to the front; return False if there are none."""
        idle = list(filterfalse(keep, self.aside)) if self.aside else []
        for key in idle:
            del self.aside[key]
        self._put_first(idle)
        return bool(idle)

    def take_hints(self, retained_max: int) -> HintedOrder[K]:
        """Take hints in the order from now on; the caller lets their keys `come_back` first."""
        self._order = self._hinted = HintedOrder[K](self._order, retained_max)
        return self._hinted

    def come_back(self, keys: Sequence[K]) -> None:
        if back := self.among(keys):
            self._drop(back)
            if self._hinted is None:
                self._order.insert(back)
            else:
                self._hinted.come_back(back)

    def insert(self, keys: Sequence[K], after: K | None = None) -> None:
        if after is None or self.among((after,)):
            self._order.insert(keys)
        else:
            self._order.insert(keys, after)

    def touch(self, keys: Sequence[K]) -> None:
        self.come_back(keys)
        self._order.touch(keys)

    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None:
        self.come_back(keys)
        self._order.rank(keys, hint)

    def move(self, old: K, new: K) -> None:
        self.come_back((old,))
        self._order.move(old, new)

    def remove(self, keys: Sequence[K]) -> None:
        if chosen := self.among(keys):
            keys = list(filterfalse(set(chosen).__contains__, keys))
            self._drop(chosen)
            if self._hinted is not None:
                self._hinted.gone(chosen)
        self._order.remove(keys)

    def evict(self, count: int, keep: Callable[[K], int], incoming: Sequence[Any] = ()) -> list[K] | None:
        """Take `count` victims from the queue, then from the order; as many are chosen for it, now or by `choose`."""
        victims = self._take(count, keep)
        if (others := self._others(count - len(victims), len(victims), keep, incoming)) is None:
            self._put_first(victims)
            return self.evict(count, keep, incoming) if self.reconsider(keep) else None
        if self._hinted is not None:
            self._hinted.gone(victims)
        return victims + others

    def grow(self, capacity: int) -> None:
        self._order.grow(capacity)

    def _chosen(self, count: int, keep: Callable[[K], int], incoming: Sequence[Any]) -> list[K] | None:
        if not count:
            return []
        return (self._order.evict if self._hinted is None else self._hinted.leave)(count, keep, incoming)

    def _others(self, missing: int, gone: int, keep: Callable[[K], int], incoming: Sequence[Any]) -> list[K] | None:
        """Return the missing victims from the order, and choose some for the queue if now is the time."""
        more = 0 if self._later else min(gone, max(0, self._ahead - len(self)))
        if not (missing or more):
            return []
        chosen = self._chosen(missing + more, keep, incoming)
        if chosen is None and more:
            chosen = self._chosen(missing, keep, incoming)
        if chosen is None:
            return None
        self._enqueue(chosen[missing:])
        if self._hinted is not None:
            self._hinted.gone(chosen[:missing])
        return chosen[:missing]

    def _enqueue(self, keys: Sequence[K]) -> None:
        self._queue.update(dict.fromkeys(keys))
        self._news += keys

    def _take(self, count: int, keep: Callable[[K], int]) -> list[K]:
        """Take out up to `count` keys that need not stay."""
        queue, victims = self._queue, list(islice(self._queue, count))
        if not any(map(keep, victims)):  # As nearly always.
            for key in victims:
                del queue[key]
            return victims
        victims = list[K]()
        while queue and len(victims) < count:
            key, _ = queue.popitem(last=False)
            if keep(key):
                self.aside[key] = None
            else:
                victims.append(key)
        return victims

    def _put_first(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            self._queue[key] = None
            self._queue.move_to_end(key, last=False)

    def _drop(self, keys: Sequence[K]) -> None:
        for key in keys:
            if key in self.aside:
                del self.aside[key]
            else:
                del self._queue[key]
