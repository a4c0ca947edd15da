"""Which file goes next when room is needed: first what was there before the start and not used since, then by policy.

What is from before has nothing but its last use, which is its file's mtime; a policy has seen nothing of it. It becomes
the policy's when it is used. With LRU this is one order by last use, through any number of restarts.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvtier.keys import OffloadKey
from kvtier.policies.base import Policy
from kvtier_backends.fs.idle import Idle, Use

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

    def snapshot(self) -> tuple[Idle, dict[OffloadKey, int]]:
        """Return what was idle at some time, and when what is not was used, if there is a clock."""
        return self._idle.copy(), dict(self._used_at_ns)

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
