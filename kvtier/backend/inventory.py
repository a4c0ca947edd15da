"""The inventory's queue: events that a tier's consumer has not received. Each is true when it is taken."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Protocol

from kvtier.backend.contract import INVENTORY_BATCH_KEYS, Added, InventoryEvent, Removed, ScanDone
from kvtier.backend.namespace import OffloadKey


class Keys(Protocol):
    """The keys that a tier holds now: a dictionary by key, for example."""

    def __contains__(self, key: OffloadKey, /) -> bool: ...

    def __iter__(self) -> Iterator[OffloadKey]: ...


class InventoryQueue:
    """The queue of one consumer at a time. Belongs to the loop's thread.

    A tier with `Inventory` reports each change that no `store` or `delete` call explains here, and returns its `watch`.
    """

    def __init__(self, held: Keys) -> None:
        self.complete: bool | None = None  # None until the start-up scan has ended; False if it is partial.
        self._held = held
        self._consumer = 0
        self._wanted = False
        self._added: deque[OffloadKey] = deque()
        self._lost: deque[OffloadKey] = deque()
        self._scan_told = False
        self._closed = False
        self._changed = asyncio.Event()  # Something for the consumer, or the end.

    def added(self, *keys: OffloadKey) -> None:
        if self._wanted and keys:
            self._added += keys
            self._changed.set()

    def lost(self, *keys: OffloadKey) -> None:
        if self._wanted and keys:
            self._lost += keys
            self._changed.set()

    def scan_ended(self, *, complete: bool) -> None:
        self.complete = complete
        self._changed.set()

    def close(self) -> None:
        """End the consumer's iteration; idempotent."""
        self._closed = True
        self._changed.set()

    def believed(self) -> list[OffloadKey]:
        return [*self._held, *self._lost] if self._wanted else []

    async def watch(self, believed: Iterable[OffloadKey] = ()) -> AsyncGenerator[InventoryEvent]:
        """Yield the keys, then `ScanDone` after the scan, then changes, until closed.

        `believed`: keys that the consumer believes to be present. Those that the scan does not find are `Removed`.
        """
        self._consumer += 1
        consumer = self._consumer
        self._wanted, self._scan_told = True, False
        self._added, self._lost = deque(self._held), deque(believed)
        try:
            while not self._closed:
                if (event := self._next_event()) is not None:
                    yield event
                else:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            if consumer == self._consumer:  # No other one has started since.
                self._wanted = False
                self._added.clear()
                self._lost.clear()

    def pending(self) -> Iterator[InventoryEvent]:
        """Yield, without waiting, what a consumer that `watch` has begun would get next."""
        while self._wanted and (event := self._next_event()) is not None:
            yield event

    def _next_event(self) -> InventoryEvent | None:
        while self._added:
            if keys := [key for key in _take(self._added) if key in self._held]:
                return Added(keys)
        if self.complete is None:
            return None
        if not self._scan_told:
            self._scan_told = True
            return ScanDone(self.complete)
        while self._lost:
            if keys := [key for key in _take(self._lost) if key not in self._held]:
                return Removed(keys)
        return None


def _take(keys: deque[OffloadKey]) -> list[OffloadKey]:
    return [keys.popleft() for _ in range(min(len(keys), INVENTORY_BATCH_KEYS))]
