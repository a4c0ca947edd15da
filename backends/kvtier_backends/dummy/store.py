"""What a dummy tier holds: chunks by name, each with its checksum, the least recently used leaving first.

A store may have a name and then outlives the tiers that were opened over it, as a disk outlives processes: closing one
and opening the next is a restart, and two open at once are two engines on one device.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvtier.errors import ConfigError

Lost = Callable[[str], None]
"""Told the name of a chunk that went without having been deleted."""


class Chunk(NamedTuple):
    """One chunk as it is kept, and the checksum of what was stored."""

    block: bytes
    checksum: int

    def sound(self) -> bool:
        return xxh3_64_intdigest(self.block) == self.checksum


class Store:
    """Chunks by name, within a capacity."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.chunks: OrderedDict[str, Chunk] = OrderedDict()  # Least recently used first.
        self._users: list[tuple[str, bool, Lost]] = []

    def put(self, name: str, block: bytes, checksum: int, keep: Container[str], *, low_water: float) -> bool:
        """Keep a chunk in place of what had its name; False, and nothing changes, if there is no room.

        Others make room, least recently used first, but for those in `keep`: down to the `low_water` part of the
        capacity, from halfway between it and the capacity, as far as there are others.
        """
        old = self.chunks.get(name)
        grown_bytes = len(block) - (len(old.block) if old else 0)
        victims = self._victims(grown_bytes, keep, low_water)
        if victims is None:
            return False
        for victim in victims:
            self.lose(victim)
        self.chunks[name] = Chunk(block, checksum)
        self.used_bytes += grown_bytes
        return True

    def _victims(self, grown_bytes: int, keep: Container[str], low_water: float) -> list[str] | None:
        if self.capacity_bytes is None:
            return []
        after_bytes, low_bytes = self.used_bytes + grown_bytes, int(self.capacity_bytes * low_water)
        needed_bytes = after_bytes - self.capacity_bytes
        surplus_bytes = after_bytes - low_bytes if 2 * after_bytes > self.capacity_bytes + low_bytes else 0
        victims: list[str] = []
        for name, chunk in self.chunks.items():
            if surplus_bytes <= 0:
                break
            if name not in keep:
                victims.append(name)
                needed_bytes -= len(chunk.block)
                surplus_bytes -= len(chunk.block)
        return victims if needed_bytes <= 0 else None

    def touch(self, names: Sequence[str]) -> None:
        """Make the chunks the most recently used, tail first: a prefix outlives its continuation."""
        for name in reversed(names):
            if name in self.chunks:
                self.chunks.move_to_end(name)

    def delete(self, name: str) -> None:
        """Forget a chunk that may be there, as asked."""
        chunk = self.chunks.pop(name, None)
        self.used_bytes -= len(chunk.block) if chunk else 0

    def lose(self, name: str) -> None:
        """Forget a chunk unasked, and tell every user."""
        self.delete(name)
        for _, _, lost in self._users:
            lost(name)

    def enter(self, namespace: str, lost: Lost, *, shared: bool) -> None:
        """Become a user of a namespace's chunks; `ConfigError` unless all its users agree to share them."""
        if any(namespace == other and not (shared and sharing) for other, sharing, _ in self._users):
            raise ConfigError("store: in use by another tier in the same namespace; shared = true on both accepted")
        self._users.append((namespace, shared, lost))

    def leave(self, lost: Lost) -> None:
        """Be a user no longer; one that is none already is ignored."""
        self._users = [user for user in self._users if user[2] != lost]


_named: dict[str, Store] = {}


def open_store(name: str | None, capacity_bytes: int | None) -> Store:
    """Return the store of this name, made at its first opening, or a new one without a name."""
    if name is None:
        return Store(capacity_bytes)
    store = _named.setdefault(name, Store(capacity_bytes))
    if store.capacity_bytes != capacity_bytes:
        given, first = (f"{size:,}" if size is not None else "none" for size in (capacity_bytes, store.capacity_bytes))
        raise ConfigError(f"capacity_bytes: {given} given, {first} as at the store's first opening accepted")
    return store


def forget_store(name: str) -> None:
    """Drop a named store and its chunks; those who have it open keep it. Unknown names are ignored."""
    _named.pop(name, None)
