"""One directory, several processes, one budget: each evicts for all, what a page that they share says is too much.

A process knows what it has stored, used and seen. What others have stored since it last looked through the directory
is newer than that look; so as long as what would go was used before it, nothing older can be unknown. Else it looks
again. Whether others have used a file is what its time says, which is asked for right before it is removed.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from kvtier.backend import OffloadKey, in_thread
from kvtier.errors import BackendClosed
from kvtier.settings import SIZE_BYTES_MAX
from kvtier_backends.fs.disk.capacity import FolderSizes, Reservation
from kvtier_backends.fs.disk.shared_page import SharedPage
from kvtier_backends.fs.files.eviction import Eviction, Removal
from kvtier_backends.fs.files.index import Held
from kvtier_backends.fs.layout import until

logger = logging.getLogger(__name__)


class SharedEviction(Eviction):
    """Promises room from the shared page, and evicts what no process has used for longest."""

    ledger: SharedPage
    sizes: FolderSizes

    def share(self, ledger: SharedPage, sizes: FolderSizes) -> None:
        """Use this page, and have it told of what folders take."""
        self.ledger = ledger
        self.sizes = sizes
        self._untold_bytes = 0
        self._folders_told_bytes = 0
        self._looked_at_ns = 0  # When the last look through the directory began.
        self._looking_since_ns = 0
        self._look_wanted = asyncio.Event()
        self._page_lost = asyncio.Event()  # Nobody knows what is used, as far as we have heard.

    def stored(self, added_bytes: int) -> None:
        super().stored(added_bytes)
        self._untold_bytes += added_bytes

    def release(self, reservation: Reservation) -> None:
        """Take a promise back behind the store's: until the page says so, it counts as promised."""
        with suppress(BackendClosed):  # Then the slot is given up, and what was promised counts as written.
            told = self._store_lanes.submit(self.ledger.settle, reservation.bytes, self._news_bytes())
            told.add_done_callback(_log_failure)
        self._wake.set()
        self.changed()

    def check(self) -> None:
        """See behind the calls what the page says."""
        self._wake.set()

    def used_bytes(self) -> int:
        """Return what known chunks take. Others may have removed some of them, so that it might be more than fits."""
        used_bytes, limit_bytes = super().used_bytes(), self._capacity.limit_bytes
        return used_bytes if limit_bytes is None else min(used_bytes, limit_bytes)

    def look_began(self) -> None:
        """Note that a look through the directory begins: what is stored from now on may be missed."""
        self._looking_since_ns = self._clock_ns()

    async def until_look_is_wanted(self, least_s: float, most_s: float) -> None:
        """Wait until what is known is not enough, or it is old; only for a page that is lost, not at least so long."""
        for_lost_page = self._page_lost.is_set()  # Then the next look for one waits: others may have to say something.
        self._page_lost.clear()
        if for_lost_page:
            await asyncio.sleep(least_s)
        elif await until(self._page_lost.wait(), least_s):
            return
        await until(self._look_wanted.wait(), most_s)
        self._look_wanted.clear()

    def scan_ended(self) -> None:
        self._looked_at_ns = self._looking_since_ns
        super().scan_ended()

    async def _promise(self, reservation: Reservation, wanted_bytes: int) -> None:
        limit_bytes = SIZE_BYTES_MAX if self._capacity.limit_bytes is None else self._capacity.limit_bytes
        limit_bytes -= self._quarantine.used_bytes  # Which the page does not know of.
        wanted_bytes -= reservation.bytes
        self._heard(sure=await in_thread(self._store_lanes, _take, reservation, self.ledger, wanted_bytes, limit_bytes))

    async def _exchange(self, reservation: Reservation, victims: Sequence[Held], wanted_bytes: int) -> None:
        gone_bytes = await self._remove(victims)
        await in_thread(
            self._store_lanes, _exchange, reservation, self.ledger, gone_bytes, wanted_bytes - reservation.bytes
        )

    async def _surplus_bytes(self) -> int:
        taken = await asyncio.get_running_loop().run_in_executor(self._lane, self.ledger.taken)
        self._heard(sure=taken is not None)
        return 0 if taken is None else self._capacity.surplus_of(*taken)

    def _choose(self, wanted_bytes: int, incoming: Sequence[OffloadKey], most: int | None = None) -> list[Held]:
        """Choose nothing as long as nobody knows what is used: it may be that nothing has to go."""
        return [] if self._page_lost.is_set() else super()._choose(wanted_bytes, incoming, most)

    def _heard(self, *, sure: bool) -> None:
        """Hear whether the page says what is used and promised."""
        if sure:
            self._page_lost.clear()
        else:
            self._page_lost.set()
            self._look_wanted.set()

    async def _remove_behind(self, victims: Sequence[Held]) -> int:
        gone_bytes = await super()._remove_behind(victims)
        self.stored(-gone_bytes)
        await asyncio.get_running_loop().run_in_executor(self._lane, self.ledger.settle, 0, self._news_bytes())
        return gone_bytes

    async def _clear_quarantine(self, wanted_bytes: int) -> int:
        gone_bytes = 0 if self._page_lost.is_set() else await super()._clear_quarantine(wanted_bytes)
        if gone_bytes:
            await in_thread(self._store_lanes, self.ledger.settle, 0, self._news_bytes())
        return gone_bytes

    def _evict(self, victims: Sequence[Held], removal: Removal) -> None:
        with self.ledger.evicting():
            self._chunks.evict_unused(victims, removal.gone, removal.used, now_ns=self._clock_ns())

    def _begin(self, victims: Sequence[Held]) -> None:
        if any(victim.used_at_ns >= self._looked_at_ns for victim in victims):
            self._look_wanted.set()
        super()._begin(victims)

    def _news_bytes(self) -> int:
        folders_bytes = self.sizes.used_bytes - self.sizes.scanned_bytes
        news_bytes = self._untold_bytes + folders_bytes - self._folders_told_bytes
        self._untold_bytes = 0
        self._folders_told_bytes = folders_bytes
        return news_bytes


def _take(reservation: Reservation, ledger: SharedPage, wanted_bytes: int, limit_bytes: int) -> bool:
    """Have a promise of the page be in the reservation, whoever is cancelled meanwhile; False: nobody knows what fits.

    Blocks, in a lane.
    """
    granted_bytes = ledger.reserve(wanted_bytes, limit_bytes)
    reservation.bytes += granted_bytes or 0
    return granted_bytes is not None


def _exchange(reservation: Reservation, ledger: SharedPage, gone_bytes: int, wanted_bytes: int) -> None:
    """Likewise for what has gone."""
    reservation.bytes += ledger.exchange(gone_bytes, wanted_bytes)


def _log_failure(told: "Future[None]") -> None:
    if error := told.exception():
        logger.warning("the shared page was not told of a store: %s", error)
