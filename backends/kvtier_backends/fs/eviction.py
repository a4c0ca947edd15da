"""Makes room: in the background before it is needed, and in a store's own lane when it was not enough.

A file that a call is at is never chosen, and a store of a key whose file is just being removed waits until it is gone:
else the removal would meet the new file. A load waits for nothing here.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from kvtier.keys import OffloadKey
from kvtier.lend import Lanes, in_thread, in_threads
from kvtier_backends.fs.capacity import Capacity
from kvtier_backends.fs.chunks import Chunks, share_out
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.entries import Held
from kvtier_backends.fs.index import Index
from kvtier_backends.fs.quarantine import Cleared, Quarantine
from kvtier_backends.fs.stamps import Stamps

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
        tally: Tally,
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
        self._tally = tally
        self._quarantine = quarantine
        self._lane = lane
        self._store_lanes = store_lanes
        self._ttl_s = ttl_s
        self._clock_ns = clock_ns
        self._busy: Counter[OffloadKey] = Counter()
        self._leaving: set[OffloadKey] = set()
        self._gone = asyncio.Event()  # Replaced each time that some are.
        self._wake = asyncio.Event()
        self.stamps = Stamps(index, chunks, lane, clock_ns)
        self._scanned = False
        self.changed: Callable[[], None] = lambda: None
        """Called when there is news for the inventory."""

    @contextmanager
    def in_use(self, keys: Sequence[OffloadKey]) -> Generator[None]:
        """Keep the keys' files for as long as the block lasts."""
        self._busy.update(keys)
        try:
            yield
        finally:
            self._busy.subtract(keys)
            for key in keys:
                if not self._busy[key]:
                    del self._busy[key]

    def used_bytes(self) -> int:
        """Return what chunks take, those included that are being removed."""
        return self._index.used_bytes + self._capacity.leaving_bytes

    def is_leaving(self, key: OffloadKey) -> bool:
        """Say whether a key's file is just being removed for room."""
        return key in self._leaving

    async def until_gone(self, keys: Sequence[OffloadKey]) -> None:
        """Wait until none of the keys' files is being removed."""
        while not self._leaving.isdisjoint(keys):
            await self._gone.wait()

    async def reserve(self, wanted_bytes: int, least_bytes: int, incoming: Sequence[OffloadKey]) -> int:
        """Promise room, as much of what is wanted as there is or can be made; less than `least_bytes` is of no use."""
        limit_bytes = self._capacity.limit_bytes
        if limit_bytes is not None and least_bytes > limit_bytes:
            return 0
        if self._capacity.watches_disk:
            await in_thread(self._store_lanes, self._capacity.look)
        granted_bytes = await self._promise(wanted_bytes)
        try:
            if granted_bytes < wanted_bytes and await self._clear_quarantine(wanted_bytes - granted_bytes):
                granted_bytes += await self._promise(wanted_bytes - granted_bytes)
            for _ in range(ROUNDS_MAX):
                short_bytes = wanted_bytes - granted_bytes
                if short_bytes <= 0 or not (victims := self._choose(short_bytes, incoming)):
                    break
                granted_bytes += await self._exchange(victims, short_bytes)
                if granted_bytes < wanted_bytes:  # Files that were gone already had left their room to all.
                    granted_bytes += await self._promise(wanted_bytes - granted_bytes)
        except BaseException:
            self.release(granted_bytes)
            raise
        return granted_bytes

    def stored(self, added_bytes: int) -> None:
        """Hear what a store or a delete has added to what is used; the index counts it."""
        self._capacity.wrote(added_bytes)

    def release(self, reserved_bytes: int) -> None:
        """Take a promise back: what was stored has been counted."""
        self._capacity.release(reserved_bytes)
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
            await self._remove_expired()
            await self.stamps.write()

    def _pause_s(self) -> float:
        pauses = [STAMP_EVERY_S]
        if self._ttl_s is not None:
            pauses.append(max(self._ttl_s / 16, 0.01))
        return min(pauses)

    async def _promise(self, wanted_bytes: int) -> int:
        return self._capacity.reserve(wanted_bytes)

    async def _exchange(self, victims: Sequence[Held], wanted_bytes: int) -> int:
        return self._capacity.exchange(await self._remove(victims), wanted_bytes)

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
                self._tally.count("quarantine_evicted", files)
                self._capacity.other_bytes -= freed_bytes
                self.stored(-freed_bytes)
        return sum(freed_bytes for _, freed_bytes in cleared)

    async def _remove_expired(self) -> None:
        if self._ttl_s is None:
            return
        before_ns = self._clock_ns() - int(self._ttl_s * 1e9)
        expired = self._index.unused_since(before_ns, self._busy.__contains__)
        self._tally.count("expired", len(expired))
        for part in share_out(expired, 1, BATCH_FILES):
            self._begin(part)
        for part in share_out(expired, 1, BATCH_FILES):
            await self._remove_behind(part)

    def _choose(self, wanted_bytes: int, incoming: Sequence[OffloadKey], most: int | None = None) -> list[Held]:
        """Choose files that take that much together, as far as there are any; and have them counted as leaving."""
        index, victims, got_bytes = self._index, list[Held](), 0
        typical_bytes = max(1, index.used_bytes // max(1, index.files))
        while got_bytes < wanted_bytes and (most is None or len(victims) < most):
            count = -(-(wanted_bytes - got_bytes) // typical_bytes)
            count = count if most is None else min(count, most - len(victims))
            found = index.victims(count, self._busy.__contains__, len(self._busy), incoming)
            if not found:
                break
            incoming = ()  # A policy adapts to what comes once.
            victims += found
            got_bytes += sum(victim.allocated_bytes for victim in found)
        self._tally.count("evicted", len(victims))
        self._begin(victims)
        return victims

    def _begin(self, victims: Sequence[Held]) -> None:
        self._leaving.update(victim.key for victim in victims)
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
        self._chunks.evict(victims, removal.gone, removal.used, check=False)

    def _end(self, victims: Sequence[Held], removal: "Removal") -> int:
        """Note what is gone; what could not be removed is there still, and takes room."""
        spared = {chunk.key for chunk in removal.used}
        for victim in victims:
            self._capacity.leaving_bytes -= victim.allocated_bytes
            if victim.key not in removal.gone and victim.key not in spared:
                self._index.stays(victim)
                self._tally.count("evictions_failed")
        for chunk in removal.used:
            self._index.stays(chunk)
        self._leaving.difference_update(victim.key for victim in victims)
        gone, self._gone = self._gone, asyncio.Event()
        gone.set()
        self.changed()
        return sum(removal.gone.values())
