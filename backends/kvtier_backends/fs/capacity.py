"""How much a directory may hold: nothing is written that was not reserved, so that the limit holds at every moment.

What counts is what the file system has allocated: chunks' files whole or not, directories, and the tier's own books.
A reservation is for the worst that a chunk can take; what it took is known when it is there.
"""

from typing import Protocol

from kvtier_backends.fs.disk import Disk

EXTENTS_INLINE = 4  # Of a file on ext4; more of them take blocks of their own,
EXTENTS_PER_BLOCK = 340  # each with so many.
FOLDERS_NEW = 2  # Above a chunk's file,
FOLDERS_GROWN = 2  # and above these some that grow by a block, also where a new one takes nothing (XFS).


class Used(Protocol):
    """Something that knows what its part of the directory takes."""

    @property
    def used_bytes(self) -> int: ...


def chunk_bytes_worst(file_bytes: int, block_bytes: int, folder_bytes: int) -> int:
    """Return the most that a chunk's file can take: as fragmented as can be, and the first one in its folders."""
    blocks = -(-file_bytes // block_bytes)
    maps = 0 if blocks <= EXTENTS_INLINE else -(-blocks // EXTENTS_PER_BLOCK)
    return (blocks + maps + FOLDERS_GROWN) * block_bytes + FOLDERS_NEW * folder_bytes


class Capacity:
    """Used, promised and free bytes of one directory. Belongs to the loop's thread."""

    def __init__(
        self,
        parts: tuple[Used, ...],
        disk: Disk,
        *,
        limit_bytes: int | None,
        low_water: float,
        min_free_bytes: int,
        kept_free_bytes: int = 0,
    ) -> None:
        """`parts`: what is used. `min_free_bytes`: what others of the file system are left.

        `kept_free_bytes`: what chunks leave to whoever asks for it by `reserve_kept`.
        """
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        """Promised to stores that are under way."""
        self.leaving_bytes = 0
        """Of files that are being removed: free once they are gone."""
        self.in_place_bytes = 0
        """Promised with files that are to be overwritten: the disk has no less free for it."""
        self.other_bytes = 0
        """Of what else of ours lies in the tier's folders."""
        self.unseen_bytes = disk.used_bytes
        """As much as the directory may hold that the scan has not come to: at first, all that is on the disk."""
        self._disk = disk
        self._parts = parts
        self._low_water = low_water
        self._min_free_bytes = min_free_bytes
        self._kept_free_bytes = kept_free_bytes

    @property
    def used_bytes(self) -> int:
        """What is on the disk, as far as is known."""
        return sum(part.used_bytes for part in self._parts) + self.leaving_bytes + self.other_bytes

    def free_bytes(self) -> int | None:
        """Return what may still be promised, less than nothing if there is too much already; None: no limit."""
        room: list[int] = []
        if self.limit_bytes is not None:
            room.append(self.limit_bytes - self.used_bytes - self.reserved_bytes - self.unseen_bytes)
        if self._min_free_bytes:
            room.append(self._disk.free_bytes - self._min_free_bytes - self.reserved_bytes + self.in_place_bytes)
        return min(room) - self._kept_free_bytes if room else None

    @property
    def watches_disk(self) -> bool:
        """Whether it matters what others leave free."""
        return self._min_free_bytes > 0

    def look(self) -> None:
        """See what is free on the disk. Blocks; any thread may call."""
        self._disk.look()

    def wrote(self, added_bytes: int) -> None:
        """Hear of what was written since anybody has looked, or just before: then it counts twice until the next."""
        if self.watches_disk:
            self._disk.free_bytes -= max(0, added_bytes)

    def reserve(self, wanted_bytes: int) -> int:
        """Promise as much of that as is free, and return how much it was."""
        free_bytes = self.free_bytes()
        granted_bytes = wanted_bytes if free_bytes is None else max(0, min(wanted_bytes, free_bytes))
        self.reserved_bytes += granted_bytes
        return granted_bytes

    def reserve_kept(self, wanted_bytes: int) -> bool:
        """Promise that much, of what is kept free before all else; False if there is less, and then nothing."""
        free_bytes = self.free_bytes()
        if free_bytes is not None and free_bytes + self._kept_free_bytes < wanted_bytes:
            return False
        self._kept_free_bytes -= wanted_bytes
        self.reserved_bytes += wanted_bytes
        return True

    def release_kept(self, wanted_bytes: int) -> None:
        """Take that promise back: what it was for has been counted, and the next one is kept free for."""
        self._kept_free_bytes += wanted_bytes
        self.release(wanted_bytes)

    def exchange(self, gone_bytes: int, wanted_bytes: int) -> int:
        """Promise to whoever made room what has gone for it: the total grows by nothing, however full it is."""
        granted_bytes = min(gone_bytes, wanted_bytes)
        self.reserved_bytes += granted_bytes
        return granted_bytes

    def hand_over(self, leaving_bytes: int) -> None:
        """Promise what files take that are going to whoever overwrites them: the total does not change."""
        self.leaving_bytes -= leaving_bytes
        self.reserved_bytes += leaving_bytes
        self.in_place_bytes += leaving_bytes

    def take_back(self, in_place_bytes: int) -> None:
        """Count what files took that were to be overwritten as any other promise: the store has ended."""
        self.in_place_bytes -= in_place_bytes

    def release(self, reserved_bytes: int) -> None:
        """Take a promise back: the store has ended, and what it took is counted where it is."""
        self.reserved_bytes -= reserved_bytes
        assert self.reserved_bytes >= 0, self.reserved_bytes

    def surplus_bytes(self) -> int:
        """Return what should go before stores have to wait for it: down to the low-water mark, from halfway to it."""
        return self.surplus_of(self.used_bytes - self.leaving_bytes, self.reserved_bytes)

    def surplus_of(self, used_bytes: int, reserved_bytes: int) -> int:
        """Return likewise what should go if so much is used and promised."""
        surplus = 0
        if self.limit_bytes is not None:
            limit_bytes = self.limit_bytes - self._kept_free_bytes
            low = int(limit_bytes * self._low_water)
            high = (limit_bytes + low) // 2
            taken = used_bytes + reserved_bytes
            surplus = taken - low if taken > high else 0
        if self._min_free_bytes:
            least_bytes = self._min_free_bytes + self._kept_free_bytes
            new_bytes = reserved_bytes - self.in_place_bytes
            lacking = least_bytes + new_bytes - self._disk.free_bytes - self.leaving_bytes
            surplus = max(surplus, lacking)
        return surplus
