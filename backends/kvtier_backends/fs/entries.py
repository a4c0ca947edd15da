"""What is known of a file, packed: a million of them must not take a gigabyte."""

from collections.abc import Iterator
from typing import NamedTuple

from kvtier.keys import OffloadKey
from kvtier_backends.fs.disk import SECTOR_BYTES
from kvtier_backends.fs.idle import Idle

# A chunk's entry is one integer: whether it was used since the start, the minute that its file's time says, and its
# sectors. Chunks of one minute mostly have the same, and share it.
SECTOR_BITS = 24  # 8 GiB.
MINUTE_BITS = 24  # 31 years.
LIVE = 1 << (SECTOR_BITS + MINUTE_BITS)
SECTORS = (1 << SECTOR_BITS) - 1
MINUTES = (1 << MINUTE_BITS) - 1
MINUTE_NS = 60_000_000_000
AHEAD_NS = 60 * MINUTE_NS  # As much as that, two machines' clocks may differ.


class Held(NamedTuple):
    """A chunk that is on the disk, and the room that it takes."""

    key: OffloadKey
    allocated_bytes: int
    used_at_ns: int = 0  # By the file's mtime, which is set to the chunk's last use.
    loadable: bool = True  # False: a file of ours by name that no load would take. It takes room all the same.


def believable_ns(time_ns: int, now_ns: int) -> int:
    """Return a file's time as one that can be believed: not before 1970, and if it is far ahead, now.

    Anybody may set a file's time, and a clock may have been wrong. Clocks of machines that share a directory differ.
    """
    return now_ns if time_ns > now_ns + AHEAD_NS else max(time_ns, 0)


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


class Snapshot(NamedTuple):
    """An index at one moment."""

    keys: list[OffloadKey]
    entries: list[int]
    idle: Idle
    used_at_ns: dict[OffloadKey, int]

    def newest_first(self, now_ns: int) -> Iterator[Held]:
        """Yield the chunks that a load would likely find, by their last use. Takes about a microsecond a chunk.

        Where no clock has noted the time of a use, it is one just before `now_ns`, in the right order.
        """
        unused: dict[OffloadKey, int] = {}
        for place, (key, entry) in enumerate(zip(reversed(self.keys), reversed(self.entries), strict=True)):
            if is_live(entry):
                yield Held(key, (entry & SECTORS) * SECTOR_BYTES, self.used_at_ns.get(key, now_ns - place))
            else:
                unused[key] = entry
        for used_at_ns, key in self.idle.newest_first():
            idle = unused.pop(key, None)  # None: it was used since, removed, or stands here twice.
            if idle is not None:
                yield Held(key, (idle & SECTORS) * SECTOR_BYTES, used_at_ns)
