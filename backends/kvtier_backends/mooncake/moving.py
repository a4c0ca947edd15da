"""Parts of calls, in threads that may hang: rows through staging, each checked on its way back.

A thread touches a row only while a call waits for it, under a lock: a call that gives it up gets rows back at once.
"""

import asyncio
import ctypes
import errno
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_128_digest

from kvtier import backend as api
from kvtier.backend.remote import caused
from kvtier_backends.mooncake.client import Meaning, Move, PoolClient, answer_of, has_ended, meaning_of, number_of

LATE_MAX = 64  # Abandoned calls that still run: with more, the client counts as lost.

Chunk = TypeVar("Chunk", api.Read, api.Write)
T = TypeVar("T")


class GivenUp(Exception):
    """The part is not moved: its call has given it up, or another part has failed for a reason they share."""


class Moved(NamedTuple):
    outcomes: list[api.Outcome]
    codes: Sequence[int]
    counts: Counter[str]

    def unsafe(self) -> list[int]:
        """Return the places of slots that late bytes may reach."""
        return [index for index, code in enumerate(self.codes) if not has_ended(code)]

    def wholly(self, *meanings: Meaning) -> bool:
        return all(meaning_of(code) in meanings for code in self.codes)


class Means(NamedTuple):
    client: PoolClient
    seal: api.Seal
    gate: threading.Lock
    """Lets one part at a time into Mooncake: the next one is copied and checked meanwhile."""

    answered: Callable[[Sequence[int], float], object]
    """Called with the codes of a call and its duration, before the next one passes the gate."""


class Part(ABC, Generic[Chunk]):
    """The work of one thread: names, slots of staging, and rows that are lent to it until they are taken back."""

    def __init__(
        self, means: Means, names: Sequence[str], chunks: Sequence[Chunk], slots: api.Slots, found: Callable[[], object]
    ) -> None:
        """`found` returns a reason once trying is useless; it holds no row."""
        self.names = names
        self.slots = slots
        self.entered_at: float | None = None
        self.inside = False  # Holds the gate.
        self._client, self._seal, self._gate, self._answered = means
        self._found = found
        self._inside_lock = threading.Lock()
        self._chunks: Sequence[Chunk] | None = chunks
        self._rows_lock = threading.Lock()
        self._keys: list[api.OffloadKey] = [chunk.key for chunk in chunks]
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in slots.views]
        self._outcomes: dict[int, api.Outcome] = {}
        self._counts = Counter[str]()

    @abstractmethod
    def _run(self) -> list[int]:
        """Move the chunks, record each one's outcome, and return the codes."""

    def move(self) -> Moved:
        """Do the work, in the part's thread, and free the memory of slots that are not used again. Raises `GivenUp`."""
        try:
            codes = self._run()
        except GivenUp:
            self.slots.empty()
            raise
        moved = Moved([self._outcomes[index] for index in range(len(codes))], codes, self._counts)
        self.slots.empty(moved.unsafe())
        return moved

    def give_up(self) -> None:
        """Take back the rows and the gate, whether the thread has ended or not. Waits for a copy of a row in use."""
        with self._rows_lock:
            self._chunks = None
        self._leave()

    def _use(self, index: int, use: Callable[[int, api.OffloadKey, memoryview], T]) -> T:
        """Call `use` with a place, its key and its row. Raises `GivenUp`."""
        with self._rows_lock:
            if self._chunks is None:
                raise GivenUp
            return use(index, *self._chunks[index])

    def _call(self, call: Move, indices: Sequence[int]) -> list[int]:
        """Fill or store these slots when the gate opens, and return the codes. Raises `GivenUp`."""
        names, addresses = [self.names[index] for index in indices], [self._addresses[index] for index in indices]
        self._gate.acquire()
        self.inside = True
        try:
            if self._chunks is None or self._found():
                raise GivenUp
            began = time.monotonic()
            self.entered_at = self.entered_at or began
            codes = call(names, addresses, self._seal.sealed_bytes)
            if self.inside:  # A part that was given up reports nothing new.
                self._answered(codes, time.monotonic() - began)
            return codes
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._inside_lock:
            inside, self.inside = self.inside, False
        if inside:
            self._gate.release()

    def _beside(self, index: int) -> memoryview:
        """Return the part of a slot beside the row: for the seal, or for all that is sent."""
        seal = self._seal
        return self.slots.views[index][seal.sealed_bytes - seal.beside_bytes : seal.sealed_bytes]

    def _outside(self, index: int, pieces: Iterable[memoryview]) -> list[tuple[memoryview, memoryview]]:
        """Return each piece that is not in the slot, with its place there; in order, the pieces fill the slot."""
        view, at = self.slots.views[index], 0
        found: list[tuple[memoryview, memoryview]] = []
        for piece in pieces:
            if piece.obj is not view.obj:
                found.append((piece, view[at : at + piece.nbytes]))
            at += piece.nbytes
        return found

    def _failed(self, index: int, code: int) -> api.Outcome:
        self._counts["unreachable" if meaning_of(code) is Meaning.AWAY else "transfers_failed"] += 1
        return caused(api.TransferFailed(f"{self._keys[index].hex()}: {answer_of(code)}"), number_of(code))


class Store(Part[api.Write]):
    def _run(self) -> list[int]:
        for index in range(len(self.names)):
            self._use(index, self._close)
        codes = self._call(self._client.put, range(len(self.names)))
        self._outcomes = {index: self._stored(index, code) for index, code in enumerate(codes)}
        return codes

    def _close(self, index: int, key: api.OffloadKey, row: memoryview) -> None:
        for piece, place in self._outside(index, self._seal.close(key, row, self._beside(index))):
            copy(piece, place)

    def _stored(self, index: int, code: int) -> api.Outcome:
        if code >= 0:
            return None
        if meaning_of(code) is Meaning.FULL:
            self._counts["no_room"] += 1
            return api.NoSpace(f"{self._keys[index].hex()}: the pool has no room")
        return self._failed(index, code)


class _Doubt(NamedTuple):
    """Loaded bytes that are not the chunk: damaged, or a mixture while another engine stores the chunk."""

    fault: api.SealFault
    came: bytes


class Load(Part[api.Read]):
    """A load. A wrong value is read a second time. If the same bytes come again, it is corrupt and is removed."""

    def _run(self) -> list[int]:
        codes = dict(enumerate(self._call(self._client.get, range(len(self.names)))))
        if doubts := self._take(codes):
            again = list(doubts)
            second = dict(zip(again, self._call(self._client.get, again), strict=True))
            self._judge(doubts, self._take(second))
            codes |= second
        return list(codes.values())

    def _take(self, codes: dict[int, int]) -> dict[int, _Doubt]:
        doubts = {index: self._taken(index, code) for index, code in codes.items()}
        return {index: doubt for index, doubt in doubts.items() if doubt is not None}

    def _taken(self, index: int, code: int) -> _Doubt | None:
        meaning, key, fault = meaning_of(code), self._keys[index], None
        if meaning is Meaning.TOO_LONG or (meaning is None and code != self._seal.sealed_bytes):
            return _Doubt(api.SealFault.LENGTH, b"%d" % code)
        if meaning is Meaning.MISSING:
            self._outcomes[index] = api.ChunkMissing(f"{key.hex()}: Mooncake answers {code}")
        elif meaning is not None:
            self._outcomes[index] = self._failed(index, code)
        elif (fault := self._use(index, self._open)) is None:
            self._outcomes[index] = None
        elif fault.corrupt:
            return _Doubt(fault, xxh3_128_digest(self.slots.views[index]))
        else:
            self._counts[f"sealed_{fault}"] += 1
            self._outcomes[index] = fault.outcome(key)
        return None

    def _open(self, index: int, key: api.OffloadKey, row: memoryview) -> api.SealFault | None:
        """Copy, then check the copy: bytes that reach the slot later are not in the row.

        A cipher decrypts out of the slot: Mooncake has reported it as complete, and never reuses one that is late.
        """
        beside = self._beside(index)
        for place, piece in self._outside(index, self._seal.places(row, beside)):
            copy(piece, place)
        return self._seal.open(key, row, beside)

    def _judge(self, first: dict[int, _Doubt], second: dict[int, _Doubt]) -> None:
        """Tell corrupt chunks from mixtures by two reads, and remove them."""
        corrupt = [index for index, doubt in second.items() if doubt == first[index]]
        for index, doubt in second.items():
            key = self._keys[index]
            mixture = api.ChunkMissing(f"{key.hex()}: it is being stored")
            self._outcomes[index] = doubt.fault.outcome(key) if index in corrupt else mixture
        self._counts.update(f"corrupt_{first[index].fault}" for index in corrupt)
        if torn := len(first) - len(corrupt):
            self._counts["torn"] += torn
        if corrupt:
            self._client.remove([self.names[index] for index in corrupt])


def copy(source: memoryview, into: memoryview) -> None:
    """Copy without the GIL, which a slice assignment would hold."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


class Late(Exception):
    """The call missed its deadline. It keeps running and its result is discarded."""


class Threads:
    """A daemon thread for each call in flight; a late one is abandoned and replaced. Belongs to one event loop."""

    def __init__(self, tier_name: str) -> None:
        self._tier_name = tier_name
        self._idle: list[api.Lanes] = []
        self._waiting: set[asyncio.Future[Any]] = set()
        self._under_way: set[Future[Any]] = set()
        self._given_up = False

    async def run(
        self, call: Callable[[], T], ends_at: Callable[[], float], *, unwanted: Callable[[T], object] | None = None
    ) -> T:
        """Return the call's result, or raise its error, or `Late` at `ends_at` (monotonic, movable) or `give_up`.

        A late or cancelled call goes on; `unwanted` gets its result. `BackendUnavailable` if too many are late.
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
            while not waiting.done() and (left_s := ends_at() - time.monotonic()) > 0:
                await asyncio.wait({waiting}, timeout=left_s)
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
            raise caused(api.BackendUnavailable(why), errno.ETIMEDOUT)

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

    def _one(self) -> api.Lanes:
        if self._idle:
            return self._idle.pop()
        try:
            return api.Lanes(1, f"kvtier-{self._tier_name}")
        except RuntimeError as error:
            raise api.BackendUnavailable(f"{self._tier_name}: no thread for a call of its client: {error}") from error


def _hand_over(unwanted: Callable[[T], object], job: "Future[T]") -> None:
    with suppress(Exception):  # Its error is discarded, too.
        unwanted(job.result())
