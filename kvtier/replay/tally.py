"""What a replay counts as it goes: for the progress bar while it runs, and for the report whenever it ends."""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtier.config import PRIMARY_NAME
from kvtier.keys import OffloadKey
from kvtier.ledger import Ledger

GPU_NAME = "gpu"  # What the engine's own prefix cache is called where hits are told apart by where they lay.
SAMPLES_MAX = 400  # Of one replay's course: a picture has no more points than this to show.
WRONG_KEYS_MAX = 8  # Named in the report; the others are counted.


class TierTotals(NamedTuple):
    """What one tier has done, in chunks."""

    hits: int
    loaded: int
    stored: int
    dropped: Mapping[str, int] = {}  # Cascades that were never sent, by reason.
    failed: Mapping[str, int] = {}  # Chunks that did not move, by what was wrong.


class Sample(NamedTuple):
    """The totals at one moment."""

    seconds: float  # Since the replay began.
    requests: int
    chunk_references: int
    tiers: Mapping[str, TierTotals]


class Tally:
    """Counts of one replay."""

    def __init__(self, requests_expected: int) -> None:
        self.requests = 0
        self.chunk_references = 0
        self.hits = 0
        self.gpu_hits: int | None = None  # Of those, what the engine's own cache had; None: it has none.
        self.wrong_chunks = 0
        self.wrong_keys: list[OffloadKey] = []
        self.seconds = 0.0
        self.drained = False  # Whether everything that was stored had reached the tiers when it ended.
        self.latencies_s: dict[str, array[float]] = {}
        self.samples: list[Sample] = []
        self._requests_a_sample = max(1, -(-requests_expected // SAMPLES_MAX))

    def time(self, operation: str, seconds: float) -> None:
        """Take note of how long one call took."""
        samples = self.latencies_s.get(operation)
        if samples is None:
            samples = self.latencies_s[operation] = array("d")
        samples.append(seconds)

    def observe(self, tier: str, operation: str, seconds: float) -> None:
        """Take note of how long a tier took for one batch; an engine's observer."""
        self.time(f"{tier} {operation}", seconds)

    def looked_up(self, chunks: int, hits: int, wrong: Sequence[OffloadKey]) -> None:
        self.chunk_references += chunks
        self.hits += hits
        self.wrong_chunks += len(wrong)
        self.wrong_keys.extend(wrong[: WRONG_KEYS_MAX - len(self.wrong_keys)])

    def found_in_gpu(self, chunks: int) -> None:
        """Count chunks that the engine's own cache had, which nobody looked up."""
        assert self.gpu_hits is not None
        self.chunk_references += chunks
        self.hits += chunks
        self.gpu_hits += chunks

    def finished(self, ledger: Ledger, seconds: float) -> None:
        """Count a request that has ended, and now and then keep the totals."""
        self.requests += 1
        if self.requests % self._requests_a_sample == 0:
            self.sample(ledger, seconds)

    def sample(self, ledger: Ledger, seconds: float) -> None:
        """Keep the totals of this moment."""
        self.seconds = seconds
        gpu = {} if self.gpu_hits is None else {GPU_NAME: TierTotals(self.gpu_hits, 0, 0)}
        self.samples.append(Sample(seconds, self.requests, self.chunk_references, gpu | totals(ledger)))

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.chunk_references if self.chunk_references else 0.0


def totals(ledger: Ledger) -> dict[str, TierTotals]:
    """Return what every tier has done, the primary first: loaded are its rows that were read, by whoever asked."""
    tiers = [tier.counters for tier in ledger.tiers]
    read = ledger.counters.hits + sum(counters.hits for counters in tiers)
    found = {PRIMARY_NAME: TierTotals(ledger.counters.hits, read, ledger.counters.stores)}
    for tier in ledger.tiers:
        counters = tier.counters
        found[tier.spec.name] = TierTotals(
            counters.hits, counters.loaded, counters.stored, dict(counters.dropped), dict(counters.failures)
        )
    return found
