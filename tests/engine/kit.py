"""Helpers for tests of whole engines: keys, chunks that identify themselves, and ways to wait."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.ledger import Ledger
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.steps import StepManager
from kvtier.settings import decode
from tests.engine.ledger import bench

CHUNK_BYTES = 4_096
PATIENCE_S = 60.0  # For what must happen: a machine under load may take its time.

FAULTY = "kvtier.testing.faults:FaultyBackend"


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(8, "big") * 4)


def chunk(number: int) -> bytes:
    return number.to_bytes(8, "big") * (CHUNK_BYTES // 8)


def keys(numbers: Iterable[int]) -> list[OffloadKey]:
    return [key(number) for number in numbers]


def now() -> float:
    return asyncio.get_running_loop().time()


def describe(rows: int = 8, *tiers: dict[str, Any], runner: str | None = None, **fields: Any) -> EngineConfig:
    described = {
        "cpu_bytes_to_use": rows * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "runner": runner,
        "secondary_tiers": tiers,
    }
    chunk_tokens = fields.pop("chunk_tokens", None)  # An LLM engine knows it; it is no option.
    config = decode(EngineConfig, described | fields, "the test's")  # Unchecked: an engine's start is.
    return replace(config, chunk_tokens=chunk_tokens)


Engine = TieringOffloadingManager | StepManager


def steps_of(engine: Engine) -> StepManager:
    return engine if isinstance(engine, StepManager) else engine.steps


def ledger_in(engine: Engine) -> Ledger:
    return steps_of(engine).ledger


async def put(engine: TieringOffloadingManager, numbers: Iterable[int], *, request_id: str | None = None) -> int:
    numbers = list(numbers)
    chunks = [chunk(number) for number in numbers]
    return await engine.put(keys(numbers), chunks, request_id=request_id)


def store(engine: Engine, numbers: Iterable[int]) -> None:
    """Store as a synchronous engine does, in one step."""
    steps, numbers = steps_of(engine), list(numbers)
    steps.on_new_request(f"store {numbers}")
    plan = steps.prepare_store(keys(numbers), f"store {numbers}")
    assert plan is not None
    for number, row in zip(numbers, plan.rows, strict=True):
        steps.region.row(row)[:] = chunk(number)
    steps.complete_store(plan.keys, f"store {numbers}")
    steps.end_step()
    steps.on_request_finished(f"store {numbers}")


async def emptied(open_engine, chunks, rows, *tiers, **fields):
    """Open an engine whose tiers hold some chunks, and whose primary holds none."""
    engine = await open_engine(rows, *tiers, **fields)
    for first in range(0, chunks, rows):
        assert await put(engine, range(first, min(first + rows, chunks))) == min(rows, chunks - first)
    assert await engine.drain(1_000)
    assert await engine.reset()
    return engine


async def found(engine: TieringOffloadingManager, numbers: Iterable[int], *, request_id: str | None = None) -> int:
    """Fetch, hold every byte against what was put, and return how many leading chunks came."""
    numbers = list(numbers)
    async with engine.fetch(keys(numbers), request_id=request_id) as rows:
        assert [bytes(row) for row in rows] == [chunk(number) for number in numbers[: len(rows)]]
        return len(rows)


async def until(condition: Callable[[], object], engine: Engine | None = None) -> None:
    """Wait until a condition holds; an engine given is kept stepping."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            if engine is not None:
                steps_of(engine).end_step()
            await asyncio.sleep(0.002)


async def kill_runner(engine: Engine, how: int = signal.SIGKILL) -> None:
    """Kill the runner that is up, and wait until the engine knows."""
    (runner,) = children()
    lost = engine.stats().runners_lost
    os.kill(runner, how)
    await until(lambda: engine.stats().runners_lost > lost, engine)


async def under_way(call, seconds):
    """Start a call, and let it go on for a while."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(seconds)
    return task


def settled(engine: Engine) -> bool:
    return bench.settled(ledger_in(engine))


async def at_rest(engine: TieringOffloadingManager) -> bool:
    """Drain the engine; return True if it has settled."""
    return await engine.drain() and settled(engine)


def children() -> set[int]:
    """Return the ids of running child processes.

    Servers of other tests do not count, nor does the resource tracker of `multiprocessing`.
    """
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= set(map(int, (task / "children").read_text().split()))
        except OSError:
            continue  # The thread has ended.
    return {pid for pid in found if _runs_python(pid) and not _is_a_tracker(pid)}


def _is_a_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _runs_python(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe")
    except OSError:
        return True  # It has ended and is not reaped yet.
