"""The witness: a tier that holds every buffer that comes in and every word that goes out of another one to account.

It stands between the engine and a tier that fails by seed. It notices faults that neither of them would: a row that is
lent twice, a chunk that is not its key's, a row that changes while it is stored, more bytes than the capacity.
"""

import asyncio
from collections import Counter
from contextlib import contextmanager
from enum import Enum

import numpy as np

from kvtier.backend import Added, Inventory, Measured, Removed, Wrapper
from kvtier.errors import BackendError, ChunkCorrupt, ChunkMissing
from kvtier.testing.faults import FAULTLESS, FaultyBackend, FaultyOptions

WITNESS = "tests.simulation.witness:Witness"
CHUNK_UNIT_BYTES = 8


class Truth(Enum):
    PRESENT = "present"  # It said that the chunk is stored, or loaded it.
    GONE = "gone"  # It said that it is not there, or that it was deleted.
    UNSURE = "unsure"  # Calls raced, came late, or were given up: both may be true.


class Book:
    """One tier's words over all lives of an engine, against which the end is held.

    Violations are written down, not raised: a runner takes what a tier raises for the tier's fault.
    """

    def __init__(self):
        self.witness = None  # The one of the life under way.
        self.truth = {}
        self.counts = Counter()
        self.violations = []
        self._under_way = Counter()
        self._raced = set()
        self._given_up = set()

    def begin(self, keys):
        """Record a call over these keys. Two concurrent calls leave both unsure."""
        for key in keys:
            if self._under_way[key] or key in self._given_up:
                self._raced.add(key)
                self._given_up.discard(key)
            self._under_way[key] += 1

    def end(self, key, truth):
        """Record the result of a finished call for one of its keys; None: nothing new."""
        self._under_way[key] -= 1
        if key in self._raced:
            truth = Truth.UNSURE
        if not self._under_way[key]:
            del self._under_way[key]
            self._raced.discard(key)
        if truth is not None:
            self.truth[key] = truth

    def give_up(self, keys):
        """Record that the engine no longer waits for these keys."""
        self._raced.update(self._under_way)
        self._given_up.update(key for key in keys if key not in self._under_way)

    def report(self, keys, truth):
        for key in keys:
            self.truth[key] = Truth.UNSURE if self._under_way[key] else truth

    def keys(self, truth):
        return [key for key, said in self.truth.items() if said is truth]

    def wrong(self, what):
        self.violations.append(what)


_open_books = {}


class WitnessOptions(FaultyOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A faulty tier's, and what the witness must know."""

    book: str  # Its name among the open ones.
    chunk_bytes: int
    deadline_s: float  # The engine's own for this tier: what comes later it does not hear.


class Witness(Wrapper[WitnessOptions]):
    """A faulty tier whose answers are checked."""

    options_type = WitnessOptions

    def __init__(self, inner, options):
        self.book = _open_books[options.book]
        self._dice = options.dice()
        self._faulty = FaultyBackend(inner, dice=self._dice)
        super().__init__(self._faulty)
        self._options = options
        self._writing = Counter()  # Addresses of buffers that a load may fill.
        self._reading = Counter()
        if isinstance(inner, Inventory):
            self.watch = self._watch
        self.book.witness = self

    @classmethod
    async def open(cls, options, context):
        inner_class, inner_options = options.inner_tier()
        return cls(await inner_class.open(inner_options, context), options)

    def calm(self):
        self._dice.faults = FAULTLESS
        self._faulty.release()

    def count_faults(self):
        self.book.counts.update({f"fault:{kind}": count for kind, count in self._faulty.met.items()})

    async def probe(self, keys):
        self.book.counts["probes"] += 1
        with self._honest("probe"):
            return await self._faulty.probe(keys)

    async def load(self, reads):
        keys, addresses, outcomes = [read.key for read in reads], [_address(read.into) for read in reads], ()
        begun = self._begin("loads", keys)
        try:
            with self._lent(self._writing, addresses, keys), self._honest("load"):
                outcomes = await self._faulty.load(reads)
            for read, outcome in zip(reads, outcomes, strict=True):
                if outcome is None:
                    self._check(read.key, read.into, "loaded")
            return outcomes
        finally:
            self._end(begun, keys, [_loaded(outcome) for outcome in outcomes])

    async def store(self, writes):
        keys, addresses, outcomes = [write.key for write in writes], [_address(write.row) for write in writes], ()
        begun = self._begin("stores", keys)
        try:
            with self._lent(self._reading, addresses, keys), self._honest("store"):
                for write in writes:
                    self._check(write.key, write.row, "to be stored")
                outcomes = await self._faulty.store(writes)
            for write in writes:
                self._check(write.key, write.row, "just stored")
            self._check_capacity()
            return outcomes
        finally:
            self._end(begun, keys, [Truth.PRESENT if outcome is None else None for outcome in outcomes])

    async def delete(self, keys):
        truths = []
        begun = self._begin("deletes", keys)
        try:
            with self._honest("delete"):
                await self._faulty.delete(keys)
            truths = [Truth.GONE] * len(keys)
        finally:
            self._end(begun, keys, truths)

    async def _watch(self):
        async for event in self._faulty.watch():
            if isinstance(event, Added):
                self.book.report(event.keys, Truth.PRESENT)
            elif isinstance(event, Removed):
                self.book.report(event.keys, Truth.GONE)
            yield event

    # What is held to account.

    def _begin(self, what, keys):
        self.book.counts[what] += 1
        self.book.counts[f"chunks in {what}"] += len(keys)
        self.book.begin(keys)
        return asyncio.get_running_loop().time()

    def _end(self, begun, keys, truths):
        """Enter what a call said of its keys; nothing (it raised, or was cancelled) or too late leaves it unsure."""
        late = asyncio.get_running_loop().time() - begun >= self._options.deadline_s
        known = truths if len(truths) == len(keys) and not late else [Truth.UNSURE] * len(keys)
        for key, truth in zip(keys, known, strict=True):
            self.book.end(key, truth)

    @contextmanager
    def _lent(self, kind, addresses, keys):
        """Keep account of who uses which row: one writer alone, or any number of readers."""
        for address, key in zip(addresses, keys, strict=True):
            kind[address] += 1
            if self._writing[address] and self._writing[address] + self._reading[address] > 1:
                self.book.wrong(f"{key.hex()}: its row is lent to a load and to somebody else at once")
        try:
            yield
        finally:
            for address in addresses:
                kind[address] -= 1

    @contextmanager
    def _honest(self, operation):
        """Write down what no tier may raise; else a runner would count it as the tier's fault, and go on."""
        try:
            yield
        except (BackendError, asyncio.CancelledError):
            raise
        except BaseException as error:
            self.book.wrong(f"{operation} raised {error!r}")
            raise

    def _check(self, key, row, what):
        size_bytes = self._options.chunk_bytes
        self.book.counts[f"bytes {what}"] += size_bytes
        if bytes(row[:size_bytes]) != chunk_of(key, size_bytes):
            self.book.wrong(f"{key.hex()}: what was {what} is not its chunk")

    def _check_capacity(self):
        occupancy = self._inner.occupancy() if isinstance(self._inner, Measured) else None
        if occupancy and occupancy.capacity_bytes is not None and occupancy.used_bytes > occupancy.capacity_bytes:
            self.book.wrong(f"{occupancy.used_bytes:,} bytes in a tier of {occupancy.capacity_bytes:,}")


@contextmanager
def open_book(name):
    book = _open_books[name] = Book()
    try:
        yield book
    finally:
        del _open_books[name]


def chunk_of(key, size_bytes):
    unit = key[:CHUNK_UNIT_BYTES].ljust(CHUNK_UNIT_BYTES, b"\0")
    return (unit * (size_bytes // CHUNK_UNIT_BYTES + 1))[:size_bytes]


def _address(buffer):
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]


def _loaded(outcome):
    if outcome is None:
        return Truth.PRESENT
    return Truth.GONE if isinstance(outcome, ChunkMissing | ChunkCorrupt) else None
