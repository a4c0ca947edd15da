"""The dummy tier's device, which times transfers, and its store, which evicts the least recently used chunks.

A transfer takes the first free slot and waits for the latency. Then it sends its bytes over the link, which serves one
transfer at a time. So on an idle device a burst of n chunks takes max(n / slots * latency, bytes / bandwidth) and about
one latency more. Loads and stores share the link, and each byte takes the time of its direction. Time is an argument.

With `loads_first`, loads go before waiting stores, as in an fs tier. A booked load delays every store in flight.

A named store outlives the tiers that were opened over it, as a disk outlives processes. Closing one tier and opening
the next is a restart. Two open tiers are two engines on one device.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from kvtier.errors import ConfigError
from kvtier.policies import Retained, Sessions
from kvtier.settings.hints import Advice, Hint

DAY_S = 86_400.0
BURST_SHARE = 4 / 32  # Of a day's write budget, at once;
INFLOW_SHARE = 27 / 32  # evenly over the day. An fs tier keeps the rest in reserve.


class Line:
    """The times at which the slots and the link of one queue are free again."""

    def __init__(self, slots: int) -> None:
        self.slots_free_at = [0.0] * slots
        self.link_free_at = 0.0


class DummyDevice:
    """The times at which the slots and the link of one device are free again."""

    def __init__(
        self,
        *,
        latency_s: float,
        bandwidth_bytes_per_s: float | None,
        slots: int,
        store_bandwidth_bytes_per_s: float | None = None,
        loads_first: bool = False,
    ) -> None:
        """Start idle. Without latency and bandwidth limit (None) a device takes no time at all."""
        self._latency_s = latency_s
        self._load_s_per_byte = 0.0 if bandwidth_bytes_per_s is None else 1.0 / bandwidth_bytes_per_s
        self._store_s_per_byte = (
            self._load_s_per_byte if store_bandwidth_bytes_per_s is None else 1.0 / store_bandwidth_bytes_per_s
        )
        self._loads = Line(slots)
        self._stores = Line(slots) if loads_first else self._loads
        self.put_off_s = 0.0  # Total delay of booked stores by later loads.

    def book(self, now: float, sizes_bytes: Iterable[int], *, storing: bool = False) -> float:
        """Book transfers of these sizes in order, and return the end of the last one.

        Any growth of `put_off_s` until then delays the end of stores.
        """
        seconds_per_byte = self._store_s_per_byte if storing else self._load_s_per_byte
        if not self._latency_s and not seconds_per_byte:
            return now
        line = self._stores if storing else self._loads
        if storing:
            line.link_free_at = max(line.link_free_at, self._loads.link_free_at)
        ends_at, link_s = now, 0.0
        for size_bytes in sizes_bytes:
            first_byte_at = max(now, line.slots_free_at[0]) + self._latency_s
            if size_bytes:
                link_s += size_bytes * seconds_per_byte
                first_byte_at = line.link_free_at = (
                    max(first_byte_at, line.link_free_at) + size_bytes * seconds_per_byte
                )
            heapq.heapreplace(line.slots_free_at, first_byte_at)
            ends_at = max(ends_at, first_byte_at)
        if line is not self._stores and self._stores.link_free_at > now:
            self._stores.link_free_at += link_s
            self.put_off_s += link_s
        return ends_at


class DummyWriteBudget:
    """The bytes that may be written in a day: a burst, and an inflow."""

    def __init__(self, bytes_per_day: int, unit_bytes: int) -> None:
        """Start full. The burst is at least `unit_bytes`."""
        self._burst_bytes = max(float(unit_bytes), bytes_per_day * BURST_SHARE)
        self._bytes_per_s = bytes_per_day * INFLOW_SHARE / DAY_S
        self._level_bytes = self._burst_bytes
        self._looked_at = 0.0

    def take(self, now: float, units: int, unit_bytes: int) -> int:
        """Return how many of these units may be written, and count them."""
        inflow_bytes = (now - self._looked_at) * self._bytes_per_s
        self._level_bytes = min(self._burst_bytes, self._level_bytes + inflow_bytes)
        self._looked_at = now
        allowed = min(units, int(self._level_bytes / unit_bytes))
        self._level_bytes -= allowed * unit_bytes
        return allowed


Lost = Callable[[str], None]  # Called with the name of an evicted chunk.


class Store:
    """Chunks by name, within a capacity."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.retained = Retained[str](0)
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.chunks: OrderedDict[str, bytes] = OrderedDict()  # Least recently used first.
        self._users: list[tuple[str, bool, Lost]] = []
        self._sessions: Sessions[str] | None = None  # From the first hint on.

    def put(self, name: str, chunk: bytes, keep: Container[str], *, low_water: float) -> bool:
        """Replace the chunk of a name; return False, and change nothing, if there is no room.

        The least recently used chunks are evicted, except those in `keep`: from halfway between the `low_water` share
        of the capacity and the capacity, down to `low_water`.
        """
        old = self.chunks.get(name)
        grown_bytes = len(chunk) - (len(old) if old else 0)
        while (victims := self._victims(grown_bytes, keep, low_water)) is None and self.retained:
            self.retained.let_go(1)  # There is nothing else.
        if victims is None:
            return False
        for victim in victims:
            self.lose(victim)
        if old is None and self._sessions is not None:
            self._sessions.came((name,))
        self.chunks[name] = chunk
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
            if name not in keep and name not in self.retained:
                victims.append(name)
                needed_bytes -= len(chunk)
                surplus_bytes -= len(chunk)
        return victims if needed_bytes <= 0 else None

    def touch(self, names: Sequence[str]) -> None:
        """Make the chunks the most recently used; the head of a prefix is evicted last."""
        for name in reversed(names):
            if name in self.chunks:
                self.chunks.move_to_end(name)

    def advise(self, advice: Advice[str], now: float) -> None:
        """Apply advice to the chunks of these names. All but a demotion makes them the most recently used."""
        names = [name for name in dict.fromkeys(advice.keys) if name in self.chunks]
        if advice.kind == "demote":
            self._demote(names)
            return
        self.touch(names)
        if advice.kind == "retain":
            self.retained.retain(names, now + advice.seconds, advice.priority)
        elif advice.hint is not None:
            self._end(names, advice.hint)

    def _end(self, names: Sequence[str], hint: Hint) -> None:
        if self._sessions is None:
            self._sessions = Sessions()
        own = self._sessions.ended(names)
        if hint.over:
            self._demote(own)

    def _demote(self, names: Sequence[str]) -> None:
        """Make the chunks the least recently used, tail first."""
        self.retained.discard(names)
        for name in names:
            self.chunks.move_to_end(name, last=False)

    def delete(self, name: str) -> None:
        """Forget a chunk, if it is there."""
        self.retained.discard((name,))
        if self._sessions is not None:
            self._sessions.gone((name,))
        chunk = self.chunks.pop(name, None)
        self.used_bytes -= len(chunk) if chunk else 0

    def lose(self, name: str) -> None:
        """Evict a chunk, and tell every user."""
        self.delete(name)
        for _, _, lost in self._users:
            lost(name)

    def enter(self, namespace: str, lost: Lost, *, shared: bool) -> None:
        """Add a user of a namespace's chunks. Raises `ConfigError` unless all its users share them."""
        if any(namespace == other and not (shared and sharing) for other, sharing, _ in self._users):
            raise ConfigError("store: in use by another tier in the same namespace; shared = true on both accepted")
        self._users.append((namespace, shared, lost))

    def leave(self, lost: Lost) -> None:
        """Remove a user; idempotent."""
        self._users = [user for user in self._users if user[2] != lost]


_named: dict[str, Store] = {}


def open_store(name: str | None, capacity_bytes: int | None) -> Store:
    """Return the store of a name, created at its first opening; without a name, a new one."""
    if name is None:
        return Store(capacity_bytes)
    store = _named.setdefault(name, Store(capacity_bytes))
    if store.capacity_bytes != capacity_bytes:
        given, first = (f"{size:,}" if size is not None else "none" for size in (capacity_bytes, store.capacity_bytes))
        raise ConfigError(f"capacity_bytes: {given} given, {first} as at the store's first opening accepted")
    return store


def forget_store(name: str) -> None:
    """Forget a named store and its chunks. Open tiers keep it. Unknown names are ignored."""
    _named.pop(name, None)
