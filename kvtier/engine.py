"""One engine as a whole: its ledger, the bridge to its runner and its rows, stepped, drained, reset and ended.

A step's actions leave at its end with one wake-up; what comes back waits in the bridge's mailbox until it is received.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from kvtier import __version__
from kvtier.assembly import ledger_of, rows_of_share
from kvtier.bridge.base import Bridge
from kvtier.bridge.messages import RunnerBack, RunnerLost
from kvtier.config import EngineConfig
from kvtier.errors import EngineClosed
from kvtier.events import EventLog
from kvtier.inbox import Observe
from kvtier.keys import OffloadKey
from kvtier.metrics import Metrics
from kvtier.region import LentRow, Region
from kvtier.request import Request
from kvtier.this_process import let_go_in_forks
from kvtier.tier_log import TierLog

logger = logging.getLogger(__name__)


class Engine:
    """What owns the state. All calls belong to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        region: Region,
        bridge: Bridge,
        *,
        clock: Callable[[], float] = time.monotonic,
        observer: Observe | None = None,
    ) -> None:
        self.config = config
        self.region = region
        self._bridge = bridge
        self._clock = clock
        self._events = EventLog(config.limits.events) if config.events else None
        self.ledger = ledger_of(config, self._events, self._observe)
        self._tier_log = TierLog(self.ledger.tiers)
        self._metrics = Metrics(self.ledger, config.row_bytes, self._events)
        self._observer = observer
        self._requests: dict[str, Request] = {}
        self._kept: list[LentRow] = []  # Given back, and still read.
        self._mailbox = bridge.mailbox
        self.ready: Mapping[OffloadKey, int] = self.ledger.primary.ready  # What could be loaded now, and its row.
        self._closed = False
        self._owner_pid = os.getpid()
        self._forked = False
        let_go_in_forks(self)
        self.messages_received = 0  # By which who reports figures knows that some may have changed.
        self._replaced = -1  # The last epoch that was replaced for its quarantined rows.
        self.ledger.begin_step(clock())
        say_start(config, bridge, config.eviction_policy)

    @property
    def metrics(self) -> CollectorRegistry:
        """A Prometheus registry with everything that this engine counts."""
        return self._metrics.registry

    @property
    def runners_lost(self) -> int:
        """How many runners ended, or were killed, before they were closed."""
        return self._metrics.runners_lost

    @property
    def events_dropped(self) -> int:
        """How many events were lost because nobody took them."""
        return 0 if self._events is None else self._events.dropped

    def end_step(self) -> None:
        """Take what has come back, and send what this step and that decided."""
        self._receive()
        if self._kept:
            self._take_kept()
        actions = self.ledger.end_step()
        if actions:
            refused = self._bridge.send(actions)
            if refused:
                self.ledger.refuse(refused)
        if self.ledger.transfers.overdue:
            self._watch_quarantine()

    def has_pending_work(self) -> bool:
        """Say whether the engine should go on stepping. What has run out of time does not count."""
        if self._mailbox or self._forked:
            self._receive()
        return self.ledger.pending

    # The whole.

    def drain(self, deadline_s: float | None = None) -> bool:
        """Send what is queued and wait until nothing is under way; False if the deadline came first. Blocks."""
        until = time.monotonic() + self._deadline(deadline_s)
        self.end_step()
        while self.ledger.pending and (left := until - time.monotonic()) > 0:
            self._bridge.wait(left)
            self.end_step()
        return not self.ledger.pending

    def reset(self, deadline_s: float | None = None) -> bool:
        """Clear the primary; tiers keep their chunks. Blocks until nothing is under way or the deadline comes.

        A tier that does not end in time is taken out of use until it has proved itself, and its rows stay lent; then
        the answer is False. Nothing is promoted until `on_reset_flushed`. No completion of an earlier load or store
        may follow.
        """
        self._check_open()
        until = time.monotonic() + self._deadline(deadline_s)
        self.ledger.outbox.clear()
        try:
            while self.ledger.transfers.under_way and (left := until - time.monotonic()) > 0:
                self._bridge.wait(left)
                self._receive()
        finally:  # Interrupted, too: what was queued has been forgotten, and its rows with it.
            clean = self._reset()
        return clean

    def on_reset_flushed(self) -> None:
        """Say that the engine's workers no longer touch rows of before the reset: tiers may fill them again."""
        self.ledger.promoting = True

    def shutdown(self, deadline_s: float | None = None) -> int:
        """Let transfers end, close the tiers and the runner; return how many transfers were left behind.

        Takes at most the deadline for the transfers and once more for the closing. Idempotent.
        """
        if self._closed:
            return 0
        self.drain(deadline_s)
        self._tier_log.look(self._clock(), last=True)
        abandoned = self._bridge.close(self._deadline(deadline_s))
        self._free()
        return abandoned

    def forked(self) -> None:
        """Be nobody's engine in a child that was forked: it has no runner, and its rows would be the owner's.

        From then on every call there but `shutdown` and `aclose`, which do nothing, raises `EngineClosed`.
        """
        self._forked = self._closed = True
        self._requests.clear()
        self._bridge.forked()
        self.region.close()

    def _reset(self) -> bool:
        clean = not self.ledger.transfers.under_way
        self.ledger.reset()
        for request in list(self._requests.values()):
            request.storing = 0
            self._forget(request)
        return clean

    def _free(self) -> None:
        """Take the last outcomes and give the rows' memory back; what is still lent keeps it until it lets go."""
        self._closed = True
        self._receive()
        self.ledger.apply(RunnerLost(self.ledger.transfers.epoch, "the engine was shut down"))
        self._requests.clear()
        self._kept.clear()  # Whoever reads one takes the memory along.
        self.region.close()

    def _deadline(self, deadline_s: float | None) -> float:
        return self.config.limits.close_s if deadline_s is None else deadline_s

    def _check_open(self) -> None:
        if self._forked:
            raise EngineClosed(
                f"this engine is of process {self._owner_pid}, and this process is a fork of it: start another one here"
            )
        if self._closed:
            raise EngineClosed("the engine was shut down")

    def _forget(self, request: Request) -> None:
        """Forget a request that is over; one that began since under its id stays."""
        if request.finished and request.storing <= 0 and self._requests.get(request.id) is request:
            del self._requests[request.id]

    def _receive(self) -> None:
        """Apply everything in the mailbox."""
        if self._forked:
            self._check_open()
        now = self._clock()
        self.ledger.begin_step(now)
        mailbox = self._mailbox
        if not mailbox and now < self._tier_log.due:
            return
        while mailbox:
            message = mailbox.popleft()
            self.messages_received += 1
            self.ledger.apply(message)
            if isinstance(message, RunnerBack):
                self._bridge.admit(message.epoch)
            elif isinstance(message, RunnerLost):
                self._metrics.runners_lost += 1
        if not self._closed:  # What the closing cuts off alarms nobody.
            self._tier_log.look(now)

    def _keep(self, lent: Sequence[LentRow]) -> None:
        """Keep rows that something still reads out of use; every step looks whether it has gone."""
        self.ledger.keep([each.row for each in lent])
        self._kept += lent

    def _take_kept(self) -> None:
        """Give back the kept rows that nothing reads any more."""
        kept, self._kept = self._kept, []
        for each in kept:
            if each.release():
                self.ledger.let_go(each.row)
            else:
                self._kept.append(each)

    def _watch_quarantine(self) -> None:
        """Have the runner replaced when hung transfers hold more rows than we can spare."""
        transfers = self.ledger.transfers
        if (
            transfers.epoch > self._replaced
            and transfers.rows_overdue >= rows_of_share(self.config.limits.quarantine_share, self.config.rows)
            and self._bridge.replace()
        ):
            self._replaced = transfers.epoch

    def _observe(self, tier: str, operation: str, seconds: float) -> None:
        self._metrics.observe(tier, operation, seconds)
        if self._observer is not None:
            try:
                self._observer(tier, operation, seconds)
            except Exception:  # The supervisor's edge: a bug in an observer costs no transfer its outcome.
                logger.exception("the observer raised for a %s of tier %s", operation, tier)


def say_start(config: EngineConfig, bridge: Bridge, primary: str) -> None:
    """Log what has started; a tier says itself what it has found. `primary`: whose rows, or their policy."""
    logger.info(
        "kvtier %s: %s rows of %s bytes (%s); tiers: %s; %s runner, process %s",
        __version__,
        f"{config.rows:,}",
        f"{config.row_bytes:,}",
        primary,
        ", ".join(tier.name for tier in config.secondary_tiers) or "none",
        bridge.kind,
        bridge.pid,
    )
