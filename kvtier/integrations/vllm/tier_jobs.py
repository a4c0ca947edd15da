"""What is under way for a manager that is not kvtier's: its jobs, the parts they are sent in, and what became of them.

A job is over only when nothing uses its rows any more: whoever gave it has no quarantine for rows that come back late.
"""

import time
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from kvtier.bridge.messages import Action, Cascade, Probe, Promote
from kvtier.bridge.packing import pack_keys, pack_rows
from kvtier.keys import OffloadKey
from kvtier.request import Request
from kvtier.tier import Tier


class Way(Enum):
    """Which way a job's chunks go; the values are the operations' names in metrics."""

    LOAD = "load"
    STORE = "store"


class Done(NamedTuple):
    """A job that is over: the keys that moved; `whole` unless one had to and did not."""

    job_id: int
    moved: Sequence[OffloadKey]
    whole: bool
    seconds: float


class Job:
    """A job in parts of at most `action_chunks` chunks."""

    def __init__(self, job_id: int, way: Way, request: Request) -> None:
        self.job_id = job_id
        self.way = way
        self.request = request
        self.begun = time.monotonic()
        self.parts = 0
        self.moved: list[OffloadKey] = []
        self.whole = True

    @property
    def done(self) -> Done:
        return Done(self.job_id, self.moved, self.whole, time.monotonic() - self.begun if self.moved else 0.0)


class Part(NamedTuple):
    """One action under way."""

    job: Job | None  # None: a probe.
    keys: Sequence[OffloadKey]
    epoch: int


class Jobs:
    """Parts under way by action id, and the jobs that are over and were not told yet."""

    def __init__(self, tier: Tier, action_chunks: int) -> None:
        self.parts: dict[int, Part] = {}
        self.done: list[Done] = []
        self.epoch = 0  # Of the runner that takes actions now.
        self._tier = tier
        self._action_chunks = action_chunks
        self._overdue: set[int] = set()  # Parts that failed in time, and whose rows have yet to come back.
        self._ids = 0

    def begin(self, job: Job, chunks: Sequence[tuple[OffloadKey, int]]) -> Iterator[Action]:
        """Enter a job over these keys and rows, and yield its actions; one without any is over."""
        kind = Promote if job.way is Way.LOAD else Cascade
        for start in range(0, len(chunks), self._action_chunks):
            keys, rows = zip(*chunks[start : start + self._action_chunks], strict=True)
            job.parts += 1
            yield kind(self._enter(job, keys), self._tier.index, pack_keys(keys), pack_rows(rows))
        if not chunks:
            self.done.append(job.done)

    def ask(self, keys: Sequence[OffloadKey]) -> Iterator[Action]:
        """Enter probes of these keys."""
        for start in range(0, len(keys), self._action_chunks):
            some = keys[start : start + self._action_chunks]
            yield Probe(self._enter(None, some), self._tier.index, pack_keys(some))

    def take_done(self) -> list[Done]:
        done, self.done = self.done, []
        return done

    def late(self, id_: int) -> None:
        """Note that a part has failed, and that its rows are still in use."""
        self._overdue.add(id_)
        self._tier.overdue_rows += len(self.parts[id_].keys)

    def is_late(self, id_: int) -> bool:
        return id_ in self._overdue

    def leave(self, id_: int) -> Part | None:
        """Note that nothing uses a part's rows any more, and return it; the last part ends its job."""
        part = self.parts.pop(id_, None)
        if part is None:
            return None
        if id_ in self._overdue:
            self._overdue.discard(id_)
            self._tier.overdue_rows -= len(part.keys)
        if part.job is not None:
            part.job.parts -= 1
            if part.job.parts == 0:
                self.done.append(part.job.done)
        return part

    def of(self, epoch: int) -> list[tuple[int, Part]]:
        """Return what a runner has."""
        return [(id_, part) for id_, part in self.parts.items() if part.epoch == epoch]

    def _enter(self, job: Job | None, keys: Sequence[OffloadKey]) -> int:
        self._ids += 1
        self.parts[self._ids] = Part(job, keys, self.epoch)
        return self._ids
