"""An engine's end of a session: the keeper's catalog, for the engine's own mover."""

import asyncio
import errno
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from kvtier.backend import Advice, InventoryQueue, Occupancy, OffloadKey, TierContext, pack_keys, unpack_keys
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Packing, make_packing
from kvtier_backends.fs.disk.lanes import start_lanes
from kvtier_backends.fs.disk.reads import QUEUE_BYTES, Reads, has_queue
from kvtier_backends.fs.host import wire
from kvtier_backends.fs.host.meeting import Place
from kvtier_backends.fs.layout import Counters, OpenTier, Work, until
from kvtier_backends.fs.lives import Life
from kvtier_backends.fs.options import FsOptions, MemoryOptions, common_options
from kvtier_backends.fs.segments.catalog import SCAN_PATIENCE_S, Doubt, Judged, Lease, Refusal, Reservation, Verdict
from kvtier_backends.fs.segments.layout import SegmentsLayout
from kvtier_backends.fs.segments.pool import PoolRoot
from kvtier_backends.fs.segments.segment import Header, Segment, Segments

ANSWER_S = 10.0  # A keeper that does not answer for so long is stopped; its engines do without it.


class KeptCatalog:
    """The catalog of one namespace, in a keeper. Belongs to the loop's thread.

    Once the session is lost, every call raises `BackendUnavailable`. A store's chunk is the catalog's when the keeper
    reads the message, before any later one: so `publish` needs no answer.
    """

    def __init__(self, connected: socket.socket, hello: wire.Hello, capacity_bytes: int | None) -> None:
        self.segments = Segments()
        self.inventory = InventoryQueue(held := set[OffloadKey]())
        self.scanned = asyncio.Event()
        self.queue = False
        self.others = 0  # Chunks loaded that other engines have stored.
        self._held = held
        self._hello = hello
        self._capacity_bytes = capacity_bytes
        self._fingerprint = bytes(32)
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._own: dict[int, bytes] = {}  # By lease.
        self._welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._link = wire.Link(connected, wire.ToEngine, self._received, self.lose)
        self._link.send(hello)

    async def opened(self) -> None:
        """Wait for the keeper's welcome. Raises `ConfigError` or `BackendUnavailable`, and then leaves nothing."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._welcome
        except TimeoutError as error:
            raise BackendUnavailable(f"the keeper has not answered for {ANSWER_S:g} s: it may be stopped") from error
        finally:
            if not self._welcome.done() or self._welcome.cancelled() or self._welcome.exception():
                self.close()

    @property
    def is_lost(self) -> bool:
        return self._link.closed

    def lose(self) -> None:
        """End every call: the keeper is gone, or does not answer."""
        self._link.close()
        for waiting in (self._welcome, *self._calls.values()):
            if not waiting.done():
                waiting.set_exception(BackendUnavailable("the keeper is gone"))
        self._calls.clear()

    def close(self, *, said: bool = False) -> None:
        """Close the session and its descriptors; idempotent. No lane may be using them. `said`: tell the keeper."""
        if said:
            self._link.send(wire.Bye())
        self.lose()
        for segment in self.segments.all:
            segment.forked()

    # The tier's calls.

    retentions_cut = 0  # The keeper's.

    def works(self) -> Sequence[Work]:
        return ()

    def stop(self) -> None:
        pass

    async def aclose(self, ends_at: float) -> int:  # noqa: ARG002
        return 0

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        if not self.scanned.is_set() and not all(key in self._held for key in keys):
            await until(self.scanned.wait(), SCAN_PATIENCE_S)
        return [key in self._held for key in keys]

    async def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        call_id, answer = await self._call("lease", keys)
        self._own[call_id] = answer.own
        return Lease(keys, wire.unpacked("q", answer.slots), wire.unpacked("Q", answer.numbers), call_id)

    async def judge(self, doubts: Sequence[Doubt]) -> Sequence[Judged]:
        call_id = next(self._ids)
        said = [(key, slot, sequence, None if fault is None else str(fault)) for key, slot, sequence, fault in doubts]
        answer = await self._answered(wire.Judge(call_id, said), call_id)
        return [Judged(Verdict(verdict), slot, sequence) for verdict, slot, sequence in answer.verdicts]

    def release(self, lease: Lease, loaded: Sequence[bool]) -> None:
        own = self._own.pop(lease.id)
        self.others += sum(is_loaded and not is_own for is_loaded, is_own in zip(loaded, own, strict=True))
        self._link.send(wire.End(lease.id, bytes(loaded)))

    async def reserve(self, keys: Sequence[OffloadKey]) -> Reservation:
        call_id, answer = await self._call("reserve", keys)
        *positions, last_sequence = wire.unpacked("q", answer.numbers)
        refusals = [
            Refusal(places, reason, OSError(number, text) if number else None)
            for places, reason, number, text in answer.refusals
        ]
        return Reservation(keys, positions, wire.unpacked("q", answer.slots), last_sequence, refusals, call_id)

    def publish(self, reservation: Reservation, written: Sequence[bool], *, told: bool) -> None:
        if self.is_lost and told:
            raise BackendUnavailable("the keeper is gone")
        self._link.send(wire.End(reservation.id, bytes(written)))
        for position, is_written in zip(reservation.positions, written, strict=True):
            if is_written:
                self._held.add(reservation.keys[position])
                if not told:
                    self.inventory.added(reservation.keys[position])

    def lost_names(self, segments: Iterable[Segment]) -> dict[Segment, OSError]:
        if self._hello.kind == "memory":
            return {}
        gone = [segment for segment in segments if not os.fstat(segment.fd).st_nlink]
        return {segment: OSError(errno.ENOENT, f"{segment.name} was removed") for segment in gone}

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._call("delete", keys)

    def advise(self, advice: Advice[OffloadKey]) -> None:
        self._link.send(wire.Advise(advice))

    def occupancy(self) -> Occupancy:
        """Return this namespace's part of the capacity, which is everybody's."""
        chunks = len(self._held)
        return Occupancy(chunks, chunks * (self._hello.row_bytes + FOOTER_BYTES), self._capacity_bytes)

    async def _call(self, kind: Any, keys: Sequence[OffloadKey]) -> tuple[int, wire.Answer]:
        call_id = next(self._ids)
        return call_id, await self._answered(wire.Call(call_id, kind, pack_keys(keys)), call_id, ends=kind != "delete")

    async def _answered(self, message: wire.Message, call_id: int, *, ends: bool = False) -> wire.Answer:
        """Return a call's answer. With `ends`, the slots of a cancelled call are given back."""
        if self.is_lost:
            raise BackendUnavailable("the keeper is gone")
        self._calls[call_id] = answered = asyncio.get_running_loop().create_future()
        self._link.send(message)
        try:
            async with asyncio.timeout(ANSWER_S):
                answer: wire.Answer = await answered
        except TimeoutError as error:
            self.lose()
            raise BackendUnavailable(f"the keeper has not answered for {ANSWER_S:g} s: it may be stopped") from error
        except asyncio.CancelledError:
            self._calls.pop(call_id, None)
            if ends:
                self._link.send(wire.End(call_id, b""))  # The keeper reads it before it answers, or afterwards.
            raise
        if answer.failure:
            raise BackendUnavailable(answer.failure)
        return answer

    # Messages.

    def _received(self, message: Any, descriptor: Callable[[], int]) -> None:
        match message:
            case wire.Answer():
                if (answered := self._calls.pop(message.id, None)) is not None and not answered.done():
                    answered.set_result(message)
            case wire.Inventory():
                self._note(unpack_keys(message.keys), there=message.there)
            case wire.NewSegment():
                header = Header(message.row_bytes, message.slots, self._fingerprint)
                segment = Segment(f"segment {message.first_slot}", descriptor(), header, own=False, allocated_bytes=0)
                self.segments.add(segment, message.first_slot)
            case wire.SegmentGone():  # Its slots are in no call of ours.
                segment = self.segments.of(message.first_slot)
                self.segments.remove(segment)
                segment.forked()
            case wire.Scanned():
                self.inventory.scan_ended(complete=message.complete)
                self.scanned.set()
            case wire.Welcome():
                self.queue = message.queue
                self._welcome.set_result(None)
            case wire.Refused():
                kind = ConfigError if message.is_config else BackendUnavailable
                self._welcome.set_exception(kind(message.reason))

    def _note(self, keys: Sequence[OffloadKey], *, there: bool) -> None:
        held, changed = self._held, [key for key in keys if (key in self._held) is not there]
        if there:
            held.update(changed)
        else:
            held.difference_update(changed)
        for key in changed:
            self.inventory.added(key) if there else self.inventory.lost(key)


async def shared_life(
    options: FsOptions | MemoryOptions, context: TierContext, counters: Counters | None = None
) -> Life:
    """Join the engines that share a root or a pool. `ConfigError` or `BackendUnavailable` leave nothing."""
    on_disk = isinstance(options, FsOptions)
    place = Place(options.root) if isinstance(options, FsOptions) else Place.of_pool(options.pool)
    mapper, row_bytes = context.mapper, context.row_bytes
    lanes = start_lanes(options, context.name)
    try:
        if isinstance(options, FsOptions):
            packing = await lanes.scan.run(make_packing, options, context)
        else:
            packing = Packing(mapper.fingerprint, row_bytes)
        pid = context.engine.pid if context.engine else os.getpid()
        hello = wire.Hello(
            wire.PROTOCOL, "fs" if on_disk else "memory", common_options(options), mapper.namespace, row_bytes,
            context.retained_share, f"{context.name} of process {pid}",
        )  # fmt: skip
        catalog = KeptCatalog(await lanes.scan.run(place.meet), hello, options.capacity_bytes)
        await catalog.opened()
    except BaseException:
        lanes.let_go()
        raise
    root = PoolRoot(str(place), options.capacity_bytes or 0)
    if catalog.queue and has_queue():
        root.reads = Reads(QUEUE_BYTES)
    capacity = Capacity(root.disk, limit_bytes=None, min_free_bytes=0)
    tier = OpenTier(options, context, root, lanes, packing, capacity, counters or Counters())

    async def is_gone(_: bool) -> bool:
        return catalog.is_lost

    async def again() -> Life:
        return await shared_life(options, context, tier.counters)

    layout = SegmentsLayout(tier, catalog, partial(catalog.close, said=True))
    return Life(context.name, str(place), row_bytes, layout, tier.counters, lanes, root.close, is_gone, again)
