"""The manager that vLLM calls beside the engine that it calls: whatever it finds by itself must change nothing."""

import random
from functools import partial

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.steps import StepManager
from kvtier.errors import ConfigError
from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.stats import Stats
from kvtier.integrations.vllm_options import read_mark
from tests.benchmarks.protocol import Steps

KEYS = [make_offload_key(bytes([number]) * 32) for number in range(8)]
ROWS = 4


@pytest.fixture
def engine(monkeypatch):
    made: list[StepManager] = []
    start = StepManager

    def kept(*given, **named):
        made.append(start(*given, **named))
        return made[-1]

    def steps(rows=ROWS, tiers=1):
        steps = Steps(rows, tiers)
        for tier in range(tiers):
            steps.hold(tier)
        return steps

    monkeypatch.setattr("tests.benchmarks.protocol.StepManager", kept)
    yield steps
    for each in made:
        each.close(0.0)


class Both:
    def __init__(self, through, direct, mark):
        self.through, self.direct = VllmManager(through, Stats(), lambda: mark), direct
        self.contexts: dict[str, ReqContext] = {}
        self.hits: dict[str, list[OffloadKey]] = {}
        self.requests = 0

    def begin(self):
        self.requests += 1
        name = str(self.requests)
        self.contexts[name], self.hits[name] = ReqContext(req_id=name), []
        self.through.on_new_request(self.contexts[name])
        self.direct.on_new_request(name)

    def finish(self, name):
        self.through.on_request_finished(self.contexts.pop(name))
        self.direct.on_request_finished(name)
        del self.hits[name]

    def lookup(self, name, key):
        found = self.through.lookup(key, self.contexts[name])
        assert found.name == self.direct.lookup(key, name).name
        if found is LookupResult.HIT:
            self.hits[name].append(key)

    def load(self, name):
        keys, context = self.hits[name], self.contexts[name]
        assert list(self.through.prepare_load(keys, context).block_ids) == self.direct.prepare_load(keys, name)
        self.through.complete_load(keys, context)
        self.direct.complete_load(keys, name)

    def store(self, name, keys):
        output, plan = self.through.prepare_store(keys, self.contexts[name]), self.direct.prepare_store(keys, name)
        assert (output is None) == (plan is None)
        if output is not None and plan is not None:
            assert (output.keys_to_store, output.evicted_keys) == (plan.keys, plan.evicted)
            self.through.complete_store(plan.keys, self.contexts[name])
            self.direct.complete_store(plan.keys, name)

    def end_step(self):
        self.through.on_schedule_end(ScheduleEndContext((), ()))
        self.direct.end_step()
        for hits in self.hits.values():
            hits.clear()

    def reset(self, name):
        """Reset in the middle of a step that has found something; a reset would wait for what is under way."""
        while self.through.has_pending_work() or self.direct.has_pending_work():
            self.end_step()
        for key in list(self.direct.ledger.primary.ready):
            self.lookup(name, key)
        self.through.reset_cache()
        self.direct.reset()
        self.direct.on_reset_flushed()
        for hits in self.hits.values():
            hits.clear()

    def do_something(self, dice):
        name = dice.choice(list(self.contexts))
        match dice.randrange(20):
            case 0 if len(self.contexts) < 4:
                self.begin()
            case 1 if len(self.contexts) > 1:
                self.finish(name)
            case 2 | 3 | 4:
                self.end_step()
            case 5 | 6:
                self.store(name, dice.sample(KEYS, dice.randint(1, 2)))
            case 7:
                self.load(name)
            case 8 if dice.random() < 0.2:
                self.reset(name)
            case _:
                for key in dice.sample(KEYS, dice.randint(1, 4)):
                    self.lookup(name, key)


def test_of_what_vllm_stores_beyond_a_tiers_budget_the_beginning_cascades(engine):
    steps = engine(len(KEYS))
    ledger = steps.manager.ledger
    ledger.tiers[0].spec = ledger.tiers[0].spec._replace(store_chunks_max=3)
    through, context = VllmManager(steps.manager, Stats()), ReqContext(req_id="r")
    dice = random.Random(5)
    for place, key in enumerate(KEYS):
        context.set_offload_key_position(key, place)
    through.on_new_request(context)
    output = through.prepare_store(KEYS, context)
    assert output is not None
    assert output.keys_to_store == KEYS
    through.complete_store(dice.sample(KEYS, len(KEYS)), context)
    assert ledger.tiers[0].storing == set(KEYS[:3])


@pytest.mark.parametrize("seed", range(100))
def test_what_vllm_is_told_is_what_the_engine_says(engine, seed):
    both, dice = Both(engine().manager, engine().manager, b"revision" * (seed % 2)), random.Random(seed)
    both.begin()
    for _ in range(200):
        both.do_something(dice)
    while both.contexts:
        both.finish(next(iter(both.contexts)))
    both.end_step()
    assert not both.through.engine.ledger.leases.rows
    assert not both.through.has_pending_work()


def test_a_reset_reads_the_weights_revision_again_and_events_tell_of_its_chunks_alone(outside, tmp_path):
    tier, revision = {"type": "fs", "root": str(tmp_path / "tier")}, tmp_path / "revision"
    given = {"cpu_bytes_to_use": 32 << 10, "chunk_bytes": 4_096, "secondary_tiers": [tier], "events": True}
    revision.write_text("one\n")
    config, context = EngineConfig.from_dict(given), ReqContext(req_id="r")
    manager = VllmManager(StepManager.start(config), Stats(), partial(read_mark, str(revision)))

    def store(key):
        assert manager.prepare_store([key], context)
        manager.complete_store([key], context)
        manager.engine.drain()
        return {(event.removed, *event.keys) for event in manager.take_events()}

    def found(key):
        while (answer := manager.lookup(key, context)) in (LookupResult.RETRY, LookupResult.HIT_PENDING):
            manager.engine.drain()
        manager.on_schedule_end(ScheduleEndContext((), ()))
        return answer is LookupResult.HIT

    try:
        manager.on_new_request(context)
        assert store(KEYS[0]) == {(False, KEYS[0])}
        revision.write_text("two")
        manager.reset_cache()
        assert list(manager.take_events()) == []
        assert not found(KEYS[0])
        assert store(KEYS[1]) == {(False, KEYS[1])}
        revision.write_text("one")
        manager.reset_cache()
        assert [found(KEYS[0]), found(KEYS[1])] == [True, False]
        revision.write_text(" ")
        with pytest.raises(ConfigError, match=r"revision_file: .* is empty"):
            manager.reset_cache()
        revision.unlink()
        with pytest.raises(ConfigError, match=r"revision_file: .* cannot be read: .*No such file"):
            manager.reset_cache()
        assert found(KEYS[0])
    finally:
        manager.shutdown()
