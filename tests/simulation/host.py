"""Simulated hosts: several engines share a pool of memory by its keeper, and any of them may end at any message.

Tier, session, keeper and catalog are the real ones, and chunks are written to real memory. What a mover writes when its
slot is another's is found by the chunks' own footers.
"""

import asyncio
import hashlib
import os
import random
import time
from collections import Counter
from contextlib import ExitStack, suppress
from typing import NamedTuple
from unittest import mock

from kvtier import backend as api
from kvtier.errors import BackendUnavailable, ChunkMissing
from kvtier_backends.fs import MemoryBackend
from kvtier_backends.fs.disk import lanes
from kvtier_backends.fs.host.keeper import Keeper
from kvtier_backends.fs.host.meeting import Place
from kvtier_backends.fs.options import MemoryOptions
from kvtier_backends.fs.segments import room, wire
from tests.simulation.machine import PROCESS, Killed, Listener, Machine, MachineLoop, Process, SimulatedLanes
from tests.simulation.scenario import POLICIES, ROW_BYTES
from tests.simulation.witness import chunk_of
from tests.simulation.world import SimulationFailed, Verdict

SEGMENT_BYTES = 32 << 10
SLOT_BYTES = 2 * ROW_BYTES
PATIENCE_S = 300.0  # Of virtual time: a call that takes longer never ends.
SETTLING_S = 100.0  # Longer than anything is stopped, hangs or is believed.
LOCK = "kvtier-simulated-lock"
LIVES_MAX = 3  # Of an engine that is killed.


class Habits(NamedTuple):
    """How one engine uses its tier."""

    model: str
    begins_s: float
    workers: int
    calls: int
    pause_s: float
    cancels: float


def draw(seed):
    """Return dice, options, habits of engines, and faults by the number of a message."""
    dice = random.Random(f"host {seed}")
    keys = [api.make_offload_key(number.to_bytes(8, "big") + bytes(24)) for number in range(dice.choice((8, 30)))]
    capacity_bytes = dice.choice((1, 2, 3, 5, 4 * len(keys))) * SEGMENT_BYTES
    options = MemoryOptions(
        shared=True, pool="simulated", capacity_bytes=capacity_bytes, eviction_policy=dice.choice(POLICIES),
        load_lanes=dice.choice((1, 2)), store_lanes=dice.choice((1, 2)),
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


class Host:
    """One seed's host. It is its pool's place, too."""

    directory = name = "simulated"

    def __init__(self, seed):
        self.counts = Counter()
        self.dice, self.keys, self.options, self.habits, faults = draw(seed)
        self.machine = Machine(self.dice, faults)
        self.width_bytes = self.dice.choice((SLOT_BYTES, 5 * SLOT_BYTES, 64 << 20))
        self.linger_s = self.dice.choice((0.5, 300.0))
        self.is_roomy = self.options.capacity_bytes > 5 * SEGMENT_BYTES
        self.keeper = self.listener = None
        self.storing, self.deletes, self.absent, self.promised = Counter(), Counter(), set(), set()  # By model and key.
        self.stores, self.deleting = Counter(), Counter()
        self.resting, self.all_rest = set(), asyncio.Event()

    # The pool's place, as a keeper and its engines know it.

    def __str__(self):
        return self.name

    def meet(self):
        if self.listener is None or self.listener.closed:
            self._start_keeper()
        ends = self.machine.pair(PROCESS.get(), self.listener.process)
        self.listener.put(ends[1])
        return ends[0]

    def inode(self):
        return id(self.listener)

    def remove_socket(self, _):
        pass

    def lock(self):
        return os.memfd_create(LOCK)

    def _start_keeper(self):
        process = Process(self.machine, "keeper", self._bury)
        self.listener = Listener(self.machine, process)
        process.begin(self._keep(process, self.listener))

    async def _keep(self, process, listener):
        process.keeper = self.keeper = Keeper(self, listener, self.linger_s)
        self.keeper.gate._width_bytes = self.width_bytes
        self.counts["keepers"] += 1
        try:
            await self.keeper.run()
            self.counts["keepers that ended"] += 1
        finally:
            self.promised.clear()
        process.kill()

    def _bury(self, process):
        """Close what the kernel closes of a keeper."""
        keeper = process.keeper
        for session in list(keeper._sessions):
            session.close()
        for namespace in keeper._namespaces.values():
            namespace._close_files()
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
        await asyncio.sleep(self.linger_s + SETTLING_S)
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
            self.machine.faults.clear()
            self.all_rest.set()
        await self.all_rest.wait()
        await asyncio.sleep(SETTLING_S)

    def _bury_engine(self, process):
        if process.tier is not None:
            assert process.tier.counters().corrupt == {}, process.tier.counters().corrupt
            self.storing.subtract(process.storing)
            process.tier._lives.close()
            process.tier._lives.now.close_files()

    async def _opened(self, process, model):
        context = api.TierContext(process.name, api.FileMapper(api.Namespace(model_name=model)), ROW_BYTES)
        async with asyncio.timeout(PATIENCE_S):
            while process.tier is None:
                try:
                    process.tier = await MemoryBackend.open(self.options, context)
                except BackendUnavailable:
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
        await asyncio.sleep(SETTLING_S)
        mapper = tier._lives.now.tier.context.mapper
        table = self.keeper._namespaces[mapper.folder, mapper.fingerprint, ROW_BYTES].catalog.table
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
        writes = [api.Write(key, memoryview(chunk_of(key, ROW_BYTES))) for key in keys]
        named = [(model, key) for key in keys]
        self.absent.difference_update(named)
        self.storing.update(named)
        PROCESS.get().storing.update(named)
        self.stores.update(named)
        keeper, deletes = self.keeper, [self.deletes[name] for name in named]
        outcomes = await tier.store(writes)
        self.storing.subtract(named)  # What ends otherwise may be published until its process has ended.
        PROCESS.get().storing.subtract(named)
        is_kept = keeper is self.keeper and not (self.listener.closed or PROCESS.get().is_cut)
        for name, outcome, count in zip(named, outcomes, deletes, strict=True):
            assert outcome is None or isinstance(outcome, api.NoSpace), outcome
            self.counts["stored" if outcome is None else "no room"] += 1
            if outcome is None and is_kept and self.deletes[name] == count and not self.deleting[name]:
                self.promised.add(name)

    async def _load(self, tier, model, keys):
        reads = [api.Read(key, memoryview(bytearray(ROW_BYTES))) for key in keys]
        absent = {key for key in keys if (model, key) in self.absent}
        for read, outcome in zip(reads, await tier.load(reads), strict=True):
            if outcome is None:
                assert read.into == chunk_of(read.key, ROW_BYTES), f"wrong bytes: {read.key.hex()}"
                assert read.key not in absent or (model, read.key) not in self.absent, f"deleted: {read.key.hex()}"
            else:
                assert isinstance(outcome, ChunkMissing), outcome
            self.counts["missing" if outcome else "loaded"] += 1

    async def _delete(self, tier, model, keys):
        named = {(model, key) for key in keys}
        self.deletes.update(named)
        self.deleting.update(named)
        self.promised -= named
        stores = {name: self.stores[name] for name in named if not self.storing[name]}
        await tier.delete(keys)
        self.deletes.update(named)
        self.deleting.subtract(named)
        self.absent |= {name for name in stores if self.stores[name] == stores[name]}
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
        await asyncio.sleep(SETTLING_S)
        tier = await self._opened(process, model)
        await asyncio.sleep(SETTLING_S)
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
        there = [key for key, is_there in zip(self.keys, await tier.probe(self.keys), strict=True) if is_there]
        reads = [api.Read(key, memoryview(bytearray(ROW_BYTES))) for key in there]
        for read, outcome in zip(reads, await tier.load(reads), strict=True):
            assert outcome is None, outcome
            assert read.into == chunk_of(read.key, ROW_BYTES), f"wrong bytes: {read.key.hex()}"
        if self.is_roomy:
            lost = {key for of, key in self.promised if of == model}.difference(there)
            assert not lost, f"promised and not there: {lost}"
        self.counts["there at the end"] += len(there)
        assert await tier.aclose(PATIENCE_S) == (0,)


def simulate(seed):
    """Run one seed. Raises `SimulationFailed` if any promise was broken."""
    descriptors = open_files()
    errors = []
    with asyncio.Runner(loop_factory=MachineLoop) as runner, ExitStack() as patches:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context.get("exception") or context["message"]))
        for owner, name, stand_in in (
            (api, "Lanes", SimulatedLanes),
            (lanes, "Lanes", SimulatedLanes),
            (room, "SEGMENT_BYTES_LEAST", SEGMENT_BYTES),
            (wire, "UNSENT_BYTES_MAX", random.Random(f"unsent {seed}").choice((3_000, 64 << 20))),
            (time, "monotonic", loop.time),
        ):
            patches.enter_context(mock.patch.object(owner, name, stand_in))
        try:
            host = runner.run(_run(seed))
            errors = [error for error in errors if not isinstance(error, Killed)]
            assert not errors, errors
            left = sorted(open_files() - descriptors)
            assert not left, f"left open: {left}"
        except Exception as error:
            again = f"python -m tests.simulation --hosts --first {seed} --seeds 1"
            raise SimulationFailed(f"seed {seed}: {type(error).__name__}: {error}\n  again: {again}") from error
        virtual_s = loop.time()
    story = repr((sorted(host.counts.items()), virtual_s)).encode()
    return Verdict(seed, hashlib.sha256(story).hexdigest()[:16], host.counts, virtual_s)


def open_files():
    """Return the descriptors of this process, with what they are of."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # That of the list itself.
            found.add((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
    return found


async def _run(seed):
    host = Host(seed)
    with mock.patch.object(Place, "of_pool", return_value=host):
        await host.run()
    return host
