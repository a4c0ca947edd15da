"""The keeper: one process that has the catalog of a root, or of a pool of memory, for all engines of a host.

No chunk passes through it. Slots that a mover has leased or reserved are its own until it says that it is done, or
until its process has ended: the kernel ends its memory and direct reads before a descriptor of the process shows that.
"""

import asyncio
import fcntl
import logging
import os
import signal
import socket
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import compress, count
from typing import Any

import msgspec
import uvloop

from kvtier import backend as api
from kvtier.backend import OffloadKey, pack_keys, unpack_keys
from kvtier.errors import BackendError, ConfigError, KVTierError, Remedy
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.host.gate import Gate
from kvtier_backends.fs.host.meeting import Place
from kvtier_backends.fs.layout import Background, FsTier, Scarce, SlotTier, open_pool, open_tier, until
from kvtier_backends.fs.options import FsOptions, MemoryOptions
from kvtier_backends.fs.segments import wire
from kvtier_backends.fs.segments.catalog import Lease, LocalCatalog, Reservation
from kvtier_backends.fs.segments.layout import disk_catalog, pool_catalog
from kvtier_backends.fs.segments.room import Space

logger = logging.getLogger(__name__)

SESSIONS_MAX = 256
LOOK_S = 1.0  # Between two looks whether engines still meet this keeper, and whether it can accept them again.


class KeptNamespace:
    """The catalog of one namespace and row length, and the sessions that use it."""

    def __init__(self, tier: SlotTier, catalog: LocalCatalog, close_files: Callable[[], None]) -> None:
        self.tier, self.catalog, self._close_files = tier, catalog, close_files
        self.sessions: dict[Session, bool] = {}  # True once a session knows every key.
        self.storing: dict[OffloadKey, tuple[tuple[Session, int], ...]] = {}
        """The session that stores a key, and its calls: no other may. A delete voids them."""
        self._stored_by = array("I")  # By slot: the session that stored its chunk, 0 for an earlier one.
        self._background = Background()
        self._background.begin("keeper", (*catalog.works(), self._report))

    def stored_by(self, session: int, slots: Sequence[int]) -> bytes:
        by, known = self._stored_by, range(len(self._stored_by))
        return bytes([slot in known and by[slot] == session for slot in slots])

    def note_stored(self, session: int, slots: Sequence[int]) -> None:
        if slots and slots[-1] >= len(self._stored_by):
            self._stored_by.extend([0] * (slots[-1] + 1 - len(self._stored_by)))
        for slot in slots:
            self._stored_by[slot] = session

    async def introduce(self, session: "Session") -> None:
        """Tell a session every key, as fast as it reads, and from now on every change."""
        self.sessions[session] = False
        self.catalog.room.is_used = True
        table, most = self.catalog.table, api.INVENTORY_BATCH_KEYS
        keys = list(table.index.of)
        for start in range(0, len(keys), most):
            there = [key for key in keys[start : start + most] if key in table]
            session.link.send(wire.Inventory(pack_keys(there), there=True))
            await session.link.drained.wait()
            await asyncio.sleep(0)
        self.sessions[session] = True
        self.report()  # What the scan has found meanwhile.
        if (complete := self.catalog.inventory.complete) is not None:
            session.link.send(wire.Inventory(pack_keys(()), there=True, scanned=complete))

    def left(self, session: "Session") -> None:
        self.sessions.pop(session, None)
        self.catalog.room.is_used = bool(self.sessions)

    def report(self) -> None:
        """Tell all sessions what is not told yet: soon, and before any other message."""
        for event in self.catalog.inventory.pending():
            self._tell(event)

    async def _report(self) -> None:
        async for event in self.catalog.inventory.watch():
            self._tell(event)
            await asyncio.sleep(0)  # All that has expired may be millions of keys: sessions read meanwhile.

    def _tell(self, event: api.InventoryEvent) -> None:
        if isinstance(event, api.ScanDone):
            said = wire.Inventory(pack_keys(()), there=True, scanned=event.complete)
        else:
            said = wire.Inventory(pack_keys(event.keys), isinstance(event, api.Added))
        for session, is_introduced in self.sessions.items():
            if is_introduced or said.scanned is None:
                session.link.send(said, soon=True)

    async def aclose(self, ends_at: float) -> None:
        self.catalog.stop()
        self._background.cancel()
        if not sum(await self.tier.end_transfers(ends_at)) + await self.catalog.aclose(ends_at):
            self._close_files()
            self.tier.root.close()


class Session:
    """One engine's session, with what it holds of slots by the number of its call."""

    def __init__(self, keeper: "Keeper", number: int, connected: socket.socket) -> None:
        self.engine = ""
        self._loaded = self._stored = 0  # Chunks.
        self._keeper, self._number = keeper, number
        self._pidfd = _peer(connected)
        self._namespace: KeptNamespace | None = None
        self._sent, self._sending = set[int](), asyncio.Lock()  # Segments that it knows, by their first slots.
        self._held: dict[int, tuple[Lease | Reservation, ExitStack]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.link = wire.Link(connected, wire.ToKeeper, self._received, self._lost)

    def samples(self) -> wire.Samples:
        held = sum(len(held.keys) for held, _ in self._held.values())
        chunks = {"session_loaded_total": self._loaded, "session_stored_total": self._stored, "session_held": held}
        labels = {"session": str(self._number), "engine": self.engine}
        return [(name, labels, count) for name, count in chunks.items()]

    def close(self) -> None:
        """End the session, and free what it holds: its process writes no more."""
        self.link.close()
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        for call_id in {*self._tasks, *self._held}:
            self._end(call_id, b"")
        if self._namespace is not None:
            self._namespace.left(self)
        self._keeper.left(self, self._number)

    def _lost(self) -> None:
        """End a session without a word: its process may still write, unless it has ended, too."""
        if self._held:
            asyncio.get_running_loop().add_reader(self._pidfd, self.close)
        else:
            self.close()

    def _received(self, message: Any, _: Callable[[], int]) -> None:
        match message:
            case wire.Call(kind="report"):
                self.link.send(wire.Answer(message.id, samples=self._keeper.report()))
            case wire.Call() if self._namespace is not None and message.id not in {0, *self._tasks, *self._held}:
                self._begin(message.id, self._called(message, self._namespace))
            case wire.End() if message.id:
                self._end(message.id, message.done)
            case wire.Advise() if self._namespace is not None:
                self._namespace.catalog.advise(message.advice)
            case wire.Hello() if not self._tasks and self._namespace is None:
                self._begin(0, self._welcome(message))
            case wire.End():
                self.close()
            case _:
                raise ValueError(f"{message!r:.100}: out of turn")

    def _begin(self, call_id: int, work: Any) -> None:
        self._tasks[call_id] = task = asyncio.create_task(work)
        task.add_done_callback(partial(self._done, call_id))

    def _done(self, call_id: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(call_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:  # Not a peer of ours, or a bug.
            logger.error("%s: its session ends; see %s", self.engine, Remedy.UNAVAILABLE, exc_info=error)
            self.link.close()
            self._lost()

    async def _welcome(self, hello: wire.Hello) -> None:
        try:
            self._namespace = namespace = await self._keeper.namespace(hello)
        except KVTierError as error:
            self.link.send(wire.Welcome(refusal=str(error), is_config=isinstance(error, ConfigError)))
            return
        self.engine = hello.engine
        self.link.send(wire.Welcome(namespace.tier.root.reads.queue_bytes > 0))
        await namespace.introduce(self)

    async def _called(self, call: wire.Call, namespace: KeptNamespace) -> None:
        keys, catalog = unpack_keys(call.keys), namespace.catalog
        try:
            match call.kind:
                case "lease":
                    answer = await self._lease(call.id, keys, namespace)
                case "reserve":
                    answer = await self._reserve(call.id, keys, namespace)
                case "probe":
                    answer = wire.Answer(call.id, own=bytes(await catalog.probe(keys)))
                case "judge":
                    answer = wire.Answer(call.id, verdicts=list(map(catalog.judged, call.doubts)))
                case _:
                    for key in keys:  # What is being stored is void: its engine may have said that it is stored.
                        namespace.storing.pop(key, None)
                    try:
                        await catalog.delete(keys)
                    finally:
                        catalog.inventory.lost(*keys)  # Those that are gone are reported.
                    answer = wire.Answer(call.id)
            namespace.report()
            await self._send_segments(namespace)
        except (BackendError, OSError) as error:
            self._end(call.id, b"")
            answer = wire.Answer(call.id, failure=str(error) or type(error).__name__)
        self.link.send(answer)

    async def _lease(self, call_id: int, keys: list[OffloadKey], namespace: KeptNamespace) -> wire.Answer:
        with ExitStack() as at_end:
            at_end.callback(await self._turn(len(keys), namespace, is_store=False))
            lease = await namespace.catalog.lease(keys)
            self._held[call_id] = lease, at_end.pop_all()
        own = namespace.stored_by(self._number, lease.slots)
        return wire.Answer(call_id, wire.packed("q", lease.slots), wire.packed("Q", lease.sequences), own)

    async def _reserve(self, call_id: int, keys: list[OffloadKey], namespace: KeptNamespace) -> wire.Answer:
        storing = namespace.storing
        wanted = [place for place, key in enumerate(keys) if key not in storing or storing[key][0][0] is self]
        free, busy = [keys[place] for place in wanted], sorted({*range(len(keys))} - {*wanted})
        storing.update({key: (*storing.get(key, ()), (self, call_id)) for key in free})
        with ExitStack() as at_end:
            at_end.callback(self._end_storing, call_id, free, namespace)
            at_end.callback(await self._turn(len(free), namespace, is_store=True))
            reservation = await namespace.catalog.reserve(free)
            self._held[call_id] = reservation, at_end.pop_all()
        refusals: list[tuple[list[int], Scarce, int, str]] = [
            ([wanted[place] for place in places], reason, error.errno or 0 if error else 0, str(error or ""))
            for places, reason, error in reservation.refusals
        ]
        if busy:
            refusals.append((busy, "storing", 0, ""))
        numbers = wire.packed("q", [*(wanted[place] for place in reservation.positions), reservation.last_sequence])
        return wire.Answer(call_id, wire.packed("q", reservation.slots), numbers, refusals=refusals)

    async def _turn(self, chunks: int, namespace: KeptNamespace, *, is_store: bool) -> Callable[[], None]:
        size_bytes = chunks * (namespace.tier.context.row_bytes + FOOTER_BYTES)
        return (await self._keeper.gate.enter(self._number, size_bytes, is_store=is_store)).end

    def _end(self, call_id: int, done: bytes) -> None:
        """End what a call holds; a call that goes on is cancelled, and then holds nothing."""
        if (task := self._tasks.get(call_id)) is not None and task is not asyncio.current_task():
            task.cancel()
        namespace, (held, at_end) = self._namespace, self._held.pop(call_id, (None, None))
        if namespace is None or held is None or at_end is None:
            return
        with at_end:
            count = len(held.keys if isinstance(held, Lease) else held.slots)
            flags = list(map(bool, done)) if len(done) == count else [False] * count
            if isinstance(held, Lease):
                self._loaded += sum(flags)
                namespace.catalog.release(held, flags)
            else:
                self._publish(call_id, held, flags, namespace)

    def _publish(self, call_id: int, held: Reservation, written: Sequence[bool], namespace: KeptNamespace) -> None:
        keys = held.slot_keys
        void = {key for key in keys if (self, call_id) not in namespace.storing.get(key, ())}
        flags = [flag and key not in void for flag, key in zip(written, keys, strict=True)]
        self._stored += sum(flags)
        namespace.note_stored(self._number, list(compress(held.slots, flags)))
        namespace.catalog.publish(held, flags, told=False)
        namespace.catalog.inventory.lost(*void)  # Its engine believes that they are there.

    def _end_storing(self, call_id: int, keys: Sequence[OffloadKey], namespace: KeptNamespace) -> None:
        storing, own = namespace.storing, (self, call_id)
        for key in keys:
            if (stores := storing.get(key, ())) == (own,):
                del storing[key]
            elif own in stores:
                storing[key] = tuple(other for other in stores if other != own)

    async def _send_segments(self, namespace: KeptNamespace) -> None:
        """Tell the session of segments that were made or removed since."""
        async with self._sending:
            segments = list(namespace.catalog.segments.all)
            if len(segments) == len(self._sent) and all(segment.first_slot in self._sent for segment in segments[-1:]):
                return  # A segment is only added at the end.
            there = {segment.first_slot for segment in segments}
            for first_slot in self._sent - there:
                self.link.send(wire.SegmentSaid(first_slot))
            new = [segment for segment in segments if segment.first_slot not in self._sent]
            self._sent &= there
            fds: list[int] = []
            own = [os.dup(segment.fd) for segment in new]  # One may be closed, and its number be another file's.
            try:
                await api.in_thread(self._keeper.lane, _open_again, own, fds)
            finally:  # A cancelled call's descriptors are sent, too.
                for fd in own:
                    os.close(fd)
                for segment, fd in zip(new, fds, strict=False):
                    self._sent.add(segment.first_slot)
                    said = wire.SegmentSaid(segment.first_slot, segment.header.row_bytes, segment.header.slots)
                    self.link.send(said, fd)


class Keeper:
    """All sessions and namespaces of one root or pool. Belongs to the loop's thread."""

    def __init__(self, place: Place, listener: socket.socket, how: float | dict[str, Any] | None) -> None:
        """`how`: the seconds that it goes on without a session. None or a service's options: it never lingers out."""
        self.gate = Gate()
        self._place, self._listener = place, listener
        self._linger_s = None if isinstance(how, dict) else how
        self._given = how if isinstance(how, dict) else None  # The options of all engines; else the first one's.
        self._space: Space | None = None
        self._fs: FsTier | None = None  # The first namespace's: it owns the root.
        self._namespaces: dict[tuple[str, bytes, int], KeptNamespace] = {}
        self._opening = asyncio.Lock()
        self._sessions: set[Session] = set()
        self._numbers = count(1)
        self.lane = api.Lanes(1, "kvtier-keeper")
        self._ended = asyncio.Event()
        self._lingering: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Serve until `end` is called, or until there was no session for long."""
        loop = asyncio.get_running_loop()
        inode = await self.lane.run(self._place.inode)
        self._linger()
        try:
            while inode and await self.lane.run(self._place.inode) == inode:  # Until the root is removed.
                loop.add_reader(self._listener, self._accept)
                if await until(self._ended.wait(), LOOK_S):
                    break
        finally:
            for reader in (self._listener, 0):
                loop.remove_reader(reader)
            self.lane.submit(self._place.remove_socket, inode)
            self._listener.close()
            for session in list(self._sessions):
                session.close()
            ends_at = loop.time() + 10.0
            for namespace in self._namespaces.values():
                await namespace.aclose(ends_at)
            await self.lane.aclose(1.0)

    def end(self) -> None:
        self._ended.set()

    def report(self) -> wire.Samples:
        """Return the metrics of all that this keeper has, and of each session."""
        sessions = [each for each in self._sessions if each.engine]
        totals = Counter[str](sessions=len(sessions))
        if self._space is not None:
            capacity = self._space.capacity
            totals.update(used_bytes=capacity.used_bytes, capacity_bytes=capacity.limit_bytes or 0)
        for namespace in self._namespaces.values():
            own = namespace.tier.counters.totals()
            totals.update(chunks=len(namespace.catalog.table), evicted_total=own.evicted, expired_total=own.expired)
        samples: wire.Samples = [(name, {}, total) for name, total in totals.items()]
        return samples + [sample for each in sessions for sample in each.samples()]

    def left(self, session: Session, number: int) -> None:
        self._sessions.discard(session)
        self.gate.forget(number)
        self._linger()

    async def namespace(self, hello: wire.Hello) -> KeptNamespace:
        """Return the catalog that an engine asks for. Raises what opening a tier does."""
        if hello.protocol != wire.PROTOCOL:
            raise ConfigError(
                f"shared: this engine's protocol is {hello.protocol}, its keeper's {wire.PROTOCOL}: end the other "
                "engines, and start all of them with one version of kvtier"
            )
        mapper = api.FileMapper(hello.namespace)
        which = mapper.folder, mapper.fingerprint, hello.row_bytes
        async with self._opening:
            for name, value in (self._given or {}).items():
                if hello.options.get(name) != value:
                    raise ConfigError(
                        f"{name}: {hello.options.get(name)!r} given, {value!r} accepted: other engines share this tier,"
                        " and its keeper has their options until the last of them has ended"
                    )
            if (kept := self._namespaces.get(which)) is None:
                context = api.TierContext("keeper", mapper, hello.row_bytes, hello.retained_share)
                kept = self._namespaces[which] = await self._open(hello, context)
                self._given = hello.options
        return kept

    async def _open(self, hello: wire.Hello, context: api.TierContext) -> KeptNamespace:
        given = hello.options | {"load_lanes": 1, "store_lanes": 1}  # To make and remove segments.
        if hello.kind == "fs":
            self._fs = tier = await open_tier(msgspec.convert(given, FsOptions), context, beside=self._fs)
            self._space = self._space or Space(tier.capacity)
            return KeptNamespace(tier, *disk_catalog(tier, self._space))
        pool = open_pool(msgspec.convert(given, MemoryOptions), context, self._space.capacity if self._space else None)
        self._space = self._space or Space(pool.capacity)
        return KeptNamespace(pool, *pool_catalog(pool, self._space))

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # There is no descriptor for it, and this would be called again at once.
            asyncio.get_running_loop().remove_reader(self._listener)
            return
        with suppress(OSError):  # Its process has ended.
            if len(self._sessions) < SESSIONS_MAX:
                self._sessions.add(Session(self, next(self._numbers), connected))
                self._linger()
                return
        connected.close()

    def _linger(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
        if self._linger_s is not None and not self._sessions:
            self._lingering = asyncio.get_running_loop().call_later(self._linger_s, self._give_up)

    def _give_up(self) -> None:
        """End, unless an engine is just looking for its keeper."""
        loop = asyncio.get_running_loop()
        locking = self.lane.submit(self._place.lock)
        locking.add_done_callback(lambda lock: loop.call_soon_threadsafe(self._locked, lock.result()))

    def _locked(self, lock: int | None) -> None:
        if lock is not None and not self._sessions:
            return self.end()  # With the lock, until the process ends.
        if lock is not None:
            os.close(lock)
        return self._linger()


def _open_again(own: Sequence[int], fds: list[int]) -> None:
    """Open files once more: a session's descriptors have no part in the keeper's locks. Blocks."""
    for fd in own:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_DIRECT)
        fds.append(os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC))


def _peer(connected: socket.socket) -> int:
    """Return a descriptor of the process at the other end, in whatever PID namespace it is, if the kernel is of 6.5."""
    with suppress(OSError):
        return connected.getsockopt(socket.SOL_SOCKET, 77)  # SO_PEERPIDFD: Python has no name for it.
    return os.pidfd_open(struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def main(arguments: Sequence[str]) -> None:
    """Run a keeper: its place, how long it lingers or the options that a service gives, and a listening descriptor."""
    place, how, descriptor = arguments
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    listener = socket.socket(fileno=int(descriptor))
    listener.setblocking(False)
    uvloop.run(_kept(Place(*os.path.split(place)), listener, msgspec.json.decode(how)))


async def _kept(place: Place, listener: socket.socket, how: float | dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    keeper = Keeper(place, listener, how)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, keeper.end)
    if isinstance(how, dict):  # Stdin ends with the service.
        loop.add_reader(0, keeper.end)
    await keeper.run()
