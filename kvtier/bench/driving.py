"""A whole engine as its owner drives it: what is stored and loaded through every part of it, step by step."""

import os
import time
from collections.abc import Callable, Sequence
from itertools import count, cycle

from kvtier.config import EngineConfig
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.ledger import LookupResult
from kvtier.manager import TieringOffloadingManager

KEYS_A_REQUEST = 64
STEP_S = 0.002  # Of the engine's own computing, between two looks at what has come.
PAUSE_S = 0.0005  # Between two steps of an engine whose requests wait.
KEYS_A_WAIT = 8
STORED_A_STEP = 16
HOT_REQUESTS = 8  # Looked up in every timed step.
HOT_KEYS = 32
DRAIN_S = 60.0

Between = Callable[["Drive"], None]


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
                f"cpu_bytes_to_use: {config.cpu_bytes_to_use:,} bytes given, at least "
                f"{8 * KEYS_A_WAIT * config.row_bytes:,} accepted: fewer rows are no load to measure"
            )
        self.moved_bytes = self.chunks * config.row_bytes
        self.manager = TieringOffloadingManager.start(config)
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
        (tier,) = self.manager.ledger.tiers
        before = tier.counters.stored
        request = self._begin()
        plan = self.manager.prepare_store(keys, request)
        assert plan is not None, f"no room for {len(keys)} chunks"
        for number, row in enumerate(plan.rows):
            self.manager.region.row(row)[:8] = number.to_bytes(8, "big")
        self.manager.complete_store(plan.keys, request)
        self.manager.on_request_finished(request)
        if not self.manager.drain(DRAIN_S) or tier.counters.stored - before != len(keys):
            reasons = {**tier.counters.failures, **tier.counters.dropped}
            raise ConfigError(f"tier {tier.spec.name}: took {tier.counters.stored - before} of {len(keys)}: {reasons}")

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
        requests = [self._begin() for _ in parts]
        for keys, request in zip(parts, requests, strict=True):
            if any(manager.lookup(key, request) is LookupResult.MISS for key in keys):
                raise self._gone()
        manager.end_step()
        while manager.has_pending_work():
            between(self)
            manager.end_step()
        for keys, request in zip(parts, requests, strict=True):
            if any(manager.lookup(key, request) is not LookupResult.HIT for key in keys):
                raise self._gone()
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
            self.manager.shutdown()

    def _gone(self) -> BackendUnavailable:
        (tier,) = self.manager.ledger.tiers
        lost = self.manager.runners_lost
        why = f"{lost} runners were lost" if lost else f"failures: {tier.counters.failures}"
        return BackendUnavailable(f"tier {tier.spec.name}: chunks that it had did not come back ({why})")

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
        left: Sequence[OffloadKey] = keys
        while left := self.manager.ledger.delete(left):
            self.manager.drain(STEP_S)
        self.manager.drain(DRAIN_S)


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
