"""The benchmark of one tier through a whole engine: rates, waits and steps, at rest and under load.

The limit of loads and stores is plain threads in the same directory (fs), the tier's bare client (`Limit`), or a
memcpy. What load costs stands next to the same without it: loads while the engine computes in Python, and waits and
steps while it stores.
"""

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, cycle
from typing import Any

from msgspec.structs import replace

from kvtier.backend import OffloadKey, backend_class, make_offload_key
from kvtier.config import EngineConfig, tier_options
from kvtier.engine.answers import LookupResult
from kvtier.engine.steps import StepManager
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.memory import Region
from kvtier.settings import shown_bytes
from kvtier.tools.bench.figures import Pair, Row, Setting, Side, measured_rows, rate_of, row_of
from kvtier.tools.bench.raw import RawFile, takes_direct

KEYS_A_REQUEST = 64
STEP_S = 0.002  # Computing between two steps of a busy engine.
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
PRIMARY_SHARES = 4  # The primary has at most this multiple of the moved bytes; more only takes time to prepare.
SIDES = 9  # Measurements of one tier in a round.


class Drive:
    """One engine with one tier, and the chunks that stay in the tier to be loaded."""

    def __init__(self, config: EngineConfig, size_bytes: int) -> None:
        """Start the engine and store the chunks to be loaded. Raises `ConfigError` if it is too small."""
        (tier,) = config.secondary_tiers
        limits = config.limits
        self.chunks = min(
            max(2 * KEYS_A_WAIT, size_bytes // config.row_bytes),
            int(config.rows * min(limits.lease_share, limits.cascade_share)) // 2,  # A flood of stores needs room, too.
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
        self._extra: list[OffloadKey] = []  # Stored by measurements, to be removed.
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
        """Delete the chunks that measurements stored."""
        self._delete(self._extra)
        self._extra = []

    def forget(self) -> None:
        """Empty the primary, so that loads come from the tier."""
        if not self.manager.reset():
            raise self._gone()
        self.manager.on_reset_flushed()

    def load(self, between: Between) -> None:
        """Load every chunk from the tier; call `between` between the steps."""
        manager = self.manager
        parts = [self.kept[start : start + KEYS_A_REQUEST] for start in range(0, self.chunks, KEYS_A_REQUEST)]
        asked = [(keys, self._begin()) for keys in parts]
        while True:  # Twice; once more if the tier's answer has expired.
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
        """Return the waits in ms of requests for 8 chunks each, one after the other, alone or during stores."""
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
        """Return the durations in ms of steps that look up ready chunks, at rest or during transfers."""
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
        """Delete all chunks and close the engine."""
        try:
            self._delete([*self.kept, *self._extra])
        finally:
            self.manager.close()

    def _gone(self) -> BackendUnavailable:
        (tier,) = self.manager.stats().tiers
        lost = self.manager.stats().runners_lost
        why = f"{lost} runners were lost" if lost else f"failures: {tier.failed}"
        return BackendUnavailable(f"tier {tier.name}: chunks that it had did not come back ({why})")

    def _begin(self) -> str:
        request = str(next(self._requests))
        self.manager.on_new_request(request)
        return request

    def _wait_for(self, keys: Sequence[OffloadKey], *, flooded: bool) -> float:
        """Look the keys up until all are ready; return the seconds since the first look-up."""
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
        """Return the duration of a step in which requests look up ready chunks."""
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
        """Start as many stores as there is room for, without waiting. The bytes of the rows are arbitrary."""
        request = self._begin()
        keys = new_keys(STORED_A_STEP)
        plan = self.manager.prepare_store(keys, request)
        if plan is not None:
            self.manager.complete_store(plan.keys, request)
            self._extra += keys
        self.manager.on_request_finished(request)

    def _look_at(self, keys: Sequence[OffloadKey]) -> None:
        """Start loads for a request that ends without waiting for them."""
        request = self._begin()
        for key in keys:
            self.manager.lookup(key, request)
        self.manager.on_request_finished(request)

    def _delete(self, keys: Sequence[OffloadKey]) -> None:
        """Delete a few calls at a time: a slow tier cannot answer thousands within its deadline."""
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
    """Return random keys, which no other engine uses."""
    return [make_offload_key(os.urandom(32)) for _ in range(number)]


def wait(drive: Drive) -> None:
    """Wait between two steps, as an idle engine does."""
    drive.manager.drain(STEP_S)


def compute(_: Drive) -> None:
    """Keep the owner's thread and the GIL busy in Python."""
    until = time.perf_counter() + STEP_S
    total = 0
    while time.perf_counter() < until:
        total += sum(range(50))


def primary_bytes(size_bytes: int, row_bytes: int) -> int:
    """Return the size of a primary that can move `size_bytes` at once."""
    return max(PRIMARY_SHARES * size_bytes, 64 * row_bytes)


def measure_tier(config: EngineConfig, size_bytes: int, rounds: int, step: Callable[[], None]) -> Iterator[Row]:
    """Yield the rows of an engine's one tier; `step` is called after each measurement."""
    room = min(config.cpu_bytes_to_use, primary_bytes(size_bytes, config.row_bytes))
    config = replace(config, cpu_bytes_to_use=room, runner="process")
    with ExitStack() as stack:
        sides, limit_is = _sides(config, size_bytes, stack)
        yield from measured_rows(sides, rounds, partial(_rows, config, limit_is), step)


def _sides(config: EngineConfig, size_bytes: int, stack: ExitStack) -> tuple[list[Side], str]:
    """Return the measurements, and the limit of loads and stores in words."""
    drive = Drive(config, size_bytes)
    stack.callback(drive.close)
    (read, write), limit_is = _limits(config, drive, stack)
    moved = partial(rate_of, moved_bytes=drive.moved_bytes)
    return [
        Side("store", moved(drive.store_new), tidy=drive.remove_new),
        Side("load", moved(lambda: drive.load(wait)), prepare=drive.forget),
        Side("load, busy", moved(lambda: drive.load(compute)), prepare=drive.forget),
        Side("wait", lambda: _p99(drive.waits(WAITS, flooded=False))),
        Side("wait, flooded", lambda: _p99(drive.waits(WAITS, flooded=True)), tidy=drive.remove_new),
        Side("step", lambda: _p99(drive.step_times(STEPS, busy=False))),
        Side("step, busy", lambda: _p99(drive.step_times(STEPS, busy=True)), tidy=drive.remove_new),
        Side("read limit", read),
        Side("write limit", write),
    ], limit_is


def _p99(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def _limits(
    config: EngineConfig, drive: Drive, stack: ExitStack
) -> tuple[tuple[Callable[[], float], Callable[[], float]], str]:
    """Return measurements of the fastest reads and writes in MB/s, and their description."""
    (tier,) = config.secondary_tiers
    region = stack.enter_context(Region.private(2 * drive.chunks, config.row_bytes))
    rows = [region.row(index) for index in range(2 * drive.chunks)]
    for row in rows:
        stack.callback(row.release)
    if tier.type == "fs":
        options: Any = tier_options(tier, "secondary_tiers[]")
        path = os.path.join(options.root, f".kvtier-raw-{os.getpid()}")
        raw = RawFile(path, rows[: drive.chunks], direct=_is_direct(options))
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


def _is_direct(options: Any) -> bool:
    return options.io != "buffered" and takes_direct(options.root)


def _plain_copies(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Callable[[], None]:
    """Return a function that copies buffer by buffer with memcpy. Addresses are looked up in advance."""
    pairs = [(_address(target), _address(source)) for target, source in zip(targets, sources, strict=True)]
    size = len(sources[0])

    def copy() -> None:
        for target, source in pairs:
            ctypes.memmove(target, source, size)

    return copy


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _rows(config: EngineConfig, limit_is: str, measured: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    (tier,) = config.secondary_tiers
    settings: dict[str, Setting] = {"tier": tier.name}
    stores, loads = dict(settings), dict(settings)
    if tier.type == "fs":
        options: Any = tier_options(tier, "secondary_tiers[]")
        io = "direct" if _is_direct(options) else "buffered"
        of_fs = {"layout": options.layout, "io": io, "fsync": options.fsync}
        stores |= of_fs | {"depth": options.store_lanes}
        loads |= of_fs | {"depth": options.load_lanes}
    alone = "the same at rest"
    for operation, unit, figure, limit, words, own in (
        ("store", "MB/s", "store", "write limit", limit_is, stores),
        ("load", "MB/s", "load", "read limit", limit_is, loads),
        ("load, engine busy in Python", "MB/s", "load, busy", "load", "the same, engine idle", settings),
        ("p99 of waits for a load during stores", "ms", "wait, flooded", "wait", alone, settings),
        ("p99 of steps during transfers", "ms", "step, busy", "step", alone, settings),
    ):
        yield row_of(Pair(operation, config.row_bytes, own, unit, figure, limit, words), measured)
