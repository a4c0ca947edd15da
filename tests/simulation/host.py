"""Simulated hosts: engines share a root or a pool of memory by its keeper, and any of them may end at any message.

Tier, session, keeper and catalog are the real ones, and chunks are written to real memory or files. What a mover writes
when its slot is another's is found by the chunks' own footers.
"""

import asyncio
import os
import random
import tempfile
import time
import weakref
from collections import Counter
from contextlib import ExitStack, suppress
from typing import NamedTuple
from unittest import mock

from kvtier import backend as api
from kvtier.errors import BackendUnavailable, ChunkCorrupt, ChunkMissing, ConfigError
from kvtier.memory import this_process
from kvtier_backends.fs import FsBackend, MemoryBackend
from kvtier_backends.fs.backend import LivingBackend
from kvtier_backends.fs.disk import lanes, owner
from kvtier_backends.fs.host.keeper import Keeper
from kvtier_backends.fs.options import FsOptions, MemoryOptions
from kvtier_backends.fs.segments import room, wire
from tests.simulation.machine import PROCESS, End, Killed, Listener, Machine, MachineLoop, Process, SimulatedLanes
from tests.simulation.scenario import POLICIES, ROW_BYTES
from tests.simulation.witness import chunk_of
from tests.simulation.world import Verdict, errors_of, failed

SEGMENT_BYTES = 32 << 10
SLOT_BYTES = 2 * ROW_BYTES
ROWS = {"a": ROW_BYTES, "b": 3 * ROW_BYTES}  # By the model.
PATIENCE_S = 300.0  # After so much virtual time a call counts as hung.
SETTLING_S = 60.0  # No process is stopped, and no call hangs, for half as long.
CALM_S = 20.0  # Once nothing fails any more, all that is owed is done in this time.
LOCK = "kvtier-simulated-lock"
LIVES_MAX = 3  # A killed engine is started again twice.


class Habits(NamedTuple):
    model: str
    begins_s: float
    workers: int
    calls: int
    pause_s: float
    cancels: float


def draw(seed, root):
    """Return dice, options, habits of engines, and faults by the number of a message. Odd seeds use the root."""
    dice = random.Random(f"host {seed}")
    keys = [api.make_offload_key(number.to_bytes(8, "big") + bytes(24)) for number in range(dice.choice((8, 30)))]
    enough = 4 * len(keys)
    capacity_bytes = dice.choice((2, 3, enough, enough, enough) if seed % 2 else (1, 2, 3, 5, enough)) * SEGMENT_BYTES
    pool, disk = {"pool": "simulated"}, {"layout": "segments", "root": root, "io": "buffered"}
    kind, where = (FsOptions, disk) if seed % 2 else (MemoryOptions, pool)
    options = kind(
        shared=True, capacity_bytes=capacity_bytes, eviction_policy=dice.choice(POLICIES),
        load_lanes=dice.choice((1, 2)), store_lanes=dice.choice((1, 2)), **where,
    )  # fmt: skip
    models = dice.choice((["a"], ["a"], ["a", "b"]))
    habits = [
        Habits(
            model=dice.choice(models),
            begins_s=dice.choice((0.0, dice.uniform(0, 2))),
            workers=dice.choice((1, 1, 3)),
            calls=dice.randint(2, 12),
            pause_s=dice.choice((0.0, 0.01, 0.5)),
            cancels=dice.choice((0.0, 0.1, 0.4)),
        )
        for _ in range(dice.choice((1, 2, 2, 3, 4)))
    ]
    last = dice.choice((20, 100, 400))
    faults = {
        dice.randint(1, last): (dice.choice(("sender", "receiver")), dice.choice(("kill", "kill", "stop")))
        for _ in range(dice.choice((0, 1, 2, 2, 5)))
    }
    return dice, keys, options, habits, faults


class Calls:
    """Calls of all engines, by model and key."""

    def __init__(self):
        self.under_way, self._begun = Counter(), Counter()

    def begin(self, named):
        self.under_way.update(named)
        self._begun.update(named)

    def quiet(self, named):
        """Return the names without a call under way, with the number of calls that have begun."""
        return {name: self._begun[name] for name in named if not self.under_way[name]}

    def none_since(self, quiet):
        """Return the names that were quiet and for which no call has begun since."""
        return {name for name, begun in quiet.items() if self._begun[name] == begun}


class Host:
    """One seed's host. It is the place of its root or pool, too."""

    def __init__(self, seed, root):
        self.counts = Counter()
        self.dice, self.keys, self.options, self.habits, faults = draw(seed, root)
        self.on_disk, self.overwritten_max = isinstance(self.options, FsOptions), 0
        self.machine = Machine(self.dice, faults)
        self.width_bytes = self.dice.choice((SLOT_BYTES, 5 * SLOT_BYTES, 64 << 20))
        self.linger_s = self.dice.choice((0.5, 30.0))
        self.is_roomy = self.options.capacity_bytes > 5 * SEGMENT_BYTES
        self.keeper, self.keepers, self.listener = None, [], None
        self.stores, self.deletes = Calls(), Calls()
        self.absent, self.promised = set(), set()  # By model and key.
        self.resting, self.all_rest = set(), asyncio.Event()

    # The place of the root or pool, as a keeper and its engines know it.

    def meet(self):
        if self.listener is None or self.listener.closed:
            self._start_keeper()
        ours, theirs = End(self.machine, PROCESS.get()), End(self.machine, self.listener.process)
        ours.peer, theirs.peer = theirs, ours
        self.listener.put(theirs)
        return ours

    def inode(self):
        return id(self.listener)

    def remove_socket(self, _):
        pass

    def lock(self):
        return os.memfd_create(LOCK)

    def _start_keeper(self):
        process, earlier = Process(self.machine, "keeper", self._bury_keeper), list(self.keepers)
        self.listener = Listener(self.machine, process)
        self.keepers.append(process)
        process.begin(self._keep(process, self.listener, earlier))

    async def _keep(self, process, listener, earlier):
        process.keeper = self.keeper = keeper = Keeper(self, listener, self.linger_s)
        while self.on_disk and not all(each.is_buried for each in earlier):
            await asyncio.sleep(0.01)  # The root has one owner.
        keeper.gate._width_bytes = self.width_bytes
        self.counts["keepers"] += 1
        try:
            await keeper.run()
            self.counts["keepers that ended"] += 1
        finally:
            if self.on_disk:  # What engines of this keeper still write to, or read, a later one may give to others.
                held = [held for session in keeper._sessions for held, _ in session._held.values()]
                self.overwritten_max += sum(len(each.slots) for each in held)
            else:
                self.promised.clear()
        process.kill()

    def _bury_keeper(self, process):
        """Close what the kernel closes of a keeper."""
        for session in list(process.keeper._sessions):
            session.close()
        for fd, name in open_files():
            if LOCK in name:
                os.close(fd)

    # Engines.

    async def run(self):
        await asyncio.gather(*(self._lives(number, habits) for number, habits in enumerate(self.habits)))
        self.counts["messages"] = self.machine.messages
        self.counts.update(f"{act} {who}" for act, who in self.machine.met)
        for model in sorted({habits.model for habits in self.habits}):
            process = Process(self.machine, "observer", self._bury_engine)
            await process.begin(self._observe(process, model))
            process.kill()
        await asyncio.sleep(self.linger_s + CALM_S)
        assert self.listener.process.is_gone, "the keeper has nobody and goes on"
        await asyncio.gather(*self.machine.burials)
        assert self.machine.loop.ends == {}, "descriptors of processes are left"

    async def _lives(self, number, habits):
        await asyncio.sleep(habits.begins_s)
        for life in range(LIVES_MAX):
            process = Process(self.machine, f"engine {number}, life {life}", self._bury_engine)
            life_under_way = process.begin(self._engine(process, number, habits))
            await asyncio.wait({life_under_way})
            if not process.is_dying:
                life_under_way.result()
                process.kill()
                return
            self.resting.discard(number)
        await self._rest(number)

    async def _rest(self, number):
        """Wait until all engines rest; then there are no faults any more, and everything settles."""
        self.resting.add(number)
        if len(self.resting) == len(self.habits):
            self.machine.end_faults()
            self.all_rest.set()
        await self.all_rest.wait()
        await asyncio.sleep(SETTLING_S)

    def _bury_engine(self, process):
        if process.tier is not None:
            self.counts["corrupt"] += sum(process.tier.counters().corrupt.values())
            assert self.counts["corrupt"] <= self.overwritten_max, process.tier.counters()
            self.stores.under_way.subtract(process.storing)
            process.tier._lives.close()

    async def _opened(self, process, model):
        context = api.TierContext(process.name, api.FileMapper(api.Namespace(model_name=model)), ROWS[model])
        async with asyncio.timeout(PATIENCE_S):
            while process.tier is None:
                try:
                    process.tier = await (FsBackend if self.on_disk else MemoryBackend).open(self.options, context)
                except (BackendUnavailable, ConfigError) as error:  # A cancelled opening may still hold the root.
                    if isinstance(error, ConfigError) and "no other tier uses" not in str(error):
                        raise
                    self.counts["unavailable at the start"] += 1
                    await asyncio.sleep(0.5)
        return process.tier

    async def _engine(self, process, number, habits):
        tier = await self._opened(process, habits.model)
        await asyncio.gather(*(self._work(tier, habits) for _ in range(habits.workers)))
        await self._rest(number)
        with suppress(BackendUnavailable):  # It may have lost its keeper since its last call.
            await tier.delete([])
        await tier.delete([])
        await asyncio.sleep(CALM_S)
        mapper = tier._lives.now.tier.context.mapper
        table = self.keeper._namespaces[mapper.folder, mapper.fingerprint, ROWS[habits.model]].catalog.table
        believed = {key for key, is_there in zip(self.keys, await tier.probe(self.keys), strict=True) if is_there}
        assert believed == {key for key in self.keys if key in table}, f"{process.name} believes {len(believed)}"
        assert await tier.aclose(PATIENCE_S) == (0,)

    async def _work(self, tier, habits):
        calls = [self._store, self._load, self._delete, self._probe, self._advise]
        for _ in range(habits.calls):
            await asyncio.sleep(self.dice.uniform(0, habits.pause_s))
            (call,) = self.dice.choices(calls, (8, 8, 3, 1, 1))
            first = self.dice.randrange(len(self.keys))
            keys = self.keys[first : first + self.dice.choice((1, 4, 12))]
            task = asyncio.create_task(call(tier, habits.model, keys))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # Its caller may be killed.
            cancelled = self.dice.random() < habits.cancels
            await asyncio.wait({task}, timeout=self.dice.choice((0.0, 0.001, 0.1)) if cancelled else PATIENCE_S)
            assert cancelled or task.done(), f"{call.__name__} never ends"
            self.counts["cancelled"] += task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                self.counts["unavailable"] += isinstance(task.exception(), BackendUnavailable)
                with suppress(BackendUnavailable):
                    task.result()

    async def _store(self, tier, model, keys):
        writes = [api.Write(key, memoryview(chunk_of(key, ROWS[model]))) for key in keys]
        named = [(model, key) for key in keys]
        self.absent.difference_update(named)
        process, keeper, quiet = PROCESS.get(), self.keeper, self.deletes.quiet(named)
        self.stores.begin(named)
        process.storing.update(named)
        outcomes = await tier.store(writes)
        self.stores.under_way.subtract(named)  # What ends otherwise may be published until its process has ended.
        process.storing.subtract(named)
        assert all(outcome is None or isinstance(outcome, api.NoSpace) for outcome in outcomes), outcomes
        stored = {name for name, outcome in zip(named, outcomes, strict=True) if outcome is None}
        self.counts.update("no room" if outcome else "stored" for outcome in outcomes)
        if keeper is self.keeper and not (self.listener.closed or process.is_cut):
            self.promised |= stored & self.deletes.none_since(quiet)

    async def _load(self, tier, model, keys):
        reads = [api.Read(key, memoryview(bytearray(ROWS[model]))) for key in keys]
        absent = self.stores.quiet((model, key) for key in keys if (model, key) in self.absent)
        for read, outcome in zip(reads, await tier.load(reads), strict=True):
            if outcome is None:
                assert read.into == chunk_of(read.key, ROWS[model]), f"wrong bytes: {read.key.hex()}"
                assert (model, read.key) not in self.stores.none_since(absent), f"deleted: {read.key.hex()}"
            else:
                assert isinstance(outcome, ChunkMissing | ChunkCorrupt), outcome
            self.counts["missing" if outcome else "loaded"] += 1

    async def _delete(self, tier, model, keys):
        named = {(model, key) for key in keys}
        quiet = self.stores.quiet(named)
        self.deletes.begin(named)
        self.promised -= named
        await tier.delete(keys)
        self.deletes.under_way.subtract(named)
        self.absent |= self.stores.none_since(quiet)
        self.counts["deletes"] += 1
        await asyncio.sleep(0.1)
        await self._load(tier, model, keys)

    async def _probe(self, tier, _, keys):
        assert len(await tier.probe(keys)) == len(keys)

    async def _advise(self, tier, _, keys):
        kind = self.dice.choice(("rank", "demote", "retain"))
        tier.advise(api.Advice(kind, keys, seconds=5.0 * (kind == "retain"), priority=1))

    # At rest.

    async def _observe(self, process, model):
        """See what is there, and that nobody holds anything any more."""
        await asyncio.sleep(CALM_S)
        tier = await self._opened(process, model)
        await asyncio.sleep(CALM_S)
        keeper = self.keeper
        for namespace in keeper._namespaces.values():
            table = namespace.catalog.table
            assert not namespace.storing, f"stored by nobody: {namespace.storing}"
            assert not list(table.in_use), f"pinned by nobody: {list(table.in_use)}"
            slots = sum(segment.header.slots for segment in table.segments.all)
            assert table.free.count + len(table) == slots, f"{slots - table.free.count - len(table)} slots leaked"
        assert keeper.gate.taken_bytes == 0, "the gate is taken by nobody"
        assert keeper._space.capacity.used_bytes <= self.options.capacity_bytes
        assert len(keeper._sessions) == 1, "sessions of nobody"
        believed = [key for key, is_there in zip(self.keys, await tier.probe(self.keys), strict=True) if is_there]
        reads = [api.Read(key, memoryview(bytearray(ROWS[model]))) for key in believed]
        outcomes = await tier.load(reads)
        assert all(outcome is None or isinstance(outcome, ChunkCorrupt) for outcome in outcomes), outcomes
        loaded = [read for read, outcome in zip(reads, outcomes, strict=True) if outcome is None]
        there = [read.key for read in loaded]
        wrong = [read.key for read in loaded if read.into != chunk_of(read.key, ROWS[model])]
        assert not wrong, f"wrong bytes: {wrong}"
        if self.is_roomy:
            lost = {key for of, key in self.promised if of == model}.difference(there)
            assert len(lost) <= self.overwritten_max, f"promised and not there: {lost}"
        self.counts["there at the end"] += len(there)
        assert await tier.aclose(PATIENCE_S) == (0,)


def simulate(seed):
    """Run one seed. Raises `SimulationFailed` if any promise was broken."""
    descriptors = open_files()
    with asyncio.Runner(loop_factory=MachineLoop) as runner, ExitStack() as patches:
        loop, root = runner.get_loop(), patches.enter_context(tempfile.TemporaryDirectory())
        errors = errors_of(loop)
        for of, name, stand_in in (
            (api, "Lanes", SimulatedLanes),
            (lanes, "Lanes", SimulatedLanes),
            (owner, "PATIENCE_S", -1.0),  # In real time.
            (room, "SEGMENT_BYTES_LEAST", SEGMENT_BYTES),
            (wire, "UNSENT_BYTES_MAX", random.Random(f"unsent {seed}").choice((3_000, 64 << 20))),
            (time, "monotonic", loop.time),
            (this_process, "_holders", Holders()),
        ):
            patches.enter_context(mock.patch.object(of, name, stand_in))
        try:
            host = runner.run(_run(seed, root))
            others = [error for error in errors if not isinstance(error, Killed)]
            assert not others, others
            left = sorted(open_files() - descriptors)
            assert not left, f"left open: {left}"
        except Exception as error:
            raise failed(seed, error, "--hosts ") from error
        return Verdict.of(seed, host.counts, [loop.time()])


def open_files():
    """Return the descriptors of this process, with what they are of."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # That of the list itself.
            found.add((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
    return found


class Holders(weakref.WeakSet):
    """Objects that hold descriptors, by process."""

    def add(self, holder):
        super().add(holder)
        if (process := PROCESS.get(None)) is not None:
            process.holders.append(holder)


async def _run(seed, root):
    host = Host(seed, root)
    with mock.patch.object(LivingBackend, "keeper", return_value=host):
        await host.run()
    return host
