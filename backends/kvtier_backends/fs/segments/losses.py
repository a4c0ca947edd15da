"""Losses: segments that another program has removed, whose chunks the next start does not find.

No call fails by itself, since a file without a name can be written and read as before. So after its write, a store asks
whether the file still has its name. All segments are checked from time to time, too. The chunks of a segment without a
name are forgotten at once. When no call uses the segment any more, it is closed, and its room is free.
"""

import asyncio
import errno
import logging
from collections.abc import Sequence

from kvtier.backend import Write
from kvtier.errors import Remedy
from kvtier_backends.fs.disk.footer import failure
from kvtier_backends.fs.layout import OpenTier, until
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.folder import SegmentFolder
from kvtier_backends.fs.segments.runs import SlotShare
from kvtier_backends.fs.segments.segment import Segment

logger = logging.getLogger(__name__)

LOOK_S = 10.0  # Two microseconds a segment.
CLOSE_S = 1.0  # Calls that were at it have mostly ended by then.


class Losses:
    """The losses of one tier. Belongs to the loop's thread, and looks in a lane."""

    def __init__(self, tier: OpenTier, catalog: Catalog, folder: SegmentFolder) -> None:
        self._catalog = catalog
        self._segments = catalog.segments
        self._folder = folder
        self._counters = tier.counters
        self._lane = tier.lanes.evict
        self._seen: list[Segment] = []  # By lanes, and not yet noted.
        self._lost: list[Segment] = []  # Noted, and open still.
        self._wake = asyncio.Event()

    def check(self, share: SlotShare[tuple[Write, int]]) -> None:
        """Count a share's writes to such a segment as failed. Blocks, in a lane."""
        errors = {segment: self._error(segment) for segment in {run.segment for run in share.runs}}
        if not any(errors.values()):
            return
        parts = [(errors[run.segment], part) for run in share.runs for part in run.parts]
        for index, (error, part) in enumerate(parts):
            if error is not None and share.outcomes[index] is None:
                share.outcomes[index] = failure(part.item[0].key, error)

    def note(self) -> None:
        """Forget the chunks of segments that were seen to be lost."""
        seen, self._seen = self._seen, []
        for segment in seen:
            if segment in self._segments.all and segment not in self._lost:
                logger.warning(
                    "%s: removed by another program; its chunks are lost; see %s", segment.name, Remedy.UNDERFOOT
                )
                self._counters.count("segments_lost")
                self._lost.append(segment)
        for segment in self._lost:
            self._catalog.abandon(segment.first_slot, segment.header.slots)
        if self._lost:
            self._wake.set()

    async def run(self) -> None:
        """Look at all segments every so often, and let go of the lost ones, until cancelled."""
        while True:
            await until(self._wake.wait(), LOOK_S)
            self._wake.clear()
            await self._lane.run(self.look, list(self._segments.all))
            self.note()
            while self._lost:
                await self._close_lost()
                await asyncio.sleep(CLOSE_S)

    async def _close_lost(self) -> None:
        for segment in list(self._lost):
            if self._catalog.abandon(segment.first_slot, segment.header.slots):
                self._lost.remove(segment)
                self._segments.remove(segment)
                await self._lane.run(self._folder.close, segment)

    def _error(self, segment: Segment) -> OSError | None:
        try:
            if self._folder.has(segment):
                return None
        except OSError as error:
            return error.with_traceback(None)
        self._seen.append(segment)
        return OSError(errno.ENOENT, f"{segment.name} was removed by another program")

    def look(self, segments: Sequence[Segment]) -> None:
        """See which are lost. Blocks, in a lane."""
        for segment in segments:
            self._error(segment)
