"""Whole engines with real tiers. Each test fails if it leaves a thread, process, descriptor or shared memory."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.steps import StepManager
from tests.engine.kit import PATIENCE_S, children, describe
from tests.own import WORKER, shared_memory

# libuv makes its two descriptors for signals with a process's first loop, and keeps them.
uvloop.new_event_loop().close()


def held() -> dict[str, set[Any]]:
    """Return what an engine must give back: threads, processes, descriptors, shared memory."""
    return {
        "threads": {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")},
        "processes": children(),
        "descriptors": set(os.listdir("/proc/self/fd")),
        "shared memory": shared_memory(WORKER),
    }


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail the test if it ends with a thread, process, descriptor or shared memory that it began without."""
    gc.collect()
    before = held()
    yield

    def left() -> dict[str, set[Any]]:
        return {what: extra for what, now in held().items() if (extra := now - before[what])}

    pause, ends_at = threading.Event(), time.monotonic() + PATIENCE_S
    while left() and time.monotonic() < ends_at:
        gc.collect()
        pause.wait(0.01)
    assert not left()


@pytest.fixture(params=["inline", "process"])
def runner(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"type": "fs", "root": str(tmp_path / "tier")}


Open = Callable[..., Awaitable[TieringOffloadingManager]]


@pytest.fixture
async def open_engine(nothing_left: None) -> AsyncIterator[Open]:
    """Open an engine as `describe` does; it is closed at the end, which must leave nothing."""
    async with AsyncExitStack() as at_end:

        async def open_engine(rows: int = 8, *tiers: dict[str, Any], **fields: Any) -> TieringOffloadingManager:
            return await at_end.enter_async_context(TieringOffloadingManager.open(describe(rows, *tiers, **fields)))

        yield open_engine


Start = Callable[..., StepManager]


@pytest.fixture
def start_engine(outside: None, nothing_left: None) -> Iterator[Start]:
    """Start an engine for a synchronous owner; it is closed at the end, which must leave nothing."""
    started: list[StepManager] = []

    def start_engine(rows: int = 8, *tiers: dict[str, Any], **fields: Any) -> StepManager:
        started.append(StepManager.start(describe(rows, *tiers, runner="process", **fields)))
        return started[-1]

    yield start_engine
    for engine in started:
        engine.close()


@pytest.fixture
def program(outside: None) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start Python programs, each in a process group of its own; what is left of them at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str, *args: str, **options: Any) -> "subprocess.Popen[str]":
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
