"""Engines that do not come to be, or end badly, leave nothing: no thread, process, descriptor or shared memory."""

import asyncio
import os
import signal
import sys
import threading
from contextlib import ExitStack

import pytest

from kvtier import BackendUnavailable, ConfigError, EngineClosed, StepManager, TieringOffloadingManager
from kvtier.memory.region import Region
from kvtier.runner.messages import Probe, RunnerBack, RunnerLost, pack_keys
from kvtier.runner.process import ProcessBridge
from tests.engine.kit import CHUNK_BYTES, PATIENCE_S, children, describe, key, ledger_in, put

pytestmark = pytest.mark.usefixtures("nothing_left")

DUMMY = {"type": "dummy"}
RUDE = "tests.engine.rude_tiers"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"secondary_tiers": [DUMMY, {"type": "dummy", "latency": 1}]}, r"secondary_tiers\[1\].*latency"),
        ({"secondary_tiers": [{"type": "dumy"}]}, r"secondary_tiers\[0\].type.*'dumy'"),
        ({"eviction_policy": "lur"}, r"^eviction_policy: 'lur' is no policy; did you mean 'lru'\?"),
        (
            {"secondary_tiers": [DUMMY, {"type": "fs", "root": "/nowhere/at/all"}]},
            r"^secondary_tiers\[1\]\.root: cannot create '/nowhere/at/all': its parent directory does not exist",
        ),
        ({"secondary_tiers": [{"type": f"{RUDE}:RefusesRows"}]}, r"^secondary_tiers\[0\]: chunk_bytes: rows of 1 byte"),
        ({"cpu_bytes_to_use": "100TiB", "chunk_bytes": "1GiB"}, "free"),  # Too large for the machine.
    ],
)
async def test_an_engine_that_cannot_be_configured_leaves_nothing(runner, fields, error):
    with pytest.raises(ConfigError, match=error):
        await TieringOffloadingManager.open(describe(4, runner=runner, **fields))


async def test_why_an_engine_cannot_be_opened_is_raised_and_not_logged_as_well(runner, caplog):
    with pytest.raises(BackendUnavailable, match="not today"):
        await TieringOffloadingManager.open(describe(4, DUMMY, {"type": f"{RUDE}:Unreachable"}, runner=runner))
    assert caplog.messages == []


@pytest.mark.promise("It hangs while it opens")
async def test_a_tier_that_never_opens_is_an_error_at_the_deadline(runner, nothing_left, monkeypatch):
    monkeypatch.setattr("kvtier.runner.runner.OPEN_S", 0.2)  # The first tier does so in its process.
    tiers = {"type": f"{RUDE}:Hurries"}, {"type": f"{RUDE}:NeverOpens", "name": "away"}
    with pytest.raises(BackendUnavailable, match=r"away: does not open within 0.2 s"):
        await TieringOffloadingManager.open(describe(4, *tiers, runner=runner))


async def test_a_mount_that_hangs_as_it_is_opened_costs_the_start_its_deadline(
    runner, nothing_left, tmp_path, monkeypatch
):
    """Its thread stays behind until the mount is back."""
    if runner == "process":
        pytest.skip("the file system of another process cannot be made to hang from here")
    monkeypatch.setattr("kvtier.runner.runner.OPEN_S", 0.2)
    back, mkdir = threading.Event(), os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda *args, **kwargs: back.wait(PATIENCE_S) and mkdir(*args, **kwargs))
    tier = {"type": "fs", "root": str(tmp_path / "mount")}
    try:
        with pytest.raises(BackendUnavailable, match="does not open"):
            await TieringOffloadingManager.open(describe(4, tier, runner=runner))
    finally:
        back.set()


@pytest.mark.parametrize("interpreter", ["/nowhere/python", "/bin/false", None])
def test_a_runner_that_cannot_be_started_is_said_to_be_unavailable(outside, monkeypatch, interpreter):
    monkeypatch.setattr(sys, "executable", interpreter)
    with pytest.raises(BackendUnavailable, match="process"):
        StepManager.start(describe(4, DUMMY, runner="process"))


async def test_an_engine_whose_tier_ends_its_runner_as_it_opens_is_said_to_be_so(outside):
    with pytest.raises((OSError, BackendUnavailable)):
        await TieringOffloadingManager.open(describe(4, DUMMY, {"type": f"{RUDE}:EndsItsThread"}, runner="process"))


@pytest.mark.parametrize("awaited", [False, True])
async def test_an_engine_is_closed_at_the_end_of_its_block_whether_it_was_awaited_before_or_not(runner, awaited):
    TieringOffloadingManager.open(describe(4, {"type": "dumy"}, runner=runner))  # Without either it does not begin.
    opening, entered = TieringOffloadingManager.open(describe(4, DUMMY, runner=runner)), []

    async def fail():
        async with await opening if awaited else opening as engine:
            entered.append((engine, await put(engine, [1])))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    ((engine, stored),) = entered
    assert stored == 1
    with pytest.raises(EngineClosed):
        await put(engine, [2])


async def test_a_start_ends_though_a_tier_blocks_its_runner_as_it_opens(outside, monkeypatch):
    monkeypatch.setattr("kvtier.runner.bridge.START_S", 0.2)
    monkeypatch.setattr("kvtier.runner.bridge.OPEN_S", 0.1)
    blocking = describe(4, {"type": f"{RUDE}:Blocks"}, runner="process", limits={"close_s": 0.1})
    with pytest.raises(BackendUnavailable, match="blocks"):
        await TieringOffloadingManager.open(blocking)


def test_a_start_that_is_interrupted_leaves_nothing(outside, nothing_left):
    interrupt = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        StepManager.start(describe(4, {"type": f"{RUDE}:NeverOpens"}))
    interrupt.join()


@pytest.mark.parametrize("after_s", [0, 0.001, 0.01, 0.03, 0.1, 0.2])
async def test_an_opening_that_is_cancelled_leaves_nothing(outside, after_s):
    opening = asyncio.ensure_future(TieringOffloadingManager.open(describe(4, DUMMY, runner="process")))
    await asyncio.sleep(after_s)
    if opening.cancel():
        await asyncio.wait([opening])
        assert opening.cancelled()
    else:
        await opening.result().aclose()


async def test_an_inline_engine_needs_a_loop():
    with pytest.raises(ValueError, match="open"):
        StepManager.start(describe(4, runner="inline"))


def sent(bridge):
    return not bridge.send([Probe(1, 0, pack_keys([key(1)]))])


@pytest.fixture
def bridge(outside):
    """A process runner whose owner has not looked at what came yet."""
    with Region.memfd(4, CHUNK_BYTES) as region:
        bridge = ProcessBridge(describe(4, DUMMY, runner="process"), region)
        yield bridge
        bridge.close(1)


def kill_runner(bridge, until):
    came = len(bridge.mailbox)
    (runner,) = children()
    os.kill(runner, signal.SIGKILL)
    wait_for(bridge, lambda: has_said(bridge, until, since=came))


def has_said(bridge, kind, since=0):
    return any(isinstance(message, kind) for message in list(bridge.mailbox)[since:])


def wait_for(bridge, condition):
    for _ in range(1_000):
        if condition():
            return
        bridge.wait(PATIENCE_S / 1_000)
    raise AssertionError(f"it did not come about: {list(bridge.mailbox)}")


@pytest.mark.parametrize("admitted", [True, False])
def test_a_successor_gets_nothing_before_its_owner_knows_of_it_and_ends_with_the_rest(bridge, admitted):
    assert sent(bridge)
    kill_runner(bridge, until=RunnerBack)
    assert not sent(bridge)
    if admitted:
        bridge.admit(1)
        assert sent(bridge)
    bridge.close(0.5)
    wait_for(bridge, lambda: not children())


def test_a_successor_that_has_died_meanwhile_is_not_admitted(bridge, monkeypatch):
    kill_runner(bridge, until=RunnerBack)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    kill_runner(bridge, until=RunnerLost)
    bridge.admit(1)
    assert not sent(bridge)


def test_a_successor_that_blocks_as_it_opens_is_killed_and_has_a_successor_itself(outside, tmp_path, monkeypatch):
    wish = tmp_path / "wish"
    tier = {"type": f"{RUDE}:BlocksOnce", "store": str(wish)}
    config = describe(4, tier, runner="process", limits={"close_s": 0.1})
    with Region.memfd(4, CHUNK_BYTES) as region, ExitStack() as at_end:
        bridge = ProcessBridge(config, region)
        at_end.callback(bridge.close, 1)
        wish.touch()
        monkeypatch.setattr("kvtier.runner.bridge.START_S", 2.0)
        monkeypatch.setattr("kvtier.runner.bridge.OPEN_S", 0.1)
        kill_runner(bridge, until=RunnerLost)
        wait_for(bridge, lambda: not wish.exists())
        monkeypatch.undo()
        wait_for(bridge, lambda: has_said(bridge, RunnerBack))


async def test_calls_cut_off_by_closing_are_not_logged(caplog):
    """A tier with a queue answers so to whatever is in it when it is closed: there may be thousands."""
    engine = await TieringOffloadingManager.open(describe(16, {"type": f"{RUDE}:GivesUpItsQueue"}))
    await put(engine, range(8))
    await engine.aclose(0.1)
    assert ledger_in(engine).tiers[0].counters.failed == {"unavailable": 8}
    assert caplog.messages == []
