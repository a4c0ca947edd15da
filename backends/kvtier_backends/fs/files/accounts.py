"""A directory's accounts: its used and its promised bytes, kept by one tier or on a page that several share.

One directory, several processes, one budget: each process evicts for all, when the page says that there is too much. A
process knows the chunks that it has stored, used and seen. Chunks that others have stored since its last scan are newer
than that scan. So if a victim was used before the scan, no unknown chunk is older. Otherwise the process scans again. A
file's time says whether others have used it. It is read right before the file is removed.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from kvtier.backend import OffloadKey, in_thread
from kvtier.errors import BackendClosed, BackendUnavailable
from kvtier.settings import SIZE_BYTES_MAX
from kvtier_backends.fs.disk.capacity import Reservation
from kvtier_backends.fs.disk.shared_page import Count, SharedPage
from kvtier_backends.fs.files.index import FileEntry
from kvtier_backends.fs.files.lane import Chunks
from kvtier_backends.fs.layout import OpenTier, until
from kvtier_backends.fs.options import FilesOptions

AGAIN_S_LEAST = 5.0  # Between two scans of a shared directory,
AGAIN_TIMES = 20  # or so many times as long as the last one took: scanning must not be all that the disk does.
AGAIN_S_MOST = 600.0  # What others have stored, and what dead processes have left, is seen after so long.


class Removal:
    """The files that lanes have removed so far, and the reservation that they are removed for."""

    def __init__(self, reservation: Reservation | None = None, wanted_bytes: int = 0) -> None:
        """Remove nothing yet. `wanted_bytes`: the bytes that the reservation should have in the end."""
        self.gone: dict[OffloadKey, int] = {}
        """What each file has given back."""
        self.used: list[FileEntry] = []
        """What was spared, because another process has used it since."""
        self.reservation = reservation or Reservation()
        self.wanted_bytes = wanted_bytes

    @property
    def gone_bytes(self) -> int:
        return sum(self.gone.values())

    @property
    def short_bytes(self) -> int:
        """The bytes that the reservation still lacks."""
        return max(0, self.wanted_bytes - self.reservation.bytes)


class Accounts(Protocol):
    """The accounts of a directory, which promise its room. For the loop's thread, but for what is said to block."""

    @property
    def known(self) -> bool:
        """Whether anybody knows what is used. As long as nobody does, nothing goes: it may be that nothing has to."""
        ...

    @property
    def others_have_room(self) -> bool:
        """Whether a store may find no room because of other processes."""
        ...

    async def promise(self, reservation: Reservation, wanted_bytes: int) -> None:
        """Promise as much as is free, up to what is wanted in all."""
        ...

    def exchange(self, removal: Removal) -> None:
        """Promise removed bytes to the reservation, if the lane that removed them has not done so."""
        ...

    def release(self, reservation: Reservation) -> None:
        """Take a promise back: what was stored has been counted."""
        ...

    def added(self, added_bytes: int) -> None:
        """Hear how many bytes a store or a delete of ours has added; below 0 if more has gone."""
        ...

    def remove(self, chunks: Chunks, victims: Sequence[FileEntry], removal: Removal) -> None:
        """Remove files, but for those that others use.

        Blocks, in a lane. It is counted even if the waiting call is cancelled.
        """
        ...

    def refused(self) -> None:
        """Hear that a store found too little room, though all that may go has gone, or that something was in doubt."""
        ...

    def chosen(self, victims: Sequence[FileEntry]) -> None:
        """Hear which files are to go."""
        ...

    def may_have_surplus(self) -> bool:
        """Say whether it is worth asking for the surplus."""
        ...

    async def surplus_bytes(self) -> int:
        """Return the bytes to evict before stores have to wait."""
        ...

    def shown_bytes(self, known_bytes: int) -> int:
        """Return the chunks' bytes, of which so many are known."""
        ...

    async def scan_began(self) -> None: ...

    async def scan_ended(self, seen_bytes: int | None) -> None:
        """Take the scan's bytes as used, with the changes meanwhile; None: the scan has not seen all."""
        ...

    async def until_scan_is_wanted(self) -> bool:
        """Wait until what is known is not enough, or old; False: it never is."""
        ...


class OwnAccounts:
    """See `Accounts`: a directory that is one tier's own."""

    known = True
    others_have_room = False

    def __init__(self, tier: OpenTier[FilesOptions]) -> None:
        self._capacity = tier.capacity
        self._scan_failed = False
        self._scan_began_s = 0.0

    async def promise(self, reservation: Reservation, wanted_bytes: int) -> None:
        reservation.bytes += self._capacity.reserve(wanted_bytes - reservation.bytes)

    def exchange(self, removal: Removal) -> None:
        removal.reservation.bytes += self._capacity.exchange(removal.gone_bytes, removal.short_bytes)

    def release(self, reservation: Reservation) -> None:
        self._capacity.release(reservation.bytes)

    def added(self, added_bytes: int) -> None:
        self._capacity.wrote(added_bytes)

    def remove(self, chunks: Chunks, victims: Sequence[FileEntry], removal: Removal) -> None:
        chunks.evict(victims, removal.gone)

    def refused(self) -> None:
        pass

    def chosen(self, victims: Sequence[FileEntry]) -> None:
        pass

    def may_have_surplus(self) -> bool:
        return self._capacity.surplus_bytes() > 0

    async def surplus_bytes(self) -> int:
        return self._capacity.surplus_bytes()

    def shown_bytes(self, known_bytes: int) -> int:
        return known_bytes

    async def scan_began(self) -> None:
        self._scan_began_s = time.monotonic()

    async def scan_ended(self, seen_bytes: int | None) -> None:
        self._scan_failed = seen_bytes is None

    async def until_scan_is_wanted(self) -> bool:
        if self._scan_failed:  # What it could not see counts as much as may be there.
            await asyncio.sleep(max(AGAIN_S_LEAST, AGAIN_TIMES * (time.monotonic() - self._scan_began_s)))
        return self._scan_failed


class SharedAccounts:
    """See `Accounts`: a directory that processes share, by their page."""

    def __init__(self, tier: OpenTier[FilesOptions], page: SharedPage) -> None:
        """Keep them on this page."""
        self._tier = tier
        self._page = page
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
        self._scan_wanted = asyncio.Event()
        self._page_lost = asyncio.Event()  # Nobody knows what is used, as far as we have heard.

    @property
    def known(self) -> bool:
        return not self._page_lost.is_set()

    @property
    def others_have_room(self) -> bool:
        return not self.known or self._page.promised_to_others

    async def promise(self, reservation: Reservation, wanted_bytes: int) -> None:
        limit_bytes = SIZE_BYTES_MAX if self._capacity.limit_bytes is None else self._capacity.limit_bytes
        wanted_bytes -= reservation.bytes
        self._heard(
            known=await in_thread(self._tier.lanes.store, self._promise, reservation, wanted_bytes, limit_bytes)
        )

    def exchange(self, removal: Removal) -> None:
        pass

    def release(self, reservation: Reservation) -> None:
        """Take a promise back behind the store's: until the page says so, it counts as promised."""
        with suppress(BackendClosed):  # Then the slot is given up, and what was promised counts as written.
            self._tier.lanes.store.submit(self._tell, reservation.bytes)

    def added(self, added_bytes: int) -> None:
        self._capacity.wrote(added_bytes)
        with self._telling:
            self._untold_bytes += added_bytes

    def remove(self, chunks: Chunks, victims: Sequence[FileEntry], removal: Removal) -> None:
        with self._page.evicting():
            gone: dict[OffloadKey, int] = {}
            try:
                chunks.evict_unused(victims, gone, removal.used, now_ns=self._tier.clock_ns())
            finally:
                removal.gone.update(gone)
                removal.reservation.bytes += self._page.exchange(sum(gone.values()), removal.short_bytes)
            self._tell()  # Of the folders that have gone with them.

    def refused(self) -> None:
        """Have the directory counted: files of others take the room, or it is that of files which somebody removed."""
        self._scan_wanted.set()

    def chosen(self, victims: Sequence[FileEntry]) -> None:
        if any(victim.used_at_ns >= self._scanned_at_ns for victim in victims):
            self._scan_wanted.set()

    def may_have_surplus(self) -> bool:
        return True  # The page knows.

    async def surplus_bytes(self) -> int:
        taken = await self._tier.lanes.evict.run(self._taken)
        self._heard(known=taken is not None)
        return 0 if taken is None else self._capacity.surplus_of(*taken)

    def shown_bytes(self, known_bytes: int) -> int:
        """Return no more than the limit: others may have removed some of what is known."""
        limit_bytes = self._capacity.limit_bytes
        return known_bytes if limit_bytes is None else min(known_bytes, limit_bytes)

    async def scan_began(self) -> None:
        self._scan_began_s = time.monotonic()
        self._scanning_since_ns = self._tier.clock_ns()  # What is stored from now on may be missed.
        self._count = None
        with suppress(BackendUnavailable):  # Then nothing is counted, and it is tried again.
            self._count = await self._tier.lanes.scan.run(self._page.begin_count)

    async def scan_ended(self, seen_bytes: int | None) -> None:
        self._scanned_at_ns = self._scanning_since_ns
        if self._count is None or seen_bytes is None:
            self._heard(known=False)
            return
        try:
            await self._tier.lanes.scan.run(self._page.end_count, self._count, seen_bytes)
        except BackendUnavailable:
            self._heard(known=False)

    async def until_scan_is_wanted(self) -> bool:
        least_s = max(AGAIN_S_LEAST, AGAIN_TIMES * (time.monotonic() - self._scan_began_s))
        for_lost_page = self._page_lost.is_set()  # Then the next scan for one waits: others may have to say something.
        self._page_lost.clear()
        if for_lost_page:
            await asyncio.sleep(least_s)
        elif await until(self._page_lost.wait(), least_s):
            return True
        await until(self._scan_wanted.wait(), AGAIN_S_MOST)
        self._scan_wanted.clear()
        return True

    def _promise(self, reservation: Reservation, wanted_bytes: int, limit_bytes: int) -> bool:
        """Have a promise of the page be in the reservation, whoever is cancelled meanwhile; False: nobody knows.

        Blocks, in a lane.
        """
        granted_bytes = self._page.reserve(wanted_bytes, limit_bytes)
        reservation.bytes += granted_bytes or 0
        return granted_bytes is not None

    def _heard(self, *, known: bool) -> None:
        """Hear whether the page says what is used and promised."""
        if known:
            self._page_lost.clear()
        else:
            self._page_lost.set()
            self._scan_wanted.set()

    def _taken(self) -> tuple[int, int] | None:
        """Return the page's totals, after telling it of changes that it could not be told before. Blocks, in a lane."""
        if self._released_bytes or self._untold_bytes:
            self._tell()
        return self._page.taken()

    def _tell(self, released_bytes: int = 0) -> None:
        """Have the page know all that it was not told yet, and take promises back. Blocks, in a lane.

        If it is unknown whether the page was told, it is told again of stored bytes, and not of removed ones. Until the
        next count it may say too much, and never too little.
        """
        with self._telling:
            released_bytes += self._released_bytes
            folders_bytes = self._sizes.used_bytes - self._sizes.scanned_bytes + self._remains.used_bytes
            news_bytes = self._untold_bytes + folders_bytes - self._folders_told_bytes
            self._released_bytes, self._untold_bytes, self._folders_told_bytes = 0, 0, folders_bytes
        try:
            self._page.settle(released_bytes, news_bytes)
        except BackendUnavailable:
            with self._telling:
                self._released_bytes += released_bytes
                self._untold_bytes += max(0, news_bytes)
            raise


def accounts_of(tier: OpenTier[FilesOptions]) -> Accounts:
    """Return the accounts of a tier's directory."""
    page = tier.root.shared_page
    return OwnAccounts(tier) if page is None else SharedAccounts(tier, page)
