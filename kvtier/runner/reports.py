"""A tier's reports: its inventory, occupancy, counts, and the speed of its loads.

A bug in one of them costs that report, never the others: a tier without an inventory is probed.

The speed is learned from loads that ended:

    seconds = fixed + load_bytes * (bytes of loads before it and its own)

Both factors, never below zero, fit what was seen by least squares; recent loads count most. A factor for all sizes
follows changes that several loads in a row have shown, and the fit comes after it.

An error counts as a share of both the observed and the predicted time. So a tier that has become twenty times as slow
shows as soon as one that has become twenty times as fast.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from kvtier.backend import Added, Backend, Counted, Described, Inventory, Measured, Occupancy, Removed, ScanDone
from kvtier.errors import Remedy
from kvtier.runner.messages import Found, Gone, Post, Scanned, TierSpeed, TierUsage, pack_keys
from kvtier.settings import shown_bytes

SPEED_EVERY_S = 0.01  # Decisions are made by it: a change must be known before the next request is weighed.
USAGE_EVERY_S = 1.0  # A gauge for people; more often only costs messages.
UNMEASURED = Occupancy(0, 0, None)
BUGS = (Exception, SystemExit, asyncio.CancelledError)  # A tier may raise the last two, which do not concern us.

KEPT = 0.9  # Weight of the earlier loads after each further one: the last ten count most.
HALF_LIFE_S = 20.0  # Of that weight, by age: what was seen before a pause gives way to what is seen after it.
DRIFT = 0.3  # Weight of the newest load in the factor for all sizes.
SURPRISE_MAX = 8.0  # Limit on observed over predicted: one hung load says no more than that, two in a row do.
LEARN_EVERY_S = 0.002  # Learning takes a fraction of it; loads that end sooner after another one say the same.
LEAST_S = 1e-7  # Shorter times are the clock's own.
RIDGE = 1e-6  # Added to the diagonal, as a share: sizes that are all alike have a solution, too.

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Speed(NamedTuple):
    """How long loads of a tier take."""

    fixed_s: float
    s_per_byte: float

    def seconds(self, load_bytes: int) -> float:
        """Return how long a load takes: `load_bytes` are its own and those of loads that come before it."""
        return max(LEAST_S, self.fixed_s + self.s_per_byte * load_bytes)


class SpeedMeter:
    """One tier's speed, measured where its transfers run; pure, with the time as an argument.

    A load's size is the bytes that the tier's loads moved while it was in flight: its own and those of earlier ones.
    """

    def __init__(self) -> None:
        self.speed: Speed | None = None
        """None: no load has ended yet."""
        self._moved_bytes = 0
        self._sums = [0.0] * 5  # Weighted: of 1, sizes, squared sizes, seconds, sizes times seconds.
        self._drift = 0.0  # Logarithm of the factor for all sizes.
        self._learned_at = -math.inf

    def begin_load(self, now: float) -> tuple[float, int]:
        """Return the time and the bytes that loads have moved until now, for `end_load`."""
        return now, self._moved_bytes

    def end_load(self, begun: tuple[float, int], size_bytes: int, now: float, *, moved: bool = True) -> None:
        """Learn from a load that has ended, or that missed its deadline; a failed one says nothing."""
        self._moved_bytes += size_bytes
        if moved and now - self._learned_at >= LEARN_EVERY_S:
            self._learn(self._moved_bytes - begun[1], max(LEAST_S, now - begun[0]), now)

    def _learn(self, size: int, seen: float, now: float) -> None:
        size = max(1, size)  # The fit divides by the sizes.
        predicted = seen if self.speed is None else self.speed.seconds(size)
        seen = min(max(seen, predicted / SURPRISE_MAX), predicted * SURPRISE_MAX)
        kept = KEPT * 0.5 ** ((now - self._learned_at) / HALF_LIFE_S)
        weight = 1.0 / (seen * predicted)
        terms = (1.0, size, size * size, seen, size * seen)
        self._sums = [kept * total + weight * term for total, term in zip(self._sums, terms, strict=True)]
        self._learned_at = now
        fit = self._fitted()
        self._drift += DRIFT * (math.log(seen / fit.seconds(size)) - self._drift)
        factor = math.exp(self._drift)
        self.speed = Speed(factor * fit.fixed_s, factor * fit.s_per_byte)

    def _fitted(self) -> Speed:
        """Return the factors, none below zero, with the least squared error."""
        ones, sizes, squares, seconds, products = self._sums
        ones, squares = ones * (1 + RIDGE), squares * (1 + RIDGE)
        determinant = ones * squares - sizes * sizes
        fixed = (seconds * squares - products * sizes) / determinant
        slope = (products * ones - seconds * sizes) / determinant
        if slope < 0.0:
            return Speed(seconds / ones, 0.0)
        if fixed < 0.0:
            return Speed(0.0, products / squares)
        return Speed(fixed, slope)


class Reports:
    """The reports of one tier. All methods belong to the runner's loop."""

    def __init__(self, index: int, name: str, backend: Backend, meter: SpeedMeter, post: Post) -> None:
        """`index`: the tier's number in messages."""
        self._index = index
        self._name = name
        self._backend = backend
        self._meter = meter
        self._post = post
        self._watcher: asyncio.Task[None] | None = None
        self._acknowledged = asyncio.Event()
        self._counts: dict[str, int] = {}
        self._complaints: set[str] = set()  # Methods of the tier whose failure was logged.
        self._usage_at = float("-inf")
        self._usage_due: asyncio.TimerHandle | None = None
        self._speed_at = float("-inf")
        self._speed_due: asyncio.TimerHandle | None = None
        self._closed = False
        self._begun_at = 0.0

    def start(self) -> None:
        self._begun_at = asyncio.get_running_loop().time()
        self._watcher = asyncio.ensure_future(self._watch())

    def acknowledge(self) -> None:
        """Let the next batch of keys be sent."""
        self._acknowledged.set()

    def usage(self, *, now: bool = False) -> None:
        """Report the tier's occupancy and its counts: `now`, or at most once in `USAGE_EVERY_S`."""
        if self._closed or not isinstance(self._backend, Measured | Counted):
            return
        if now:
            if self._usage_due is not None:
                self._usage_due.cancel()
            self._post_usage()
        elif self._usage_due is None:
            loop = asyncio.get_running_loop()
            self._usage_due = loop.call_at(max(loop.time(), self._usage_at + USAGE_EVERY_S), self._post_usage)

    def speed(self) -> None:
        """Report the measured speed: now, or `SPEED_EVERY_S` after the last time."""
        if self._closed or self._speed_due is not None or self._meter.speed is None:
            return
        loop = asyncio.get_running_loop()
        due_at = self._speed_at + SPEED_EVERY_S
        if loop.time() >= due_at:
            self._post_speed()
        else:
            self._speed_due = loop.call_at(due_at, self._post_speed)

    async def aclose(self, deadline_s: float) -> bool:
        """Stop; False if the tier goes on reporting beyond the deadline."""
        self._closed = True
        if self._speed_due is not None:
            self._speed_due.cancel()
        if self._usage_due is not None:
            self._usage_due.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait((self._watcher,), timeout=deadline_s)
            if not self._watcher.done():
                logger.error("tier %s does not stop reporting its chunks; see %s", self._name, Remedy.CLOSING)
                return False
        return True

    async def _watch(self) -> None:
        """Pass on the tier's inventory; a tier without one is probed."""
        if isinstance(self._backend, Inventory):
            await self._pass_on(self._backend)
        else:
            self._say_start("open; its chunks are found by probes")
        if not self._closed:
            self._post(Scanned(self._index, complete=False))

    async def _pass_on(self, backend: Inventory) -> None:
        """Pass on an inventory until it ends, one unacknowledged batch at a time."""
        try:
            async for event in backend.watch():
                self.usage()
                match event:
                    case Added():
                        self._post(Found(self._index, pack_keys(event.keys)))
                    case Removed():
                        self._post(Gone(self._index, pack_keys(event.keys)))
                    case ScanDone():
                        self._say_start(self._finding())
                        self._post(Scanned(self._index, event.complete))
                        continue
                await self._acknowledged.wait()
                self._acknowledged.clear()
        except BUGS:  # The supervisor's edge: the tier is asked instead.
            assert self._watcher is not None
            if self._watcher.cancelling():
                raise
            logger.exception(
                "tier %s: its inventory failed; from now on it is asked; see %s", self._name, Remedy.CONTRACT
            )
        else:
            if not self._closed:
                logger.error(
                    "tier %s: its inventory ended before the tier did; from now on it is asked; see %s",
                    self._name,
                    Remedy.CONTRACT,
                )

    def _finding(self) -> str:
        """Describe the chunks that the start-up scan has found."""
        seconds = asyncio.get_running_loop().time() - self._begun_at
        tier = self._backend
        holds = self._told("occupancy", tier.occupancy, Occupancy) if isinstance(tier, Measured) else None
        if holds is None:
            return f"all that it holds is known after {seconds:.2f} s"
        return f"found {holds.chunks:,} chunks of {shown_bytes(holds.used_bytes)} in {seconds:.2f} s"

    def _say_start(self, finding: str) -> None:
        tier = self._backend
        about = self._told("description", tier.description, dict[str, str]) if isinstance(tier, Described) else None
        words = ", ".join(f"{name} {value}" for name, value in (about or {}).items())
        logger.info("tier %s: %s", self._name, f"{words}; {finding}" if words else finding)

    def _post_usage(self) -> None:
        self._usage_due = None
        self._usage_at = asyncio.get_running_loop().time()
        tier = self._backend
        holds = self._told("occupancy", tier.occupancy, Occupancy) if isinstance(tier, Measured) else UNMEASURED
        if holds is not None:
            self._post(TierUsage(self._index, *holds, self._counted()))

    def _post_speed(self) -> None:
        self._speed_due = None
        self._speed_at = asyncio.get_running_loop().time()
        if self._meter.speed is not None:
            self._post(TierSpeed(self._index, *self._meter.speed))

    def _counted(self) -> dict[str, int]:
        """Return the tier's counts since the last call: the owner's totals outlive this runner."""
        tier = self._backend
        counts = self._told("counts", tier.counts, dict[str, int]) if isinstance(tier, Counted) else None
        if counts is None:
            return {}
        before, self._counts = self._counts, counts
        return {name: total - before.get(name, 0) for name, total in counts.items() if total != before.get(name, 0)}

    def _told(self, name: str, method: Callable[[], object], type_: type[T]) -> T | None:
        """Call a method of the tier; None, and the bug in the log, once, if the answer is not of its type."""
        try:
            return msgspec.convert(method(), type_)
        except BUGS:  # The supervisor's edge; no await, so no cancel of ours.
            if name not in self._complaints:
                self._complaints.add(name)
                logger.exception(
                    "tier %s: its %s() raised, or returned what it may not; see %s", self._name, name, Remedy.CONTRACT
                )
            return None
