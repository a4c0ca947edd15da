"""Makes room by having files overwritten: what comes takes the place of what goes, inode, blocks and all.

A file system spends more on making a file and on removing one than on the bytes between: blocks are found and freed,
and ext4 passes over every inode that was freed in the last minutes. A rename aside, a write in place and a rename to
the new name cost little more than the write. So nothing is removed before its room is wanted, and then it is not.

Whoever has a file open sees it change. So this is for directories that nobody else reads but by footers.
"""

from collections.abc import Sequence

from kvtier_backends.fs.files.eviction import Eviction
from kvtier_backends.fs.files.index import Held
from kvtier_backends.fs.files.lane import Grant


class Recycling(Eviction):
    """Grants files instead of removing them. What a store leaves of them is removed behind it."""

    def release(self, grant: Grant) -> None:
        gone, left = grant.end()
        self._claims.end(spare.key for spare in gone)
        self._capacity.take_back(grant.spares_bytes)
        super().release(grant)
        if left:
            self._capacity.leaving_bytes += sum(victim.allocated_bytes for victim in left)
            self._chosen += left
            self._wake.set()

    async def _exchange(self, grant: Grant, victims: Sequence[Held], wanted_bytes: int) -> None:
        """Promise the victims themselves, and what those leave that are too many to be overwritten."""
        if not self._scanned:  # Of what a checkpoint names, nobody has seen that it is there, and has room to give.
            await super()._exchange(grant, victims, wanted_bytes)
            return
        spares, others = victims[: grant.spares_wanted], victims[grant.spares_wanted :]
        self._capacity.hand_over(grant.overwrite(spares))
        if others:
            await super()._exchange(grant, others, wanted_bytes)
