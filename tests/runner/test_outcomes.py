"""An exception during a transfer is its outcome: no caller waits for ever."""

import asyncio
from contextlib import ExitStack, contextmanager

import pytest

from kvtier.backend import Abandoned
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.errors import BackendUnavailable
from kvtier.memory.region import Region
from kvtier.runner.bridge import Bridge, ThreadBridge
from kvtier.runner.messages import Acknowledge, Advise, Cascade, Code, Delete, Probe, Promote, pack_keys, pack_rows
from kvtier.runner.process import ProcessBridge
from kvtier_backends.dummy import DummyBackend
from tests.engine.kit import CHUNK_BYTES, PATIENCE_S, at_rest, describe, found, key, put

RUDE = "tests.engine.rude_tiers"
ROWS = 4
BEYOND = ROWS  # The first row that is not there.
KEYS = pack_keys([key(1), key(2)])


WHERE = pytest.mark.parametrize("where", ["thread", pytest.param("process", marks=pytest.mark.outside)])


@contextmanager
def bridge(where, *tiers):
    with ExitStack() as at_end:
        config = describe(ROWS, *(tiers or ({"type": "dummy"},)))
        make, bridge_class = {"thread": (Region.private, ThreadBridge), "process": (Region.memfd, ProcessBridge)}[where]
        region = at_end.enter_context(make(ROWS, CHUNK_BYTES))
        started: Bridge = bridge_class(config, region)
        at_end.callback(started.close, PATIENCE_S)
        yield started


def outcome(bridge, id_):
    told = [message for message in bridge.mailbox if getattr(message, "id", None) == id_]
    while not told:
        assert bridge.wait(PATIENCE_S)
        told = [message for message in bridge.mailbox if getattr(message, "id", None) == id_]
    assert len(told) == 1
    return told[0]


@WHERE
@pytest.mark.parametrize("kind", [Promote, Cascade])
@pytest.mark.parametrize("rows", [[0, BEYOND], [0], [0, 1, 2]], ids=["row beyond", "row too few", "row too many"])
def test_a_transfer_of_rows_that_are_not_there_fails_and_the_next_one_works(nothing_left, where, kind, rows):
    with bridge(where) as runner:
        assert not runner.send([kind(1, 0, KEYS, pack_rows(rows))])
        assert outcome(runner, 1).failures() == {0: Code.UNAVAILABLE, 1: Code.UNAVAILABLE}
        runner.send([Cascade(2, 0, KEYS, pack_rows([0, 1]))])
        assert outcome(runner, 2).failures() == {}


@WHERE
def test_an_action_for_an_unknown_tier_fails_and_costs_no_other(nothing_left, where):
    with bridge(where) as runner:
        rows = pack_rows([0, 1])
        wrong = [Promote(1, 7, KEYS, rows), Cascade(2, 7, KEYS, rows), Probe(3, 7, KEYS), Delete(4, 7, KEYS)]
        runner.send([Acknowledge(7), Advise(7, "rank", KEYS), *wrong, Cascade(5, 0, KEYS, rows)])
        for id_ in (1, 2, 4):
            assert outcome(runner, id_).failures() == {0: Code.UNAVAILABLE, 1: Code.UNAVAILABLE}
        assert (outcome(runner, 3).present, outcome(runner, 5).failures()) == (b"", {})


@pytest.mark.parametrize(("tier", "left"), [("EndsItsThreadLater", 1), ("EndsItsThreadAsItCloses", 0)])
def test_a_runner_whose_tier_stopped_its_loop_can_be_closed(nothing_left, tier, left):
    with bridge("thread", {"type": f"{RUDE}:{tier}"}) as runner:
        runner.send([Cascade(1, 0, KEYS, pack_rows([0, 1]))])
        assert runner.wait(PATIENCE_S)
        runner._thread.join(PATIENCE_S * left)
        assert runner._thread.is_alive() == (left == 0)
        assert runner.close(0.2) == left


def test_a_start_that_is_given_up_closes_the_tiers_that_it_has_opened(nothing_left, monkeypatch):
    closed: list[str] = []

    async def aclose(tier, deadline_s):
        await asyncio.sleep(0.05)
        closed.append("closed")
        return Abandoned(0)

    monkeypatch.setattr("kvtier.runner.bridge.opening_s", lambda _: 0.2)
    monkeypatch.setattr(DummyBackend, "aclose", aclose)
    with (
        pytest.raises(BackendUnavailable, match=r"does not open within 0.2 s"),
        bridge("thread", {"type": "dummy"}, {"type": f"{RUDE}:NeverOpens"}),
    ):
        pass
    assert closed == ["closed"]


async def test_an_observer_that_raises_is_logged_and_costs_no_outcome(nothing_left, caplog):
    def observe(tier, operation, seconds):
        raise ZeroDivisionError

    async with (
        asyncio.timeout(PATIENCE_S),
        TieringOffloadingManager.open(describe(4, {"type": "dummy"}), observer=observe) as engine,
    ):
        await put(engine, [1, 2])
        assert await at_rest(engine)
        assert await engine.reset()
        assert await found(engine, [1, 2]) == 2
        assert await at_rest(engine)
    assert len([line for line in caplog.messages if "the observer raised" in line]) == 1
