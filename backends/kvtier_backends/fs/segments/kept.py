"""The catalog in a keeper, for the mover of one engine: the engine's end of a session."""

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, count, filterfalse
from typing import Any, Self

from kvtier.backend import Advice, InventoryQueue, Occupancy, OffloadKey, pack_keys, unpack_keys
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.layout import Counters, Work
from kvtier_backends.fs.segments import wire
from kvtier_backends.fs.segments.catalog import Doubt, Judged, Lease, Refusal, Reservation
from kvtier_backends.fs.segments.segment import Header, Segment, Segments

ANSWER_S = 10.0  # A keeper that does not answer for so long is stopped; its engines do without it.


class KeeperGone(BackendUnavailable):
    """The keeper has ended, or it has no room for another session."""

    def __init__(self, message: str = "the keeper is gone") -> None:
        super().__init__(message)


class KeptCatalog:
    """Offers what `LocalCatalog` does. Belongs to the loop's thread.

    Once the session is lost, every call raises `BackendUnavailable`. Messages are read in their order, so `publish` and
    `release` need no answer.
    """

    retentions_cut = 0  # The keeper's.

    def __init__(
        self, connected: socket.socket, hello: wire.Hello, capacity_bytes: int | None, counters: Counters
    ) -> None:
        self.segments = Segments()
        self.inventory = InventoryQueue(held := set[OffloadKey]())
        self.is_lost = self.queue = False  # `queue`: see `wire.Welcome`.
        self._held, self._hello, self._scanned = held, hello, False
        self._capacity_bytes, self._counters = capacity_bytes, counters
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._heard, self._ids = 0, count(1)  # Messages, and numbers of calls.
        self._calls: dict[int, asyncio.Future[Any]] = {0: asyncio.get_running_loop().create_future()}
        self._own: dict[int, bytes] = {}  # By lease.
        self._link = wire.Link(connected, wire.ToEngine, self._received, self._lose)
        self._link.send(hello)

    async def opened(self) -> Self:
        """Wait for the keeper's welcome. Raises `ConfigError` or `BackendUnavailable`, and then leaves nothing."""
        try:
            welcome: wire.Welcome = await self._answer(0)
            if welcome.refusal:
                raise (ConfigError if welcome.is_config else BackendUnavailable)(welcome.refusal)
        except BaseException:
            self.close()
            raise
        self.queue = welcome.queue
        return self

    def close(self) -> None:
        """Close the session and its descriptors; idempotent. No lane may be using them; any thread may call."""
        if threading.get_ident() == self._thread or self._loop.is_closed():
            self._close()
        else:
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._link.send(wire.End(0))
        self._link.close_when_sent()
        self._lose()
        for segment in self.segments.all:
            segment.forked()

    def works(self) -> Sequence[Work]:
        return ()

    def stop(self) -> None: ...

    async def aclose(self, ends_at: float) -> int:  # noqa: ARG002
        return 0

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Answer from memory; the keeper's start is not over before the end of the scan, and it is asked."""
        if not (self._scanned or all(key in self._held for key in keys)):
            return list(map(bool, (await self._call("probe", keys)).own))
        if self.is_lost:
            raise KeeperGone
        return [key in self._held for key in keys]

    async def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        answer = await self._call("lease", keys)
        self._own[answer.id] = answer.own
        return Lease(keys, wire.unpacked("q", answer.slots), wire.unpacked("Q", answer.numbers), answer.id)

    async def judge(self, doubts: Sequence[Doubt]) -> Sequence[Judged]:
        return (await self._call("judge", (), doubts)).verdicts

    def release(self, lease: Lease, loaded: Sequence[bool]) -> None:
        own = self._own.pop(lease.id)
        others = sum(is_loaded and not is_own for is_loaded, is_own in zip(loaded, own, strict=True))
        self._counters.count("from_others", others)
        self._link.send(wire.End(lease.id, bytes(loaded)))

    async def reserve(self, keys: Sequence[OffloadKey]) -> Reservation:
        answer = await self._call("reserve", keys)
        *positions, last_sequence = wire.unpacked("q", answer.numbers)
        refusals = [
            Refusal(places, reason, OSError(number, text) if number else None)
            for places, reason, number, text in answer.refusals
        ]
        return Reservation(keys, positions, wire.unpacked("q", answer.slots), last_sequence, refusals, answer.id)

    def publish(self, reservation: Reservation, written: Sequence[bool], *, told: bool) -> None:
        self._link.send(wire.End(reservation.id, bytes(written)))
        if told and (self.is_lost or self._link.ending):
            raise KeeperGone
        keys = list(compress(reservation.slot_keys, written))
        self._held.update(keys)
        if not told:
            self.inventory.added(*keys)

    def lost_names(self, segments: Iterable[Segment]) -> dict[Segment, OSError]:
        if self._hello.kind == "memory":
            return {}
        gone = [segment for segment in segments if not os.fstat(segment.fd).st_nlink]
        return {segment: OSError(errno.ENOENT, f"{segment.name} was removed by another program") for segment in gone}

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._call("delete", keys)

    def advise(self, advice: Advice[OffloadKey]) -> None:
        self._link.send(wire.Advise(advice))

    def occupancy(self) -> Occupancy:
        """Return this namespace's part of the capacity, which is everybody's."""
        chunks = len(self._held)
        return Occupancy(chunks, chunks * (self._hello.row_bytes + FOOTER_BYTES), self._capacity_bytes)

    async def _call(self, kind: Any, keys: Sequence[OffloadKey], doubts: Any = ()) -> wire.Answer:
        if self.is_lost:
            raise KeeperGone
        call = wire.Call(next(self._ids), kind, pack_keys(keys), list(doubts))
        self._calls[call.id] = asyncio.get_running_loop().create_future()
        self._link.send(call)
        try:
            answer: wire.Answer = await self._answer(call.id)
        except (asyncio.CancelledError, BackendUnavailable):
            self._link.send(wire.End(call.id))  # The keeper reads it before it answers, or afterwards.
            raise
        if answer.failure:
            raise BackendUnavailable(answer.failure)
        return answer

    async def _answer(self, call_id: int) -> Any:
        """Wait for a call's answer, which may take its time, while the keeper says anything when it is asked."""
        waiting, heard = self._calls[call_id], -1
        try:
            while not (await asyncio.wait({waiting}, timeout=ANSWER_S / 2))[0]:
                if heard == self._heard:
                    self._lose(lambda: BackendUnavailable(f"no answer in {ANSWER_S:g} s: the keeper may be stopped"))
                heard = self._heard
                self._link.send(wire.Call(next(self._ids), "report", pack_keys(())))
            return waiting.result()
        finally:
            self._calls.pop(call_id, None)

    def _lose(self, error: Callable[[], BackendUnavailable] = KeeperGone) -> None:
        """End every call: the keeper is gone, or does not answer. One that goes on again reads what is sent still."""
        self.is_lost = True
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(error())
                waiting.exception()  # Its caller may have been cancelled.

    def _received(self, message: wire.ToEngine, descriptor: Callable[[], int]) -> None:
        self._heard += 1
        match message:
            case wire.Answer() | wire.Welcome():
                waiting = self._calls.get(message.id if isinstance(message, wire.Answer) else 0)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case wire.Inventory():
                self._note(unpack_keys(message.keys), there=message.there)
                if message.scanned is not None:
                    self.inventory.scan_ended(complete=message.scanned)
                    self._scanned = True
            case wire.SegmentSaid(slots=0):  # No store has slots there; a load that reads there misses its chunk.
                segment = self.segments.of(message.first_slot)
                self.segments.remove(segment)
                segment.forked()
            case wire.SegmentSaid():
                header = Header(message.row_bytes, message.slots, bytes(32))
                segment = Segment(f"segment {message.first_slot}", descriptor(), header, own=False, allocated_bytes=0)
                self.segments.add(segment, message.first_slot)

    def _note(self, keys: Sequence[OffloadKey], *, there: bool) -> None:
        if there:
            self.inventory.added(*filterfalse(self._held.__contains__, keys))
            self._held.update(keys)
        else:
            self.inventory.lost(*filter(self._held.__contains__, keys))
            self._held.difference_update(keys)
