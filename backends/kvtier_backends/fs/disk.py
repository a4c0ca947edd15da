"""The file system as a whole: how much of it is taken, and what it leaves others."""

import os


class Disk:
    """What was seen of it when it was last looked at. Any thread may look."""

    def __init__(self, fd: int) -> None:
        """Look at the file system that a directory, open as `fd`, is on. Blocks."""
        self._fd = fd
        found = os.fstatvfs(fd)
        self.block_bytes = max(found.f_frsize, 4_096)  # Chunks are written in pages of this, whatever the disk's are.
        self.size_bytes = found.f_blocks * found.f_frsize
        self.used_bytes = (found.f_blocks - found.f_bfree) * found.f_frsize
        self.free_bytes = found.f_bavail * found.f_frsize
        """For who is not root."""

    def look(self) -> None:
        """See what is free now. Blocks."""
        found = os.fstatvfs(self._fd)
        self.free_bytes = found.f_bavail * found.f_frsize
