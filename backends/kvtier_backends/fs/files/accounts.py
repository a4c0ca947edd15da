"""A directory's accounts: its used and its promised bytes, kept by one tier or on a page that several share.

Several processes have one budget, and each evicts for all. Chunks that others stored since its last scan are newer than
it: if a victim was used before, no unknown chunk is older; otherwise the process scans again. A file's time, read right
before its removal, shows whether others have used it.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvtier.backend import OffloadKey, in_thread
from kvtier.errors import BackendClosed, BackendUnavailable
from kvtier.settings import SIZE_BYTES_MAX
from kvtier_backends.fs.disk.capacity import Reservation
from kvtier_backends.fs.disk.shared_page import Count, SharedPage
from kvtier_backends.fs.files.index import FileEntry
from kvtier_backends.fs.files.lane import FileChunks
from kvtier_backends.fs.layout import FsTier, until

AGAIN_S_LEAST = 5.0  # Between two scans of a shared directory,
AGAIN_TIMES = 20  # or 20 times as long as the last one took: the disk has other work.
AGAIN_S_MOST = 600.0  # What others have stored, and what dead processes have left, is seen after so long.


@dataclass(slots=True)
class FileRemoval:
    """The files that lanes have removed so far, and the reservation that they are removed for."""

    reservation: Reservation = field(default_factory=Reservation)
    wanted_bytes: int = 0  # That the reservation should have in the end.
    gone: dict[OffloadKey, int] = field(default_factory=dict[OffloadKey, int])  # The bytes that each has given back.
    used: list[FileEntry] = field(default_factory=list[FileEntry])  # They stay: another process has used them since.

    @property
    def gone_bytes(self) -> int:
        return sum(self.gone.values())

    @property
    def short_bytes(self) -> int:
        return max(0, self.wanted_bytes - self.reservation.bytes)


class Accounts:
    """The used and promised bytes of one directory. For the loop's thread, except where it says that a call blocks."""

    def __init__(self, tier: FsTier) -> None:
        self._tier = tier
        self._page = tier.root.shared_page
        self._capacity = tier.capacity
        self._sizes, self._remains = tier.root.sizes, tier.root.remains
        self._telling = threading.Lock()
        self._released_bytes = 0  # Of promises, which the page was not told yet,
        self._untold_bytes = 0  # and of what has come and gone.
        self._folders_told_bytes = 0
        self._count: Count | None = None  # None: the page could not be asked.
        self._scanned_at_ns = 0  # When the last scan of the directory began.
        self._scanning_since_ns = 0
        self._scan_began_s = 0.0
        self._scan_failed = False
        self._scan_wanted = asyncio.Event()
        self._page_lost = asyncio.Event()  # The used bytes are unknown.

    @property
    def known(self) -> bool:
        """Whether the used bytes are known. While they are not, nothing is evicted: perhaps nothing has to be."""
        return not self._page_lost.is_set()

    @property
    def others_have_room(self) -> bool:
        """Whether a store may find no room because of other processes."""
        return self._page is not None and (not self.known or self._page.promised_to_others)

    async def promise(self, reservation: Reservation, wanted_bytes: int) -> None:
        wanted_bytes -= reservation.bytes
        if self._page is None:
            reservation.bytes += self._capacity.reserve(wanted_bytes)
            return
        limit_bytes = SIZE_BYTES_MAX if self._capacity.limit_bytes is None else self._capacity.limit_bytes
        promise = partial(self._promise, self._page, reservation, wanted_bytes, limit_bytes)
        self._heard(known=await in_thread(self._tier.lanes.store, promise))

    def release(self, reservation: Reservation) -> None:
        """Take a promise back: its bytes are counted. The page is told in the stores' lane, behind the store."""
        if self._page is None:
            self._capacity.release(reservation.bytes)
            return
        with suppress(BackendClosed):  # Then the slot is given up, and promised bytes count as written.
            self._tier.lanes.store.submit(self._tell, self._page, reservation.bytes)

    def added(self, added_bytes: int) -> None:
        self._capacity.wrote(added_bytes)
        with self._telling:
            self._untold_bytes += added_bytes

    def chosen(self, victims: Sequence[FileEntry]) -> None:
        """Record chosen victims; want another scan if unknown chunks of others may be older."""
        if self._page is not None and any(victim.used_at_ns >= self._scanned_at_ns for victim in victims):
            self._scan_wanted.set()

    def refused(self) -> None:
        """Want another scan: a store found too little room although all victims have gone, or something is in doubt."""
        self._scan_wanted.set()

    def remove(self, chunks: FileChunks, victims: Sequence[FileEntry], removal: FileRemoval) -> None:
        """Remove files, except those that others use. Blocks, in a lane; counted even if the call is cancelled."""
        if self._page is None:
            chunks.evict(victims, removal.gone)
            return
        with self._page.evicting():
            gone: dict[OffloadKey, int] = {}
            try:
                chunks.evict_unused(victims, gone, removal.used, now_ns=self._tier.clock_ns())
            finally:
                removal.gone.update(gone)
                removal.reservation.bytes += self._page.exchange(sum(gone.values()), removal.short_bytes)
            self._tell(self._page)  # Of the folders that have gone with them.

    def removed(self, removal: FileRemoval) -> None:
        """Promise removed bytes to the reservation, unless the lane that removed them has done so on the page."""
        if self._page is None:
            removal.reservation.bytes += self._capacity.exchange(removal.gone_bytes, removal.short_bytes)

    def may_have_surplus(self) -> bool:
        return self._page is not None or self._capacity.surplus_bytes() > 0

    async def surplus_bytes(self) -> int:
        if self._page is None:
            return self._capacity.surplus_bytes()
        taken = await self._tier.lanes.evict.run(self._taken, self._page)
        self._heard(known=taken is not None)
        return 0 if taken is None else self._capacity.surplus_of(*taken)

    def shown_bytes(self, known_bytes: int) -> int:
        """Return the chunks' bytes: no more than the limit, since others may have removed some of the known ones."""
        limit_bytes = self._capacity.limit_bytes
        return known_bytes if self._page is None or limit_bytes is None else min(known_bytes, limit_bytes)

    async def scan_began(self) -> None:
        self._scan_began_s = time.monotonic()
        self._scanning_since_ns = self._tier.clock_ns()  # Chunks that are stored from now on may be missed.
        self._count = None
        if self._page is not None:
            with suppress(BackendUnavailable):  # Then nothing is counted, and it is tried again.
                self._count = await self._tier.lanes.scan.run(self._page.begin_count)

    async def scan_ended(self, seen_bytes: int | None) -> None:
        """Take the scan's bytes as used, with the changes since its start; None: the scan was incomplete."""
        self._scan_failed = seen_bytes is None
        self._scanned_at_ns = self._scanning_since_ns
        if self._page is None:
            return
        if self._count is None or seen_bytes is None:
            self._heard(known=False)
            return
        try:
            await self._tier.lanes.scan.run(self._page.end_count, self._count, seen_bytes)
        except BackendUnavailable:
            self._heard(known=False)

    async def until_scan_is_wanted(self) -> bool:
        """Wait until the known bytes are not enough, or old; False: they always are."""
        least_s = max(AGAIN_S_LEAST, AGAIN_TIMES * (time.monotonic() - self._scan_began_s))
        if self._page is None:
            if self._scan_failed:  # The part that it could not see counts as the whole file system.
                await asyncio.sleep(least_s)
            return self._scan_failed
        for_lost_page = self._page_lost.is_set()  # Then the next scan waits: others may have to repeat promises.
        self._page_lost.clear()
        if for_lost_page:
            await asyncio.sleep(least_s)
        elif await until(self._page_lost.wait(), least_s):
            return True
        await until(self._scan_wanted.wait(), AGAIN_S_MOST)
        self._scan_wanted.clear()
        return True

    def _promise(self, page: SharedPage, reservation: Reservation, wanted_bytes: int, limit_bytes: int) -> bool:
        """Put a promise into the reservation, also for a cancelled call; False: used bytes are unknown. Blocks."""
        granted_bytes = page.reserve(wanted_bytes, limit_bytes)
        reservation.bytes += granted_bytes or 0
        return granted_bytes is not None

    def _heard(self, *, known: bool) -> None:
        if known:
            self._page_lost.clear()
        else:
            self._page_lost.set()
            self._scan_wanted.set()

    def _taken(self, page: SharedPage) -> tuple[int, int] | None:
        """Return the page's totals, after telling it of earlier changes. Blocks, in a lane."""
        if self._released_bytes or self._untold_bytes:
            self._tell(page)
        return page.taken()

    def _tell(self, page: SharedPage, released_bytes: int = 0) -> None:
        """Tell the page of all changes, and take promises back. Blocks, in a lane.

        In doubt it is told again of stored bytes, not of removed ones: too much until the next count, never too little.
        """
        with self._telling:
            released_bytes += self._released_bytes
            folders_bytes = self._sizes.used_bytes - self._sizes.scanned_bytes + self._remains.used_bytes
            news_bytes = self._untold_bytes + folders_bytes - self._folders_told_bytes
            self._released_bytes, self._untold_bytes, self._folders_told_bytes = 0, 0, folders_bytes
        try:
            page.settle(released_bytes, news_bytes)
        except BackendUnavailable:
            with self._telling:
                self._released_bytes += released_bytes
                self._untold_bytes += max(0, news_bytes)
            raise
