"""What is where and what is under way: every decision of the engine, in plain synchronous calls.

No await, no clock, no I/O: the time is an argument, and what is to be done comes out of `end_step` as actions. So every
change of state is atomic, and a test is a plain call. The ledger answers the engine; `outbox` and `inbox` are its
traffic with the tiers, `finding` is how it looks up.
"""

from collections.abc import Sequence

from kvtier.answers import LedgerCounters, LedgerLimits, LookupResult, StorePlan
from kvtier.bridge.messages import Action, LocalMessage, Message, RunnerBack, RunnerGone, RunnerLost
from kvtier.config import PRIMARY_NAME
from kvtier.events import Event, EventKind
from kvtier.finding import Finder
from kvtier.keys import OffloadKey
from kvtier.request import Request

__all__ = ["Ledger", "LedgerCounters", "LedgerLimits", "LookupResult", "StorePlan"]


class Ledger(Finder):
    """All state of one engine, and all that changes it."""

    # Time and messages.

    def apply(self, message: Message | LocalMessage) -> None:
        """Settle what a message says was done."""
        match message:
            case RunnerLost():
                self.runner_up = False
                self.inbox.lose(self._now)
            case RunnerGone():
                self.inbox.gone(message.epoch)
            case RunnerBack():
                self.runner_up = True
                self.transfers.epoch = message.epoch
            case _:
                self.inbox.apply(message, self._now)

    def refuse(self, actions: Sequence[Action]) -> None:
        """Settle actions that the bridge did not take."""
        self.inbox.refuse(actions, self._now)

    def end_step(self) -> list[Action]:
        """Lease the rows of requests that wait, let go of other rows answered HIT, and return what is to be done."""
        if self._looking or self._looked:
            self._end_looking()
        if self._parked:
            self._cascade_parked()
        return self.outbox.flush()

    # Requests.

    new_request = Request

    def wants_all(self, request: Request) -> bool:
        """Say whether a tier wants all of the request's chunks, those that are present already, too."""
        return bool(self._request_level) and any(request.allows(tier.spec) for tier in self._request_level)

    def finish(self, request: Request) -> None:
        """Rank the request's keys anew, tail first, here and in tiers, and end its leases.

        Loads and completions may still follow.
        """
        request.finished = True
        if request.leased:
            self.leases.end_all(request)
        if request.used:
            used = list(request.used)
            self.primary.rank(self.primary.rows_of(used))
            for tier in self.tiers:
                if self.runner_up and request.allows(tier.spec):
                    self.outbox.rank(used, tier)

    # Loading: primary → engine.

    def prepare_load(self, keys: Sequence[OffloadKey], request: Request) -> list[int]:
        """Pin the rows of these keys, each answered HIT in this step, and return them in order."""
        ready = self.primary.ready
        try:
            rows = list(map(ready.__getitem__, keys))
        except KeyError as error:
            raise LookupError(f"prepare_load of {error.args[0].hex()}, which this step's lookup did not find") from None
        self.primary.pin(rows)
        self.rows_in_use += len(rows)
        if request.leased:
            for row in rows:
                self.leases.end(row, request)
        self._count_hits(keys, request)
        self._access(keys, keys, request)
        return rows

    def complete_load(self, keys: Sequence[OffloadKey]) -> None:
        """Drop the pins of one `prepare_load`."""
        self.primary.unpin(list(map(self.primary.ready.__getitem__, keys)))
        self.rows_in_use -= len(keys)

    def keep(self, rows: Sequence[int]) -> None:
        """Pin rows that come back while whoever loaded them still reads them: each until `let_go`."""
        self.kept.update(rows)
        self.counters.rows_kept += len(rows)
        self.primary.pin(rows)

    def let_go(self, row: int) -> None:
        """Take note that a kept row is read no more, as far as one of its readers is concerned."""
        if row not in self.kept:  # The primary was cleared meanwhile: the row is in quarantine.
            self.primary.release(row)
            return
        self.kept[row] -= 1
        if not self.kept[row]:
            del self.kept[row]
        self.primary.unpin((row,))

    def touch(self, keys: Sequence[OffloadKey], request: Request) -> None:
        """Count an access to those of the keys that are present, once a request."""
        ready, filling = self.primary.ready, self.primary.filling
        present = [key for key in keys if key in ready or key in filling]
        self._access(present, present, request)

    # Storing: engine → primary.

    def prepare_store(self, keys: Sequence[OffloadKey], request: Request) -> StorePlan | None:
        """Reserve rows for the absent ones of these keys, all or none (None: no room); evict none of these keys."""
        ready, filling = self.primary.ready, self.primary.filling
        absent = [key for key in keys if key not in ready and key not in filling]
        present: Sequence[OffloadKey] = ()
        if len(absent) < len(keys):
            present = [key for key in keys if key in ready or key in filling]
        if len(absent) > 1:
            absent = list(dict.fromkeys(absent))
        after = request.last_used
        evicted = self._reserve(request.in_prefix_order(absent), present, after) if absent else []
        if evicted is None:
            self.counters.stores_refused += len(absent)
            return None
        if evicted:
            self._removed(evicted)
        self._access(present, keys, request)
        if present and self._request_level:
            self._offer_present(present, request)
        request.storing += len(absent)
        self.rows_in_use += len(absent)
        return StorePlan(absent, [filling[key] for key in absent], evicted)

    def complete_store(self, keys: Sequence[OffloadKey], request: Request, *, success: bool = True) -> None:
        """Make keys of a `StorePlan`, all or some, loadable, and have them cascade; without `success`, forget them."""
        request.storing -= len(keys)
        self.rows_in_use -= len(keys)
        if not success:
            self._give_up(keys)
            return
        published = self.primary.publish(keys)
        self.counters.stores += len(published)
        if published and self._events is not None:
            self._events.add(Event(EventKind.STORED, PRIMARY_NAME, published))
        for tier in self.tiers:
            if not request.allows(tier.spec):
                continue
            if self.runner_up:
                self.outbox.cascade(published, tier, self._now)
            else:
                tier.counters.drop("runner", len(published))

    # The whole.

    def delete(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Forget keys in the primary and in every tier, but for those that something holds: these are returned.

        What only a hung store holds, or a caller that should not, is forgotten, too; its row stays lent, and the store,
        if it ends, may come after.
        """
        lost, ready = self.transfers.pins_overdue() + self.kept, self.primary.ready
        self._removed([key for key in keys if key in ready and self.primary.discard(key, lost[ready[key]])])
        held = [key for key in keys if self.primary.row(key) is not None]
        gone = [key for key in keys if self.primary.row(key) is None]
        for tier in self.tiers:
            self.where.remove(tier, gone)
            tier.forget_answers(gone)
            self.outbox.delete(gone, tier)
        return held

    def reset(self) -> None:
        """Clear the primary; the tiers keep what they have. What is still under way is given up, its rows stay lent."""
        self.outbox.clear()
        self.inbox.give_up(self._now)
        self.leases.clear()
        self._parked.clear()
        for requests in (self._looked, self._looking):
            for request in requests:
                request.forget_hits()
            requests.clear()
        self._removed(self.primary.clear(self.transfers.clear() + self.kept))
        self.kept.clear()
        self.rows_in_use = 0
        self.promoting = False

    @property
    def pending(self) -> bool:
        """Something is queued or under way within its deadline: the engine should go on stepping."""
        return bool(self.transfers.under_way) or not self.outbox.empty

    def _give_up(self, keys: Sequence[OffloadKey]) -> None:
        """Forget keys that the engine did not store after all."""
        given_up = [key for key in keys if key in self.primary.filling]
        for key in given_up:
            self.leases.end_row(self.primary.filling[key])
            self.primary.abandon(key, lent=False)
        if given_up and self._events is not None:
            self._events.add(Event(EventKind.FAILED, PRIMARY_NAME, given_up, "store"))

    def _offer_present(self, keys: Sequence[OffloadKey], request: Request) -> None:
        """Give request-level tiers what was there before; what is on its way, once it has come."""
        for tier in self._request_level:
            if request.allows(tier.spec):
                self.outbox.cascade(dict.fromkeys(filter(self.primary.ready.__contains__, keys)), tier, self._now)
                for key in keys:
                    if key in self.primary.filling:
                        self._parked.setdefault(key, []).append(tier)

    def _cascade_parked(self) -> None:
        for key, tiers in list(self._parked.items()):
            if key in self.primary.filling:
                continue
            del self._parked[key]
            if key in self.primary.ready:
                for tier in tiers:
                    self.outbox.cascade((key,), tier, self._now)
