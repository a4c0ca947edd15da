"""Staging: a tier's own memory between rows and a client that cannot be trusted with them.

Some clients write into a buffer minutes after they have reported the transfer as failed. In a row they would overwrite
another request's KV. So they are lent a slot of staging, whose bytes are checked and copied. A slot whose transfer
failed is retired. Its address range stays mapped, so late bytes hit nothing else.
"""

import asyncio
import mmap
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

from kvtier.errors import BackendUnavailable


class Slots:
    """Slots that are lent for one transfer."""

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        self.retired: set[int] = set()

    def retire(self, indices: Iterable[int] | None = None) -> None:
        """Retire these slots, or all of them: their transfer failed or may go on. They are never used again."""
        self.retired.update(range(len(self.views)) if indices is None else indices)

    def empty(self, indices: Iterable[int] | None = None) -> None:
        """Return the memory of these slots, or of all, to the system; their address range stays mapped.

        For retired slots whose bytes are not needed any more. Late bytes take memory again. For any thread.
        """
        for index in range(len(self.views)) if indices is None else indices:
            view = self.views[index]
            assert isinstance(view.obj, mmap.mmap)
            view.obj.madvise(mmap.MADV_DONTNEED)


class Staging:
    """A fixed number of page-aligned slots in use, and a limit to those that are retired. Belongs to one event loop."""

    def __init__(self, tier_name: str, slot_bytes: int, slots: int, retired_max: int) -> None:
        """Up to `retired_max` retired slots are replaced by new ones."""
        self.slots = slots
        self.retired = 0  # Slots that are kept and not used any more.
        self._tier_name = tier_name
        self._slot_bytes = slot_bytes
        self._retired_max = retired_max
        self._kept: list[memoryview] = []
        self._free: list[memoryview] = []
        self._unmapped = slots  # Slots that are mapped at their first use.
        self._turns = asyncio.Lock()  # First come, first served, even if a later call wants fewer slots.
        self._came_back = asyncio.Event()

    @asynccontextmanager
    async def lend(self, count: int) -> AsyncGenerator[Slots]:
        """Lend `count` slots for the length of the block. Waits until they are free.

        An exception or a cancellation retires the slots, because their transfer may go on.
        Raises `BackendUnavailable` when more slots were retired than the limit allows: then the client's process has to
        be replaced. Raises it, too, when the system has no memory for the slots. ValueError for more slots than there
        are.
        """
        if not 1 <= count <= self.slots:
            raise ValueError(f"{count} slots wanted, 1 to {self.slots} are there")
        slots = Slots(await self._taken(count))
        try:
            yield slots
        except BaseException:
            slots.retire()
            raise
        finally:
            self._put_back(slots)

    async def _taken(self, count: int) -> list[memoryview]:
        async with self._turns:
            while len(self._free) + self._unmapped < count:
                if count > self.slots - max(0, self.retired - self._retired_max):
                    raise BackendUnavailable(
                        f"tier {self._tier_name}: {self.retired} slots of staging are retired, "
                        f"{self._retired_max} accepted: restart its client"
                    )
                self._came_back.clear()
                await self._came_back.wait()
            while len(self._free) < count:
                self._free.append(self._mapped())
                self._unmapped -= 1
            taken = self._free[-count:]  # The most recently used ones may still be in a CPU cache.
            del self._free[-count:]
        return taken

    def _put_back(self, slots: Slots) -> None:
        """Return slots. Must not fail: other calls wait for them."""
        retired = len(slots.retired)
        self._unmapped += max(0, min(retired, self._retired_max - self.retired))
        self.retired += retired
        for index, view in enumerate(slots.views):
            (self._kept if index in slots.retired else self._free).append(view)
        self._came_back.set()

    def _mapped(self) -> memoryview:
        size_bytes = -(-self._slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:  # Private: the system takes back no shared memory.
            mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BackendUnavailable(
                f"tier {self._tier_name}: no memory for a slot of staging of {size_bytes:,} bytes: {error.strerror}"
            ) from error
        return memoryview(mapped)[: self._slot_bytes]
