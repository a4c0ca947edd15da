"""What the directory holds, as far as the tier knows: plain memory, owned by the loop's thread.

Answers probes without a system call, knows how full the directory is and which chunk was used last, and keeps what an
inventory's consumer has not heard yet. It errs on the side of "there": a load corrects that, while a chunk that is
wrongly taken for absent is lost until the next start.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier.backend import INVENTORY_BATCH_KEYS, Added, InventoryEvent, Removed, ScanDone
from kvtier.keys import OffloadKey

SECTOR_BYTES = 512
# A chunk's entry is one integer, its age above its sectors, to stay near 200 bytes a chunk, key and order included: 60
# bits fit the smallest object that holds more than 30.
_SECTOR_BITS = 24  # 8 GiB.


class Held(NamedTuple):
    """A chunk that is on the disk, and the room that it takes."""

    key: OffloadKey
    allocated_bytes: int


class Index:
    """Keys in the order of their last use, oldest first."""

    def __init__(self) -> None:
        """Know nothing: every key may be there."""
        self.used_bytes = 0
        self.authoritative = False
        """Whether a key that is not in here is absent."""
        self._entries: OrderedDict[OffloadKey, int] = OrderedDict()
        self._age = 0
        self._scanning = True
        self._removed_in_scan: set[OffloadKey] = set()
        self._report = 0
        self._reporting = False
        self._added: deque[OffloadKey] = deque()
        self._lost: deque[OffloadKey] = deque()
        self._scan_reported = False

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._entries

    def oldest_first(self) -> Iterable[OffloadKey]:
        """Yield the keys by their last use."""
        return iter(self._entries)

    def mark(self) -> int:
        """Return the time, in calls: what is stored from now on is not removed by who began to look before."""
        self._age += 1
        return self._age

    def stored(self, chunk: Held) -> None:
        """Note a chunk that a store of ours has put in place."""
        key, allocated_bytes = chunk
        self._removed_in_scan.discard(key)
        self._forget(key)
        sectors = allocated_bytes // SECTOR_BYTES
        assert sectors < 1 << _SECTOR_BITS, allocated_bytes
        self._entries[key] = self._age << _SECTOR_BITS | sectors
        self.used_bytes += allocated_bytes

    def used(self, key: OffloadKey) -> None:
        """Make a key the last used one, if it is known."""
        if key in self._entries:
            self._entries.move_to_end(key)

    def found(self, chunk: Held) -> None:
        """Note a chunk that is there without a store call having said so; the consumer hears of it."""
        if chunk.key not in self._entries:
            self.stored(chunk)
            self.report(chunk.key)

    def report(self, key: OffloadKey) -> None:
        """Let the consumer, if there is one, hear that a chunk is there."""
        if self._reporting:
            self._added.append(key)

    def scanned(self, chunks: Sequence[Held]) -> None:
        """Note what the scan has seen, but for what was removed since it may have looked."""
        for chunk in chunks:
            if chunk.key not in self._removed_in_scan and chunk.key not in self._entries:
                self.found(chunk)
                self._entries.move_to_end(chunk.key, last=False)  # Whatever was used since the start is newer.

    def scan_ended(self, *, complete: bool) -> None:
        """Note that the scan is over; `complete`: that nothing was left out."""
        self._scanning = False
        self.authoritative = complete
        self._removed_in_scan.clear()

    def removed(self, key: OffloadKey, mark: int) -> None:
        """Note that a call of ours that began at `mark` has removed a chunk."""
        entry = self._entries.get(key)
        if entry is not None and entry >> _SECTOR_BITS >= mark:
            return  # Stored again since: the file may be there.
        if self._scanning:
            self._removed_in_scan.add(key)
        self._forget(key)

    def lost(self, key: OffloadKey, mark: int) -> None:
        """Note that a load that began at `mark` has not found a chunk, or not a whole one; the consumer hears of it."""
        known = key in self._entries
        self.removed(key, mark)
        if self._reporting and known and key not in self._entries:
            self._lost.append(key)

    def begin_report(self) -> int:
        """Start from what is there now: a consumer has come, and knows nothing. Returns the report's number."""
        self.end_report(self._report)
        self._report += 1
        self._reporting = True
        self._scan_reported = False
        self._added.extend(self._entries)
        return self._report

    def end_report(self, report: int) -> None:
        """Keep nothing for a consumer that has gone, if none has come since."""
        if report == self._report:
            self._reporting = False
            self._added.clear()
            self._lost.clear()

    def next_event(self) -> InventoryEvent | None:
        """Return what the consumer should hear next; None if it knows everything."""
        while self._added:
            if keys := [key for key in _take(self._added) if key in self._entries]:
                return Added(keys)
        if self._scanning:
            return None
        if not self._scan_reported:
            self._scan_reported = True
            return ScanDone(self.authoritative)
        while self._lost:
            if keys := [key for key in _take(self._lost) if key not in self._entries]:
                return Removed(keys)
        return None

    def _forget(self, key: OffloadKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= (entry & ((1 << _SECTOR_BITS) - 1)) * SECTOR_BYTES


def _take(keys: deque[OffloadKey]) -> list[OffloadKey]:
    return [keys.popleft() for _ in range(min(len(keys), INVENTORY_BATCH_KEYS))]
