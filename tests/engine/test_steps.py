"""The step protocol, as a synchronous engine drives it: nothing waits, and everything arrives in the end."""

import signal
import threading

import pytest

from kvtier import LookupResult, TierMatcher
from tests.engine.kit import FAULTY, key, ledger_in, settled, store, wait_for

HIT, MISS = LookupResult.HIT, LookupResult.MISS
DUMMY = {"type": "dummy"}


def test_a_drain_gives_up_at_its_deadline(start_engine):
    engine = start_engine(4, {"type": FAULTY, "inner": DUMMY, "script": {"store": ["hang"]}, "faults": {"hang_s": 1.0}})
    store(engine, [1])
    assert not engine.drain(deadline_s=0.01)
    assert engine.drain()


def test_a_store_may_complete_after_its_request_has_finished(start_engine):
    remote = {"type": "dummy", "locality": "REMOTE"}
    engine = start_engine(4, DUMMY | {"locality": "LOCAL"}, remote)
    engine.on_new_request("r", [TierMatcher(locality="REMOTE")])
    plan = engine.prepare_store([key(1), key(2)], "r")
    engine.complete_store([key(1)], "r")
    engine.on_request_finished("r")
    engine.end_step()
    engine.complete_store(plan.keys[1:], "r")
    assert engine.drain()
    assert [tier.counters.stored for tier in ledger_in(engine).tiers] == [0, 2]
    assert settled(engine)
    engine.on_new_request("r")
    with pytest.raises(ValueError, match="'r' is known already"):
        engine.on_new_request("r")
    assert engine.lookup(key(1), "r") is HIT
    engine.on_request_finished("r")
    engine.prepare_load([key(1)], "r")  # Calls after its end are served.
    engine.complete_load([key(1)], "r")
    engine.touch([key(1)], "r")
    assert engine.drain()
    assert settled(engine)


def test_an_interrupted_reset_is_a_reset(start_engine):
    slow = {"type": "dummy", "latency_s": 0.5}
    engine = start_engine(4, slow, limits={"cascade_share": 1.0})
    store(engine, [1, 2])
    engine.on_new_request("r")
    engine.complete_store(engine.prepare_store([key(3)], "r").keys, "r")
    timer = threading.Timer(0.05, signal.raise_signal, (signal.SIGINT,))  # As Ctrl-C does.
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.reset()
    timer.join()
    assert ledger_in(engine).primary.rows_free == 2
    wait_for(lambda: engine.end_step() or settled(engine))


def test_more_than_the_socket_takes_at_once_arrives_in_the_end(outside, start_engine, monkeypatch):
    monkeypatch.setattr("kvtier.runner.process.QUEUED_ACTIONS_MAX", 100_000)
    engine = start_engine(
        4_096,
        DUMMY | {"limits": {"store_chunks_in_flight": 100_000}},
        limits={"cascade_share": 1.0, "action_chunks": 1},
    )
    store(engine, range(4_000))  # Some 300 KB of actions in one frame.
    assert engine.drain()
    (tier,) = ledger_in(engine).tiers
    assert (tier.counters.stored, tier.counters.dropped) == (4_000, {})
    assert settled(engine)


def test_hits_that_a_caller_adds_are_kept_until_the_step_ends(start_engine):
    engine = start_engine(2)
    store(engine, [1, 2])
    engine.on_new_request("reader")
    assert engine.lookup(key(1), "reader") is HIT
    with pytest.raises(LookupError, match="nobody"):
        engine.hits("nobody")
    ready, hits = engine.ledger.primary.ready, engine.hits("reader")
    assert key(2) in ready
    hits.append(key(2))
    engine.on_new_request("other")
    assert engine.prepare_store([key(3)], "other") is None
    assert not hits  # It is to look up again.
    assert engine.prepare_load([key(1), key(2)], "reader") == [ready[key(1)], ready[key(2)]]
    engine.complete_load([key(1), key(2)], "reader")
    engine.end_step()
    store(engine, [3])
