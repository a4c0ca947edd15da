"""The scheduler: a model of an LLM engine. Requests wait, look up in every step, load, compute, store, decode and end.

It keeps to the step protocol as an LLM engine's scheduler does. A request whose prefix is on its way stays in the queue
and lets others pass. Chunks that a look-up does not find are computed, so many a step for all requests together, and
stored as they are computed. Every byte that it loads is compared.
"""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier import LookupResult, OffloadKey, TierMatcher
from tests.simulation.witness import chunk_of


class Prompt(NamedTuple):
    """One request: its keys in prefix order, and when it comes."""

    id: str
    keys: Sequence[OffloadKey]
    arrives_s: float = 0.0
    matchers: Sequence[TierMatcher] | None = None
    hint: object = None


class Pace(NamedTuple):
    step_s: float = 0.02
    running_max: int = 16
    prefill_chunks: int = 8  # Computed in one step, by all requests together.
    load_s: float = 0.0  # From `prepare_load` to `complete_load`.
    decode_s: float = 0.5
    failed_stores: float = 0.0  # Share of stores whose copy from the device fails.


class Served(NamedTuple):
    id: str
    hits: int
    waited_s: float  # From its arrival until it ran.


class Scheduler:
    def __init__(self, engine, prompts, pace, *, resets_s=(), seed=0):
        self.served = []
        self._manager, self._steps, self._pace = engine, engine.steps, pace
        self._arriving = deque(sorted(prompts, key=lambda prompt: prompt.arrives_s))
        self._resets = deque(sorted(resets_s))
        self._random = random.Random(seed)
        self._waiting, self._running = list[_Run](), list[_Run]()
        self._now = 0.0

    async def run(self):
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while self._arriving or self._waiting or self._running:
            self._now = loop.time() - begun
            if self._resets and self._now >= self._resets[0]:
                self._resets.popleft()
                self._preempt()
                await self._manager.reset()
            self._arrive()
            self._advance()
            self._schedule()
            self._steps.end_step()
            await asyncio.sleep(self._pace.step_s)
        return self.served

    def _arrive(self):
        while self._arriving and self._arriving[0].arrives_s <= self._now:
            prompt = self._arriving.popleft()
            self._steps.on_new_request(prompt.id, prompt.matchers, hint=prompt.hint)
            self._waiting.append(_Run(prompt))

    def _schedule(self):
        self._waiting = [run for run in self._waiting if self._full or not self._look(run)]

    @property
    def _full(self):
        return len(self._running) >= self._pace.running_max

    def _look(self, run):
        hits, waits = 0, False
        for key in run.prompt.keys:
            result = self._steps.lookup(key, run.prompt.id)
            if result is LookupResult.MISS:
                break
            if result is not LookupResult.HIT:
                waits = True
            elif not waits:
                hits += 1
        if waits:
            return False
        run.hits = run.done = hits
        run.waited_s = self._now - run.prompt.arrives_s
        if hits:
            run.loading = run.prompt.keys[:hits]
            run.rows = self._steps.prepare_load(run.loading, run.prompt.id)
            run.loaded_at = self._now + self._pace.load_s
        self._running.append(run)
        return True

    def _advance(self):
        budget = self._pace.prefill_chunks
        for run in tuple(self._running):
            if run.loading:
                if self._now < run.loaded_at:
                    continue
                self._complete_load(run)
            self._complete_store(run)
            if run.done < len(run.prompt.keys):
                chunks = min(budget, len(run.prompt.keys) - run.done)
                budget -= chunks
                self._compute(run, chunks)
            elif run.ends_at is None:
                run.ends_at = self._now + self._pace.decode_s
                self.served.append(Served(run.prompt.id, run.hits, run.waited_s))
            if run.ends_at is not None and self._now >= run.ends_at:
                self._steps.on_request_finished(run.prompt.id)
                self._running.remove(run)

    def _complete_load(self, run):
        for key, row in zip(run.loading, run.rows, strict=True):
            size_bytes = self._steps.config.chunk_bytes
            assert self._steps.region.row(row)[:size_bytes] == chunk_of(key, size_bytes), f"wrong bytes: {key.hex()}"
        self._steps.complete_load(run.loading, run.prompt.id)
        run.loading = ()

    def _compute(self, run, chunks):
        first = run.done
        run.done += chunks
        plan = self._steps.prepare_store(run.prompt.keys[first : run.done], run.prompt.id) if chunks else None
        if plan is not None:
            size_bytes = self._steps.config.chunk_bytes
            for key, row in zip(plan.keys, plan.rows, strict=True):
                self._steps.region.row(row)[:size_bytes] = chunk_of(key, size_bytes)
            run.storing = plan.keys

    def _complete_store(self, run):
        if run.storing:
            success = self._random.random() >= self._pace.failed_stores
            self._steps.complete_store(run.storing, run.prompt.id, success=success)
            run.storing = ()

    def _preempt(self):
        for run in tuple(self._running):
            if run.loading:
                self._complete_load(run)
            self._complete_store(run)
            if run.ends_at is None:
                self._running.remove(run)
                self._waiting.append(run)


@dataclass(slots=True, eq=False)
class _Run:
    prompt: Prompt
    hits: int = 0
    done: int = 0
    waited_s: float = 0.0
    loaded_at: float = 0.0
    ends_at: float | None = None
    loading: Sequence[OffloadKey] = ()
    rows: Sequence[int] = ()
    storing: Sequence[OffloadKey] = ()
