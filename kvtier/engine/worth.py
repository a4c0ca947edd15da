"""The worth of loads: how much of a request's leading part to load, and how much to compute.

Pure: `loads` does what follows from it for requests, rows and batches. A load's time is predicted by its tier's speed,
for its own bytes and those queued ahead of it. Tiers load side by side, so the slowest one decides when the leading
part is there. The rest is computed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.engine.prefill import EXPLORE_SHARE, PrefillSpeed
from kvtier.engine.tier import Tier

TRIAL_CHUNKS = 2  # Of the first trial of a declined tier,
TRIAL_GROWTH = 4  # and times as many in the next one, while that takes less than computing the declined chunks.
TRIAL_EVERY_S = 1.0


class LoadRun:
    """Neighbouring keys that a request wants from one tier."""

    __slots__ = ("alternatives", "common", "keys", "start", "tier", "too_slow")

    def __init__(self, tier: Tier, start: int) -> None:
        self.tier = tier
        self.start = start  # Place of the first key among all that the request has found in the step.
        self.keys: list[OffloadKey] = []
        self.alternatives = False  # A further tier has some of it, or has not answered yet.
        self.too_slow: Sequence[Tier] = ()  # Were passed over for its last keys,
        self.common = 0  # for this many of them.

    def append(self, key: OffloadKey, too_slow: Sequence[Tier], *, alternatives: bool) -> None:
        self.keys.append(key)
        self.alternatives = self.alternatives or alternatives
        if too_slow != self.too_slow:
            self.too_slow, self.common = too_slow, 0
        self.common += 1

    def cut(self, chunks: int) -> Sequence[OffloadKey]:
        """Remove the last keys and return them."""
        gone = self.keys[-chunks:]
        del self.keys[-chunks:]
        return gone

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


class Choice(NamedTuple):
    """The leading part that is worth its load."""

    end: int  # A place among the keys that the request has found in the step.
    seconds: float  # Predicted for its load; 0 if unknown, or if nothing is loaded.
    computing_s: float  # Predicted for computing it.


class Worth:
    """Weighs loads against computing. Off while the prefill speed is unknown."""

    def __init__(self, prefill: PrefillSpeed, *, chunk_tokens: int, row_bytes: int, late_margin: float) -> None:
        self._prefill = prefill
        self.chunk_tokens = chunk_tokens
        self._row_bytes = row_bytes
        self._late_margin = late_margin
        self.token_s = 0.0
        """Seconds to compute one token, in this step; 0: loads are not weighed."""
        self.begin_step()

    def begin_step(self) -> None:
        """Take the present prefill speed for a whole step."""
        speed = self._prefill.tokens_per_s
        self.token_s = 0.0 if speed is None else 1.0 / speed

    @property
    def chunk_s(self) -> float:
        """Seconds to compute one chunk."""
        return self.chunk_tokens * self.token_s

    def wait_max_s(self, computing_s: float) -> float:
        """Return how long to wait for chunks whose computing takes `computing_s`."""
        return self._late_margin * computing_s

    def computing_s(self, wait_max_s: float) -> float:
        """Return the inverse of `wait_max_s`."""
        return wait_max_s / self._late_margin

    def never(self, tier: Tier) -> bool:
        """Return True if each chunk of this tier takes longer to load than to compute, however many there are."""
        speed = tier.speed
        return speed is not None and speed.s_per_byte * self._row_bytes >= self.chunk_s

    def load_s(self, tier: Tier, chunks: int, now: float) -> float:
        """Return the predicted time of a load behind those that the tier has in flight.

        A tier without a speed loads for one request first; others do not wait for it.
        """
        if tier.speed is None:
            return math.inf if tier.loading else 0.0
        size_bytes = self.size_bytes(tier, chunks)
        return tier.speed.seconds(size_bytes) * tier.slowdown(size_bytes, now)

    def size_bytes(self, tier: Tier, chunks: int) -> int:
        """Return the bytes of `chunks`, and of those that the tier has in flight."""
        return (tier.loading + chunks) * self._row_bytes

    def choose(self, runs: Sequence[LoadRun], looked_up: int, ahead: Mapping[Tier, int], now: float) -> Choice:
        """Choose the leading runs whose load saves most time.

        `looked_up` is the number of keys that the request has found; those between the runs are in the primary.
        `ahead` are the chunks of this step that each tier loads first.
        """
        first, chunk_s = runs[0].start, self.chunk_s
        best, chunks, slowest_s = Choice(first, 0.0, 0.0), dict(ahead), 0.0
        ends = [*(run.start for run in runs[1:]), looked_up]
        for run, end in zip(runs, ends, strict=True):
            chunks[run.tier] = chunks.get(run.tier, 0) + len(run.keys)
            slowest_s = max(slowest_s, self.load_s(run.tier, chunks[run.tier], now))
            computing_s = (end - first) * chunk_s
            if computing_s - slowest_s > best.computing_s - best.seconds:
                best = Choice(end, slowest_s, computing_s)
        return best

    def choose_all(
        self, runs: Sequence[LoadRun], looked_up: int, tokens: int, ahead: Mapping[Tier, int], now: float
    ) -> Choice:
        """Choose all or nothing, where a leading part is of no use by itself: for models with several groups."""
        chunks = dict(ahead)
        for run in runs:
            chunks[run.tier] = chunks.get(run.tier, 0) + len(run.keys)
        seconds = max(self.load_s(run.tier, chunks[run.tier], now) for run in runs)
        computing_s = tokens * self.token_s
        return Choice(looked_up, seconds, computing_s) if seconds < computing_s else Choice(runs[0].start, 0.0, 0.0)

    def computes_anyway(self, choice: Choice, now: float) -> bool:
        """Return True if a request is to compute chunks that are worth their load, to measure the prefill speed.

        The measurement counts as done.
        """
        if not choice.seconds:
            return False
        return self._prefill.explores(choice.computing_s / self.token_s, choice.computing_s - choice.seconds, now)

    def trial_due(self, tier: Tier, now: float) -> bool:
        """Return True if a tier that was declined or passed over is to be tried again."""
        return not tier.loading and now - tier.tried_at >= TRIAL_EVERY_S

    def trial_chunks(self, tier: Tier, wanted: int, most: int, now: float, *, costs: bool = False) -> int:
        """Return how many chunks to load from a tier as a trial, up to `most`; 0 if none is due.

        `wanted`: the chunks that a request would load from it. Few chunks show what a call costs, and many what their
        bytes cost. A tier on which many are a burden gets fewer. `costs`: the request computes them, although another
        tier would load them. Then trials wait, so that they take a small share of the time.
        """
        if not self.trial_due(tier, now):
            return 0
        last, chunks = tier.trial, TRIAL_CHUNKS
        if last is not None and last.seconds < wanted * self.chunk_s:
            chunks = TRIAL_GROWTH * last.chunks
        chunks = min(chunks, most)
        if costs and now - tier.tried_at < chunks * self.chunk_s / EXPLORE_SHARE:
            return 0
        if chunks:
            tier.trial, tier.tried_at = None, now
        return chunks
