"""Helpers for tests of whole engines: keys, chunks that identify themselves, and ways to wait."""

import asyncio
import os
import signal
import time
from pathlib import Path

from msgspec.structs import replace

from kvtier import EngineConfig, StepManager, make_offload_key
from kvtier.settings import decode
from tests.engine.ledger import bench
from tests.own import processes

CHUNK_BYTES = 4_096
PATIENCE_S = 60.0  # For what must happen: a machine under load may take its time.

DETACHED = b"kvtier.runner.detached"  # The module that starts a runner.
FAULTY = "kvtier.testing.faults:FaultyBackend"


def key(number):
    return make_offload_key(number.to_bytes(8, "big") * 4)


def chunk(number):
    return number.to_bytes(8, "big") * (CHUNK_BYTES // 8)


def keys(numbers):
    return [key(number) for number in numbers]


def now():
    return asyncio.get_running_loop().time()


def describe(rows=8, *tiers, runner=None, **fields):
    described = {
        "cpu_bytes_to_use": rows * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "runner": runner,
        "secondary_tiers": tiers,
    }
    chunk_tokens = fields.pop("chunk_tokens", None)  # An LLM engine knows it; it is no option.
    config = decode(EngineConfig, described | fields, "the test's")  # Unchecked: an engine's start is.
    return replace(config, chunk_tokens=chunk_tokens)


def steps_of(engine):
    return engine if isinstance(engine, StepManager) else engine.steps


def ledger_in(engine):
    return steps_of(engine).ledger


async def put(engine, numbers, *, request_id=None):
    numbers = list(numbers)
    chunks = [chunk(number) for number in numbers]
    return await engine.put(keys(numbers), chunks, request_id=request_id)


def store(engine, numbers):
    steps, numbers = steps_of(engine), list(numbers)
    steps.on_new_request(f"store {numbers}")
    plan = steps.prepare_store(keys(numbers), f"store {numbers}")
    for number, row in zip(numbers, plan.rows, strict=True):
        steps.region.row(row)[:] = chunk(number)
    steps.complete_store(plan.keys, f"store {numbers}")
    steps.end_step()
    steps.on_request_finished(f"store {numbers}")


async def emptied(open_engine, chunks, rows, *tiers, **fields):
    engine = await open_engine(rows, *tiers, **fields)
    for first in range(0, chunks, rows):
        assert await put(engine, range(first, min(first + rows, chunks))) == min(rows, chunks - first)
    await forget_rows(engine)
    return engine


async def forget_rows(engine):
    """Let the tiers get all chunks, and the primary forget them."""
    assert await engine.drain(1_000)
    assert await engine.reset()


def wait_for(condition):
    ends_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.002)


async def found(engine, numbers, *, request_id=None):
    """Fetch, hold every byte against what was put, and return how many leading chunks came."""
    numbers = list(numbers)
    async with engine.fetch(keys(numbers), request_id=request_id) as rows:
        assert [bytes(row) for row in rows] == [chunk(number) for number in numbers[: len(rows)]]
        return len(rows)


async def until(condition, engine=None):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            if engine is not None:
                steps_of(engine).end_step()
            await asyncio.sleep(0.002)


async def kill_runner(engine, how=signal.SIGKILL):
    (runner,) = children()
    lost = engine.stats().runners_lost
    os.kill(runner, how)
    await until(lambda: engine.stats().runners_lost > lost, engine)


async def under_way(call, seconds):
    task = asyncio.ensure_future(call)
    await asyncio.sleep(seconds)
    return task


def settled(engine):
    return bench.settled(ledger_in(engine))


async def at_rest(engine):
    return await engine.drain() and settled(engine)


def children():
    """Return the ids of running child processes, and of this process's runners, which are detached.

    Servers of other tests do not count, nor does the resource tracker of `multiprocessing`, nor a runner's starter.
    """
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= set(map(int, (task / "children").read_text().split()))
        except OSError:
            continue  # The thread has ended.
    runners = {pid for pid in processes() if _owner(pid) == os.getpid()}
    return {pid for pid in found - runners if _runs_python(pid) and not _is_a_tracker(pid)} | (runners - found)


def _owner(pid):
    """Return the process that started this runner; None for any other process."""
    command = _command(pid)
    at = command.index(DETACHED) if DETACHED in command else len(command)
    numbers = command[at + 4 : at + 5]  # After a socket, a region and a log level; another program may name the module.
    return int(numbers[0]) if numbers and numbers[0].isdigit() else None


def _is_a_tracker(pid):
    return any(b"multiprocessing.resource_tracker" in word for word in _command(pid))


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _runs_python(pid):
    try:
        return os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe")
    except OSError:
        return True  # It has ended and is not reaped yet.
