"""An LRU order for nothing: the index's entries stand in the order of their last use anyway.

A dict keeps a hole where a key was moved from or removed until it is rebuilt, and finding its first key steps over
them all. So its coldest keys are listed, a part of all at a time: a search for each list, and not for each victim.
"""

from collections.abc import Callable, Sequence
from itertools import islice

from kvtier.keys import OffloadKey
from kvtier.policies.base import Policy

LISTED_LEAST = 1_024
LISTED_PART = 64  # Of all keys one in so many. A search then costs a victim some dozen holes, of some ns each.


class ColdEnd(Policy[OffloadKey]):
    """Evicts what was used longest ago. What is kept at the cold end is renewed: it is in use."""

    def __init__(self, entries: dict[OffloadKey, int], is_live: Callable[[int], bool]) -> None:
        """`entries`: what is there. Those that are live by their value stand in the order of their last use."""
        self._entries = entries
        self._is_live = is_live
        self._listed: list[OffloadKey] = []  # The coldest last.
        self._cold: set[OffloadKey] = set()  # Of those, what was neither used nor removed since.

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        pass

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._cold.difference_update(keys)

    def rank(self, keys: Sequence[OffloadKey]) -> None:
        self._cold.difference_update(keys)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        self._cold.difference_update(keys)

    def evict(
        self,
        count: int,
        keep: Callable[[OffloadKey], bool],
        incoming: Sequence[OffloadKey] = (),  # noqa: ARG002  # For policies that learn from it.
    ) -> list[OffloadKey] | None:
        victims: list[OffloadKey] = []
        renewed: set[OffloadKey] = set()
        while len(victims) < count:
            if not self._listed and not self._search({*victims, *renewed}):
                break
            key = self._listed.pop()
            if key not in self._cold:
                continue
            self._cold.discard(key)
            if keep(key):
                renewed.add(key)
                self._entries[key] = self._entries.pop(key)
            else:
                victims.append(key)
        return victims

    def _search(self, passed: set[OffloadKey]) -> bool:
        """List the coldest keys but for those that this call has passed; say whether there are any."""
        size = max(LISTED_LEAST, len(self._entries) // LISTED_PART)
        live = (key for key, entry in self._entries.items() if self._is_live(entry) and key not in passed)
        self._listed = list(islice(live, size))
        self._listed.reverse()
        self._cold = set(self._listed)
        return bool(self._listed)
