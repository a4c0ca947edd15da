"""One tier behind vLLM's manager, its runner played by the test: messages, limits, counters."""

import os
from collections.abc import Iterator, Sequence

import pytest

from kvtier.backend.namespace import OffloadKey
from kvtier.engine.answers import EventLog
from kvtier.engine.tier import TierSpec
from kvtier.integrations.vllm.secondary import TierClient, client_series
from kvtier.integrations.vllm.stats import ObservedTimes, Stats, tier_metric_definitions
from kvtier.memory.region import Region
from kvtier.runner.bridge import Bridge, ThreadBridge
from kvtier.runner.messages import (
    Acknowledge,
    Action,
    Advise,
    Answered,
    Cascade,
    Code,
    Finished,
    Found,
    Gone,
    Probe,
    Promote,
    Returned,
    RunnerBack,
    RunnerGone,
    RunnerLost,
    Scanned,
    TierUsage,
    pack_keys,
    pack_rows,
    unpack_keys,
)
from kvtier.runner.process import ProcessBridge
from kvtier.settings.hints import Advice, Hint
from tests.engine.kit import describe

A, B, C, D = (OffloadKey(bytes([each]) * 36) for each in range(4))


class Played(Bridge):
    """A runner whose part the test plays."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Action] = []
        self.admitted: list[int] = []
        self.replaced = 0
        self.full = False

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        if self.full:
            return actions
        self.sent += actions
        return ()

    def admit(self, epoch: int) -> None:
        self.admitted.append(epoch)

    def replace(self) -> bool:
        self.replaced += 1
        return False

    def close(self, deadline_s: float) -> int:
        return 0


class Scene:
    """A client, the runner behind it, and the requests `one` and `two`."""

    def __init__(self, *, ttl_s: float = 60.0, scanned: bool = False, **limits: int) -> None:
        spec = TierSpec("kvtier:fs", limits.pop("stores", 100), ttl_s, 3, 60.0, limits.pop("trial", 2), **limits)
        self.bridge = Played()
        self.times = ObservedTimes()
        self.client = TierClient(
            self.bridge, spec, action_chunks=2, observe=self.times.observe, events=EventLog(100), chunk_tokens=16
        )
        self.client.begin("one")
        self.client.begin("two")
        if scanned:
            self.hear(Scanned(0, complete=True))

    def hear(self, *messages) -> None:
        self.bridge.mailbox.extend(messages)
        self.client.take_events()

    def sent(self) -> list[Action]:
        """Flush, and take what was sent since the last call."""
        self.client.flush()
        sent, self.bridge.sent = self.bridge.sent, []
        return sent

    def answer(self, *present: bool) -> None:
        (probe,) = self.sent()
        assert isinstance(probe, Probe)
        self.hear(Answered(probe.id, bytes(present), 0.1))

    def counted(self) -> dict[tuple[str, tuple[str, ...]], float]:
        stats = Stats(client_series(self.client), self.times).take()
        assert stats is not None
        return {(name, labels): value for name, by in stats.data["data"].items() for labels, value in by.items()}


def finished(action: Action, failed: Sequence[int] = (), code: Code = Code.FAILED, *, lent: bool = False) -> Finished:
    return Finished(action.id, pack_rows(failed), bytes([code] * len(failed)), 0.25, lent)


# Asking.


def test_a_request_gets_an_answer_even_if_answers_are_older_than_a_step():
    scene = Scene(ttl_s=1e-9)
    assert scene.client.has(A, "one") is None
    assert scene.client.has(B, "one") is None
    scene.answer(True, False)
    assert scene.client.has(A, "one") is True
    assert scene.client.has(B, "one") is False
    assert scene.client.has(A, "two") is None


def test_keys_beyond_what_may_be_asked_at_once_are_misses_and_counted():
    scene = Scene(asked_keys_max=2)
    assert [scene.client.has(key, "one") for key in (A, B, C, A)] == [None, None, False, None]
    assert scene.client.tier.counters.dropped == {"asking": 1}
    scene.answer(True, True)
    assert scene.client.has(C, "one") is None


def test_a_probe_without_an_answer_is_a_miss_and_counted():
    scene = Scene()
    assert scene.client.has(A, "one") is None
    scene.answer()
    assert scene.client.has(A, "one") is False
    assert scene.counted()["kvtier_tier_probes_failed", ("kvtier:fs",)] == 1


def test_a_miss_is_counted_once_a_request_and_chunk():
    scene = Scene(scanned=True)
    for request in ("one", "one", "two"):
        assert scene.client.has(A, request) is False
    assert scene.client.tier.counters.misses == 2


@pytest.mark.parametrize("code", [Code.FAILED, Code.LOST, Code.REFUSED, Code.MISSING])
def test_what_did_not_come_is_not_sent_for_again_by_the_same_request(code):
    scene = Scene(ttl_s=1e-9, scanned=True)
    scene.hear(Found(0, pack_keys([A])))
    assert scene.client.has(A, "one") is True
    scene.client.load(1, [A], [0], "one")
    (load,) = scene.sent()[-1:]
    scene.hear(finished(load, [0], code))
    assert scene.client.has(A, "one") is False
    assert scene.client.has(A, "two") is (code is not Code.MISSING)


def test_a_chunk_that_is_evicted_again_and_again_is_sent_for_twice():
    scene = Scene(scanned=True)
    scene.hear(Found(0, pack_keys([A])))
    scene.sent()
    for job in (1, 2):
        assert scene.client.has(A, "one") is True
        scene.client.load(job, [A], [0], "one")
        scene.hear(finished(*scene.sent()))
    assert scene.client.has(A, "one") is False
    assert scene.client.has(A, "two") is True


def test_a_breakers_trial_lets_few_chunks_through():
    scene = Scene(scanned=True, trial=2)
    scene.hear(Found(0, pack_keys([A, B, C])))
    scene.client.tier.breaker.trip(-100.0)
    assert [scene.client.has(key, "one") for key in (A, B, C)] == [True, True, False]


# Moving.


def test_of_a_job_beyond_the_budget_the_beginning_is_stored():
    scene = Scene(stores=2, scanned=True)
    scene.client.store(1, [A, B, C], [0, 1, 2], "one")
    (store,) = scene.sent()
    assert unpack_keys(store.keys) == [A, B]
    scene.hear(finished(store))
    (done,) = scene.client.finished()
    assert (done.job_id, list(done.moved), done.whole) == (1, [A, B], False)
    assert scene.client.tier.counters.dropped == {"budget": 1}


def test_what_the_tier_has_or_is_getting_is_not_stored_and_not_said_to_have_moved():
    scene = Scene(scanned=True)
    scene.hear(Found(0, pack_keys([A])))
    scene.client.store(1, [B], [1], "one")
    scene.client.store(2, [A, B], [0, 1], "two")
    (done,) = scene.client.finished()
    assert (done.job_id, list(done.moved), done.whole) == (2, [], True)


@pytest.mark.parametrize("tiers", [True, ["kvtier:fs"]])
def test_what_a_request_says_not_to_store_is_over_at_once_and_counted(tiers):
    scene = Scene(scanned=True)
    scene.client.begin("secret", hint={"no_store": tiers})
    scene.client.store(1, [A, B], [0, 1], "secret")
    (done,) = scene.client.finished()
    assert (done.job_id, list(done.moved), done.whole) == (1, [], True)
    assert scene.sent() == []
    assert scene.counted()["kvtier_tier_skipped", ("kvtier:fs", "no_store")] == 2


def test_a_tier_hears_of_a_requests_hint_when_the_request_and_its_stores_are_over():
    scene = Scene(scanned=True)
    scene.client.begin("last", {A: 16, B: 32}.get, {"over": True, "retain_s": 60, "priority": 7, "tokens": 16})
    scene.client.store(1, [A, B], [0, 1], "last")
    (store,) = scene.sent()
    scene.client.finish("last")
    assert scene.sent() == []
    scene.hear(finished(store))
    rank, retain = scene.sent()
    assert (rank.kind, rank.hint) == ("rank", Hint(over=True, retain_s=60.0, priority=7, tokens=16))
    assert retain.advice() == Advice("retain", [A], seconds=60.0, priority=7)


def test_a_job_is_over_when_its_rows_are_and_late_ones_count_against_the_share():
    scene = Scene(scanned=True, overdue_rows_max=2)
    scene.client.store(1, [A, B], [0, 1], "one")
    (store,) = scene.sent()
    scene.hear(finished(store, [0, 1], Code.DEADLINE, lent=True))
    assert scene.bridge.replaced == 1
    assert scene.client.finished() == []
    assert scene.client.pending
    scene.client.store(2, [C], [2], "one")
    assert scene.client.tier.counters.dropped == {"overdue": 1}
    scene.hear(Returned(store.id, pack_rows([1])))
    assert [(done.job_id, done.whole) for done in scene.client.finished()] == [(2, False), (1, False)]
    assert scene.client.tier.overdue_rows == 0


def test_what_was_stored_too_late_is_asked_for():
    scene = Scene(scanned=True)
    scene.client.store(1, [A, B], [0, 1], "one")
    (store,) = scene.sent()
    scene.hear(finished(store, [0, 1], Code.DEADLINE, lent=True), Returned(store.id, pack_rows([1])))
    assert scene.client.has(A, "one") is False
    assert scene.client.has(B, "one") is None


def test_what_a_lost_runner_had_is_over_when_its_process_is():
    scene = Scene(scanned=True)
    assert scene.client.tier.authoritative
    scene.client.store(1, [A, B, C], [0, 1, 2], "one")
    late, _ = scene.sent()
    scene.hear(finished(late, [0, 1], Code.DEADLINE, lent=True), RunnerLost(0, "killed"))
    assert scene.client.finished() == []
    assert scene.client.has(D, "one") is False
    scene.hear(RunnerBack(1), RunnerGone(0))
    assert scene.bridge.admitted == [1]
    assert [(done.job_id, done.whole) for done in scene.client.finished()] == [(1, False)]
    assert scene.client.tier.counters.failed == {"deadline": 2, "lost": 1}
    assert scene.client.tier.storing == set()
    assert scene.client.has(D, "one") is None
    assert scene.counted()["kvtier_runners_lost", ()] == 1


def test_what_was_not_sent_when_its_runner_was_lost_is_over_and_never_sent():
    scene = Scene(scanned=True)
    scene.client.load(1, [A], [0], "one")
    scene.client.store(2, [B], [1], "one")
    scene.hear(RunnerLost(0, "killed"))
    assert [(done.job_id, done.whole) for done in scene.client.finished()] == [(1, False), (2, False)]
    scene.bridge.full = True
    assert scene.sent() == []
    scene.bridge.full = False
    scene.client.load(3, [C], [2], "one")  # Begun while there is no runner.
    scene.hear(RunnerGone(0), RunnerBack(1))
    assert scene.sent() == []
    assert [(done.job_id, done.whole) for done in scene.client.finished()] == [(3, False)]
    assert not scene.client.pending


def test_what_the_bridge_does_not_take_is_settled():
    scene = Scene()
    scene.bridge.full = True
    assert scene.client.has(A, "one") is None
    scene.client.load(1, [B], [1], "one")
    scene.client.store(2, [C], [2], "two")
    scene.client.flush()
    assert sorted((done.job_id, done.whole) for done in scene.client.finished()) == [(1, False), (2, False)]
    assert scene.client.has(A, "one") is False
    assert not scene.client.pending


# Order, and what the tier says of itself.


def test_a_tier_hears_in_which_order_a_request_used_its_chunks_when_all_are_stored():
    scene = Scene(scanned=True)
    scene.hear(Found(0, pack_keys([A])))
    scene.client.load(1, [A], [0], "one")
    scene.client.store(2, [B], [1], "one")
    scene.client.store(3, [C], [2], "one")
    acknowledge, load, *stores = scene.sent()
    assert isinstance(acknowledge, Acknowledge)
    assert isinstance(load, Promote)
    scene.client.finish("one")
    assert scene.sent() == []
    scene.hear(finished(load), *map(finished, stores))
    assert scene.sent() == [Advise.of(0, Advice("rank", [A, B, C]))]


def test_a_tier_hears_in_prefix_order_of_what_came_in_any():
    scene = Scene(scanned=True)
    scene.client.begin("groups", {A: 16, B: 32, C: 16, D: 32}.get)
    scene.client.store(1, [B, A], [0, 1], "groups")
    scene.client.store(2, [D, C], [2, 3], "groups")
    scene.hear(*map(finished, scene.sent()))
    scene.client.finish("groups")
    (rank,) = scene.sent()
    keys = unpack_keys(rank.keys)
    assert (set(keys[:2]), set(keys[2:])) == ({A, C}, {B, D})


def test_what_goes_while_it_is_stored_is_asked_for_later():
    scene = Scene(scanned=True)
    scene.client.store(1, [A], [0], "one")
    (store,) = scene.sent()
    scene.hear(Gone(0, pack_keys([A])), finished(store))
    assert scene.client.has(A, "one") is None


def test_everything_declared_is_counted_and_nothing_else():
    scene = Scene(scanned=True)
    scene.hear(Found(0, pack_keys([A])), TierUsage(0, 1, 10, 100, 20, {"evicted": 3}))
    scene.client.has(A, "one")
    scene.client.has(D, "one")
    scene.client.load(1, [A], [0], "one")
    scene.client.store(2, [B, C], [1, 2], "one")
    _, load, store = scene.sent()
    assert isinstance(store, Cascade)
    scene.hear(finished(load), finished(store, [0]))
    scene.hear(RunnerLost(0, "killed"), RunnerBack(1))
    scene.client.has(B, "one")
    scene.answer()
    scene.client.store(3, [B], [1], "one")
    (store,) = scene.sent()
    scene.hear(finished(store, [0]))  # The third failure: the breaker opens.
    scene.client.store(4, [B], [1], "one")
    scene.client.begin("secret", hint={"no_store": True})
    scene.client.begin("bad", hint="over")
    scene.client.store(5, [D], [3], "secret")
    counted = scene.counted()
    assert counted["kvtier_tier_reserved_bytes", ("kvtier:fs",)] == 20
    assert counted["kvtier_tier_capacity_bytes", ("kvtier:fs",)] == 100
    assert counted["kvtier_tier_misses", ("kvtier:fs",)] == 1
    assert counted["kvtier_tier_reported", ("kvtier:fs", "evicted")] == 3
    assert counted["kvtier_transfer_seconds", ("kvtier:fs", "load")] == [0.25]
    assert counted["kvtier_transfer_seconds", ("kvtier:fs", "store")] == [0.25] * 2
    assert counted["kvtier_transfer_seconds", ("kvtier:fs", "probe")] == [0.1]
    assert {name for name, _ in counted} | {"kvtier_events_dropped"} == tier_metric_definitions().keys()


# Jobs over rows that are not there.


@pytest.fixture
def real() -> Iterator[TierClient]:
    """A client of a real runner over four rows."""
    config = describe(4, {"type": "dummy"})
    with Region.private(4, config.row_bytes) as region:
        bridge = ThreadBridge(config, region)
        spec = TierSpec("0:dummy", 100, 60.0, 3, 60.0, 2)
        yield TierClient(bridge, spec, action_chunks=1, observe=lambda *_: None)
        bridge.close(60.0)


def test_a_job_with_a_row_that_is_not_there_ends_as_a_failure(real):
    real.load(1, [A, B], [0, 4], "one")
    real.store(2, [C, D], [1, 5], "one")
    real.drain()
    assert {done.job_id: (done.whole, list(done.moved)) for done in real.finished()} == {
        1: (False, []),
        2: (False, [C]),
    }
    assert not real.tier.loading
    assert not real.tier.storing


@pytest.mark.parametrize("rows", [[0], [0, 1, 2], [0, -1]])
def test_a_job_that_has_not_one_row_for_each_key_is_refused_and_nothing_of_it_begun(real, rows):
    for begin in (real.load, real.store):
        with pytest.raises(ValueError, match="one row, 0 or above, is needed for each"):
            begin(1, [A, B], rows, "one")
    real.drain()
    assert not real.pending
    assert not real.tier.loading
    assert not real.tier.storing


# Forks.


def test_a_fork_of_its_owner_sends_the_runner_nothing_and_goes_on_in_the_owner(outside):
    config = describe(4, {"type": "dummy"}, runner="process")
    with Region.memfd(4, config.row_bytes) as region:
        bridge = ProcessBridge(config, region)
        client = TierClient(bridge, TierSpec("0:dummy", 100, 60.0, 3, 60.0, 2), action_chunks=1, observe=lambda *_: 0)
        child = os.fork()
        if child == 0:
            client.store(1, [A], [0], "one")
            client.flush()
            os._exit([(done.job_id, done.whole) for done in client.finished()] != [(1, False)])
        assert os.waitpid(child, 0)[1] == 0
        client.store(2, [B], [1], "one")
        client.drain()
        assert [(done.job_id, done.whole) for done in client.finished()] == [(2, True)]
        assert client.tier.counters.stored == 1
        client.close(60.0)
