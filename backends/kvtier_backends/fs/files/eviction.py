"""Makes room: in the background before it is needed, and in a store's own lane when it was not enough."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from kvtier.backend import Lanes, OffloadKey, in_thread, in_threads
from kvtier.errors import BackendClosed
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.capacity import Capacity, Reservation
from kvtier_backends.fs.disk.lanes import share_out
from kvtier_backends.fs.disk.quarantine import Cleared, Quarantine
from kvtier_backends.fs.files.claims import Claims
from kvtier_backends.fs.files.index import Held, Index
from kvtier_backends.fs.files.lane import Chunks

# When files were used, as their times say it after a restart: set behind the loads, and seldom.


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


BATCH_FILES = 64  # Removed in one hop in the background: a few milliseconds, and then another look.
ROUNDS_MAX = 3  # A store looks for room so often: files may be gone already, or be hard to remove.
STAMP_EVERY_S = 10.0  # Uses are collected for so long before files' times are set.


class Removal:
    """What a lane has removed so far, whoever waits for it."""

    def __init__(self) -> None:
        self.gone: dict[OffloadKey, int] = {}
        """What each file has given back."""
        self.used: list[Held] = []
        """What was spared, because another process has used it since."""


class Eviction:
    """One tier's. Belongs to the loop's thread, and removes in lanes."""

    def __init__(
        self,
        index: Index,
        capacity: Capacity,
        chunks: Chunks,
        claims: Claims,
        counters: Counters,
        quarantine: Quarantine,
        *,
        lane: Lanes,
        store_lanes: Lanes,
        ttl_s: float | None,
        clock_ns: Callable[[], int],
    ) -> None:
        """`lane`: for the background; `store_lanes`: for stores that find no room."""
        self._index = index
        self._capacity = capacity
        self._chunks = chunks
        self._claims = claims
        self._counters = counters
        self._quarantine = quarantine
        self._lane = lane
        self._store_lanes = store_lanes
        self._ttl_s = ttl_s
        self._clock_ns = clock_ns
        self._wake = asyncio.Event()
        self._chosen: list[Held] = []  # Files that the background has still to remove.
        self.stamps = Stamps(index, chunks, lane, clock_ns)
        self._scanned = False
        self.changed: Callable[[], None] = lambda: None
        """Called when there is news for the inventory."""

    def used_bytes(self) -> int:
        """Return what chunks take, those included that are being removed."""
        return self._index.used_bytes + self._capacity.leaving_bytes

    async def reserve(self, wanted_bytes: int, least_bytes: int, incoming: Sequence[OffloadKey]) -> Reservation:
        """Promise room, as much of what is wanted as there is or can be made; less than `least_bytes` is of no use."""
        reservation, limit_bytes = Reservation(), self._capacity.limit_bytes
        if limit_bytes is not None and least_bytes > limit_bytes:
            return reservation
        if self._capacity.watches_disk:
            await in_thread(self._store_lanes, self._capacity.look)
        try:
            await self._promise(reservation, wanted_bytes)
            if reservation.bytes < wanted_bytes and await self._clear_quarantine(wanted_bytes - reservation.bytes):
                await self._promise(reservation, wanted_bytes)
            for _ in range(ROUNDS_MAX):
                short_bytes = wanted_bytes - reservation.bytes
                if short_bytes <= 0 or not (victims := self._choose(short_bytes, incoming)):
                    break
                await self._exchange(reservation, victims, wanted_bytes)
                if reservation.bytes < wanted_bytes:  # Files that were gone already had left their room to all.
                    await self._promise(reservation, wanted_bytes)
        except BaseException:
            self.release(reservation)
            raise
        return reservation

    def stored(self, added_bytes: int) -> None:
        """Hear what a store or a delete has added to what is used; the index counts it."""
        self._capacity.wrote(added_bytes)

    def release(self, reservation: Reservation) -> None:
        """Take a promise back: what was stored has been counted."""
        self._capacity.release(reservation.bytes)
        self.check()
        self.changed()

    async def make_room_on_disk(self, wanted_bytes: int, incoming: Sequence[OffloadKey]) -> int:
        """Remove files because the disk is full, whatever the limit says; return how much went."""
        cleared_bytes = await self._clear_quarantine(wanted_bytes)
        if cleared_bytes >= wanted_bytes:
            return cleared_bytes
        victims = self._choose(wanted_bytes - cleared_bytes, incoming)
        gone_bytes = await self._remove(victims) if victims else 0
        self.stored(-gone_bytes)
        return cleared_bytes + gone_bytes

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Have it written down, behind, that files were used now, in prefix order."""
        if self.stamps.used(keys):
            self._wake.set()

    def check(self) -> None:
        """See whether there is so much that some of it should go before the next store."""
        if self._scanned and self._capacity.surplus_bytes() > 0:
            self._wake.set()

    def scanned(self, batch: Sequence[Held]) -> None:
        """Count what the scan has found."""
        found_bytes = self._index.scanned(batch)
        self._capacity.unseen_bytes = max(0, self._capacity.unseen_bytes - found_bytes)
        self.changed()

    def scan_ended(self) -> None:
        """From now on it is known what is there: what is too much goes at once."""
        self._scanned = True
        self._capacity.unseen_bytes = 0
        self._wake.set()
        self.changed()

    async def run(self) -> None:
        """Work in the background until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            self._wake.clear()
            await self._remove_surplus()
            self._choose_expired()
            await self._remove_chosen()
            await self.stamps.write()

    def _pause_s(self) -> float:
        pauses = [STAMP_EVERY_S]
        if self._ttl_s is not None:
            pauses.append(max(self._ttl_s / 16, 0.01))
        return min(pauses)

    async def _promise(self, reservation: Reservation, wanted_bytes: int) -> None:
        """Promise as much as is free, up to what is wanted in all."""
        reservation.bytes += self._capacity.reserve(wanted_bytes - reservation.bytes)

    async def _exchange(self, reservation: Reservation, victims: Sequence[Held], wanted_bytes: int) -> None:
        """Promise what victims leave, up to what is wanted in all."""
        gone_bytes = await self._remove(victims)
        reservation.bytes += self._capacity.exchange(gone_bytes, max(0, wanted_bytes - reservation.bytes))

    async def _surplus_bytes(self) -> int:
        return self._capacity.surplus_bytes()

    async def _remove_surplus(self) -> None:
        while self._scanned and (surplus_bytes := await self._surplus_bytes()) > 0:
            if await self._clear_quarantine(surplus_bytes):
                continue
            victims = self._choose(surplus_bytes, (), BATCH_FILES)
            if not victims or not await self._remove_behind(victims):
                return  # Nothing may go, or nothing can be removed: not again before something has changed.

    async def _clear_quarantine(self, wanted_bytes: int) -> int:
        """Have corrupt files go before any chunk; return how much went."""
        if not self._scanned or self._quarantine.empty:
            return 0  # Before the scan has counted them, they take room that nobody knows of.
        cleared: list[Cleared] = []
        try:
            await in_thread(self._store_lanes, lambda: cleared.append(self._quarantine.clear(wanted_bytes)))
        finally:
            for files, freed_bytes in cleared:
                self._counters.count("quarantine_evicted", files)
                self._capacity.other_bytes -= freed_bytes
                self.stored(-freed_bytes)
        return sum(freed_bytes for _, freed_bytes in cleared)

    def _choose_expired(self) -> None:
        if self._ttl_s is None:
            return
        before_ns = self._clock_ns() - int(self._ttl_s * 1e9)
        expired = self._index.unused_since(before_ns, self._claims.in_use.__contains__)
        self._counters.count("expired", len(expired))
        self._begin(expired)
        self._chosen += expired

    async def _remove_chosen(self) -> None:
        while self._chosen:
            part, self._chosen = self._chosen[:BATCH_FILES], self._chosen[BATCH_FILES:]
            await self._remove_behind(part)

    def _choose(self, wanted_bytes: int, incoming: Sequence[OffloadKey], most: int | None = None) -> list[Held]:
        """Choose files that take that much together, as far as there are any; and have them counted as leaving."""
        index, busy, victims, got_bytes = self._index, self._claims.in_use, list[Held](), 0
        kept = sum(key in index for key in busy)  # A batch may be larger than the tier, and mostly new.
        typical_bytes = max(1, index.used_bytes // max(1, index.files))
        while got_bytes < wanted_bytes and (most is None or len(victims) < most):
            count = -(-(wanted_bytes - got_bytes) // typical_bytes)
            count = count if most is None else min(count, most - len(victims))
            found = index.victims(count, busy.__contains__, kept, incoming)
            if not found:
                break
            incoming = ()  # A policy adapts to what comes once.
            victims += found
            got_bytes += sum(victim.allocated_bytes for victim in found)
        self._counters.count("evicted", len(victims))
        self._begin(victims)
        return victims

    def _begin(self, victims: Sequence[Held]) -> None:
        self._claims.begin(victim.key for victim in victims)
        self._capacity.leaving_bytes += sum(victim.allocated_bytes for victim in victims)
        self.changed()

    async def _remove(self, victims: Sequence[Held]) -> int:
        """Remove in the stores' lanes, for a store that waits for it; return how much went."""
        parts = share_out(victims, self._store_lanes.count, BATCH_FILES)
        removal = Removal()
        try:
            await in_threads(self._store_lanes, [partial(self._evict, part, removal) for part in parts])
        finally:
            gone_bytes = self._end(victims, removal)
        return gone_bytes

    async def _remove_behind(self, victims: Sequence[Held]) -> int:
        """Remove in the background's lane; return how much went."""
        removal = Removal()
        try:
            # No buffer is lent: a tier that closes need not wait for the thread.
            await asyncio.get_running_loop().run_in_executor(self._lane, self._evict, victims, removal)
        finally:
            gone_bytes = self._end(victims, removal)
        return gone_bytes

    def _evict(self, victims: Sequence[Held], removal: "Removal") -> None:
        """Remove files. Blocks, in a lane."""
        self._chunks.evict(victims, removal.gone)

    def _end(self, victims: Sequence[Held], removal: "Removal") -> int:
        """Note what is gone; what could not be removed is there still, and takes room."""
        spared = {chunk.key for chunk in removal.used}
        for victim in victims:
            self._capacity.leaving_bytes -= victim.allocated_bytes
            if victim.key not in removal.gone and victim.key not in spared:
                self._index.stays(victim)
                self._counters.count("evictions_failed")
        for chunk in removal.used:
            self._index.stays(chunk)
        self._claims.end(victim.key for victim in victims)
        self.changed()
        return sum(removal.gone.values())
