"""Whatever an engine, its tiers and its runner do, in whatever order: no row is lost, shared or overwritten.

The machine plays all three. It keeps what lies in each row, so a chunk that would be wrong is seen: an engine or a
promotion writes a row when it is done with it, and what is late, or was lost with its process, writes rubbish at the
last moment at which it may.
"""

import random
import string
from collections import Counter
from typing import NamedTuple

from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvtier import LookupResult, OffloadKey, TierMatcher
from kvtier.runner import messages
from kvtier.runner.messages import Code
from kvtier.settings.hints import Advice, Hint
from tests.engine.ledger.bench import Bench, keys_of
from tests.simulation.audit import audit

ROWS = 5
NAMES = string.ascii_lowercase[:7]
RUBBISH = OffloadKey(b"rubbish")

dice = random.Random(0)
names = st.sampled_from(["".join(dice.choices(NAMES, k=length % 4 + 1)) for length in range(400)])  # Drawn at once.
tiers = st.integers(0, 1)
codes = st.sampled_from([Code.MISSING, Code.CORRUPT, Code.NO_SPACE, Code.FAILED, Code.UNAVAILABLE])
pick = st.integers(0, 1_000)
hints = st.sampled_from(
    [
        None,
        None,
        None,
        Hint(over=True),
        Hint(over=True),
        Hint(no_store=True),
        Hint(no_store=("disk",)),
        Hint(no_store=("peer", "stranger")),
        Hint(retain_s=3.0, priority=5),
        Hint(over=True, retain_s=3.0, tokens=1),
        Hint(over=True, no_store=("disk",), retain_s=1e9),
    ]
)
seldom = st.integers(0, 3).map(lambda drawn: drawn == 0)  # Or the machine would spend its time in ruins.


KINDS = [  # When each tier is written, and what computing a chunk takes: more than a tier's load, or less.
    (("store", "store"), None),
    (("evict", "second_use"), None),
    (("evict", "evict"), None),
    (("evict", "second_use"), 1.0),
]


class Lent(NamedTuple):
    action: messages.Action
    keys: list[OffloadKey]
    rows: list[int]
    epoch: int


class Engine(stateful.RuleBasedStateMachine):
    @stateful.initialize(kind=st.sampled_from(KINDS), scanned=st.booleans())
    def begin(self, kind, scanned):
        self.cascades, self.computing_s = kind
        peer = {"locality": "REMOTE", "cascade": self.cascades[1], "breaker_failures": 1}
        self.bench = Bench(
            ROWS,
            [Bench.spec("disk", store_chunks_max=3, cascade=self.cascades[0]), Bench.spec("peer", **peer)],
            lease_rows_max=3,
            cascade_rows_max=3,
            lease_s=4.0,
            action_chunks=2,
            ahead_rows=2,
            retained_rows_max=2,
            computing_s=self.computing_s,
        )
        self.ledger = self.bench.ledger
        self.wanted = set()  # By tier, what somebody stored or used who may write to it.
        self.forgotten = set()  # And neither stored since, nor reported by a tier.
        self.content = [None] * ROWS
        self.requests = [self.bench.request()]
        self.loads = []
        self.stores = []
        self.in_flight = {}
        self.late = {}
        self.hits = {}
        self.last_before_reset = 0
        self.epoch = 0
        self.runner_up = True
        self.between_steps = True
        self.bench.knows_all(0)
        if scanned:
            self.bench.knows_all(1, complete=False)

    @precondition(lambda self: len(self.requests) < 4)
    @rule(matchers=st.sampled_from([None, None, (), (TierMatcher(locality="REMOTE"),)]), hint=hints)
    def new_request(self, matchers, hint):
        self.requests.append(self.bench.request("r", matchers))
        self.ledger.hint(self.requests[-1], hint)

    @rule(names=names, which=pick)
    def look_up(self, names, which):
        self.between_steps = False
        request = self._request(which)
        for key in keys_of(names):
            absent = self.ledger.primary.row(key) is None
            if self.ledger.lookup(key, request) is LookupResult.HIT:
                row = self.ledger.primary.ready[key]
                assert self.content[row] == key
                self.hits[key] = row
            if absent and self.ledger.primary.row(key) is not None:
                self._want([key], request)

    @precondition(lambda self: self.hits)
    @rule(which=pick, count=st.integers(1, 3))
    def begin_load(self, which, count):
        self._used()
        keys = list(self.hits)[:count]
        self.loads.append((keys, self.ledger.prepare_load(keys, self._request(which))))
        self._want(keys, self._request(which))

    @precondition(lambda self: self.loads)
    @rule(which=pick)
    def end_load(self, which):
        keys, rows = self.loads.pop(which % len(self.loads))
        assert [self.content[row] for row in rows] == keys
        self.ledger.complete_load(keys)

    @rule(names=names, which=pick)
    def begin_store(self, names, which):
        self.between_steps = False
        request = self._request(which)
        plan = self.ledger.prepare_store(keys_of(names), request)
        if plan is None:
            return
        self._want(keys_of(names), request)
        if plan.keys:
            assert not set(plan.evicted) & set(keys_of(names))
            self.stores.append((request, plan.keys, plan.rows))
            self.forgotten.difference_update(plan.keys)

    @precondition(lambda self: self.stores)
    @rule(which=pick, part=st.integers(1, 6), success=st.booleans())
    def end_store(self, which, part, success):
        self.between_steps = False
        request, keys, rows = self.stores.pop(which % len(self.stores))
        for key, row in zip(keys[:part], rows, strict=False):
            self.content[row] = key
        if success:
            self._want(keys[:part], request)  # Its hint may be another one than when the store began.
        self.ledger.complete_store(keys[:part], request, success=success)
        if keys[part:]:
            self.stores.append((request, keys[part:], rows[part:]))

    @rule(names=names, which=pick)
    def touch(self, names, which):
        self._used()
        self.ledger.touch(keys_of(names), self._request(which))
        self._want(keys_of(names), self._request(which))

    @precondition(lambda self: len(self.requests) > 1)
    @rule(which=pick, hint=hints)
    def finish_request(self, which, hint):
        request = self.requests.pop(which % len(self.requests))
        self.ledger.hint(request, hint)
        self.ledger.finish(request)
        assert not request.leased
        if request.hint is not None and request.hint.retain_s:
            self._are_as_any_other(request.leading(request.hint.tokens, 1))

    @rule(names=names)
    def demote(self, names):
        self.ledger.advise(Advice("demote", keys_of(names)))

    @rule(names=names, seconds=st.sampled_from([1.0, 1e9]), priority=st.integers(0, 3))
    def retain(self, names, seconds, priority):
        self.ledger.advise(Advice("retain", keys_of(names), seconds=seconds, priority=priority))
        self._are_as_any_other(keys_of(names))

    @rule(names=names)
    def prefetch(self, names):
        self.ledger.prefetches.begin(keys_of(names))
        self._are_as_any_other(keys_of(names))

    @precondition(lambda self: self.ledger.prefetches.waiting)
    @rule(which=pick)
    def give_up_prefetch(self, which):
        waiting = self.ledger.prefetches.waiting
        self.ledger.prefetches.give_up(waiting[which % len(waiting)])

    @rule(names=names, how=st.sampled_from(["forget", "delete", *[""] * 6]))
    def forget(self, names, how):
        if not how:
            return
        self.between_steps = False
        keys = keys_of(names)
        if how == "forget":
            self.ledger.forget(keys)
            self.forgotten.update(keys)
        else:
            self.ledger.delete(keys)
        for key in keys:
            if self.ledger.primary.row(key) is None:
                self.hits.pop(key, None)

    @rule(refused=seldom, seconds=st.sampled_from([0.0, 0.0, 1.0, 6.0]))
    def end_step(self, refused, seconds):
        prefetched = [prefetch.request for prefetch in self.ledger.prefetches.waiting]
        actions = self.ledger.end_step()
        for request in prefetched:
            self._want([key for key in request.sources if key in self.ledger.primary.filling], request)
        self._check_writes(actions)
        self._check_forgotten()
        if refused or not self.runner_up:
            self.ledger.refuse(actions)
        else:
            for action in actions:
                self._lend(action)
        self.hits.clear()
        self.bench.now += seconds
        self.ledger.begin_step(self.bench.now)
        self.between_steps = not refused

    @rule(flushed=st.booleans(), sure=seldom)
    def reset(self, flushed, sure):
        if not sure:
            return
        self.ledger.prefetches.clear()
        self.ledger.reset()
        self.last_before_reset = max([self.last_before_reset, *self.in_flight, *self.late])
        self.late |= self.in_flight
        self.in_flight.clear()
        self.late = {id_: lent for id_, lent in self.late.items() if lent.rows}
        self.loads.clear()
        self.stores.clear()
        self.hits.clear()
        self.ledger.promoting = flushed
        self.between_steps = False

    @precondition(lambda self: not self.ledger.promoting)
    @rule()
    def flushed(self):
        self.ledger.promoting = True

    @precondition(lambda self: self.in_flight)
    @rule(which=pick, failed=st.lists(st.none() | codes, max_size=2), present=st.none() | st.booleans())
    def outcome(self, which, failed, present):
        lent = self.in_flight.pop(list(self.in_flight)[which % len(self.in_flight)])
        codes = {index: code for index, code in enumerate(failed[: len(lent.keys)]) if code}
        self._work(lent, codes)
        if isinstance(lent.action, messages.Probe):
            self.bench.answer(lent.action, present)
        else:
            self.bench.finish(lent.action, codes)

    @precondition(lambda self: any(lent.rows for lent in self.in_flight.values()))
    @rule(which=pick)
    def deadline(self, which):
        with_rows = [id_ for id_, lent in self.in_flight.items() if lent.rows]
        id_ = with_rows[which % len(with_rows)]
        self.late[id_] = lent = self.in_flight.pop(id_)
        self.bench.fail(lent.action, Code.DEADLINE, lent=True)

    @precondition(lambda self: self.late)
    @rule(which=pick, finished=st.booleans())
    def rows_come_back(self, which, finished):
        lent = self.late.pop(list(self.late)[which % len(self.late)])
        self._end_late(lent)
        if finished:
            self.bench.finish(lent.action)
        else:
            self.bench.give_back(lent.action)

    @precondition(lambda self: self.late)
    @rule()
    def late_twice(self):
        """A deadline that passes after a reset gave the transfer up."""
        for lent in self.late.values():
            self.bench.fail(lent.action, Code.DEADLINE, lent=True)

    @precondition(lambda self: self.runner_up)
    @rule(sure=seldom)
    def lose_runner(self, sure):
        if not sure:
            return
        self.ledger.apply(messages.RunnerLost(self.epoch, "killed by the machine"))
        self.late |= {id_: lent for id_, lent in self.in_flight.items() if lent.rows}
        self.in_flight.clear()
        self.runner_up = False

    @precondition(lambda self: not self.runner_up)
    @rule()
    def new_runner(self):
        self.between_steps = False  # What the lost one was to delete is due.
        self.epoch += 1
        self.ledger.apply(messages.RunnerBack(self.epoch))
        self.runner_up = True

    @precondition(lambda self: self.epoch or not self.runner_up)
    @rule(which=pick)
    def old_process_ends(self, which):
        epoch = which % (self.epoch + (not self.runner_up))
        for id_, lent in list(self.late.items()):
            if lent.epoch == epoch:
                self._end_late(self.late.pop(id_))
        self.ledger.apply(messages.RunnerGone(epoch))

    @rule(names=names, tier=tiers)
    def found(self, names, tier):
        self.bench.holds(names, tier)
        self.forgotten.difference_update(keys_of(names))

    @rule(names=names, tier=tiers)
    def gone(self, names, tier):
        self.bench.loses(names, tier)

    @precondition(lambda self: self.computing_s is not None)
    @rule(tier=tiers, chunk_s=st.sampled_from([0.01, 0.9, 30.0]))
    def speed(self, tier, chunk_s):
        self.bench.takes(0.1, chunk_s, tier)

    @stateful.invariant()
    def rows_pins_and_transfers_add_up(self):
        audit(self.ledger)

    @stateful.invariant()
    def every_ready_row_holds_its_chunk(self):
        assert {row: self.content[row] for row in self.ledger.primary.ready.values()} == {
            row: key for key, row in self.ledger.primary.ready.items()
        }

    @stateful.invariant()
    def every_pin_has_a_reason(self):
        primary = self.ledger.primary
        loaded = {row for _, rows in self.loads for row in rows}
        filling, cascading = set(primary.filling.values()), set(self.ledger.traffic.cascade_rows)
        assert {row for row in range(ROWS) if primary.pinned(row)} == loaded | cascading | self._leased() | filling
        stored = [row for _, _, rows in self.stores for row in rows]
        assert self.ledger.rows_in_use == sum(len(rows) for _, rows in self.loads) + len(stored)

    @stateful.invariant()
    def every_transfer_is_accounted_for(self):
        transfers = self.ledger.traffic
        assert set(transfers.in_flight) == set(self.in_flight)
        assert set(transfers.overdue) == set(self.late)
        if self.between_steps:
            assert transfers.cascade_rows == self._cascading()
            assert self.ledger.traffic.nothing_queued

    @stateful.invariant()
    def what_is_lent_stays_where_it_is(self):
        primary = self.ledger.primary
        for lent in self.in_flight.values():
            for key, row in zip(lent.keys, lent.rows, strict=False):
                assert primary.row(key) == row, key
        writing = Counter(
            row for lent in self.late.values() if isinstance(lent.action, messages.Promote) for row in lent.rows
        )
        assert set(writing) <= set(primary.quarantined)
        assert not writing or max(writing.values()) == 1

    @stateful.invariant()
    def a_hit_stays_until_the_step_ends(self):
        assert self.hits.items() <= self.ledger.primary.ready.items()

    def teardown(self):
        """Finish everything: afterwards no row is pinned, leased or lent, and no transfer is in flight."""
        for lent in [*self.in_flight.values()]:
            self._work(lent, {})
            self.bench.finish(lent.action)
        for lent in self.late.values():
            self._end_late(lent)
            self.bench.give_back(lent.action)
        for keys, _ in self.loads:
            self.ledger.complete_load(keys)
        for request, keys, _ in self.stores:
            self.ledger.complete_store(keys, request, success=False)
        for request in self.requests:
            self.ledger.finish(request)
        self.ledger.prefetches.clear()
        actions = self.ledger.end_step()
        self._check_writes(actions)
        self.ledger.refuse(actions)
        assert self.bench.settled()

    def _used(self):
        """Record that chunks are used: a second use may be queued, and sent at the step's end."""
        self.between_steps = self.between_steps and "second_use" not in self.cascades

    def _want(self, keys, request):
        self.wanted |= {(tier.index, key) for tier in self.ledger.tiers if request.stores_in(tier.spec) for key in keys}

    def _are_as_any_other(self, keys):
        writeback, rows = self.ledger.writeback, set(self.ledger.primary.rows_of(keys))
        assert not rows & writeback.over
        assert not rows & writeback.demoted

    def _check_writes(self, actions):
        for action in actions:
            if isinstance(action, messages.Cascade):
                keys = messages.unpack_keys(action.keys)
                assert {(action.tier, key) for key in keys} <= self.wanted

    def _check_forgotten(self):
        """What was forgotten has gone, or is held, and goes with the first step's end at which it is not."""
        for key in self.forgotten:
            row = self.ledger.primary.row(key)
            if row is None:
                assert key not in self.ledger.locations.mask
            else:
                assert self.ledger.primary.pinned(row)

    def _request(self, which):
        return self.requests[which % len(self.requests)]

    def _leased(self):
        prefetches = [prefetch.request for prefetch in self.ledger.prefetches.waiting]
        return set().union(*(request.leased for request in [*self.requests, *prefetches]))

    def _cascading(self):
        everything = self.in_flight | {id_: lent for id_, lent in self.late.items() if id_ > self.last_before_reset}
        return Counter(
            row for lent in everything.values() if isinstance(lent.action, messages.Cascade) for row in lent.rows
        )

    def _lend(self, action):
        if isinstance(action, messages.Acknowledge | messages.Advise):
            return
        rows = (
            list(messages.unpack_rows(action.rows)) if isinstance(action, messages.Promote | messages.Cascade) else []
        )
        self.in_flight[action.id] = Lent(action, messages.unpack_keys(action.keys), rows, self.epoch)

    def _work(self, lent, failed):
        for index, (key, row) in enumerate(zip(lent.keys, lent.rows, strict=False)):
            if isinstance(lent.action, messages.Promote):
                self.content[row] = RUBBISH if index in failed else key
            else:
                assert self.content[row] == key

    def _end_late(self, lent):
        for key, row in zip(lent.keys, lent.rows, strict=True):
            if isinstance(lent.action, messages.Promote):
                self.content[row] = RUBBISH
            else:
                assert self.content[row] == key


def test_whatever_happens_no_row_is_lost_shared_or_overwritten():
    """Of each kind of engine some examples, however Hypothesis draws them."""
    most = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=60)
    stateful.run_state_machine_as_test(Engine, settings=most)
