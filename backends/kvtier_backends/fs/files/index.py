"""The index: the chunks in the directory, as far as the tier knows. Plain memory, owned by the loop's thread.

It answers probes without a system call. It knows how full the directory is and which chunk is evicted next, and tells
an inventory's consumer of changes. In doubt it says that a chunk is there: a load corrects that. A chunk that is
wrongly taken for absent would be lost until the next start.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvtier.backend import Advice, InventoryQueue, OffloadKey
from kvtier.policies import Policy
from kvtier_backends.fs.disk.capacity import SECTOR_BYTES
from kvtier_backends.fs.disk.claims import Claims
from kvtier_backends.fs.files.recency import ColdEnd, Keep, Order

REFRESH_MINUTES = 60  # A file's time is set to its last use at most so often.
SHARED_MAX = 65_536  # Different entries that are remembered to be shared: some megabytes.

# A chunk's entry is one integer, since a million of them must not take a gigabyte: whether it was used since the start,
# the minute that its file's time says, and its sectors. Chunks of one minute mostly have the same, and share it.
SECTOR_BITS = 24  # 8 GiB.
MINUTE_BITS = 24  # 31 years.
LIVE = 1 << (SECTOR_BITS + MINUTE_BITS)
SECTORS = (1 << SECTOR_BITS) - 1
MINUTES = (1 << MINUTE_BITS) - 1
MINUTE_NS = 60_000_000_000


class Held(NamedTuple):
    """A chunk that is on the disk, and the room that it takes."""

    key: OffloadKey
    allocated_bytes: int
    used_at_ns: int = 0  # By the file's mtime, which is set to the chunk's last use.
    loadable: bool = True  # False: a file of ours by name that no load would take. It takes room all the same.


def entry_of(chunk: Held, *, live: bool) -> int:
    sectors = chunk.allocated_bytes // SECTOR_BYTES
    assert sectors <= SECTORS, chunk.allocated_bytes
    return LIVE * live | minute_of(chunk.used_at_ns) << SECTOR_BITS | sectors


def is_live(entry: int) -> bool:
    """Say whether a chunk was stored or used since the start."""
    return entry >= LIVE


def minute_of(time_ns: int) -> int:
    """Return a time in minutes, which come round after 31 years."""
    return time_ns // MINUTE_NS & MINUTES


def is_later(time_ns: int, known_ns: int) -> bool:
    """Say whether a file's time is a later minute than the one that was known of it."""
    return 0 < (minute_of(time_ns) - minute_of(known_ns) & MINUTES) < 1 << (MINUTE_BITS - 1)


class Index:
    """Keys, the room that they take, and whether they were used since the start."""

    def __init__(
        self,
        policy: Policy[OffloadKey] | None = None,
        clock_ns: Callable[[], int] | None = None,
    ) -> None:
        """Know nothing: every key may be there. `clock_ns` is for who asks what was not used for long.

        Without a policy what was used longest ago goes first, and this order takes no memory of its own.
        """
        self.used_bytes = 0
        self._entries: dict[OffloadKey, int] = {}  # Those used since the start in the order of their last use.
        self.claims = Claims()
        self.inventory = InventoryQueue(self._entries)
        self._unloadable: dict[OffloadKey, int] = {}  # In bytes.
        self._shared: dict[int, int] = {}
        self._calls: list[set[OffloadKey]] = []  # Under way, each with its keys that were not stored since it began.
        self._order = Order(policy or ColdEnd(self._entries, is_live), self._is_idle, clock_ns)
        self.doubtful: set[OffloadKey] = set()
        """Keys whose files may have gone, or may take another room."""
        self._scanning = True
        self._removed_in_scan: set[OffloadKey] = set()

    @property
    def authoritative(self) -> bool:
        """Whether a key that is not in here is absent."""
        return self.inventory.complete is True

    @property
    def files(self) -> int:
        """How many files of chunks' names there are, whether or not a load would take them."""
        return len(self._entries) + len(self._unloadable)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._entries

    def taken_bytes(self, key: OffloadKey) -> int:
        """Return the room that a key's file takes, whether or not a load would take it; 0 if none is known."""
        return self._unloadable.get(key, 0) or (self._entries.get(key, 0) & SECTORS) * SECTOR_BYTES

    @contextmanager
    def call(self, keys: Iterable[OffloadKey]) -> Generator[set[OffloadKey]]:
        """Give, for as long as the block lasts, those of the keys that were not stored since it began.

        Only of these can a call say that they are gone.
        """
        unchanged = set(keys)
        self._calls.append(unchanged)
        try:
            yield unchanged
        finally:
            self._calls = [call for call in self._calls if call is not unchanged]

    def stored(self, chunk: Held) -> None:
        """Note a chunk that a store of ours has put in place: for the order, a use."""
        key = chunk.key
        for unchanged in self._calls:
            unchanged.discard(key)
        self._removed_in_scan.discard(key)
        (self._order.touch if self._is_live(key) else self._order.insert)(key)
        self._drop(key)
        self._note(key, entry_of(chunk, live=True))
        self.used_bytes += chunk.allocated_bytes

    def used(self, key: OffloadKey) -> None:
        """Note that a chunk was used, if it is known."""
        entry = self._entries.get(key)
        if entry is None:
            return
        (self._order.touch if is_live(entry) else self._order.insert)(key)
        del self._entries[key]  # So that their order is that of their last use.
        self._note(key, entry | LIVE)

    def measured(self, key: OffloadKey, allocated_bytes: int) -> None:
        """Note the room that a chunk in doubt was seen to take; 0: it has no file, and the consumer hears of it."""
        self.doubtful.discard(key)
        if not allocated_bytes:
            self.lost(key)
        elif key in self._entries:
            entry = self._entries[key]
            self.used_bytes += allocated_bytes - self.taken_bytes(key)
            self._note(key, entry - (entry & SECTORS) + allocated_bytes // SECTOR_BYTES)

    def advise(self, advice: Advice[OffloadKey], retained_max: int) -> None:
        """Apply advice to those of its keys that are known. All but a demotion renews their recency."""
        if advice.kind == "demote":
            known = [key for key in dict.fromkeys(advice.keys) if self._is_live(key)]
        else:
            known = self._renewed(advice.keys)
        self._order.advise(advice.of(known), retained_max)

    @property
    def retentions_cut(self) -> int:
        """How many chunks were to be retained and were not, or not for all their time."""
        return self._order.retentions_cut

    def _renewed(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Renew the recency of known keys, in prefix order, in the entries; return them."""
        for key in reversed(known := [key for key in dict.fromkeys(keys) if key in self._entries]):
            if self._is_live(key):
                self._entries[key] = self._entries.pop(key)
            else:
                self.used(key)
        return known

    def found(self, chunk: Held) -> None:
        """Note a chunk that is there without a store call having said so; the consumer hears of it."""
        if chunk.key not in self._entries:
            self.stored(chunk)
            self.inventory.added(chunk.key)

    def refresh_due(self, key: OffloadKey, now_ns: int) -> bool:
        """Say whether a file's time should be set to now; asked once, it counts as done."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        minute = minute_of(now_ns)
        if minute - (entry >> SECTOR_BITS) & MINUTES < REFRESH_MINUTES:  # Round the corner, and of a time ahead, too.
            return False
        self._note(key, entry & LIVE | minute << SECTOR_BITS | entry & SECTORS)
        return True

    def scanned(self, chunks: Sequence[Held]) -> int:
        """Note chunks of the scan, but none that were stored, used or removed meanwhile.

        Returns how much room that takes which it noted.
        """
        noted_bytes, uses = 0, list[tuple[int, OffloadKey]]()
        for chunk in chunks:
            key = chunk.key
            if key in self._removed_in_scan or key in self._unloadable or self._is_live(key):
                continue
            noted_bytes += chunk.allocated_bytes
            if key in self._entries:
                self._correct(chunk)
                continue
            if chunk.loadable:
                self._note(key, entry_of(chunk, live=False))
                self.inventory.added(key)
            else:
                self._unloadable[key] = chunk.allocated_bytes
            self.used_bytes += chunk.allocated_bytes
            uses.append((chunk.used_at_ns, key))
        self._order.found(uses)
        return noted_bytes

    def scan_ended(self, *, complete: bool) -> None:
        """Note that the scan is over; `complete`: that nothing was left out."""
        self._scanning = False
        self.inventory.scan_ended(complete=complete)
        self._removed_in_scan.clear()

    def removed(self, key: OffloadKey) -> None:
        """Note that a `call` of ours has removed a chunk."""
        if self._scanning:
            self._removed_in_scan.add(key)
        if self._is_live(key):
            self._order.remove(key)
        self._drop(key)

    def lost(self, key: OffloadKey) -> None:
        """Note that a `call` has not found a chunk, or not a whole one; the consumer hears of it."""
        if key in self._entries:
            self.inventory.lost(key)
        self.removed(key)

    def victims(self, count: int, keep: Keep, kept: int, incoming: Sequence[OffloadKey] = ()) -> list[Held]:
        """Choose up to `count` files that go for room, and forget them; the consumer hears of it. See `Order`."""
        return [self._evict(key) for key in self._order.victims(count, keep, kept, incoming)]

    def unused_since(self, before_ns: int, keep: Keep) -> list[Held]:
        """Choose the files that go because their last use was before that time, likewise."""
        return [self._evict(key) for key in self._order.unused_since(before_ns, keep)]

    def stays(self, chunk: Held) -> None:
        """Note that a file that was to go for room is there still."""
        if chunk.loadable:
            self.found(chunk)
        elif chunk.key not in self._entries:
            self._unloadable[chunk.key] = chunk.allocated_bytes
            self.used_bytes += chunk.allocated_bytes
            self._order.found([(chunk.used_at_ns, chunk.key)])

    def _is_live(self, key: OffloadKey) -> bool:
        return is_live(self._entries.get(key, 0))

    def _is_idle(self, key: OffloadKey) -> bool:
        entry = self._entries.get(key)
        return key in self._unloadable if entry is None else not is_live(entry)

    def _correct(self, chunk: Held) -> None:
        """Correct the room of a chunk that an earlier scan has found."""
        self._drop(chunk.key)
        self.used_bytes += chunk.allocated_bytes
        if chunk.loadable:
            self._note(chunk.key, entry_of(chunk, live=False))
            return
        self._unloadable[chunk.key] = chunk.allocated_bytes
        self.inventory.lost(chunk.key)

    def _evict(self, key: OffloadKey) -> Held:
        taken_bytes, loadable = self.taken_bytes(key), key in self._entries
        used_at_ns = (self._entries.get(key, 0) >> SECTOR_BITS & MINUTES) * MINUTE_NS
        if self._scanning:
            self._removed_in_scan.add(key)
        if loadable:
            self.inventory.lost(key)
        self._drop(key)
        return Held(key, taken_bytes, used_at_ns, loadable)

    def _note(self, key: OffloadKey, entry: int) -> None:
        if len(self._shared) >= SHARED_MAX:
            self._shared.clear()
        self._entries[key] = self._shared.setdefault(entry, entry)

    def _drop(self, key: OffloadKey) -> None:
        self.used_bytes -= self.taken_bytes(key)
        self._entries.pop(key, None)
        self._unloadable.pop(key, None)
        self.doubtful.discard(key)
