"""The order of eviction: first chunks from before the start that were not used since, by last use; then by policy.

Of a chunk from before the start only the last use is known, by its file's mtime. A policy has seen nothing of it. It
becomes the policy's when it is used. With LRU this is one order by last use, through any number of restarts.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import count, islice
from operator import itemgetter
from time import monotonic

from kvtier.backend import Advice, Hint, OffloadKey
from kvtier.policies import HintedOrder, Policy

LISTED_LEAST = 1_024
LISTED_PART = 64  # Of all keys one in so many. A search then costs a victim some dozen holes, of some ns each.

Use = tuple[int, OffloadKey]  # When a chunk was used last, in ns since the epoch.
Keep = Callable[[OffloadKey], bool]


class ColdEnd(Policy[OffloadKey]):
    """The cold end of an index: a policy that evicts what was used longest ago.

    Keys that must stay are renewed: they are in use. It has no order of its own: the index's entries stand in the order
    of their last use anyway. A dict keeps a hole for each key that was moved or removed, until it is rebuilt. Finding
    its first key steps over all holes. So its coldest keys are listed, a part of all at a time: a search for each list,
    and not for each victim.
    """

    def __init__(self, entries: dict[OffloadKey, int], is_live: Callable[[int], bool]) -> None:
        """`entries`: the chunks that are there.

        Those that are live by their value stand in the order of their last use.
        """
        self._entries = entries
        self._is_live = is_live
        self._listed: list[OffloadKey] = []  # The coldest last.
        self._cold: set[OffloadKey] = set()  # Of those, what was neither used nor removed since.

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        pass

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._cold.difference_update(keys)

    def rank(self, keys: Sequence[OffloadKey], hint: Hint | None = None) -> None:  # noqa: ARG002  # See `evict`.
        self._cold.difference_update(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        self._cold.difference_update(keys)

    def evict(
        self,
        count: int,
        keep: Callable[[OffloadKey], bool],
        incoming: Sequence[OffloadKey] = (),  # noqa: ARG002  # For policies that learn from it.
    ) -> list[OffloadKey] | None:
        victims: list[OffloadKey] = []
        renewed: set[OffloadKey] = set()
        while len(victims) < count:
            if not self._listed and not self._search({*victims, *renewed}):
                break
            key = self._listed.pop()
            if key not in self._cold:
                continue
            self._cold.discard(key)
            if keep(key):
                renewed.add(key)
                self._entries[key] = self._entries.pop(key)
            else:
                victims.append(key)
        return victims

    def _search(self, passed: set[OffloadKey]) -> bool:
        """List the coldest keys but for those that this call has passed; say whether there are any."""
        size = max(LISTED_LEAST, len(self._entries) // LISTED_PART)
        live = (key for key, entry in self._entries.items() if self._is_live(entry) and key not in passed)
        self._listed = list(islice(live, size))
        self._listed.reverse()
        self._cold = set(self._listed)
        return bool(self._listed)


class Batch:
    """Chunks that a scan has found at once, the newest first, so that the oldest is taken from the end."""

    __slots__ = ("keys", "times_ns")

    def __init__(self, uses: Iterable[Use]) -> None:
        newest_first = sorted(uses, reverse=True)
        self.times_ns = array("q", map(itemgetter(0), newest_first))
        self.keys = list(map(itemgetter(1), newest_first))


class Idle:
    """Chunks that were not used since the start, by last use.

    Chunks that were used or removed meanwhile are still in it. The taker passes over them. The scan gives a batch at a
    time, and some of it may have to go before the rest is found. A batch is sorted when it comes, and batches are
    merged as they are taken from. That takes sixteen bytes a chunk. A heap of pairs would take nine times as much.
    """

    def __init__(self) -> None:
        self._heads: list[tuple[int, int, Batch]] = []  # A heap: when a batch's oldest was used, and the batch.
        self._numbers = count()  # Batches cannot be compared.

    def add(self, uses: Iterable[Use]) -> None:
        """Take in some more."""
        batch = Batch(uses)
        if batch.keys:
            self._heads.append((batch.times_ns[-1], next(self._numbers), batch))
            heapify(self._heads)

    def oldest_ns(self) -> int | None:
        """Return when the oldest was used; None if there is none."""
        return self._heads[0][0] if self._heads else None

    def pop(self) -> Use:
        """Take the oldest, of which there must be one."""
        time_ns, number, batch = self._heads[0]
        batch.times_ns.pop()
        key = batch.keys.pop()
        if batch.keys:
            heapreplace(self._heads, (batch.times_ns[-1], number, batch))
        else:
            heappop(self._heads)
        return time_ns, key

    def __len__(self) -> int:
        return sum(len(batch.keys) for _, _, batch in self._heads)


class Order:
    """Victims of one directory; its index says what is there. Belongs to the loop's thread."""

    def __init__(
        self,
        policy: Policy[OffloadKey],
        is_idle: Keep,
        clock_ns: Callable[[], int] | None = None,
    ) -> None:
        """`is_idle`: whether a key is there, from before the start, and was not used since.

        With a clock it also knows when each was used last, for another hundred bytes a chunk.
        """
        self._hinted: HintedOrder[OffloadKey] | None = None  # Around the policy, from the first hint on.
        self._clock_ns = clock_ns
        self._used_at_ns: OrderedDict[OffloadKey, int] = OrderedDict()  # Of what is not idle, oldest first.
        self._policy: Policy[OffloadKey] | HintedOrder[OffloadKey] = policy
        self._is_idle = is_idle
        self._live = 0  # Keys that the policy holds.
        self._idle = Idle()

    def found(self, uses: Iterable[Use]) -> None:
        """Take in what the scan has found: when each was used, and its key."""
        self._idle.add(uses)

    def insert(self, key: OffloadKey) -> None:
        """Take in a chunk that was stored, or an idle one that was used."""
        self._policy.insert((key,))
        self._live += 1
        self._note_use(key)

    def touch(self, key: OffloadKey) -> None:
        """Count one more use of a chunk that is not idle."""
        self._policy.touch((key,))
        self._note_use(key)

    def advise(self, advice: Advice[OffloadKey], retained_max: int) -> None:
        """Apply advice to chunks that are not idle. `retained_max`: how many chunks may be retained at once."""
        if not advice.is_hint:
            self._policy.rank(advice.keys)
            return
        hinted = self._take_hints()
        hinted.retained.keys_max = retained_max
        hinted.advise(advice, monotonic())

    @property
    def retentions_cut(self) -> int:
        """How many were to be retained and were not, or not for all their time."""
        return 0 if self._hinted is None else self._hinted.retained.cut

    def _take_hints(self) -> HintedOrder[OffloadKey]:
        if self._hinted is None:
            self._hinted = HintedOrder(self._policy, 0, monotonic)
            self._policy = self._hinted
        return self._hinted

    def remove(self, key: OffloadKey) -> None:
        """Forget a chunk that is not idle."""
        self._policy.remove((key,))
        self._live -= 1
        self._used_at_ns.pop(key, None)

    def victims(self, count: int, keep: Keep, kept: int, incoming: Sequence[OffloadKey] = ()) -> list[OffloadKey]:
        """Choose up to `count` files that `keep` does not hold back, and forget them.

        `kept`: how many it holds back at most. `incoming`: the keys that the room is for.
        """
        chosen = self._oldest_idle(count, keep)
        wanted = min(count - len(chosen), self._live - kept)
        if wanted > 0:
            # None, though there are enough: a policy that never evicts. Then there is no room.
            for key in self._policy.evict(wanted, keep, incoming) or ():
                self._live -= 1
                self._used_at_ns.pop(key, None)
                chosen.append(key)
        return chosen

    def unused_since(self, before_ns: int, keep: Keep) -> list[OffloadKey]:
        """Choose the files whose last use was before that time, and forget them. Needs a clock."""
        chosen = self._oldest_idle(len(self._idle), keep, before_ns)
        for key, used_at_ns in self._used_at_ns.items():
            if used_at_ns >= before_ns:
                break
            if not keep(key):
                chosen.append(key)
        for key in chosen:
            if self._used_at_ns.pop(key, None) is not None:
                self._policy.remove((key,))
                self._live -= 1
        return chosen

    def _note_use(self, key: OffloadKey) -> None:
        if self._clock_ns is not None:
            self._used_at_ns[key] = self._clock_ns()
            self._used_at_ns.move_to_end(key)

    def _oldest_idle(self, count: int, keep: Keep, before_ns: int | None = None) -> list[OffloadKey]:
        chosen: list[OffloadKey] = []
        held_back: list[Use] = []
        while len(chosen) < count and (oldest_ns := self._idle.oldest_ns()) is not None:
            if before_ns is not None and oldest_ns >= before_ns:
                break
            use = self._idle.pop()
            if not self._is_idle(use[1]):
                continue
            if keep(use[1]):
                held_back.append(use)
            else:
                chosen.append(use[1])
        self._idle.add(held_back)
        return chosen
