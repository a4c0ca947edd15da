"""The benchmark of a configuration's tiers, each through a whole engine: rates, waits, steps, at rest and under load.

Loads and stores stand beside what plain threads do in the same directory (fs tiers), what a tier's client does by
itself (`Limit`), or a memcpy. What load costs stands beside the same without it: loads while the engine computes in
Python, waits and steps beside stores.
"""

import ctypes
import os
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, count, cycle
from typing import Any

from msgspec.structs import replace

from kvtier.backend import OffloadKey, backend_class, make_offload_key
from kvtier.config import EngineConfig, tier_options
from kvtier.engine.answers import LookupResult
from kvtier.engine.steps import StepManager
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.memory import Region
from kvtier.settings import shown_bytes
from kvtier.tools.bench.figures import Pair, Row, Setting, Side, measured_rows, rate_of, row_of, steps_of
from kvtier.tools.bench.raw import RawFile, takes_direct
from kvtier.tools.replay.report import Distribution, distribution

KEYS_A_REQUEST = 64
STEP_S = 0.002  # Of the engine's own computing, between two looks at what has come.
PAUSE_S = 0.0005  # Between two steps of an engine whose requests wait.
KEYS_A_WAIT = 8
STORED_A_STEP = 16
HOT_REQUESTS = 8  # Looked up in every timed step.
HOT_KEYS = 32
DELETED_AT_ONCE = 256  # Four calls.
DRAIN_S = 60.0

Between = Callable[["Drive"], None]
WAITS = 100  # A round.
STEPS = 200
PRIMARY_SHARES = 4  # The primary is at most so many times what is moved: larger ones only take time to prepare.
SIDES = 9


class Drive:
    """One engine with one tier, and the chunks that lie in it all the time."""

    def __init__(self, config: EngineConfig, size_bytes: int) -> None:
        """Start the engine and store what loads will find. `ConfigError` if it does not take it."""
        (tier,) = config.secondary_tiers
        limits = config.limits
        self.chunks = min(
            max(2 * KEYS_A_WAIT, size_bytes // config.row_bytes),
            int(config.rows * min(limits.lease_share, limits.cascade_share)) // 2,  # A flood beside them needs room.
            tier.limits.store_chunks_in_flight,
            tier.limits.store_bytes_in_flight // config.row_bytes,
        )
        if self.chunks < 2 * KEYS_A_WAIT:
            raise ConfigError(
                f"cpu_bytes_to_use: {shown_bytes(config.cpu_bytes_to_use)} given, at least "
                f"{shown_bytes(8 * KEYS_A_WAIT * config.row_bytes)} accepted: fewer rows are no load to measure"
            )
        self.moved_bytes = self.chunks * config.row_bytes
        self.manager = StepManager.start(config)
        self._requests = count()
        self._extra: list[OffloadKey] = []  # Stored meanwhile, and to be removed.
        self.kept = new_keys(self.chunks)
        try:
            self.store(self.kept)
        except BaseException:
            self.close()
            raise

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store chunks and wait until they are in the tier. `ConfigError` if some are not."""
        (before,) = self.manager.stats().tiers
        request = self._begin()
        plan = self.manager.prepare_store(keys, request)
        assert plan is not None, f"no room for {len(keys)} chunks"
        for number, row in enumerate(plan.rows):
            self.manager.region.row(row)[:8] = number.to_bytes(8, "big")
        self.manager.complete_store(plan.keys, request)
        self.manager.on_request_finished(request)
        drained = self.manager.drain(DRAIN_S)
        (tier,) = self.manager.stats().tiers
        if not drained or tier.stored - before.stored != len(keys):
            reasons = {**tier.failed, **tier.dropped}
            raise ConfigError(f"tier {tier.name}: took {tier.stored - before.stored} of {len(keys)}: {reasons}")

    def store_new(self) -> None:
        self._extra = new_keys(self.chunks)
        self.store(self._extra)

    def remove_new(self) -> None:
        """Have the tier forget what was stored meanwhile."""
        self._delete(self._extra)
        self._extra = []

    def forget(self) -> None:
        """Empty the primary: what is in the tier must come from there."""
        if not self.manager.reset():
            raise self._gone()
        self.manager.on_reset_flushed()

    def load(self, between: Between) -> None:
        """Have every chunk come from the tier, doing something between the steps."""
        manager = self.manager
        parts = [self.kept[start : start + KEYS_A_REQUEST] for start in range(0, self.chunks, KEYS_A_REQUEST)]
        asked = [(keys, self._begin()) for keys in parts]
        while True:  # Twice; once more where the tier has to be asked first, as its answer has grown old.
            results = {manager.lookup(key, request) for keys, request in asked for key in keys}
            if LookupResult.MISS in results:
                raise self._gone()
            if results == {LookupResult.HIT}:
                break
            manager.end_step()
            while manager.has_pending_work():
                between(self)
                manager.end_step()
        for _, request in asked:
            manager.on_request_finished(request)
        manager.end_step()

    def waits(self, number: int, *, flooded: bool) -> list[float]:
        """Return the ms that requests for 8 chunks each wait, one after the other, without or beside stores."""
        waited: list[float] = []
        groups = self.chunks // KEYS_A_WAIT
        for index in range(number):
            if index % groups == 0:
                self.manager.drain(DRAIN_S)
                self.forget()
            start = index % groups * KEYS_A_WAIT
            waited.append(1e3 * self._wait_for(self.kept[start : start + KEYS_A_WAIT], flooded=flooded))
        self.manager.drain(DRAIN_S)
        return waited

    def step_times(self, number: int, *, busy: bool) -> list[float]:
        """Return the ms of steps that look up what is ready, with nothing or with stores and loads under way."""
        self.manager.drain(DRAIN_S)
        self.forget()
        self.load(wait)
        hot_keys = min(HOT_KEYS, self.chunks // 2)
        hot, rest = self.kept[:hot_keys], cycle(self.kept[hot_keys:])
        times: list[float] = []
        for _ in range(number):
            if busy:
                self._flood()
                self._look_at([next(rest) for _ in range(KEYS_A_WAIT)])
            self.manager.end_step()
            time.sleep(PAUSE_S)
            times.append(1e3 * self._timed_step(hot))
        self.manager.drain(DRAIN_S)
        return times

    def close(self) -> None:
        """Remove what was stored, and shut the engine down."""
        try:
            self._delete([*self.kept, *self._extra])
        finally:
            self.manager.close()

    def _gone(self) -> BackendUnavailable:
        (tier,) = self.manager.stats().tiers
        lost = self.manager.runners_lost
        why = f"{lost} runners were lost" if lost else f"failures: {tier.failed}"
        return BackendUnavailable(f"tier {tier.name}: chunks that it had did not come back ({why})")

    def _begin(self) -> str:
        request = str(next(self._requests))
        self.manager.on_new_request(request)
        return request

    def _wait_for(self, keys: Sequence[OffloadKey], *, flooded: bool) -> float:
        """Look the keys up until all are there; return the seconds from the first look."""
        manager, request = self.manager, self._begin()
        begun = time.perf_counter()
        while True:
            results = [manager.lookup(key, request) for key in keys]
            if all(result is LookupResult.HIT for result in results):
                break
            if LookupResult.MISS in results:
                raise self._gone()
            if flooded:
                self._flood()
            manager.end_step()
            time.sleep(PAUSE_S)
        seconds = time.perf_counter() - begun
        manager.prepare_load(keys, request)
        manager.complete_load(keys, request)
        manager.on_request_finished(request)
        manager.end_step()
        return seconds

    def _timed_step(self, hot: Sequence[OffloadKey]) -> float:
        """Make a step of some requests that look up what is ready; outcomes that came are applied in it."""
        manager = self.manager
        begun = time.perf_counter()
        requests = [self._begin() for _ in range(HOT_REQUESTS)]
        for request in requests:
            for key in hot:
                manager.lookup(key, request)
        manager.end_step()
        for request in requests:
            manager.on_request_finished(request)
        return time.perf_counter() - begun

    def _flood(self) -> None:
        """Store what there is room for, as an engine that never waits; the rows' bytes are whatever lies there."""
        request = self._begin()
        keys = new_keys(STORED_A_STEP)
        plan = self.manager.prepare_store(keys, request)
        if plan is not None:
            self.manager.complete_store(plan.keys, request)
            self._extra += keys
        self.manager.on_request_finished(request)

    def _look_at(self, keys: Sequence[OffloadKey]) -> None:
        """Have keys come that are not there, for a request that does not wait for them."""
        request = self._begin()
        for key in keys:
            self.manager.lookup(key, request)
        self.manager.on_request_finished(request)

    def _delete(self, keys: Sequence[OffloadKey]) -> None:
        """Delete some at a time: a slow tier would answer few of thousands within its deadline."""
        for start in range(0, len(keys), DELETED_AT_ONCE):
            left: Sequence[OffloadKey] = keys[start : start + DELETED_AT_ONCE]
            while left := self.manager.delete(left):
                self.manager.drain(STEP_S)
            if not self.manager.drain(DRAIN_S):
                (tier,) = self.manager.config.secondary_tiers
                raise BackendUnavailable(
                    f"tier {tier.name}: deletions did not end within {DRAIN_S:g} s; up to {len(keys) - start:,} chunks "
                    "of this run are left in it"
                )


def new_keys(number: int) -> list[OffloadKey]:
    """Return keys that nobody has: a tier that others use, too, keeps what it holds."""
    return [make_offload_key(os.urandom(32)) for _ in range(number)]


def wait(drive: Drive) -> None:
    """Do nothing between two steps: an engine that is idle."""
    drive.manager.drain(STEP_S)


def compute(_: Drive) -> None:
    """Keep the owner's thread, and its GIL, busy in Python."""
    until = time.perf_counter() + STEP_S
    total = 0
    while time.perf_counter() < until:
        total += sum(range(50))


def measure_tiers(config: EngineConfig, size_bytes: int, rounds: int, step: Callable[[], None]) -> Iterator[Row]:
    """Yield the rows of every tier of a configuration whose fs tiers have their roots; each tier is alone."""
    for tier in config.secondary_tiers:
        room = min(config.cpu_bytes_to_use, max(PRIMARY_SHARES * size_bytes, 64 * config.row_bytes))
        alone = replace(config, secondary_tiers=(tier,), cpu_bytes_to_use=room, runner="process")
        times = Times()
        with ExitStack() as stack:
            sides, moved_as = _sides(alone, size_bytes, times, stack)
            yield from measured_rows(sides, rounds, partial(_rows, alone, moved_as, times), step)


def whole_steps(config: EngineConfig, rounds: int) -> int:
    return len(config.secondary_tiers) * steps_of(SIDES, rounds)


class Times:
    """The times that quantiles are of, by side."""

    def __init__(self) -> None:
        self._rounds: dict[str, list[array[float]]] = {}

    def p99(self, name: str, times_ms: Callable[[], Sequence[float]]) -> Side:
        """Return a side whose figure is the 99th percentile of such times, which are kept."""

        def measure() -> float:
            taken_ms = times_ms()
            self._rounds.setdefault(name, []).append(array("d", (each / 1e3 for each in taken_ms)))
            return statistics.quantiles(taken_ms, n=100, method="inclusive")[98]

        return Side(name, measure)

    def distributions(self) -> dict[str, Distribution]:
        """Return them without those of the first round, which is not counted."""
        return {
            name: distribution(array("d", chain.from_iterable(rounds[1:]))) for name, rounds in self._rounds.items()
        }


def _sides(config: EngineConfig, size_bytes: int, times: Times, stack: ExitStack) -> tuple[list[Side], str]:
    """Return what is measured, and what the limit of loads and stores is."""
    drive = Drive(config, size_bytes)
    stack.callback(drive.close)
    (read, write), limit_is = _limits(config, drive, stack)
    moved = partial(rate_of, moved_bytes=drive.moved_bytes)
    return [
        Side("store", moved(drive.store_new), tidy=drive.remove_new),
        Side("load", moved(lambda: drive.load(wait)), prepare=drive.forget),
        Side("load, busy", moved(lambda: drive.load(compute)), prepare=drive.forget),
        times.p99("wait", lambda: drive.waits(WAITS, flooded=False)),
        times.p99("wait, flooded", lambda: drive.waits(WAITS, flooded=True))._replace(tidy=drive.remove_new),
        times.p99("step", lambda: drive.step_times(STEPS, busy=False)),
        times.p99("step, busy", lambda: drive.step_times(STEPS, busy=True))._replace(tidy=drive.remove_new),
        Side("read limit", read),
        Side("write limit", write),
    ], limit_is


def _limits(
    config: EngineConfig, drive: Drive, stack: ExitStack
) -> tuple[tuple[Callable[[], float], Callable[[], float]], str]:
    """Return what measures how fast bytes can be read and written at all, as MB/s."""
    (tier,) = config.secondary_tiers
    region = stack.enter_context(Region.private(2 * drive.chunks, config.row_bytes))
    rows = [region.row(index) for index in range(2 * drive.chunks)]
    for row in rows:
        stack.callback(row.release)
    if tier.type == "fs":
        options: Any = tier_options(tier, "secondary_tiers[]")
        direct = options.io != "buffered" and takes_direct(options.root)
        raw = RawFile(os.path.join(options.root, f".kvtier-raw-{os.getpid()}"), rows[: drive.chunks], direct=direct)
        stack.callback(raw.close)
        sync = options.fsync
        return (
            lambda: raw.read(options.load_lanes) / 1e6,
            lambda: raw.write(options.store_lanes, sync=sync) / 1e6,
        ), "preadv and pwritev of one file"
    limit = backend_class(tier.type).limit(tier_options(tier, "secondary_tiers[]"), rows[: drive.chunks])
    if limit is not None:
        stack.callback(limit.close)
        return (rate_of(limit.read, drive.moved_bytes), rate_of(limit.write, drive.moved_bytes)), limit.limit_is
    measure = rate_of(_plain_copies(rows[drive.chunks :], rows[: drive.chunks]), drive.moved_bytes)
    return (measure, measure), "memcpy"


def _plain_copies(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Callable[[], None]:
    """Return a copy of buffer by buffer with memcpy alone, between addresses that are looked up here."""
    pairs = [(_address(target), _address(source)) for target, source in zip(targets, sources, strict=True)]
    size = len(sources[0])

    def copy() -> None:
        for target, source in pairs:
            ctypes.memmove(target, source, size)

    return copy


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _rows(config: EngineConfig, moved_as: str, times: Times, measured: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    (tier,) = config.secondary_tiers
    settings: dict[str, Setting] = {"tier": tier.name}
    alone, distributions = "the same with nothing beside it", times.distributions()
    for operation, unit, figure, limit, limit_is in (
        ("store", "MB/s", "store", "write limit", moved_as),
        ("load", "MB/s", "load", "read limit", moved_as),
        ("load, engine busy in Python", "MB/s", "load, busy", "load", "the same, engine idle"),
        ("p99 of waits for a load beside stores", "ms", "wait, flooded", "wait", alone),
        ("p99 of steps beside transfers", "ms", "step, busy", "step", alone),
    ):
        pair = Pair(operation, config.row_bytes, settings, unit, figure, limit, limit_is)
        yield row_of(pair, measured, distributions)
