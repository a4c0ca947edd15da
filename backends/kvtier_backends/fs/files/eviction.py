"""Eviction of files: in the background before room is needed, and in a store's own lane when that was not enough."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

from kvtier.backend import OffloadKey, in_thread, in_threads
from kvtier.errors import BackendClosed, BackendUnavailable
from kvtier_backends.fs.disk.capacity import Reservation
from kvtier_backends.fs.disk.lanes import share_out
from kvtier_backends.fs.files.accounts import Accounts, FileRemoval
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from kvtier_backends.fs.files.lane import FileChunks
from kvtier_backends.fs.layout import FsTier, Settling

STAMPS_MAX = 4_096  # Uses that are collected before they are written,
STAMP_EVERY_S = 10.0  # or for so long.
BATCH_FILES = 64  # Removed in one call in the background: a few milliseconds, and then another look.
ROUNDS_MAX = 3  # A store looks for room so often: files may be gone already, or be hard to remove.


class Eviction:
    """The eviction of one tier. Belongs to the loop's thread, and removes in lanes."""

    def __init__(self, tier: FsTier, index: FileIndex, chunks: FileChunks, accounts: Accounts) -> None:
        self._tier = tier
        self._index = index
        self._chunks = chunks
        self.accounts = accounts
        self._capacity = tier.capacity
        self._wake = asyncio.Event()
        self._chosen: list[FileEntry] = []  # Files that the background has still to remove.
        self._stamps: dict[OffloadKey, int] = {}  # Uses that their files' times do not say yet.
        self._scanned = False
        self._settling = Settling(tier, chunks.settle_folders)

    def used_bytes(self) -> int:
        chunks_bytes = self._index.used_bytes + self._capacity.leaving_bytes
        return self.accounts.shown_bytes(chunks_bytes + self._tier.root.remains.used_bytes)

    def doubt(self, keys: Iterable[OffloadKey]) -> None:
        self._index.doubtful.update(keys)
        self._want_settling()

    async def reserve(self, wanted_bytes: int, least_bytes: int, incoming: Sequence[OffloadKey]) -> Reservation:
        """Promise room, as much of what is wanted as there is or can be made; less than `least_bytes` is of no use."""
        reservation, limit_bytes = Reservation(), self._capacity.limit_bytes
        if limit_bytes is not None and least_bytes > limit_bytes:
            return reservation
        if self._capacity.watches_disk:
            await in_thread(self._tier.lanes.store, self._capacity.look)
        try:
            await self.accounts.promise(reservation, wanted_bytes)
            if reservation.bytes < wanted_bytes and self._tier.root.remains.used_bytes:
                await self._settling()
                await self.accounts.promise(reservation, wanted_bytes)
            for _ in range(ROUNDS_MAX):
                short_bytes = wanted_bytes - reservation.bytes
                if short_bytes <= 0 or not (victims := self._choose(short_bytes, incoming)):
                    break
                await self._remove(victims, FileRemoval(reservation, wanted_bytes))
                if reservation.bytes < wanted_bytes:  # Files that were gone already had left their room to all.
                    await self.accounts.promise(reservation, wanted_bytes)
        except BaseException:
            self.release(reservation)
            raise
        if reservation.bytes < least_bytes:
            self.accounts.refused()
        return reservation

    def release(self, reservation: Reservation) -> None:
        self.accounts.release(reservation)
        self.check()

    async def make_room_on_disk(self, wanted_bytes: int, incoming: Sequence[OffloadKey]) -> int:
        """Remove files because the disk is full, whatever the limit says; return how much went."""
        victims, removal = self._choose(wanted_bytes, incoming), FileRemoval()
        if victims:
            await self._remove(victims, removal)
        return removal.gone_bytes

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Record uses, in prefix order: files' times are set behind the loads, unless they are recent."""
        now_ns = self._tier.clock_ns()
        for index, key in enumerate(keys):
            if self._index.refresh_due(key, now_ns):
                self._stamps[key] = now_ns - index  # The head is the newest, also after a restart.
        if len(self._stamps) >= STAMPS_MAX:
            self._wake.set()

    def stamp_last(self) -> None:
        """Queue the last uses before the lane ends, so far."""
        due, self._stamps = self._stamps, {}  # The lane's own from now on: loads still in flight are uses, too.
        with suppress(BackendClosed):  # Closed before.
            self._tier.lanes.evict.submit(self._chunks.stamp, due)

    def check(self) -> None:
        if len(self._tier.root.remains):
            self._want_settling()
        if self._scanned and self.accounts.may_have_surplus():
            self._wake.set()

    def scanned(self, batch: Sequence[FileEntry]) -> None:
        found_bytes = self._index.scanned(batch)
        self._capacity.unseen_bytes = max(0, self._capacity.unseen_bytes - found_bytes)

    def scan_ended(self, *, complete: bool) -> None:
        """From now on all chunks are known, but for those that could not be seen: a surplus is evicted at once."""
        self._scanned = True
        self._capacity.unseen_bytes = 0 if complete else self._tier.root.disk.used_bytes
        self._wake.set()

    async def run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            self._wake.clear()
            with suppress(BackendUnavailable):  # The shared page is away: it is asked again after a pause.
                await self._settle()
                await self._remove_surplus()
                self._choose_expired()
                await self._remove_chosen()
            if self._stamps:
                due, self._stamps = self._stamps, {}
                await self._tier.lanes.evict.run(self._chunks.stamp, due)

    def _pause_s(self) -> float:
        ttl_s = self._tier.options.ttl_s
        pause_s = STAMP_EVERY_S if ttl_s is None else min(STAMP_EVERY_S, max(ttl_s / 16, 0.01))
        return min(pause_s, self._settling.left_s())

    def _want_settling(self) -> None:
        if self._settling.wanted():
            self._wake.set()

    async def _settle(self) -> None:
        if self._settling.left_s():
            return
        if self._index.doubtful or len(self._tier.root.remains) or self._tier.root.sizes.doubtful:
            self.accounts.refused()  # The page of a shared directory says too much.
        if keys := list(islice(self._index.doubtful, STAMPS_MAX)):
            with self._index.call(keys) as unchanged:
                for key, allocated_bytes in (await self._tier.lanes.evict.run(self._chunks.look, keys)).items():
                    if key in unchanged and key not in self._index.claims.leaving:
                        if allocated_bytes:  # Otherwise the process that removed it may have told the page.
                            self.accounts.added(allocated_bytes - self._index.taken_bytes(key))
                        self._index.measured(key, allocated_bytes)
        await self._settling()
        if self._index.doubtful:
            self._settling.wanted()

    async def _remove_surplus(self) -> None:
        while self._scanned and (surplus_bytes := await self.accounts.surplus_bytes()) > 0:
            victims = self._choose(surplus_bytes, (), BATCH_FILES)
            if not victims or not await self._remove_behind(victims):
                return  # Nothing may go, or nothing can be removed: not again before something has changed.

    def _choose_expired(self) -> None:
        if (ttl_s := self._tier.options.ttl_s) is None:
            return
        expired = self._index.unused_since(self._tier.clock_ns() - int(ttl_s * 1e9))
        self._tier.counters.count("expired", len(expired))
        self._begin(expired)
        self._chosen += expired

    async def _remove_chosen(self) -> None:
        while self._chosen:
            part, self._chosen = self._chosen[:BATCH_FILES], self._chosen[BATCH_FILES:]
            await self._remove_behind(part)

    def _choose(self, wanted_bytes: int, incoming: Sequence[OffloadKey], most: int | None = None) -> list[FileEntry]:
        """Choose files that take `wanted_bytes` together, and count them as leaving."""
        if not self.accounts.known:
            return []
        index, victims, got_bytes = self._index, list[FileEntry](), 0
        typical_bytes = max(1, index.used_bytes // max(1, index.files))
        while got_bytes < wanted_bytes and (most is None or len(victims) < most):
            count = -(-(wanted_bytes - got_bytes) // typical_bytes)
            count = count if most is None else min(count, most - len(victims))
            if not (found := index.victims(count, incoming)):
                break
            incoming = ()  # A policy adapts to what comes once.
            victims += found
            got_bytes += sum(victim.allocated_bytes for victim in found)
        self._tier.counters.count("evicted", len(victims))
        self._begin(victims)
        return victims

    def _begin(self, victims: Sequence[FileEntry]) -> None:
        self.accounts.chosen(victims)
        self._index.claims.leaving.update(victim.key for victim in victims)
        self._capacity.leaving_bytes += sum(victim.allocated_bytes for victim in victims)

    async def _remove(self, victims: Sequence[FileEntry], removal: FileRemoval) -> None:
        lanes = self._tier.lanes.store
        parts = share_out(victims, lanes.count, BATCH_FILES)
        try:
            await in_threads(lanes, [partial(self.accounts.remove, self._chunks, part, removal) for part in parts])
        finally:
            self._end(victims, removal)
        self.accounts.removed(removal)

    async def _remove_behind(self, victims: Sequence[FileEntry]) -> int:
        removal = FileRemoval()
        try:
            # No buffer is lent: a tier that closes need not wait for the thread.
            await self._tier.lanes.evict.run(self.accounts.remove, self._chunks, victims, removal)
        finally:
            self._end(victims, removal)
        return removal.gone_bytes

    def _end(self, victims: Sequence[FileEntry], removal: FileRemoval) -> None:
        """Record removed files. A file that could not be removed is still there, and takes room."""
        spared = {chunk.key for chunk in removal.used}
        for victim in victims:
            self._capacity.leaving_bytes -= victim.allocated_bytes
            if victim.key not in removal.gone and victim.key not in spared:
                self._index.stays(victim)
                self.doubt([victim.key])
                self._tier.counters.count("evictions_failed")
        for chunk in removal.used:
            self._index.stays(chunk)
        self._index.claims.end(victim.key for victim in victims)
