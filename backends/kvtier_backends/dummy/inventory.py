"""What a tier in memory reports of its contents: everything at first, later what went unasked."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice

from kvtier.backend import INVENTORY_BATCH_KEYS, Added, InventoryEvent, Removed, ScanDone
from kvtier.keys import OffloadKey


class Report:
    """One consumer's view. Remembers losses only while somebody watches, or they would pile up."""

    def __init__(self, holds: Callable[[OffloadKey], bool], *, complete: bool) -> None:
        self._holds = holds
        self._complete = complete
        self._watched = self._ended = False
        self._lost: dict[OffloadKey, None] = {}
        self._changed = asyncio.Event()

    def lose(self, key: OffloadKey) -> None:
        if self._watched:
            self._lost[key] = None
            self._changed.set()

    def end(self) -> None:
        """End the consumer's iteration; idempotent."""
        self._ended = True
        self._changed.set()

    async def watch(self, keys: Callable[[], Sequence[OffloadKey]]) -> AsyncIterator[InventoryEvent]:
        """Yield what is there, then that this was all, then what goes; each is true when it is yielded."""
        assert not self._watched, "one consumer"
        self._watched = True
        try:
            for batch in _batches(keys()):
                present = [key for key in batch if self._holds(key)]
                if present and not self._ended:
                    yield Added(present)
            if not self._ended:
                yield ScanDone(self._complete)
            while not self._ended:
                gone = self._take_lost()
                if gone:
                    yield Removed(gone)
                else:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            self._watched = False
            self._lost.clear()

    def _take_lost(self) -> list[OffloadKey]:
        gone: list[OffloadKey] = []
        while self._lost and len(gone) < INVENTORY_BATCH_KEYS:
            key = next(iter(self._lost))
            del self._lost[key]
            if not self._holds(key):  # Else it was stored again.
                gone.append(key)
        return gone


def _batches(keys: Sequence[OffloadKey]) -> Iterator[list[OffloadKey]]:
    rest = iter(keys)
    while batch := list(islice(rest, INVENTORY_BATCH_KEYS)):
        yield batch
