"""Whole engines with real tiers. Each test fails if it leaves a thread, process, descriptor or shared memory."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import AsyncExitStack, suppress

import pytest
import uvloop

from kvtier import StepManager, TieringOffloadingManager
from tests.engine.kit import PATIENCE_S, children, describe, put
from tests.own import WORKER, shared_memory, until_end

# libuv makes its two descriptors for signals with a process's first loop, and keeps them.
uvloop.new_event_loop().close()


def held():
    return {
        "threads": {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")},
        "processes": children(),
        "descriptors": set(os.listdir("/proc/self/fd")),
        "shared memory": shared_memory(WORKER),
    }


@pytest.fixture
def nothing_left():
    """Fail the test if it ends with a thread, process, descriptor or shared memory that it began without."""
    gc.collect()
    before = held()
    yield

    def left():
        return {what: extra for what, now in held().items() if (extra := now - before[what])}

    ends_at = time.monotonic() + PATIENCE_S
    while left() and time.monotonic() < ends_at:
        gc.collect()
        time.sleep(0.01)
    assert not left()


@pytest.fixture(params=["inline", "process"])
def runner(request):
    return request.param


@pytest.fixture
def disk(tmp_path):
    return {"type": "fs", "root": str(tmp_path / "tier")}


@pytest.fixture
async def open_engine(nothing_left):
    """Open an engine as `describe` does, and put `holds` into it; it is closed at the end, which must leave nothing."""
    async with AsyncExitStack() as at_end:

        async def open_engine(rows=8, *tiers, holds=(), **fields):
            opening = TieringOffloadingManager.open(describe(rows, *tiers, **fields))
            engine = await at_end.enter_async_context(opening)
            if holds:
                await put(engine, holds)
            return engine

        yield open_engine


@pytest.fixture
def start_engine(request, outside, nothing_left):
    def start_engine(rows=8, *tiers, **fields):
        return until_end(request, e := StepManager.start(describe(rows, *tiers, runner="process", **fields)), e.close)

    return start_engine


@pytest.fixture
def program(outside):
    """Start Python programs, each in a process group of its own; what is left of them at the end is killed."""
    started = []

    def start(text, *args, **options):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        started.append(subprocess.Popen([sys.executable, "-c", text, *args], env=environment, **streams, **options))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()
