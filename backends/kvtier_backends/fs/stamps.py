"""When files were used, as their times say it after a restart: set behind the loads, and seldom."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtier.errors import BackendClosed
from kvtier.keys import OffloadKey
from kvtier.lend import Lanes
from kvtier_backends.fs.chunks import Chunks
from kvtier_backends.fs.index import Index

STAMPS_MAX = 4_096  # Collected before they are written.


class Stamps:
    """Uses of one tier's files that are still to be written down. Belongs to the loop's thread."""

    def __init__(self, index: Index, chunks: Chunks, lane: Lanes, clock_ns: Callable[[], int]) -> None:
        """Write in this lane."""
        self._index = index
        self._chunks = chunks
        self._lane = lane
        self._clock_ns = clock_ns
        self._due: dict[OffloadKey, int] = {}

    def used(self, keys: Sequence[OffloadKey]) -> bool:
        """Note that files were used now, in prefix order, unless their times say so; say whether it is time."""
        now_ns = self._clock_ns()
        for place, key in enumerate(keys):
            if self._index.refresh_due(key, now_ns):
                self._due[key] = now_ns - place  # The head is the newest, also after a restart.
        return len(self._due) >= STAMPS_MAX

    async def write(self) -> None:
        """Set the times of files that were used."""
        due, self._due = self._due, {}
        if due:
            await asyncio.get_running_loop().run_in_executor(self._lane, self._chunks.stamp, due)

    def write_before_end(self) -> None:
        """Have it done before the lane ends."""
        with suppress(BackendClosed):  # Closed before.
            self._lane.submit(self._chunks.stamp, self._due)
