"""Claims: keys that are busy, because calls are at their chunks or because these are on their way out.

A chunk that a call uses is never chosen for eviction. A store of a key whose file is being removed waits until the file
is gone. Otherwise the removal would meet the new file. A load does not wait: a chunk that is being removed is a miss.
"""

import asyncio
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvtier.backend import OffloadKey
from kvtier.errors import BackendClosed


class InUse:
    """Keys, by how many calls each is in use. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._calls: dict[OffloadKey, int] = {}

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._calls

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._calls)

    @contextmanager
    def __call__(self, keys: Sequence[OffloadKey]) -> Generator[None]:
        """Keep the keys' chunks for as long as the block lasts."""
        calls = self._calls
        for key in keys:
            calls[key] = calls.get(key, 0) + 1
        try:
            yield
        finally:
            for key in keys:
                if calls[key] == 1:
                    del calls[key]
                else:
                    calls[key] -= 1


class Claims:
    """The claims on one tier's files. Belongs to the loop's thread."""

    def __init__(self) -> None:
        """Start without claims."""
        self.leaving: set[OffloadKey] = set()
        """Whose files are going: whether they are still there is up to the lane that is at it."""
        self.in_use = InUse()
        """The keys whose files calls are at."""
        self._gone = asyncio.Event()  # Replaced each time that some are.
        self._closed = False

    async def until_gone(self, keys: Sequence[OffloadKey]) -> None:
        """Wait until none of the keys' files is leaving; raises `BackendClosed` once closed."""
        while not self.leaving.isdisjoint(keys):
            if self._closed:
                raise BackendClosed("closed before the former chunk was removed")
            await self._gone.wait()

    def begin(self, keys: Iterable[OffloadKey]) -> None:
        """Mark these keys' files as leaving."""
        self.leaving.update(keys)

    def end(self, keys: Iterable[OffloadKey]) -> None:
        """Record that they are gone, or stay."""
        self.leaving.difference_update(keys)
        self._wake()

    def close(self) -> None:
        """End all waiting for files. A chunk that was chosen, and not removed yet, stays."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        gone, self._gone = self._gone, asyncio.Event()
        gone.set()
