"""Parts of calls, in threads that may hang: rows through staging, each checked on its way back.

Mooncake may hang and cannot be stopped. So its thread touches a row only while a call waits for it, under a lock, one
row at a time. A call that gives up the thread gets its rows back at once.
"""

import asyncio
import ctypes
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_128_digest

from kvtier.backend import (
    BackendUnavailable,
    ChunkMissing,
    Lanes,
    NoSpace,
    OffloadKey,
    Outcome,
    Read,
    Seal,
    SealFault,
    Slots,
    TransferFailed,
    Write,
)
from kvtier_backends.mooncake.client import Meaning, Move, PoolClient, caused, has_ended, meaning_of, number_of

LATE_MAX = 64  # Abandoned calls that still run: with more, the client counts as lost.

Chunk = TypeVar("Chunk", Read, Write)
T = TypeVar("T")


class GivenUp(Exception):
    """The part is not moved: its call has given it up, or another part has failed for a reason they share."""


class Moved(NamedTuple):
    """The outcome of a part."""

    outcomes: list[Outcome]
    unsafe: list[int]  # Places of slots that late bytes may reach.
    counts: Counter[str]
    meanings: list[Meaning | None]  # One for each return code; None for success.

    def wholly(self, *meanings: Meaning) -> bool:
        return all(meaning in meanings for meaning in self.meanings)


class Means(NamedTuple):
    """The means that all parts of one direction share."""

    client: PoolClient
    seal: Seal
    gate: threading.Lock
    """Lets one part at a time into Mooncake: the next one is copied and checked meanwhile."""

    answered: Callable[[Sequence[int], float], object]
    """Called with the codes of a call and its duration, before the next one passes the gate."""


class Part(Generic[Chunk]):
    """The work of one thread: names, slots of staging, and rows that are lent to it until they are taken back."""

    def __init__(
        self, means: Means, names: Sequence[str], chunks: Sequence[Chunk], slots: Slots, found: Callable[[], object]
    ) -> None:
        """`found` returns a reason once trying is useless; it holds no row."""
        self.client, self.seal, self._gate, self._answered = means
        self._found = found
        self._lock = threading.Lock()
        self.inside = False  # Holds the gate.
        self.entered_at: float | None = None
        self.names = names
        self.keys: list[OffloadKey] = [chunk.key for chunk in chunks]
        self.slots = slots
        self.counts = Counter[str]()
        self.addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in slots.views]
        self._chunks: Sequence[Chunk] | None = chunks
        self._rows_lock = threading.Lock()

    def use(self, index: int, use: Callable[[OffloadKey, memoryview], T]) -> T:
        """Call `use` with a key and its row. Raises `GivenUp`."""
        with self._rows_lock:
            if self._chunks is None:
                raise GivenUp
            return use(*self._chunks[index])

    def call(self, call: Move, indices: Sequence[int]) -> list[int]:
        """Fill or store these slots when the gate opens, and return the codes. Raises `GivenUp`."""
        names, addresses = [self.names[index] for index in indices], [self.addresses[index] for index in indices]
        self._gate.acquire()
        self.inside = True
        try:
            self._enter()
            began = time.monotonic()
            codes = call(names, addresses, self.seal.sealed_bytes)
            if self.inside:  # A part that was given up reports nothing new.
                self._answered(codes, time.monotonic() - began)
            return codes
        finally:
            self._leave()

    def give_up(self) -> None:
        """Take back the rows and the gate, whether the thread has ended or not. Waits for a copy of a row in use."""
        with self._rows_lock:
            self._chunks = None
        self._leave()

    def _enter(self) -> None:
        if self._chunks is None or self._found():
            raise GivenUp
        if self.entered_at is None:
            self.entered_at = time.monotonic()

    def _leave(self) -> None:
        with self._lock:
            inside, self.inside = self.inside, False
        if inside:
            self._gate.release()

    def beside(self, index: int) -> memoryview:
        """Return the part of a slot beside the row: for the seal, or for all that is sent."""
        seal = self.seal
        return self.slots.views[index][seal.sealed_bytes - seal.beside_bytes : seal.sealed_bytes]

    def is_in(self, index: int, part: memoryview) -> bool:
        return part.obj is self.slots.views[index].obj

    def failed(self, index: int, code: int) -> Outcome:
        """Return the outcome of a code that does not concern the chunk itself."""
        self.counts["unreachable" if meaning_of(code) is Meaning.AWAY else "transfers_failed"] += 1
        why = f"{self.keys[index].hex()}: Mooncake answers {code} ({meaning_of(code).value})"
        return caused(TransferFailed(why), number_of(code))

    def moved(self, outcomes: list[Outcome], codes: Sequence[int]) -> Moved:
        """Return the result, and give back the memory of slots that are not used again."""
        unsafe = [index for index, code in enumerate(codes) if not has_ended(code)]
        self.slots.empty(unsafe)
        meanings = [None if code >= 0 else meaning_of(code) for code in codes]
        return Moved(outcomes, unsafe, self.counts, meanings)


def moved(work: Callable[[Part[Chunk]], Moved], part: Part[Chunk]) -> Moved:
    """Do the work of a part, in its thread. Raises `GivenUp`."""
    try:
        return work(part)
    except GivenUp:
        part.slots.empty()
        raise


def store(part: Part[Write]) -> Moved:
    for index in range(len(part.names)):
        part.use(index, partial(_seal_into_slot, part, index))
    codes = part.call(part.client.put, range(len(part.names)))
    return part.moved([_stored(part, index, code) for index, code in enumerate(codes)], codes)


def _seal_into_slot(part: Part[Write], index: int, key: OffloadKey, row: memoryview) -> None:
    view, at = part.slots.views[index], 0
    for piece in part.seal.close(key, row, part.beside(index)):
        if not part.is_in(index, piece):
            copy(piece, view[at : at + piece.nbytes])
        at += piece.nbytes


def _stored(part: Part[Write], index: int, code: int) -> Outcome:
    if code >= 0:
        return None
    if meaning_of(code) is Meaning.FULL:
        part.counts["no_room"] += 1
        return NoSpace(f"{part.keys[index].hex()}: the pool has no room")
    return part.failed(index, code)


class _Doubt(NamedTuple):
    """Loaded bytes that are not the chunk: damaged, or a mixture while another engine stores the chunk."""

    fault: SealFault
    came: bytes


def load(part: Part[Read]) -> Moved:
    return _Loading(part).run()


class _Loading:
    """A load. A wrong value is read a second time. If the same bytes come again, it is corrupt and is removed."""

    def __init__(self, part: Part[Read]) -> None:
        self._part = part
        self._outcomes: dict[int, Outcome] = {}
        self._doubts: dict[int, _Doubt] = {}

    def run(self) -> Moved:
        part = self._part
        codes = part.call(part.client.get, range(len(part.names)))
        for index, code in enumerate(codes):
            self._take(index, code)
        if self._doubts:
            codes = self._read_again(list(codes))
        return part.moved([self._outcomes[index] for index in range(len(codes))], codes)

    def _take(self, index: int, code: int) -> None:
        part = self._part
        meaning = meaning_of(code) if code < 0 else None
        if meaning is Meaning.TOO_LONG or (meaning is None and code != part.seal.sealed_bytes):
            self._doubt(index, SealFault.LENGTH, b"%d" % code)
        elif meaning is Meaning.MISSING:
            self._outcomes[index] = ChunkMissing(f"{part.keys[index].hex()}: Mooncake answers {code}")
        elif meaning is not None:
            self._outcomes[index] = part.failed(index, code)
        elif fault := part.use(index, partial(self._open, index)):
            self._fault(index, fault)
        else:
            self._outcomes[index] = None

    def _open(self, index: int, key: OffloadKey, row: memoryview) -> SealFault | None:
        """Copy, then check the copy: bytes that reach the slot later are not in the row.

        A cipher decrypts out of the slot. That is safe: Mooncake has reported these bytes as complete, and a slot whose
        transfer may go on is never used again.
        """
        part, beside, at = self._part, self._part.beside(index), 0
        for place in part.seal.places(row, beside):
            if not part.is_in(index, place):
                copy(part.slots.views[index][at : at + place.nbytes], place)
            at += place.nbytes
        return part.seal.open(key, row, beside)

    def _fault(self, index: int, fault: SealFault) -> None:
        if fault.corrupt:
            self._doubt(index, fault, xxh3_128_digest(self._part.slots.views[index]))
            return
        self._part.counts[f"sealed_{fault}"] += 1
        self._outcomes[index] = fault.outcome(self._part.keys[index])

    def _doubt(self, index: int, fault: SealFault, came: bytes) -> None:
        self._doubts[index] = _Doubt(fault, came)

    def _read_again(self, codes: list[int]) -> list[int]:
        part, before, self._doubts = self._part, self._doubts, {}
        again = list(before)
        second = part.call(part.client.get, again)
        for index, code in zip(again, second, strict=True):
            codes[index] = code
            self._take(index, code)
        corrupt = [index for index in again if self._doubts.get(index) == before[index]]
        for index in self._doubts:
            key = part.keys[index]
            mixture = ChunkMissing(f"{key.hex()}: it is being stored")
            self._outcomes[index] = before[index].fault.outcome(key) if index in corrupt else mixture
        for index in corrupt:
            part.counts[f"corrupt_{before[index].fault}"] += 1
        part.counts["torn"] += len(again) - len(corrupt)
        if corrupt:
            part.client.remove([part.names[index] for index in corrupt])
        return codes


def copy(source: memoryview, into: memoryview) -> None:
    """Copy without the GIL, which a slice assignment would hold."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


class Late(Exception):
    """The call missed its deadline. It keeps running and its result is discarded."""


class Threads:
    """One daemon thread for each call in flight, which may never end. Belongs to one event loop.

    A late thread is abandoned to its call, and another takes its place.
    """

    def __init__(self, tier_name: str) -> None:
        self._tier_name = tier_name
        self._idle: list[Lanes] = []
        self._waiting: set[asyncio.Future[Any]] = set()
        self._under_way: set[Future[Any]] = set()
        self._given_up = False

    async def run(
        self, call: Callable[[], T], ends_at: Callable[[], float], *, unwanted: Callable[[T], object] | None = None
    ) -> T:
        """Return the call's result, or raise its error.

        Raises `Late` at `ends_at`, by `time.monotonic`, which may move meanwhile, or at `give_up`. Then, and if the
        waiting task is cancelled, the call goes on in its thread, and `unwanted` gets its result. Raises
        `BackendUnavailable` at once while too many calls are late.
        """
        self.check()
        if self._given_up:
            raise Late
        lanes = self._one()
        job = lanes.submit(call)
        self._under_way.add(job)
        job.add_done_callback(self._under_way.discard)
        waiting = asyncio.wrap_future(job)
        self._waiting.add(waiting)
        ended = False
        try:
            while True:
                await asyncio.wait({waiting}, timeout=max(0.0, ends_at() - time.monotonic()))
                if waiting.done() or ends_at() <= time.monotonic():
                    break
            ended = waiting.done() and not waiting.cancelled()
        finally:
            self._waiting.discard(waiting)
            if ended:
                self._idle.append(lanes)
            else:
                lanes.shutdown(wait=False)  # The thread ends with the call.
                waiting.cancel()
                if unwanted is not None:
                    job.add_done_callback(partial(_hand_over, unwanted))
        if not ended:
            raise Late
        try:
            return waiting.result()
        finally:
            del job, waiting  # An error's traceback keeps this frame, which must not keep the error.

    def check(self) -> None:
        """Raise `BackendUnavailable` if too many calls are late."""
        if len(self._under_way) - len(self._waiting) >= LATE_MAX:
            why = f"{self._tier_name}: {LATE_MAX} calls of its client are late and still running"
            raise BackendUnavailable(why) from TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def give_up(self) -> None:
        """Raise `Late` in every waiting and later call."""
        self._given_up = True
        for waiting in list(self._waiting):
            waiting.cancel()

    async def ended(self, ends_at: float) -> bool:
        """Wait until no call is in flight; return False at the deadline."""
        left = {asyncio.wrap_future(job) for job in list(self._under_way)}
        if left:
            await asyncio.wait(left, timeout=max(0.0, ends_at - time.monotonic()))
        for waiting in left:
            waiting.cancel()
        return not self._under_way

    def shutdown(self) -> None:
        while self._idle:
            self._idle.pop().shutdown(wait=False)

    def _one(self) -> Lanes:
        if self._idle:
            return self._idle.pop()
        try:
            return Lanes(1, f"kvtier-{self._tier_name}")
        except RuntimeError as error:
            raise BackendUnavailable(f"{self._tier_name}: no thread for a call of its client: {error}") from error


def _hand_over(unwanted: Callable[[T], object], job: "Future[T]") -> None:
    with suppress(Exception):  # Its error is discarded, too.
        unwanted(job.result())
