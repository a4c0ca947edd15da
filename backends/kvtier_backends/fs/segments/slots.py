"""What is known of each slot, in arrays by its number: ten million of them must not take gigabytes."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvtier.backend import OffloadKey
from kvtier.policies import Policy

# Which chunk goes next, by its slot: LRU as two links a slot, any other policy as it is.
#
# An ordered dictionary takes more than a hundred bytes a chunk, which is as much as everything else that is known of
# it.


Keep = Callable[[OffloadKey], bool]


class SlotOrder(Protocol):
    """An order among the chunks that may go for room."""

    def insert(self, key: OffloadKey, slot: int) -> None: ...

    def touch(self, key: OffloadKey, slot: int) -> None: ...

    def move(self, key: OffloadKey, old: int, new: int) -> None:
        """Count the store of a chunk that is there already, in another slot now."""
        ...

    def rank(self, found: Sequence[tuple[OffloadKey, int]]) -> None:
        """Renew the recency of chunks in prefix order, without counting a use."""
        ...

    def remove(self, key: OffloadKey, slot: int) -> None: ...

    def settle(self, found: Iterable[tuple[OffloadKey, int]]) -> None:
        """Take in what is older than everything else; the newest first."""
        ...

    def victims(
        self, count: int, keep: Keep, kept: Callable[[], int], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey]:
        """Choose up to `count` chunks, and forget them. `kept`: how many `keep` holds back at most."""
        ...


class LRUOrder:
    """By last use: a ring of links, with the coldest behind the ring's first element and the newest before it."""

    def __init__(self, keys: list[OffloadKey | None]) -> None:
        """`keys`: whose chunk each slot has; it grows with the slots."""
        self._keys = keys
        self._next = array("I", [0])  # Of a slot at its number + 1; 0 is the ring's own.
        self._prev = array("I", [0])

    def insert(self, key: OffloadKey, slot: int) -> None:
        self._link(slot + 1, self._prev[0], 0)

    def touch(self, key: OffloadKey, slot: int) -> None:
        self.remove(key, slot)
        self.insert(key, slot)

    def move(self, key: OffloadKey, old: int, new: int) -> None:
        self.remove(key, old)
        self.insert(key, new)

    def rank(self, found: Sequence[tuple[OffloadKey, int]]) -> None:
        for key, slot in reversed(found):
            self.touch(key, slot)

    def remove(self, key: OffloadKey, slot: int) -> None:
        before, behind = self._prev[slot + 1], self._next[slot + 1]
        self._next[before] = behind
        self._prev[behind] = before

    def settle(self, found: Iterable[tuple[OffloadKey, int]]) -> None:
        for _, slot in found:
            self._link(slot + 1, 0, self._next[0])

    def victims(
        self, count: int, keep: Keep, kept: Callable[[], int], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey]:
        chosen: list[OffloadKey] = []
        at = self._next[0]
        while at and len(chosen) < count:
            key, slot, at = self._keys[at - 1], at - 1, self._next[at]
            assert key is not None, slot
            if not keep(key):
                self.remove(key, slot)
                chosen.append(key)
        return chosen

    def _link(self, at: int, before: int, behind: int) -> None:
        if at >= len(self._next):
            more = [0] * (len(self._keys) + 1 - len(self._next))
            self._next.extend(more)
            self._prev.extend(more)
        self._next[at], self._prev[at] = behind, before
        self._next[before] = self._prev[behind] = at


class PolicyOrder:
    """By a policy of the engine's, which goes by keys."""

    def __init__(self, policy: Policy[OffloadKey]) -> None:
        self._policy = policy
        self._count = 0

    def insert(self, key: OffloadKey, slot: int) -> None:
        self._policy.insert((key,))
        self._count += 1

    def touch(self, key: OffloadKey, slot: int) -> None:
        self._policy.touch((key,))

    def move(self, key: OffloadKey, old: int, new: int) -> None:
        self._policy.touch((key,))

    def rank(self, found: Sequence[tuple[OffloadKey, int]]) -> None:
        self._policy.rank([key for key, _ in found])

    def remove(self, key: OffloadKey, slot: int) -> None:
        self._policy.remove((key,))
        self._count -= 1

    def settle(self, found: Iterable[tuple[OffloadKey, int]]) -> None:
        for key, slot in reversed(list(found)):
            self.insert(key, slot)

    def victims(
        self, count: int, keep: Keep, kept: Callable[[], int], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey]:
        wanted = min(count, self._count - kept())
        # None, though there are enough: a policy that never evicts. Then there is no room.
        chosen = (self._policy.evict(wanted, keep, incoming) if wanted > 0 else None) or []
        self._count -= len(chosen)
        return chosen


class Held(NamedTuple):
    """A chunk in its slot."""

    key: OffloadKey
    slot: int
    sequence: int
    used_at_ns: int


class Snapshot(NamedTuple):
    """All slots at one moment."""

    keys: list[OffloadKey | None]
    sequences: "array[int]"
    used_at_ns: "array[int]"
    foreign: frozenset[int]

    def held(self) -> Iterator[Held]:
        """Yield the chunks that are the tier's own."""
        for slot, key in enumerate(self.keys):
            if key is not None and slot not in self.foreign:
                yield Held(key, slot, self.sequences[slot], self.used_at_ns[slot])


class Slots:
    """Which chunk each holds, and since when it was not used. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self.of: dict[OffloadKey, int] = {}
        """Where each key's newest chunk is."""
        self.keys: list[OffloadKey | None] = []
        self.sequences = array("Q")  # Of the last chunk that was there, if there is none now.
        self.used_at_ns = array("q")  # 0: nothing is held there.
        self.foreign: set[int] = set()
        """Slots of another process: read, and nothing else."""
        self._idle: bytearray | None = bytearray()  # By slot: held from before, not used since; None after the scan.

    def add(self, count: int) -> int:
        """Take in so many; return the first one's number."""
        first = len(self.keys)
        self.keys.extend([None] * count)
        self.sequences.extend([0] * count)
        self.used_at_ns.extend([0] * count)
        if self._idle is not None:
            self._idle.extend(bytes(count))
        return first

    def hold(self, chunk: Held) -> None:
        """Note what a slot holds from now on."""
        key, slot, sequence, used_at_ns = chunk
        self.of[key] = slot
        self.keys[slot] = key
        self.sequences[slot] = sequence
        self.used_at_ns[slot] = max(used_at_ns, 1)

    def hold_idle(self, chunk: Held) -> None:
        """Note what a slot has held from before the start, and that it was not used since."""
        assert self._idle is not None
        self.hold(chunk)
        self._idle[chunk.slot] = 1

    def leave(self, slot: int) -> None:
        """Note that a slot holds nothing any more; its key has another one by now."""
        self.keys[slot] = None
        self.used_at_ns[slot] = 0
        self.foreign.discard(slot)
        if self._idle is not None:
            self._idle[slot] = 0

    def forget(self, key: OffloadKey) -> int:
        """Note that nothing is held of this key any more; return where it was."""
        slot = self.of.pop(key)
        self.leave(slot)
        return slot

    def use(self, slot: int, used_at_ns: int) -> bool:
        """Note when a slot's chunk was used; say whether that was the first time since the start."""
        self.used_at_ns[slot] = max(used_at_ns, 1)
        if self._idle is None or not self._idle[slot]:
            return False
        self._idle[slot] = 0
        return True

    def is_idle(self, slot: int) -> bool:
        """Say whether what a slot holds is from before the start and was not used since."""
        return self._idle is not None and bool(self._idle[slot])

    def is_live(self, slot: int) -> bool:
        """Say whether what a slot of ours holds was stored or used since the start."""
        return slot not in self.foreign and not self.is_idle(slot)

    def end_idle(self) -> Iterator[tuple[OffloadKey, int]]:
        """Call nothing idle from now on; yield the chunks that were, the newest first."""
        assert self._idle is not None
        slots = np.flatnonzero(np.frombuffer(bytes(self._idle), dtype=np.uint8))
        self._idle = None
        newest_first = np.argsort(np.array(self.used_at_ns, dtype=np.int64)[slots], kind="stable")[::-1]
        idle = memoryview(slots[newest_first].tobytes()).cast("q")  # Read one by one: a list is as large as the rest.
        return ((key, slot) for slot in idle if (key := self.keys[slot]) is not None)

    def unused_since(self, before_ns: int) -> list[OffloadKey]:
        """Return the keys of our chunks whose last use was before that time."""
        used_at_ns = np.array(self.used_at_ns, dtype=np.int64)
        old = np.flatnonzero((used_at_ns > 0) & (used_at_ns < before_ns)).tolist()
        return [key for slot in old if slot not in self.foreign and (key := self.keys[slot]) is not None]

    def coldest(self, keep: Callable[[OffloadKey], bool]) -> OffloadKey | None:
        """Return which of our keys was used longest ago of those that `keep` does not hold back."""
        never = np.iinfo(np.int64).max
        used_at_ns = np.array(self.used_at_ns, dtype=np.int64)
        used_at_ns[used_at_ns == 0] = never
        while len(used_at_ns) and used_at_ns[slot := int(used_at_ns.argmin())] != never:
            key = self.keys[slot]
            if key is not None and slot not in self.foreign and not keep(key):
                return key
            used_at_ns[slot] = never
        return None

    def snapshot(self) -> Snapshot:
        """Return what is there now, for another thread to write down: some 10 ms a million slots."""
        return Snapshot(list(self.keys), self.sequences[:], self.used_at_ns[:], frozenset(self.foreign))
