"""One tier behind vLLM's manager, its runner played by the test: messages, limits, counters."""

import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvtier.backend.namespace import OffloadKey
from kvtier.integrations.vllm import KVTierSecondaryTier, secondary
from kvtier.integrations.vllm.stats import tier_metric_definitions
from kvtier.memory.region import Region
from kvtier.runner import messages
from kvtier.runner.bridge import Bridge, ThreadBridge
from kvtier.runner.messages import Code
from kvtier.runner.process import ProcessBridge
from kvtier.settings.hints import Advice, Hint
from tests.vllm.test_one_host import config

A, B, C, D = (OffloadKey(bytes([each]) * 36) for each in range(4))
NAME, ROWS, ROW_BYTES = "kvtier:dummy", 8, 16_384
ANSWERS = {LookupResult.HIT: True, LookupResult.MISS: False, LookupResult.RETRY: None}


class Played(Bridge):
    kind, pid = "played", 0

    def __init__(self):
        super().__init__()
        self.sent: list[messages.Action] = []
        self.admitted: list[int] = []
        self.replaced, self.full = 0, False

    def send(self, actions):
        if self.full:
            return actions
        self.sent += actions
        return ()

    def admit(self, epoch):
        self.admitted.append(epoch)

    def replace(self):
        self.replaced += 1
        return False

    def close(self, deadline_s):
        return 0


class Scene:
    def __init__(self, bridge_of, region, patch, action_chunks=2):
        def start(spec, rows, config):
            self.bridge: Any = bridge_of(config, region)
            return self.bridge, region

        patch.setattr(secondary, "_start", start)
        events = SimpleNamespace(enable_kv_cache_events=True)
        rows = memoryview(bytearray(ROWS * ROW_BYTES)).cast("B", (ROWS, ROW_BYTES))
        spec: Any = SimpleNamespace(config=config("/dev/shm"), kv_events_config=events)
        given = {"backend": "dummy", "enable_kv_events": True, "limits": {"action_chunks": action_chunks}}
        self.tier = KVTierSecondaryTier(spec, rows, "KVTierSecondaryTier", **given)
        self.requests: dict[str, ReqContext] = {}

    def begin(self, name, positions=None, hint=None):
        self.requests[name] = context = ReqContext(name, None if hint is None else {"kvtier": hint})
        for key, position in (positions or {}).items():
            context.set_offload_key_position(key, position)
        self.tier.on_new_request(context)
        return context

    def finish(self, name):
        self.tier.on_request_finished(self.requests[name])

    def has(self, key, name="one"):
        return ANSWERS[self.tier.lookup(key, self.requests.get(name) or self.begin(name))]

    def load(self, job, keys, rows, name="one"):
        self.tier.submit_load(self._job(job, keys, rows, name))

    def store(self, job, keys, rows, name="one"):
        self.tier.submit_store(self._job(job, keys, rows, name))

    def finished(self):
        """Return what vLLM is told of jobs that have ended: id, success, chunks that moved."""
        found = self.tier.get_finished_jobs()
        return [(each.job_id, each.success, each.transfer_bytes // ROW_BYTES) for each in found]

    def hear(self, *messages):
        self.bridge.mailbox.extend(messages)
        list(self.tier.take_events())

    def sent(self):
        self.tier.on_schedule_end(None)
        sent, self.bridge.sent = self.bridge.sent, []
        return sent

    def answer(self, *present):
        (probe,) = self.sent()
        assert isinstance(probe, messages.Probe)
        self.hear(messages.Answered(probe.id, bytes(present), 0.1))

    def _job(self, job, keys, rows, name):
        context = self.requests.get(name) or self.begin(name)
        return TransferJob(job, keys, np.array(rows), is_promotion=True, req_context=context)


@pytest.fixture
def play(monkeypatch):
    def made(*found, scanned=True, **spec):
        scene = Scene(lambda config, region: Played(), Region.private(ROWS, ROW_BYTES), monkeypatch)
        scene.tier.tier.spec = scene.tier.tier.spec._replace(**spec)
        if scanned:
            scene.hear(messages.Scanned(0, complete=True), messages.Found(0, messages.pack_keys(found)))
            scene.sent()
        return scene

    return made


def finished(action, failed=(), code=Code.FAILED, *, lent=False):
    return messages.Finished(action.id, messages.pack_rows(failed), bytes([code] * len(failed)), 0.25, lent)


def test_a_request_gets_an_answer_even_if_answers_are_older_than_a_step(play):
    scene = play(scanned=False, answer_ttl_s=1e-9)
    assert (scene.has(A), scene.has(B)) == (None, None)
    scene.answer(True, False)
    assert (scene.has(A), scene.has(B), scene.has(A, "two")) == (True, False, None)


def test_keys_beyond_what_may_be_asked_at_once_are_misses_and_counted(play):
    scene = play(scanned=False, asked_keys_max=2)
    assert [scene.has(key) for key in (A, B, C, A)] == [None, None, False, None]
    assert scene.tier.tier.counters.dropped == {"asking": 1}
    scene.answer(True, True)
    assert scene.has(C) is None


def test_a_probe_without_an_answer_is_a_miss_and_counted(play):
    scene = play(scanned=False)
    assert scene.has(A) is None
    scene.answer()
    assert scene.has(A) is False
    assert scene.tier.tier.counters.probes_failed == 1


def test_a_miss_is_counted_once_a_request_and_chunk(play):
    scene = play()
    assert [scene.has(A, name) for name in ("one", "one", "two")] == [False] * 3
    assert scene.tier.tier.counters.misses == 2


@pytest.mark.parametrize("code", [Code.FAILED, Code.LOST, Code.REFUSED, Code.MISSING])
def test_what_did_not_come_is_not_sent_for_again_by_the_same_request(play, code):
    scene = play(A, answer_ttl_s=1e-9)
    assert scene.has(A) is True
    scene.load(1, [A], [0])
    scene.hear(finished(*scene.sent(), [0], code))
    assert scene.has(A) is False
    assert scene.has(A, "two") is (code is not Code.MISSING)


def test_a_chunk_that_is_evicted_again_and_again_is_sent_for_twice(play):
    scene = play(A)
    for job in (1, 2):
        assert scene.has(A) is True
        scene.load(job, [A], [0])
        scene.hear(finished(*scene.sent()))
    assert (scene.has(A), scene.has(A, "two")) == (False, True)


def test_a_breakers_trial_lets_few_chunks_through(play):
    scene = play(A, B, C)
    scene.tier.tier.breaker.trip(-100.0)
    assert [scene.has(key) for key in (A, B, C)] == [True, True, False]


def test_of_a_job_beyond_the_budget_the_beginning_is_stored(play):
    scene = play(store_chunks_max=2)
    scene.store(1, [A, B, C], [0, 1, 2])
    (store,) = scene.sent()
    assert messages.unpack_keys(store.keys) == [A, B]
    scene.hear(finished(store))
    assert (scene.finished(), scene.tier.tier.counters.dropped) == ([(1, False, 2)], {"budget": 1})


def test_what_the_tier_has_or_is_getting_is_not_stored_and_not_said_to_have_moved(play):
    scene = play(A)
    scene.store(1, [B], [1])
    scene.store(2, [A, B], [0, 1], "two")
    assert scene.finished() == [(2, True, 0)]


@pytest.mark.parametrize("tiers", [True, [NAME]])
def test_what_a_request_says_not_to_store_is_over_at_once_and_counted(play, tiers):
    scene = play()
    scene.begin("secret", hint={"no_store": tiers})
    scene.store(1, [A, B], [0, 1], "secret")
    assert (scene.finished(), scene.sent()) == ([(1, True, 0)], [])
    assert scene.tier.tier.counters.skipped == {"no_store": 2}


def test_a_job_is_over_when_its_rows_are_and_late_ones_count_against_the_share(play):
    scene = play(overdue_rows_max=2)
    scene.store(1, [A, B], [0, 1])
    (store,) = scene.sent()
    scene.hear(finished(store, [0, 1], Code.DEADLINE, lent=True))
    assert (scene.bridge.replaced, scene.finished(), scene.tier.has_pending_work()) == (1, [], True)
    scene.store(2, [C], [2])
    assert scene.tier.tier.counters.dropped == {"overdue": 1}
    scene.hear(messages.Returned(store.id, messages.pack_rows([1])))  # The other row's chunk has been stored.
    assert (scene.finished(), scene.tier.tier.overdue_rows) == ([(2, False, 0), (1, False, 0)], 0)
    assert (scene.has(A), scene.has(B)) == (False, None)  # It is asked for.


def test_what_a_lost_runner_had_is_over_when_its_process_is(play):
    scene = play()
    scene.store(1, [A, B, C], [0, 1, 2])
    late, _ = scene.sent()
    scene.hear(finished(late, [0, 1], Code.DEADLINE, lent=True), messages.RunnerLost(0, "killed"))
    assert (scene.finished(), scene.has(D)) == ([], False)
    scene.hear(messages.RunnerBack(1), messages.RunnerGone(0))
    assert (scene.bridge.admitted, scene.finished()) == ([1], [(1, False, 0)])
    assert (scene.tier.tier.counters.failed, scene.tier.tier.storing) == ({"deadline": 2, "lost": 1}, set())
    assert scene.has(D) is None


def test_what_was_not_sent_when_its_runner_was_lost_is_over_and_never_sent(play):
    scene = play()
    scene.load(1, [A], [0])
    scene.store(2, [B], [1])
    scene.hear(messages.RunnerLost(0, "killed"))
    assert scene.finished() == [(1, False, 0), (2, False, 0)]
    scene.load(3, [C], [2])  # Begun while there is no runner.
    scene.hear(messages.RunnerGone(0), messages.RunnerBack(1))
    assert (scene.sent(), scene.finished()) == ([], [(3, False, 0)])
    assert not scene.tier.has_pending_work()


def test_what_the_bridge_does_not_take_is_settled(play):
    scene = play(scanned=False)
    scene.bridge.full = True
    assert scene.has(A) is None
    scene.load(1, [B], [1])
    scene.store(2, [C], [2], "two")
    assert (scene.sent(), sorted(scene.finished())) == ([], [(1, False, 0), (2, False, 0)])
    assert scene.has(A) is False
    assert not scene.tier.has_pending_work()


def test_a_tier_hears_of_a_requests_order_and_hint_when_it_and_its_stores_are_over(play):
    scene = play(A)
    scene.begin("one", {A: 16, B: 32, C: 48}, {"over": True, "retain_s": 60, "priority": 7, "tokens": 16})
    scene.load(1, [A], [0])
    scene.store(2, [C, B], [2, 1])
    load, store = scene.sent()
    assert isinstance(load, messages.Promote)
    scene.finish("one")
    assert scene.sent() == []
    scene.hear(finished(load), finished(store))
    hint = Hint(over=True, retain_s=60.0, priority=7, tokens=16)
    retain = Advice("retain", [A], seconds=60.0, priority=7)
    assert scene.sent() == [messages.Advise.of(0, Advice("rank", [A, B, C], hint=hint)), messages.Advise.of(0, retain)]


def test_everything_declared_is_counted_and_nothing_else(play):
    scene = play(A)
    scene.hear(messages.TierUsage(0, 1, 10, 100, 20, {"evicted": 3}))
    assert (scene.has(A), scene.has(D)) == (True, False)
    scene.load(1, [A], [0])
    scene.store(2, [B, C], [1, 2])
    load, store = scene.sent()
    scene.hear(finished(load), finished(store, [0]))
    scene.hear(messages.RunnerLost(0, "killed"), messages.RunnerBack(1))
    scene.has(B)
    scene.answer()
    scene.store(3, [B], [1])
    scene.hear(finished(*scene.sent(), [0]))
    scene.tier.tier.breaker.trip(time.monotonic())
    scene.store(4, [B], [1])
    scene.begin("secret", hint={"no_store": True})
    scene.begin("bad", hint="over")
    scene.store(5, [D], [3], "secret")
    stats = scene.tier.get_stats()
    assert stats is not None
    counted = {(name, labels): value for name, by in stats.data["data"].items() for labels, value in by.items()}
    assert counted["kvtier_tier_reserved_bytes", (NAME,)] == 20
    assert counted["kvtier_tier_capacity_bytes", (NAME,)] == 100
    assert (counted["kvtier_tier_misses", (NAME,)], counted["kvtier_tier_probes_failed", (NAME,)]) == (1, 1)
    assert counted["kvtier_tier_skipped", (NAME, "no_store")] == 1
    assert (counted["kvtier_tier_reported", (NAME, "evicted")], counted["kvtier_runners_lost", ()]) == (3, 1)
    assert counted["kvtier_transfer_seconds", (NAME, "load")] == [0.25]
    assert counted["kvtier_transfer_seconds", (NAME, "store")] == [0.25] * 2
    assert counted["kvtier_transfer_seconds", (NAME, "probe")] == [0.1]
    assert {name for name, _ in counted} | {"kvtier_events_dropped"} == tier_metric_definitions().keys()


def test_a_job_with_a_row_that_is_not_there_ends_as_a_failure(monkeypatch):
    scene = Scene(ThreadBridge, Region.private(ROWS, ROW_BYTES), monkeypatch, action_chunks=1)
    scene.load(1, [A, B], [0, ROWS])
    scene.store(2, [C, D], [1, ROWS + 1])
    scene.tier.drain_jobs()
    assert sorted(scene.finished()) == [(1, False, 0), (2, False, 1)]
    assert not scene.tier.tier.loading
    assert not scene.tier.tier.storing
    scene.tier.shutdown()


def test_a_fork_of_its_owner_sends_the_runner_nothing_and_goes_on_in_the_owner(monkeypatch):
    scene = Scene(ProcessBridge, Region.memfd(ROWS, ROW_BYTES), monkeypatch)
    child = os.fork()
    if child == 0:
        scene.store(1, [A], [0])
        scene.tier.on_schedule_end(None)
        os._exit(scene.finished() != [(1, False, 0)])
    assert os.waitpid(child, 0)[1] == 0
    scene.store(2, [B], [1])
    scene.tier.drain_jobs()
    assert scene.finished() == [(2, True, 1)]
    scene.tier.shutdown()
