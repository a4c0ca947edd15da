"""What an inventory's consumer has still to hear. Each event is true when it is taken."""

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvtier.backend import INVENTORY_BATCH_KEYS, Added, InventoryEvent, OffloadKey, Removed, ScanDone

# Which chunks calls are at: none of them goes for room meanwhile.


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
        calls = self._calls
        for key in keys:
            calls[key] = calls.get(key, 0) + 1
        try:
            yield
        finally:
            for key in keys:
                if calls[key] == 1:
                    del calls[key]
                else:
                    calls[key] -= 1


class InventoryQueue:
    """One consumer's at a time. Belongs to the loop's thread."""

    def __init__(self, known: Mapping[OffloadKey, object]) -> None:
        """`known`: what is there, by key, at any time."""
        self.complete: bool | None = None
        """Once the scan is over: whether nothing was left out."""
        self._known = known
        self._consumer = 0
        self._wanted = False
        self._added: deque[OffloadKey] = deque()
        self._lost: deque[OffloadKey] = deque()
        self._scan_told = False

    def begin(self) -> int:
        """Start from what is there now: a consumer has come, and knows nothing. Returns its number."""
        self.end(self._consumer)
        self._consumer += 1
        self._wanted = True
        self._scan_told = False
        self._added.extend(self._known)
        return self._consumer

    def end(self, consumer: int) -> None:
        """Keep nothing for a consumer that has gone, if none has come since."""
        if consumer == self._consumer:
            self._wanted = False
            self._added.clear()
            self._lost.clear()

    def added(self, key: OffloadKey) -> None:
        """Have it told that a chunk is there, if anybody listens."""
        if self._wanted:
            self._added.append(key)

    def lost(self, key: OffloadKey) -> None:
        """Have it told that a chunk is gone, if anybody listens."""
        if self._wanted:
            self._lost.append(key)

    def next_event(self) -> InventoryEvent | None:
        """Return what the consumer should hear next; None if it knows everything."""
        while self._added:
            if keys := [key for key in _take(self._added) if key in self._known]:
                return Added(keys)
        if self.complete is None:
            return None
        if not self._scan_told:
            self._scan_told = True
            return ScanDone(self.complete)
        while self._lost:
            if keys := [key for key in _take(self._lost) if key not in self._known]:
                return Removed(keys)
        return None


def _take(keys: deque[OffloadKey]) -> list[OffloadKey]:
    return [keys.popleft() for _ in range(min(len(keys), INVENTORY_BATCH_KEYS))]
