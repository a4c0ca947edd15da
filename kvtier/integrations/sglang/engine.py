"""The engine behind one host pool: staging rows, a runner in its own process, and calls from SGLang's threads.

SGLang calls from three threads: one backs up, one looks up, and one prefetches. Each call holds the lock while it steps
the engine, and releases it to copy pages and to wait: no thread waits for another thread's tier. Every call ends by its
deadline; only a copy in progress, of one part of a batch, may exceed it.
"""

# ruff: noqa: SLF001  The asyncio face does the same: this face and its steps are one engine.
# pyright: reportPrivateUsage=false

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from kvtier.backend import OffloadKey
from kvtier.config import EngineConfig
from kvtier.engine.answers import LookupResult, StorePlan, sources_of
from kvtier.engine.requests import Request, Turn
from kvtier.engine.steps import StepManager
from kvtier.engine.tier import Tier
from kvtier.errors import EngineClosed
from kvtier.memory import let_go_in_forks

TICK_S = 0.05  # Leases and tiers' cool-downs end without a message.

PagePieces = Sequence[Sequence[tuple[int, int]]]  # Address and length of each piece of each page.

logger = logging.getLogger(__name__)


class PoolEngine:
    """One kvtier engine, for threads. `until` is a call's deadline, in seconds of `time.monotonic`.

    Calls after `close`, and those in progress, raise `EngineClosed`.
    """

    def __init__(self, config: EngineConfig, durable: Sequence[int]) -> None:
        """Start the engine and its runner; blocks until the tiers are open.

        `durable`: the places of the tiers whose acknowledgement makes a store succeed, any one of them. Raises
        `ConfigError`, leaving nothing behind, if the configuration cannot be used, and `BackendUnavailable` if a tier
        cannot be opened now.
        """
        self._steps = steps = StepManager.start(config)
        self._ledger = steps.ledger
        self._durable = [self._ledger.tiers[place] for place in durable]
        self._free_locks()
        self._part = config.rows // 2
        self._waiting: set[threading.Event] = set()
        self._ids = count()
        self._memory: Any = np.frombuffer(steps.region.view, np.uint8)  # Keeps rows mapped under a copy.
        self._address: int = self._memory.ctypes.data
        steps._bridge.notify = self._wake
        let_go_in_forks(self)

    @property
    def metrics(self) -> CollectorRegistry:
        return self._steps.metrics

    def find(self, keys: Sequence[OffloadKey], until: float) -> list[bool]:
        """Return which keys are in a tier or in a row. Loads nothing; a tier that does not answer in time has none."""
        request = Request("find")
        with self._lock:
            self._until(lambda: not self._ask(keys, request), until)
            return [self._found(key, request) for key in keys]

    def load(self, keys: Sequence[OffloadKey], pages: PagePieces, until: float) -> list[bool]:
        """Copy the pages that a tier has, verified, to their places, and no others; return which ones came in time."""
        came = [False] * len(keys)
        with self._alone(self._loading, until) as alone, self._lock:
            for start in range(0, len(keys) if alone else 0, self._part):
                part = set(range(start, min(start + self._part, len(keys))))
                with self._request() as request:
                    for place in self._load(keys, pages, part, request, until):
                        came[place] = True
        return came

    def store(self, keys: Sequence[OffloadKey], pages: PagePieces, until: float) -> list[bool]:
        """Store pages; return which ones a durable tier has when the call ends: at once, if none takes chunks now."""
        left = range(len(keys))
        with self._alone(self._storing, until) as alone, self._lock, self._request() as request:
            while alone and left and self._takes():
                if not (stored := self._store(keys, pages, left, request, until)):
                    break
                left = left[stored:]
            self._until(lambda: all(self._settled(key) for key in keys), until)
            return [self._kept(key) for key in keys]

    def clear(self, until: float) -> bool:
        """Delete every key on record from the tiers; return False if the deadline came first."""
        with self._lock:
            keys = {*self._ledger.locations.mask, *self._ledger.primary.ready}
            for tier in self._ledger.tiers:
                keys.update(tier.answered)
            self._steps.forget(list(keys))
            return self._until(lambda: not self._ledger.pending, until)

    def close(self) -> None:
        """Wait up to `limits.close_s` for transfers, and end the runner. Idempotent."""
        with self._lock:
            self._steps.close()
            self._memory = None
        self._wake()

    def forked(self) -> None:
        """Free the locks in a forked child, whose threads are gone; every call raises `EngineClosed` there."""
        self._free_locks()

    # Steps of a call, with the lock held.

    def _load(
        self, keys: Sequence[OffloadKey], pages: PagePieces, waits: set[int], request: Request, until: float
    ) -> Iterator[int]:
        """Look up the keys at these places until each one hits or misses; yield the places whose pages were copied."""
        hits: list[int] = []
        while waits and self._until(lambda: self._look(keys, waits, hits, request), until):
            held = [keys[place] for place in hits]
            rows = self._steps.prepare_load(held, request.id)
            try:
                with self._unlocked():
                    for place, row in zip(hits, rows, strict=True):
                        self._copy(row, pages[place], into_row=False)
            finally:
                if not self._steps._closed:
                    self._steps.complete_load(held, request.id)
            yield from hits
            waits.difference_update(hits)
            self._wake()

    def _look(self, keys: Sequence[OffloadKey], waits: set[int], hits: list[int], request: Request) -> bool:
        """Set `hits` to the places whose pages are in rows, and drop misses from `waits`; True if any changed."""
        turn = request.turn = Turn(mine=True)
        hits.clear()
        for place in sorted(waits):
            result = self._steps.lookup(keys[place], request.id)
            if turn.short:  # The next ones have no row either.
                break
            if result is LookupResult.HIT:
                hits.append(place)
            elif result is LookupResult.MISS:
                waits.discard(place)
        request.turn = None
        return bool(hits) or not waits

    def _store(self, keys: Sequence[OffloadKey], pages: PagePieces, left: range, request: Request, until: float) -> int:
        """Store the next pages that fit; return their number, 0 if there was no room in time."""
        traffic, size = self._ledger.traffic, 0
        plan: StorePlan | None = None

        def reserve() -> bool:
            nonlocal plan, size
            size = min(len(left), traffic.slice_chunks)
            if not traffic.room(size):
                return not self._takes()
            part = [keys[place] for place in left[:size]]
            plan = self._steps.prepare_store([key for key in part if not self._kept(key)], request.id)
            return plan is not None

        if not self._until(reserve, until) or plan is None:
            return 0
        place_of = {keys[place]: place for place in left[:size]}
        done = False
        try:
            with self._unlocked():
                for key, row in zip(plan.keys, plan.rows, strict=True):
                    self._copy(row, pages[place_of[key]], into_row=True)
            done = True
        finally:
            self._steps.complete_store(plan.keys, request.id, success=done)
        again = [key for key in place_of if key in self._ledger.primary.ready and not self._kept(key)]
        for tier in self._ledger.tiers:  # Rows of an earlier store that failed; `cascade` skips those in flight.
            traffic.cascade(again, tier, self._steps._clock())
        self._steps.end_step()
        return size

    def _takes(self) -> bool:
        """Return True if a durable tier takes chunks now."""
        now = self._steps._clock()
        return self._ledger.runner_up and any(tier.admits(now) for tier in self._durable)

    def _kept(self, key: OffloadKey) -> bool:
        """Return True if a durable tier has the key, by its record or its last answer."""
        now, mask = self._steps._clock(), self._ledger.locations.mask.get(key, 0)
        return any(tier.answer(key, mask & tier.bit, now) for tier in self._durable)

    def _settled(self, key: OffloadKey) -> bool:
        return self._kept(key) or not any(key in tier.storing for tier in self._durable)

    def _ask(self, keys: Sequence[OffloadKey], request: Request) -> bool:
        """Probe the tiers that have not answered for a key; return True while a probe is in flight."""
        waits = False
        if not self._ledger.runner_up:
            return False
        for key in keys:
            for tier in self._silent(key, request):
                if (tier.index, key) not in request.search.asked and tier.may_ask(key):
                    tier.ask(key)
                    request.search.asked.add((tier.index, key))
                waits |= key in tier.asking
        return waits

    def _silent(self, key: OffloadKey, request: Request) -> Sequence[Tier]:
        if key in self._ledger.primary.ready:
            return ()
        mask, now = self._ledger.locations.mask.get(key, 0), self._steps._clock()
        having, _, silent, _, _ = sources_of(key, request, request.search, self._ledger.tiers, mask, now)
        return () if having else silent

    def _found(self, key: OffloadKey, request: Request) -> bool:
        ledger = self._ledger
        if key in ledger.primary.ready:
            return True
        mask, now = ledger.locations.mask.get(key, 0), self._steps._clock()
        having, *_ = sources_of(key, request, request.search, ledger.tiers, mask, now)
        return ledger.runner_up and bool(having)

    def _copy(self, row: int, pieces: Sequence[tuple[int, int]], *, into_row: bool) -> None:
        at = self._address + row * self._steps.config.row_bytes
        for address, size in pieces:
            if into_row:
                ctypes.memmove(at, address, size)
            else:
                ctypes.memmove(address, at, size)
            at += size

    def _free_locks(self) -> None:
        self._lock = threading.Lock()
        self._storing, self._loading = threading.Lock(), threading.Lock()  # Each uses half of the rows.

    def _until(self, ready: Callable[[], bool], until: float) -> bool:
        """Step the engine until `ready()`, called within a step; False at the deadline. Other threads get the lock."""
        came = threading.Event()
        self._waiting.add(came)
        try:
            while True:
                came.clear()
                self._steps._check_open()
                self._steps._receive()
                if (left := until - time.monotonic()) <= 0:
                    return False
                if ready():
                    return True
                self._steps.end_step()
                with self._unlocked():
                    came.wait(min(left, TICK_S))
        finally:
            self._waiting.discard(came)

    @contextmanager
    def _unlocked(self) -> Generator[None]:
        memory = self._memory  # Stays mapped here if another thread closes the engine.
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            del memory
        self._steps._check_open()

    @contextmanager
    def _alone(self, lock: threading.Lock, until: float) -> Generator[bool]:
        taken = lock.acquire(timeout=max(0.0, until - time.monotonic()))
        try:
            yield taken
        finally:
            if taken:
                lock.release()

    @contextmanager
    def _request(self) -> Generator[Request]:
        id_ = f"sglang-{next(self._ids)}"
        self._steps.on_new_request(id_)
        try:
            yield self._steps._known(id_)
        finally:
            with suppress(EngineClosed):
                self._steps.on_request_finished(id_)
                self._steps.end_step()

    def _wake(self) -> None:
        for came in tuple(self._waiting):
            came.set()
