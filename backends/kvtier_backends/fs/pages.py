"""Aligned pages for footers: direct I/O takes no others."""

import mmap
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager


class Pages:
    """As many pages as there are transfers at once. Any thread may borrow one."""

    def __init__(self, count: int, page_bytes: int) -> None:
        """Map `count` pages of `page_bytes`, a multiple of the system's own page."""
        assert page_bytes % mmap.PAGESIZE == 0, page_bytes
        whole = memoryview(mmap.mmap(-1, count * page_bytes))
        self._free = deque(whole[start : start + page_bytes] for start in range(0, count * page_bytes, page_bytes))

    @contextmanager
    def one(self) -> Generator[memoryview]:
        """Lend a page for as long as the block lasts; what is on it is undefined."""
        page = self._free.pop()  # Empty: a bug, there is a page for every lane.
        try:
            yield page
        finally:
            self._free.append(page)
