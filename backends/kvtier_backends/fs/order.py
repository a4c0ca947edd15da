"""Which file goes next when room is needed: first what was there before the start and not used since, then by policy.

What is from before has nothing but its last use, which is its file's mtime; a policy has seen nothing of it. It becomes
the policy's when it is used. With LRU this is one order by last use, through any number of restarts.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvtier.keys import OffloadKey
from kvtier.policies.base import Policy

Keep = Callable[[OffloadKey], bool]


class Order:
    """Victims of one directory; its index says what is there. Belongs to the loop's thread."""

    def __init__(self, policy: Policy[OffloadKey], is_idle: Keep, clock_ns: Callable[[], int] | None = None) -> None:
        """`is_idle`: whether a key is there, from before the start, and was not used since.

        With a clock it also knows when each was used last, for another hundred bytes a chunk.
        """
        self._clock_ns = clock_ns
        self._used_at_ns: OrderedDict[OffloadKey, int] = OrderedDict()  # Of what is not idle, oldest first.
        self._policy = policy
        self._is_idle = is_idle
        self._live = 0  # Keys that the policy holds.
        self._idle: list[tuple[int, OffloadKey]] = []  # A heap by last use; may hold what is idle no more.

    def found(self, key: OffloadKey, used_at_ns: int) -> None:
        """Take in what the scan has found."""
        heappush(self._idle, (used_at_ns, key))

    def insert(self, key: OffloadKey) -> None:
        """Take in a chunk that was stored, or an idle one that was used."""
        self._policy.insert((key,))
        self._live += 1
        self._note_use(key)

    def touch(self, key: OffloadKey) -> None:
        """Count one more use of a chunk that is not idle."""
        self._policy.touch((key,))
        self._note_use(key)

    def rank(self, keys: Sequence[OffloadKey]) -> None:
        """Renew the recency of chunks that are not idle, tail first, without counting a use."""
        self._policy.rank(keys)

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

    def snapshot(self) -> tuple[list[tuple[int, OffloadKey]], dict[OffloadKey, int]]:
        """Return, in no order, the last use of what was idle at some time, and of what is not if there is a clock."""
        return list(self._idle), dict(self._used_at_ns)

    def _note_use(self, key: OffloadKey) -> None:
        if self._clock_ns is not None:
            self._used_at_ns[key] = self._clock_ns()
            self._used_at_ns.move_to_end(key)

    def _oldest_idle(self, count: int, keep: Keep, before_ns: int | None = None) -> list[OffloadKey]:
        chosen: list[OffloadKey] = []
        held_back: list[tuple[int, OffloadKey]] = []
        while self._idle and len(chosen) < count:
            if before_ns is not None and self._idle[0][0] >= before_ns:
                break
            entry = heappop(self._idle)
            if not self._is_idle(entry[1]):
                continue
            if keep(entry[1]):
                held_back.append(entry)
            else:
                chosen.append(entry[1])
        for entry in held_back:
            heappush(self._idle, entry)
        return chosen
