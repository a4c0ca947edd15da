"""The index of a bucket: keys known to be present, and for a while keys known to be absent."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier.backend import InventoryQueue, OffloadKey

ABSENT_MAX = 1 << 16  # Keys; some megabytes.


class BucketIndex:
    """Hints, since other engines store and delete in the bucket, too. Belongs to the loop's thread."""

    def __init__(self, held_max: int, absent_ttl_s: float, clock: Callable[[], float]) -> None:
        # In order of arrival. A plain dictionary scans past all removed keys to find its first one.
        self.held: OrderedDict[OffloadKey, None] = OrderedDict()
        self.queue = InventoryQueue(self.held)
        self._held_max = held_max
        self._absent: OrderedDict[OffloadKey, float] = OrderedDict()  # By time of expiry.
        self._absent_ttl_s = absent_ttl_s
        self._clock = clock
        self._deleted: set[OffloadKey] = set()  # Since the scan began, which may still list them.

    @property
    def full(self) -> bool:
        return len(self.held) >= self._held_max

    def knows(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Return for each key True, False, or None if it is unknown."""
        self._forget_absent()
        held, absent = self.held, self._absent
        return [True if key in held else False if key in absent else None for key in keys]

    def listed(self, key: OffloadKey) -> None:
        """Record a key of the start-up scan."""
        if key not in self.held and not self.full and key not in self._deleted:
            self.held[key] = None
            self._absent.pop(key, None)
            self.queue.added(key)

    def listing_ended(self) -> None:
        """End the start-up scan. It is never complete: other engines' stores are not reported."""
        self._deleted.clear()
        self.queue.scan_ended(complete=False)

    def there(self, key: OffloadKey) -> None:
        """Record a key that a call has stored or found."""
        self._absent.pop(key, None)
        if key in self.held or not self._held_max:
            return
        if self.full:
            self.held.popitem(last=False)
        self.held[key] = None

    def deleted(self, key: OffloadKey) -> None:
        """Record a key that a call deletes."""
        if self.queue.complete is None:
            self._deleted.add(key)
        self.gone(key)

    def gone(self, key: OffloadKey) -> None:
        """Record a key that a call has not found."""
        if key in self.held:
            del self.held[key]
            self.queue.lost(key)
        if self._absent_ttl_s:
            self._absent.pop(key, None)
            self._absent[key] = self._clock() + self._absent_ttl_s

    def unknown(self, key: OffloadKey) -> None:
        """Forget the state of a key whose store failed."""
        self.held.pop(key, None)
        self._absent.pop(key, None)

    def _forget_absent(self) -> None:
        now, absent = self._clock(), self._absent
        while absent:
            key = next(iter(absent))
            if absent[key] > now and len(absent) <= ABSENT_MAX:
                break
            del absent[key]
