"""Which chunks calls are at: none of them goes for room meanwhile."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from kvtier.keys import OffloadKey


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
