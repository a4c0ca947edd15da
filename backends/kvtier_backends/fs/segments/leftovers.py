"""Has go, before any chunk, what takes room and holds none: unusable files, and corrupt slots that are kept aside."""

from collections.abc import Iterable
from contextlib import suppress

from kvtier.lend import Lanes, in_thread
from kvtier_backends.fs.capacity import Capacity
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.quarantine import Cleared, Quarantine
from kvtier_backends.fs.segments.folder import SegmentFolder, Unusable


class Leftovers:
    """One tier's. Belongs to the loop's thread."""

    def __init__(
        self, folder: SegmentFolder, capacity: Capacity, quarantine: Quarantine, tally: Tally, *, lanes: Lanes
    ) -> None:
        """Remove them in these lanes."""
        self._folder = folder
        self._capacity = capacity
        self._quarantine = quarantine
        self._tally = tally
        self._lanes = lanes
        self._unusable: list[Unusable] = []

    def found(self, unusable: Iterable[Unusable]) -> None:
        """Hear of files in the segments' place that take room and hold nothing."""
        self._unusable += unusable

    async def remove(self, wanted_bytes: int) -> bool:
        """Remove one of the files, or so much of what is kept aside; False if there is nothing that can be."""
        return await self._remove_unusable() or await self.clear_quarantine(wanted_bytes)

    async def clear_quarantine(self, wanted_bytes: int) -> bool:
        """Remove so much of what is kept aside; False if there is nothing."""
        cleared = list[Cleared]()
        if self._quarantine.empty:
            return False
        try:
            await in_thread(self._lanes, lambda: cleared.append(self._quarantine.clear(wanted_bytes)))
        finally:
            for files, freed_bytes in cleared:
                self._tally.count("quarantine_evicted", files)
                self._capacity.other_bytes -= freed_bytes
        return any(files for files, _ in cleared)

    async def _remove_unusable(self) -> bool:
        while self._unusable:
            unusable = self._unusable.pop()
            removed = False
            with suppress(OSError):  # Then it takes its room still.
                removed = await in_thread(self._lanes, self._folder.remove_unusable, unusable)
            if removed:
                self._capacity.other_bytes -= unusable.allocated_bytes
                return True
        return False
