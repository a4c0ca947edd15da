"""The write budget: the bytes that may be written in a day, to spare flash. A token bucket that survives restarts.

The bucket's level is in a file. A process draws from it in small advances before it writes. A process that is killed
wastes the rest of its advance, and never writes twice on one token. An eighth of the day's bytes may come at once. That
eighth, the advance, and the inflow of 24 hours are together the day's bytes.
"""

import asyncio
import logging
import os
import struct
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from kvtier.backend import Lanes, in_thread
from kvtier.errors import Remedy
from kvtier.memory import let_go_in_forks
from kvtier.settings import shown_bytes
from kvtier_backends.fs.disk.below import lock_file, open_file, unlock_file

logger = logging.getLogger(__name__)

DAY_NS = 86_400_000_000_000
BURST_PARTS = 4  # Of the day's bytes, in 32nds: what the bucket holds,
ADVANCE_PARTS = 1  # what is drawn at once,
INFLOW_PARTS = 27  # and what runs in during a day.

_RECORD = struct.Struct("<QQ")  # Bytes in the bucket, and when it was looked at, in ns since the epoch.
_CHECKSUM = struct.Struct("<Q")


class DiskWriteBudget:
    """The write budget of one tier. Belongs to the loop's thread, and reads and writes its file in lanes."""

    def __init__(
        self, root_fd: int, name: str, bytes_per_day: int, unit_bytes: int, clock_ns: Callable[[], int], lanes: Lanes
    ) -> None:
        """Open the file, or make it with a full bucket. Blocks. `unit_bytes`: the bytes that one chunk writes."""
        self._fd = open_file(root_fd, name, os.O_RDWR | os.O_CREAT)
        self._lanes = lanes
        self._bytes_per_day = bytes_per_day
        self._burst_bytes = max(unit_bytes, bytes_per_day * BURST_PARTS // 32)
        self._advance_bytes = max(unit_bytes, bytes_per_day * ADVANCE_PARTS // 32)
        self._clock_ns = clock_ns
        self._advance_left = 0
        self._drawing = asyncio.Lock()
        try:
            self._draw(0)
        except BaseException:
            os.close(self._fd)
            raise
        let_go_in_forks(self)

    async def take(self, chunks: int, chunk_bytes: int) -> int:
        """Return how many of the chunks there are bytes for; they count as written."""
        if (wanted_bytes := chunks * chunk_bytes) > self._advance_left:
            async with self._drawing:
                if (short_bytes := wanted_bytes - self._advance_left) > 0:
                    await in_thread(self._lanes, self._draw, max(short_bytes, self._advance_bytes))
        allowed = min(wanted_bytes, self._advance_left) // chunk_bytes
        self._advance_left -= allowed * chunk_bytes
        return allowed

    def put_back(self) -> None:
        """Put back what was not written, when no store comes any more. Blocks; where it fails, it is wasted."""
        try:
            self._draw(-self._advance_left)
        except OSError as error:
            logger.warning(
                "%s of the write budget could not be put back: %s; see %s",
                shown_bytes(self._advance_left),
                error.strerror,
                Remedy.WRITE_BUDGET,
            )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    forked = close  # In a child: the rest of the advance is its owner's.

    def _draw(self, wanted_bytes: int) -> None:
        """Take from the bucket, or put back into it, under the file's lock: other processes may draw on it, too."""
        lock_file(self._fd, wait=True)
        try:
            now_ns = self._clock_ns()
            level_bytes = self._level(os.pread(self._fd, _RECORD.size + _CHECKSUM.size, 0), now_ns)
            drawn_bytes = min(wanted_bytes, level_bytes)
            record = _RECORD.pack(min(level_bytes - drawn_bytes, self._burst_bytes), now_ns)
            os.pwrite(self._fd, record + _CHECKSUM.pack(xxh3_64_intdigest(record)), 0)
        finally:
            unlock_file(self._fd)
        self._advance_left += drawn_bytes

    def _level(self, content: bytes, now_ns: int) -> int:
        """Return the bucket's level now: 0 if it cannot be known, and no more for a clock that was set back."""
        if not content:
            return self._burst_bytes
        record = content[: _RECORD.size]
        if len(content) != _RECORD.size + _CHECKSUM.size or _CHECKSUM.unpack(content[_RECORD.size :]) != (
            xxh3_64_intdigest(record),
        ):
            return 0
        level_bytes, looked_at_ns = _RECORD.unpack(record)
        passed_ns = min(DAY_NS, max(0, now_ns - looked_at_ns))
        inflow_bytes = self._bytes_per_day * INFLOW_PARTS * passed_ns // (32 * DAY_NS)
        return int(min(self._burst_bytes, level_bytes + inflow_bytes))
