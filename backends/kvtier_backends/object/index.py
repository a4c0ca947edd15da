"""The index of a bucket: keys that are known to be there, and for a while keys that are known to be absent."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.backend import InventoryQueue, OffloadKey

ABSENT_MAX = 1 << 16  # Keys; some megabytes.


class Index:
    """Hints: others store and delete in the bucket, too. Belongs to the loop's thread."""

    def __init__(self, held_max: int, absent_ttl_s: float, clock: Callable[[], float]) -> None:
        """Know at most so many keys that are there. Absent keys are remembered for so long."""
        # In the order they were heard of. A plain dictionary looks for its first key past all that were removed before.
        self.held: OrderedDict[OffloadKey, None] = OrderedDict()
        self.queue = InventoryQueue(self.held)
        self._held_max = held_max
        self._absent: OrderedDict[OffloadKey, float] = OrderedDict()  # When it ends: in that order.
        self._absent_ttl_s = absent_ttl_s
        self._clock = clock
        self._deleted: set[OffloadKey] = set()  # Since the scan began: it may still name them.

    @property
    def full(self) -> bool:
        """Whether nothing more can be known to be there."""
        return len(self.held) >= self._held_max

    def knows(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Say for each key whether it is there; None: unknown."""
        self._forget_absent()
        held, absent = self.held, self._absent
        return [True if key in held else False if key in absent else None for key in keys]

    def listed(self, key: OffloadKey) -> None:
        """Note the keys that the start-up list has found."""
        if key not in self.held and not self.full and key not in self._deleted:
            self.held[key] = None
            self._absent.pop(key, None)
            self.queue.added(key)

    def listing_ended(self) -> None:
        """Note that the start-up scan is over. Stores of others are not reported, so kvtier goes on asking."""
        self._deleted.clear()
        self.queue.scan_ended(complete=False)

    def there(self, key: OffloadKey) -> None:
        """Note the keys that a call has stored or found."""
        self._absent.pop(key, None)
        if key in self.held or not self._held_max:
            return
        if self.full:
            self.held.popitem(last=False)
        self.held[key] = None

    def deleted(self, key: OffloadKey) -> None:
        """Note the keys that a call deletes."""
        if self.queue.complete is None:
            self._deleted.add(key)
        self.gone(key)

    def gone(self, key: OffloadKey) -> None:
        """Note the keys that a call has not found."""
        if key in self.held:
            del self.held[key]
            self.queue.lost(key)
        if self._absent_ttl_s:
            self._absent.pop(key, None)
            self._absent[key] = self._clock() + self._absent_ttl_s

    def unknown(self, key: OffloadKey) -> None:
        """Note that a key's state is unknown: a store failed half-way."""
        self.held.pop(key, None)
        self._absent.pop(key, None)

    def _forget_absent(self) -> None:
        now, absent = self._clock(), self._absent
        while absent:
            key = next(iter(absent))
            if absent[key] > now and len(absent) <= ABSENT_MAX:
                break
            del absent[key]
