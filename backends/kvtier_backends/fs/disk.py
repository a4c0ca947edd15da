"""The file system as a whole: how it counts what a file takes, how much of it is taken, and what it leaves others.

How it counts is tried out, not asked: a file server's answer to `statvfs` has the sizes that it likes to send at once.
"""

import os

PAGE_BYTES = 4_096  # Chunks are written in pages of this, whatever the disk's are.
SECTOR_BYTES = 512  # The unit of st_blocks, whatever the file system's own.
FRAGMENT_BYTES_MOST = 64 << 10  # No local file system has larger ones; a file server's are no blocks.


class Disk:
    """What was seen of it when it was last looked at. Any thread may look."""

    def __init__(self, fd: int) -> None:
        """Look at the file system that a directory, open as `fd`, is on. Blocks."""
        self._fd = fd
        found = os.fstatvfs(fd)
        whole = PAGE_BYTES <= found.f_frsize <= FRAGMENT_BYTES_MOST
        self.block_bytes = found.f_frsize if whole else PAGE_BYTES
        """By so much a file grows. As it is said, until it has been tried."""
        self.counts_blocks = True
        """Whether it says at once what a file takes: not where blocks are found late (ZFS) or are not told at all."""
        self.size_bytes = found.f_blocks * found.f_frsize
        self.used_bytes = (found.f_blocks - found.f_bfree) * found.f_frsize
        self.free_bytes = found.f_bavail * found.f_frsize
        """For who is not root."""

    def look(self) -> None:
        """See what is free now. Blocks."""
        found = os.fstatvfs(self._fd)
        self.free_bytes = found.f_bavail * found.f_frsize

    def tried(self, page: os.stat_result) -> None:
        """Learn from a file of one page, just written as chunks are, of bytes that cannot be compressed."""
        taken_bytes = page.st_blocks * SECTOR_BYTES
        self.counts_blocks = taken_bytes >= PAGE_BYTES
        self.block_bytes = max(taken_bytes, PAGE_BYTES)

    def taken_bytes(self, status: os.stat_result) -> int:
        """Return what a file takes: its blocks, or its length where these are not to be had."""
        return taken_bytes(status, counts_blocks=self.counts_blocks)


def taken_bytes(status: os.stat_result, *, counts_blocks: bool) -> int:
    """Return what a file takes, on a file system that counts so."""
    length = 0 if counts_blocks else -(-status.st_size // SECTOR_BYTES)
    return max(status.st_blocks, length) * SECTOR_BYTES
