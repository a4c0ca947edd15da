"""Engines in processes as others have them: thousands of descriptors, closed streams, odd paths, forks."""

import fcntl
import os
import subprocess

import pytest

from tests.engine.kit import PATIENCE_S, found, kill_runner, put, wait_for
from tests.own import stat_of

PRELUDE = """
import asyncio, os, resource, signal, subprocess, sys, traceback
from inspect import signature
from pathlib import Path
from tests.engine.kit import children, chunk, describe, found, key, kill_runner, ledger_in, put, store, until
from kvtier.errors import EngineClosed, KVTierError
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.steps import StepManager

root, runner = sys.argv[1:3]
"""


@pytest.fixture
def run(program, tmp_path):
    """Start a program with a root and a runner's kind for arguments."""
    root = str(tmp_path / "tier")
    return lambda text, runner="process", *args, **options: program(PRELUDE + text, root, runner, *args, **options)


def output(process):
    """Wait for the end of a program; return what it said, or fail with what it said went wrong."""
    said, wrong = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, wrong
    return said.split()


def has_ended(pid):
    try:
        return stat_of(pid)[0] in "ZX"
    except FileNotFoundError:
        return True


def test_a_runner_is_replaced_however_many_descriptors_its_owner_has(run, tmp_path):
    """Its first successors fail: their supervisor waits before it starts another."""
    replaced = run("""
resource.setrlimit(resource.RLIMIT_NOFILE, (2_048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1_200)]
mount = Path(root).parent / "mount"
mount.mkdir()

async def main():
    tier = {"type": "fs", "root": str(mount / "tier")}
    async with TieringOffloadingManager.open(describe(4, tier, runner=runner)) as engine:
        await put(engine, [1])
        await put(engine, [2, 3, 4, 5])
        assert await engine.drain()
        mount.rename(mount.parent / "away")
        seen = children()
        await kill_runner(engine)
        await until(lambda: seen.update(children()) or len(seen) > 2, engine)
        (mount.parent / "away").rename(mount)
        while not await found(engine, [1]):
            await engine.drain()
        print("served")

asyncio.run(main())
""")
    assert output(replaced) == ["served"]


@pytest.mark.parametrize(
    ("runner", "closed"), [*(("process", closed) for closed in ((0,), (1,), (2,), (0, 1, 2))), ("inline", (0, 1, 2))]
)
def test_closed_standard_streams_are_not_used_for_files(run, tmp_path, runner, closed):
    """The program reports through a file, because its streams may be closed."""
    daemon = run(
        f"closed = {closed}"
        + """
def streams(pid):
    return {os.readlink(f"/proc/{pid}/fd/{number}") for number in closed}

async def main():
    for number in closed:
        os.close(number)
    tier = {"type": "fs", "root": root}
    async with TieringOffloadingManager.open(describe(4, tier, runner=runner)) as engine:
        for turn in range(2 if runner == "process" else 1):
            assert await put(engine, [1, 2, 3, 4]) == 4
            assert await engine.drain()
            assert await put(engine, [5, 6, 7, 8]) == 4
            while not await found(engine, [1, 2]) == 2:
                await engine.drain()
            for pid in {os.getpid(), *children()}:
                assert streams(pid) <= {"/dev/null"}, streams(pid)
            if runner == "process" and not turn:
                killed = children()
                await kill_runner(engine)
                await until(lambda: ledger_in(engine).runner_up and children() - killed, engine)
                await engine.reset()
                await until(lambda: engine.stats().primary.rows_free == 4, engine)

try:
    asyncio.run(main())
    Path(root + ".said").write_text("served")
except BaseException:
    Path(root + ".said").write_text(traceback.format_exc())
    raise
""",
        runner,
    )
    daemon.communicate(timeout=PATIENCE_S)
    assert (tmp_path / "tier.said").read_text() == "served"
    assert daemon.returncode == 0


def test_a_tier_that_its_owner_finds_in_its_working_directory_is_found_after_a_change_of_it(run, tmp_path):
    (tmp_path / "tiers_of_mine.py").write_text("from kvtier_backends.dummy import DummyBackend as Mine\n")
    started = run(
        """
sys.path[:0] = ["", Path("/nowhere")]  # A path that is no text is no reason not to start.
async def main():
    tier = {"type": "tiers_of_mine:Mine"}
    async with TieringOffloadingManager.open(describe(4, tier, runner=runner)) as engine:
        os.chdir("/")
        await kill_runner(engine)
        while not ledger_in(engine).tiers[0].counters.stored:
            await put(engine, [1])
            await engine.drain()
            await engine.reset()
        print("served")

asyncio.run(main())
""",
        cwd=tmp_path,
    )
    assert output(started) == ["served"]


async def test_a_relative_root_is_the_same_directory_for_every_runner(outside, open_engine, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = await open_engine(4, {"type": "fs", "root": "tier"}, runner="process", holds=[1])
    await put(engine, [2, 3, 4, 5])
    assert await engine.drain()
    monkeypatch.chdir(tmp_path / "elsewhere")
    await kill_runner(engine)
    while not await found(engine, [1]):
        await engine.drain()
    assert os.listdir() == []


FORKED = """
engine = StepManager.start(describe(8, {"type": "fs", "root": root}, runner=runner))
store(engine, range(4))
engine.drain()
"""


HOLDERS = {
    "a fork": """
if not os.fork():
    signal.pause()
""",
    "another process": """
opened = map(int, os.listdir("/proc/self/fd"))
sockets = [fd for fd in opened if fd > 2 and Path(f"/proc/self/fd/{fd}").is_socket()]
assert sockets
subprocess.Popen(["sleep", "1000"], pass_fds=sockets, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
""",  # As has who was forked while the runner was being started.
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_runner_ends_with_its_owner_though_another_process_holds_the_socket(run, holder):
    end = "print(*runners, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    killed = run(f"{FORKED}\nrunners = children()\n{HOLDERS[holder]}\n{end}")
    runner = int(killed.stdout.readline())
    killed.wait()
    wait_for(lambda: has_ended(runner))


@pytest.mark.promise("The engine's process forks")
def test_a_fork_of_the_owner_can_only_read_counters_and_the_owner_goes_on(run):
    forked = run(
        FORKED
        + """
ARGUMENTS = {"key": key(1), "keys": [key(1)], "chunks": [chunk(1)], "request_id": "known", "tokens": 1, "seconds": 1.0}

def refused(of, name):
    method = getattr(of, name)
    needed = [each.name for each in signature(method).parameters.values() if each.default is each.empty]
    try:
        answer = method(*(ARGUMENTS[each] for each in needed))
        if name == "fetch":
            answer = answer.__aenter__()
        elif name == "stream":
            answer = anext(answer)
        asyncio.run(answer)
    except EngineClosed as error:
        assert f"process {os.getppid()}" in str(error), error
    else:
        raise AssertionError(name)

def public(of):
    return {name for name in vars(of) if not name.startswith("_")}

engine.on_new_request("known")
counted = engine.stats()
face = TieringOffloadingManager(engine, asyncio.new_event_loop())
child = os.fork()
if child == 0:
    answer = {"stats", "metrics", "start", "close", "forked"}
    for name in public(StepManager) - answer:
        refused(engine, name)
    for name in public(TieringOffloadingManager) - {"stats", "metrics", "open", "step_manager", "aclose"}:
        refused(face, name)
    assert engine.stats() == face.stats() == counted
    assert (engine.stats().runners_lost, engine.stats().events_dropped) == (0, 0)
    assert engine.metrics.get_sample_value("kvtier_primary_stores_total") == 4
    assert engine.close() == 0
    assert asyncio.run(face.aclose()) == 0
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
engine.on_request_finished("known")
store(engine, range(4, 8))
assert engine.drain()
print(ledger_in(engine).tiers[0].counters.stored, engine.stats().runners_lost)
assert engine.close() == 0
"""
    )
    assert output(forked) == ["8", "0"]


def test_a_fork_keeps_no_lock_of_an_fs_tier_and_takes_none_away(run, tmp_path):
    """The engine's runner is inline, so the fork has all of its descriptors."""
    forked = run(
        """
async def main():
    tier = {"type": "fs", "root": root, "layout": "segments"}
    async with TieringOffloadingManager.open(describe(8, tier, runner=runner)) as engine:
        await put(engine, range(4))
        await engine.drain()
        if not os.fork():
            print("forked", flush=True)
            signal.pause()
            os._exit(0)
        sys.stdin.readline()
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
""",
        "inline",
        stdin=subprocess.PIPE,
    )
    assert forked.stdout.readline()
    (segment,) = (tmp_path / "tier").rglob("*.seg")
    with open(segment, "rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        forked.stdin.close()
        forked.wait()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


LIMITED = """
what, most = sys.argv[3:]
resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (int(most), int(most)))
try:
    engine = StepManager.start(describe(8, {"type": "fs", "root": root}, runner=runner))
except KVTierError as error:
    assert f"RLIMIT_{what}" in str(error) and "ulimit" in str(error), error
    print("refused")
else:
    store(engine, range(4))
    engine.drain()
    assert ledger_in(engine).tiers[0].counters.stored == 4 or what == "AS"  # There any call may find no memory.
    engine.close()
    print("works")
"""


@pytest.mark.promise("A resource limit is too low")
@pytest.mark.parametrize(
    ("limit", "most"),
    [
        *(("NOFILE", most) for most in (8, 16, 64)),
        *(("FSIZE", most) for most in (0, 8_192, 1 << 20)),
        *(("AS", most << 20) for most in (300, 540, 560, 580, 600)),  # At some of these a lane found no memory.
    ],
)
def test_an_engine_under_a_resource_limit_works_or_names_the_limit(run, limit, most):
    limited = run(LIMITED, "process", limit, str(most))
    assert output(limited) in (["works"], ["refused"])
