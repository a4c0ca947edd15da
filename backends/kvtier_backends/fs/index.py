"""The index: a tier's chunks by number, their last uses, and the order in which they go. Owned by the loop's thread.

A number is a slot of a segment, or stands for a file; facts are in arrays: ten million chunks must not take gigabytes.
Chunks unused since the start are idle, and go first, by their last use. With LRU this is one order by last use.
"""

import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvtier.backend import Advice, InventoryQueue, OffloadKey
from kvtier.policies import HintedOrder, LinkedLRU, NumberOrder, Policy, number_order

LISTED_LEAST = 1_024  # Idle numbers that are sorted at once during a scan,
LISTED_PART = 64  # and at least one in so many: some milliseconds a million.


class InUse:
    """Keys, by how many calls each is in use. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._calls: dict[OffloadKey, int] = {}

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._calls

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._calls)

    @contextmanager
    def __call__(self, keys: Sequence[OffloadKey]) -> Generator[None]:
        """Keep the keys' chunks for as long as the block lasts."""
        self.pin(keys)
        try:
            yield
        finally:
            self.unpin(keys)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        calls = self._calls
        for key in keys:
            calls[key] = calls.get(key, 0) + 1

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        calls = self._calls
        for key in keys:
            if calls[key] == 1:
                del calls[key]
            else:
                calls[key] -= 1


class ChunkIndex:
    def __init__(self, policy: Policy[OffloadKey] | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty. `policy`: orders the chunks that were used since the start; None for LRU."""
        self.of: dict[OffloadKey, int] = {}  # The number of each key's chunk.
        self.keys: list[OffloadKey | None] = []
        self.used_at_ns = array("q")  # By number; 0: nothing is held there.
        self.foreign: set[int] = set()  # Numbers of chunks that another process has: in no order, they never go.
        self.inventory = InventoryQueue(self.of)
        self._idle = bytearray()  # By number: 1 for a chunk from before the start that was not used since.
        self._idle_count = 0
        self._oldest = array("I")  # Idle numbers, the oldest last. Some are idle no more, and others are missing.
        self._live = 0  # Numbers in the order.
        self._order: NumberOrder = LinkedLRU(0) if policy is None else number_order(policy, 0, self.keys, self.of.get)
        self._hinted: HintedOrder[int] | None = None  # The same order, from the first hint on.
        self._clock = clock

    def add(self, count: int) -> int:
        first = len(self.keys)
        self.keys.extend([None] * count)
        self.used_at_ns.extend([0] * count)
        self._idle.extend(bytes(count))
        self._order.grow(len(self.keys))
        return first

    def is_live(self, number: int) -> bool:
        """Return True if a held chunk was stored or used since the start: it is in the order."""
        return not self._idle[number] and number not in self.foreign

    def store(self, key: OffloadKey, number: int, used_at_ns: int) -> None:
        """Hold a key's new chunk, which counts as a use, in place of the one that it had."""
        old = self.of.get(key)
        self.of[key] = number
        self.keys[number] = key
        self.used_at_ns[number] = used_at_ns or 1
        if old is None:  # Inlined: once a stored chunk.
            self._order.insert((number,))
            self._live += 1
        elif not self.is_live(old):
            self._end_idle(old)
            self._insert((number,))
        else:
            self._order.move(old, number)
        if old is not None and old != number:
            self._clear(old)

    def hold(
        self, key: OffloadKey, number: int, used_at_ns: int, *, foreign: bool = False, listed: bool = True
    ) -> None:
        """Hold a chunk from before the start. With `listed` unset, no load finds it: it only takes room."""
        if listed:
            self.of[key] = number
        self.keys[number] = key
        self.used_at_ns[number] = max(used_at_ns, 1)
        if foreign:
            self.foreign.add(number)
        else:
            self._idle[number] = 1
            self._idle_count += 1

    def recall(self, numbers: NDArray[np.int64], used_at_ns: NDArray[np.int64]) -> None:
        """Hold chunks from before the start whose keys the caller has put in `of` and `keys`."""
        np.frombuffer(self.used_at_ns, np.int64)[numbers] = np.maximum(used_at_ns, 1)
        np.frombuffer(self._idle, np.uint8)[numbers] = 1
        self._idle_count += len(numbers)

    def used_elsewhere(self, number: int, used_at_ns: int) -> None:
        self.used_at_ns[number] = max(self.used_at_ns[number], used_at_ns)

    def own(self, number: int) -> None:
        self.foreign.discard(number)
        self._idle[number] = 1
        self._idle_count += 1

    def use(self, keys: Iterable[OffloadKey], now_ns: int) -> None:
        """Count a use of those keys, in prefix order, that are known: used together, the head is the newest."""
        numbers, first_used = self._renew(keys, now_ns)
        if first_used:
            others = set(first_used)
            self._order.touch([number for number in numbers if number not in others])
            self._order.rank(numbers)
        else:
            self._order.touch(numbers)

    def advise(self, advice: Advice[OffloadKey], now_ns: int, retained_max: int) -> None:
        """Apply advice to its known keys: all but a demotion is a use. `retained_max` chunks may be retained."""
        hinted = self._take_hints() if advice.is_hint else None
        if advice.kind == "demote":
            known = (self.of.get(key) for key in dict.fromkeys(advice.keys))
            numbers = [number for number in known if number is not None and self.is_live(number)]
        else:
            numbers, _ = self._renew(advice.keys, now_ns)
        if hinted is None:
            self._order.rank(numbers)
        else:
            hinted.retained.keys_max = retained_max
            hinted.advise(advice.of(numbers), self._clock())

    @property
    def retentions_cut(self) -> int:
        return 0 if self._hinted is None else self._hinted.retained.cut

    def remove(self, number: int) -> OffloadKey:
        self.take(number)
        return self.forget(number)

    def take(self, number: int) -> None:
        """Take a held chunk out of the order; the caller calls `forget`."""
        if self.is_live(number):
            self._order.remove((number,))
            self._live -= 1

    def forget(self, number: int) -> OffloadKey:
        """Forget a chunk that `evict` has chosen, or `take` taken; return its key."""
        key = self.keys[number]
        assert key is not None, number
        if self.of.get(key) == number:
            del self.of[key]
        self.keys[number] = None  # Inlined `_clear`: once an evicted chunk.
        self.used_at_ns[number] = 0
        if self._idle[number]:
            self._end_idle(number)
        if self.foreign:
            self.foreign.discard(number)
        return key

    def evict(
        self, count: int, keep: Callable[[int], bool], kept: Iterable[OffloadKey], incoming: Sequence[OffloadKey] = ()
    ) -> list[int]:
        """Choose up to `count` numbers for `incoming` keys, none that `keep` holds back; the caller forgets them."""
        victims = self._take_idle(count, keep)
        wanted = min(count - len(victims), self._live)
        found = self._order.evict(wanted, keep, incoming) if wanted else []
        if found is None:  # Then there are hardly more of them than calls have chunks.
            numbers = map(self.of.get, kept)
            wanted = min(wanted, self._live - sum(number is not None and self.is_live(number) for number in numbers))
            found = self._order.evict(wanted, keep, incoming) if wanted > 0 else []
        if found:  # None, though there are enough: a policy that never evicts. Then there is no room.
            self._live -= len(found)
            victims += found
        return victims

    def unused_since(self, before_ns: int) -> list[int]:
        used_at_ns = np.array(self.used_at_ns, dtype=np.int64)
        old = np.flatnonzero((used_at_ns > 0) & (used_at_ns < before_ns)).tolist()
        return [number for number in old if number not in self.foreign]

    def coldest(self, keep: Callable[[int], bool]) -> int | None:
        """Return the number of our chunk that was used longest ago, of those that `keep` does not hold back."""
        never = np.iinfo(np.int64).max
        used_at_ns = np.array(self.used_at_ns, dtype=np.int64)
        used_at_ns[used_at_ns == 0] = never
        while len(used_at_ns) and used_at_ns[number := int(used_at_ns.argmin())] != never:
            if number not in self.foreign and not keep(number):
                return number
            used_at_ns[number] = never
        return None

    def idle(self) -> tuple[bytes, "array[int]"]:
        """Return the arguments of `oldest_last`, for another thread: some 3 ms a million chunks."""
        return bytes(self._idle), self.used_at_ns[:]

    def order_idle(self, oldest_last: "array[int]") -> None:
        self._oldest = oldest_last

    def _renew(self, keys: Iterable[OffloadKey], now_ns: int) -> tuple[list[int], list[int]]:
        """Set the last use of known keys; return their numbers, and those that this puts into the order."""
        of, foreign, idle, used_at_ns = self.of, self.foreign, self._idle, self.used_at_ns
        known = [number for key in dict.fromkeys(keys) if (number := of.get(key)) is not None and number not in foreign]
        first_used: list[int] = []
        for place, number in enumerate(known):
            used_at_ns[number] = now_ns - place
            if idle[number]:
                first_used.append(number)
                self._end_idle(number)
        if first_used:
            self._insert(first_used)
        return known, first_used

    def _insert(self, numbers: Sequence[int]) -> None:
        self._order.insert(numbers)
        self._live += len(numbers)

    def _clear(self, number: int) -> None:
        self.keys[number] = None
        self.used_at_ns[number] = 0
        self.foreign.discard(number)
        self._end_idle(number)

    def _end_idle(self, number: int) -> None:
        self._idle_count -= self._idle[number]
        self._idle[number] = 0

    def _take_idle(self, count: int, keep: Callable[[int], bool]) -> list[int]:
        """Take up to `count` idle numbers, the oldest first, as far as they are listed."""
        taken: list[int] = []
        kept: list[int] = []
        while len(taken) < count and self._idle_count:
            if not self._oldest:
                least = max(LISTED_LEAST, self._idle_count // LISTED_PART)
                self._oldest = oldest_last(self._idle, self.used_at_ns, least)
            number = self._oldest.pop()
            if self._idle[number]:
                self._end_idle(number)
                (kept if keep(number) else taken).append(number)
        for number in reversed(kept):
            self._idle[number] = 1
            self._oldest.append(number)
        self._idle_count += len(kept)
        return taken

    def _take_hints(self) -> HintedOrder[int]:
        if self._hinted is None:
            self._hinted = HintedOrder(self._order, 0, self._clock)
            self._order = self._hinted
        return self._hinted


def oldest_last(idle: bytes | bytearray, used_at_ns: "array[int]", most: int | None = None) -> "array[int]":
    """Return the idle numbers, or the oldest `most` of them, by their last use, the oldest last."""
    numbers = np.flatnonzero(np.frombuffer(bytes(idle), np.uint8))
    times = np.array(used_at_ns, dtype=np.int64)[numbers]
    if most is not None and len(numbers) > most:
        chosen = np.argpartition(times, most)[:most]
        numbers, times = numbers[chosen], times[chosen]
    ordered = numbers[np.argsort(times, kind="stable")[::-1]]
    return array("I", ordered.astype(np.uint32).tobytes())
