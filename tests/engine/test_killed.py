"""Processes killed, stopped and interrupted: no wrong byte, nothing left behind, and the engine goes on."""

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engine import kit
from tests.engine.kit import FAULTY, PATIENCE_S, found, kill_runner, put, settled, until, wait_for
from tests.own import processes, stat_of

pytestmark = pytest.mark.usefixtures("outside")


@pytest.fixture
def disk(tmp_path):
    return {"type": "fs", "layout": "files", "root": str(tmp_path / "tier"), "load_lanes": 1, "store_lanes": 1}


def slow(disk, **changes):
    """Describe a tier on disk whose calls take a moment, so that they can be interrupted."""
    return {"type": FAULTY, "inner": disk, "faults": {"delay": 1.0, "delay_s": 0.03}} | changes


async def until_serving(engine, number):
    """Wait until a chunk that only the tier has comes."""
    async with asyncio.timeout(PATIENCE_S):
        while not await found(engine, [number]):
            await engine.drain()


@pytest.mark.promise("The runner's process dies")
async def test_a_runner_killed_in_mid_transfer_costs_hits_and_no_byte(open_engine, disk):
    engine = await open_engine(16, slow(disk), runner="process", limits={"action_chunks": 2})
    for first in range(0, 48, 8):
        assert await put(engine, range(first, first + 8)) == 8
    assert await engine.drain()
    dice = random.Random(10)
    (tier,) = kit.ledger_in(engine).tiers
    for turn in range(5):
        calls = [asyncio.ensure_future(found(engine, range(first, first + 4))) for first in range(0, 48, 12)]
        calls += [asyncio.ensure_future(put(engine, range(100 + 4 * turn, 104 + 4 * turn)))]
        await until(lambda: tier.loading or all(call.done() for call in calls))  # noqa: B023  # Asked at once.
        await asyncio.sleep(dice.uniform(0, 0.01))
        await kill_runner(engine)
        await asyncio.gather(*calls)
        await engine.reset()
        await until_serving(engine, 0)
    assert engine.steps.stats().runners_lost == 5
    assert tier.counters.failed["lost"] > 0
    await until(lambda: settled(engine), engine)
    assert [await found(engine, range(first, first + 8)) for first in range(0, 48, 8)] == [8] * 6


async def test_a_runner_that_hangs_is_replaced_for_its_silence(open_engine, disk):
    engine = await open_engine(4, disk, runner="process", limits={"heartbeat_s": 0.5}, holds=[1])
    await put(engine, [2, 3, 4, 5])
    assert await engine.drain()
    await kill_runner(engine, signal.SIGSTOP)
    await until_serving(engine, 1)
    await until(lambda: settled(engine), engine)


@pytest.mark.promise("Hung transfers hold too many rows")
@pytest.mark.parametrize("too_many", [True, False])
async def test_a_runner_that_holds_too_many_rows_is_replaced_and_its_rows_come_back(open_engine, disk, too_many):
    hung = {"type": FAULTY, "inner": disk, "script": {"store": ["hang"]}, "limits": {"deadline_s": 0.05}}
    hung |= {} if too_many else {"faults": {"hang_s": 0.5}}
    engine = await open_engine(8, hung, runner="process", limits={"quarantine_share": 0.2 if too_many else 0.5})
    await put(engine, [1, 2])
    await until(lambda: kit.ledger_in(engine).tiers[0].counters.failed, engine)
    await until(lambda: settled(engine), engine)
    assert engine.steps.stats().runners_lost == too_many
    assert await found(engine, [1, 2]) == 2
    assert await put(engine, range(10, 18)) == 8


async def test_while_no_runner_can_be_started_the_primary_serves_and_the_tier_comes_back(open_engine, tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    engine = await open_engine(4, {"type": "fs", "root": str(mount / "tier")}, runner="process", holds=[1])
    await put(engine, [2, 3, 4, 5])
    assert await engine.drain()
    mount.rename(tmp_path / "away")
    await kill_runner(engine)
    assert await found(engine, [2, 3, 4]) == 3
    assert await found(engine, [1]) == 0
    assert await put(engine, [6]) == 1
    assert kit.ledger_in(engine).tiers[0].counters.dropped == {"runner": 1}
    (tmp_path / "away").rename(mount)
    await until_serving(engine, 1)


OWNER = """
import signal, sys
from tests.engine.kit import children, describe, ledger_in, store
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.steps import StepManager

def interrupted(number, frame):
    raise KeyboardInterrupt

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, interrupted)
tier = eval(sys.argv[1])
if sys.argv[2] == "opening":
    print("opening", flush=True)
engine = StepManager.start(describe(64, tier, runner="process"))
if sys.argv[2] == "opens":
    engine.close()
    print(engine.stats().runners_lost, flush=True)
if sys.argv[2] == "stores":
    print(*children(), flush=True)
    for number in range(0, 1 << 30, 8):
        store(engine, range(number, number + 8))
        while not ledger_in(engine).traffic.room(8):
            engine.drain(0.01)
if sys.argv[2] == "waits":
    store(engine, range(8))
    try:
        print(*children(), flush=True)
        signal.pause()
    except KeyboardInterrupt:
        store(engine, range(8, 16))
        engine.drain()
        print(ledger_in(engine).tiers[0].counters.stored, engine.stats().runners_lost, flush=True)
    engine.close()
"""


@pytest.fixture
def owner(program):
    return lambda tier, does: program(OWNER, repr(tier), does)


def processes_in(group):
    living = set()
    for pid in processes():
        try:
            state, _, process_group = stat_of(pid)[:3]
        except OSError:
            continue  # It has just ended.
        if int(process_group) == group and state not in "ZX":
            living.add(pid)
    return living


@pytest.mark.promise("The engine's process is killed")
@pytest.mark.parametrize("seed", range(3))
def test_an_owner_that_is_killed_leaves_no_process_and_no_temporary(owner, disk, seed):
    killed = owner(disk, "stores")
    assert killed.stdout.readline().strip()
    time.sleep(random.Random(seed).uniform(0, 0.2))  # At some moment, not for something.
    killed.kill()
    killed.wait()
    wait_for(lambda: not processes_in(killed.pid))
    files = [path for path in Path(disk["root"]).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".bin", ".json", ""}  # The checkpoint has none.


def test_a_runner_outlives_the_kill_of_its_owner_and_all_descendants_and_closes_its_tier(owner, tmp_path):
    """As vLLM ends by default. A tier of segments writes its checkpoint as it closes."""
    tier = {"type": "fs", "root": str(tmp_path / "tier"), "capacity_bytes": "16MiB"}
    killed = owner(tier, "stores")
    (runner,) = map(int, killed.stdout.readline().split())
    tree = [killed.pid, *descendants(killed.pid)]
    assert runner not in tree
    for pid in tree:
        os.kill(pid, signal.SIGKILL)
    killed.wait()
    wait_for(lambda: not processes_in(killed.pid))
    assert list((tmp_path / "tier").rglob("index*"))


def descendants(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


@pytest.mark.parametrize(("tier", "does"), [("HangsInAThread", "stores"), ("HangsAtOpening", "opening")])
def test_a_runner_that_hangs_does_not_outlive_its_owner(owner, tier, does):
    killed = owner({"type": f"tests.engine.rude_tiers:{tier}"}, does)
    assert killed.stdout.readline().strip()
    wait_for(lambda: len(processes_in(killed.pid)) == 2)
    time.sleep(0.3)  # So that it hangs; if it does not yet, the test is only easier.
    killed.kill()
    killed.wait()
    wait_for(lambda: not processes_in(killed.pid))


@pytest.mark.promise("SIGINT or SIGTERM reaches the process group")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_is_the_owners_to_handle(owner, disk, number):
    interrupted = owner(disk, "waits")
    assert interrupted.stdout.readline().strip()
    os.killpg(interrupted.pid, number)
    assert interrupted.stdout.readline().split() == ["16", "0"]
    assert interrupted.wait(PATIENCE_S) == 0
    wait_for(lambda: not processes_in(interrupted.pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_runner_interrupted_during_its_start_comes_up(owner, disk, number):
    started = owner(disk, "opens")
    wait_for(lambda: len(processes_in(started.pid)) > 1)
    for _ in range(100):
        for runner in processes_in(started.pid) - {started.pid}:  # Its starter first, and both for a moment.
            with suppress(ProcessLookupError):  # It has come up, and its owner has closed it.
                os.kill(runner, number)
        time.sleep(0.001)  # Some before, some after it is Python's.
    assert started.stdout.readline().split() == ["0"]
    assert started.wait(PATIENCE_S) == 0
