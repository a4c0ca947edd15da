"""The worth of loads: a request's leading part is loaded as far as that saves most time against computing it.

It is computed here; what follows from it for requests, rows and loads is done by `weighing`.

A load is expected to take what its tier's speed says for its bytes and those ahead of it. Several tiers load side by
side, so that the slowest of them decides when the leading part is there. What follows it is computed.

A tier whose loads are declined is heard of no more. So now and then a few chunks are loaded for nobody, to see whether
it has become faster.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtier.engine.outbox import Run
from kvtier.engine.prefill import EXPLORE_SHARE, PrefillSpeed
from kvtier.engine.tier import Tier

EXPLORED_CHUNKS = 2  # Loaded for nobody at first,
EXPLORED_TIMES = 4  # and so many times as many next, while that takes less than computing what was declined.
EXPLORE_EVERY_S = 1.0  # In every tier that is declined; at once where the last ones came much faster than expected.


class Choice(NamedTuple):
    """The leading part that is worth its load."""

    end: int  # Its end, as a place among what the request looked up in the step.
    seconds: float  # That its load is expected to take; 0 if that is not known, or nothing is loaded.
    computing_s: float  # That computing it would take.


class Worth:
    """Weighs loads against computing. Off while the prefill speed is not known."""

    def __init__(self, prefill: PrefillSpeed, *, chunk_tokens: int, row_bytes: int, late_margin: float) -> None:
        self._prefill = prefill
        self.chunk_tokens = chunk_tokens
        self._row_bytes = row_bytes
        self._late_margin = late_margin
        self.token_s = 0.0
        """What computing one token takes, in this step; 0: loads are not weighed."""
        self.begin_step()

    def begin_step(self) -> None:
        """Take the prefill speed as it is now, for a whole step."""
        speed = self._prefill.tokens_per_s
        self.token_s = 0.0 if speed is None else 1.0 / speed

    @property
    def chunk_s(self) -> float:
        """What computing one chunk takes."""
        return self.chunk_tokens * self.token_s

    def patience_s(self, computing_s: float) -> float:
        """Return how long to wait for what could be computed in so many seconds."""
        return self._late_margin * computing_s

    def computing_s(self, patience_s: float) -> float:
        """Return the same the other way round."""
        return patience_s / self._late_margin

    def never(self, tier: Tier) -> bool:
        """Say whether no number of chunks of this tier is worth a load: each takes longer than its computing."""
        speed = tier.speed
        return speed is not None and speed.load_s_per_byte * self._row_bytes >= self.chunk_s

    def load_s(self, tier: Tier, chunks: int, now: float) -> float:
        """Return how long a tier is expected to take for so many chunks, behind what it loads and stores already.

        Of a tier that was never heard of nothing is known. One load shows what it can do; others do not wait for it.
        """
        if tier.speed is None:
            return math.inf if tier.loading else 0.0
        sizes = self.sizes(tier, chunks)
        return tier.speed.seconds(*sizes) * tier.slowdown(sizes[0], now)

    def sizes(self, tier: Tier, chunks: int) -> tuple[int, int]:
        """Return the bytes of so many chunks with what a tier loads already, and of what it stores meanwhile."""
        return (tier.loading + chunks) * self._row_bytes, len(tier.storing) * self._row_bytes

    def choose(self, runs: Sequence[Run], looked_up: int, queued: Mapping[Tier, int], now: float) -> Choice:
        """Choose how much of a request's leading part to load.

        `runs` are what could be loaded, by place among the `looked_up` keys; what lies between them is there. `queued`
        are chunks that go before them in this step.
        """
        first, chunk_s = runs[0].start, self.chunk_s
        chunks = dict(queued)
        best, most_s, slowest_s = Choice(first, 0.0, 0.0), 0.0, 0.0
        for index, run in enumerate(runs):
            tier, before = run.tier, chunks.get(run.tier, 0)
            last = index + 1 == len(runs)
            chunks[tier] = before + run.end - run.start
            whole_s = self.load_s(tier, chunks[tier], now)
            # What comes while another tier loads what is before it costs nothing.
            if slowest_s and whole_s > slowest_s:
                free = self._within(tier, before, run.end - run.start, slowest_s, now)
                computing_s = (run.start + free - first) * chunk_s
                if free and computing_s - slowest_s > most_s:
                    best, most_s = Choice(run.start + free, slowest_s, computing_s), computing_s - slowest_s
            slowest_s = max(slowest_s, whole_s)
            end = looked_up if last else runs[index + 1].start
            computing_s = (end - first) * chunk_s
            if computing_s - slowest_s > most_s:
                best, most_s = Choice(end, slowest_s, computing_s), computing_s - slowest_s
        return best

    def choose_all(
        self, runs: Sequence[Run], looked_up: int, tokens: int, queued: Mapping[Tier, int], now: float
    ) -> Choice:
        """Choose all or nothing, where a leading part is of no use by itself: of models with several groups."""
        chunks = dict(queued)
        for run in runs:
            chunks[run.tier] = chunks.get(run.tier, 0) + run.end - run.start
        seconds = max(self.load_s(run.tier, chunks[run.tier], now) for run in runs)
        computing_s = tokens * self.token_s
        return Choice(looked_up, seconds, computing_s) if seconds < computing_s else Choice(runs[0].start, 0.0, 0.0)

    def computes_anyway(self, choice: Choice, now: float) -> bool:
        """Say whether a request computes what is worth its load, to see how fast that is; if so, it counts as seen."""
        if not choice.seconds:
            return False
        return self._prefill.explores(choice.computing_s / self.token_s, choice.computing_s - choice.seconds, now)

    def may_explore(self, tier: Tier, now: float) -> bool:
        """Say whether it is time to load something of a tier for nobody, since nothing was heard of it for a while."""
        last = tier.explored
        faster = last is not None and last.seconds < last.expected_s / 2
        return not tier.loading and (faster or now - tier.heard_at >= EXPLORE_EVERY_S)

    def explores(self, tier: Tier, declined: int, queued: Mapping[Tier, int], now: float) -> int:
        """Return how many of the chunks that a request was declined to load for nobody; if any, the tier is heard of.

        Few chunks say what a call costs, and many what their bytes cost. A tier on which many are a burden shows it
        with fewer.
        """
        if queued.get(tier) or not self.may_explore(tier, now):
            return 0
        last, tier.explored, tier.heard_at = tier.explored, None, now
        if last is None or last.seconds >= declined * self.chunk_s:
            return EXPLORED_CHUNKS
        return EXPLORED_TIMES * last.chunks

    def explores_beside(self, tier: Tier, queued: Mapping[Tier, int], now: float) -> bool:
        """Say whether to load a few chunks of a tier for nobody, which a request then computes; if so, it is heard of.

        That costs the request time: so nothing was heard of the tier for a hundred times as long.
        """
        lost_s = EXPLORED_CHUNKS * self.chunk_s
        if tier.loading or queued.get(tier) or now - tier.heard_at < max(EXPLORE_EVERY_S, lost_s / EXPLORE_SHARE):
            return False
        tier.explored, tier.heard_at = None, now
        return True

    def soonest(
        self, runs: Sequence[Run], tiers: Sequence[Tier], queued: Mapping[Tier, int], now: float
    ) -> tuple[list[Run], bool]:
        """Choose for each run, in order, from which of the tiers that have it it is there soonest.

        `queued` are chunks that go before them in this step. Neighbours of one tier become one run. Say, too, whether
        any is of another tier now.
        """
        chunks = dict(queued)
        chosen: list[Run] = []
        moved: dict[Tier, int] = {}  # Chunks by the tier that they move to: its breaker does not count them yet.
        for run in runs:
            size = run.end - run.start
            others = [each for each in tiers if each.bit & run.others and each.admits(now) >= moved.get(each, 0) + size]
            tier = self._soonest(run, others, chunks, now)
            if tier is not run.tier:
                moved[tier] = moved.get(tier, 0) + size
            chunks[tier] = chunks.get(tier, 0) + size
            bits = (run.tier.bit | run.others) & ~tier.bit
            if chosen and chosen[-1].tier is tier and chosen[-1].end == run.start:
                last = chosen[-1]
                last.end, last.others, last.unasked = run.end, last.others & bits, last.unasked or run.unasked
            else:
                chosen.append(Run(tier, run.start, run.end, bits, unasked=run.unasked))
        return chosen, bool(moved)

    def _soonest(self, run: Run, others: Sequence[Tier], chunks: Mapping[Tier, int], now: float) -> Tier:
        if not others:
            return run.tier
        size = run.end - run.start
        return min([run.tier, *others], key=lambda tier: self._there_s(tier, chunks.get(tier, 0) + size, size, now))

    def _there_s(self, tier: Tier, chunks: int, size: int, now: float) -> float:
        """Return when so many chunks are there; a tier that was never heard of is taken to be as fast as computing."""
        if tier.speed is None and not tier.loading:
            return size * self.chunk_s
        return self.load_s(tier, chunks, now)

    def _within(self, tier: Tier, before: int, chunks: int, seconds: float, now: float) -> int:
        """Return how many of so many chunks a tier loads in the time, behind those before."""
        least, most = 0, chunks
        while least < most:
            middle = (least + most + 1) // 2
            if self.load_s(tier, before + middle, now) <= seconds:
                least = middle
            else:
                most = middle - 1
        return least
