"""A configuration's tiers, each through a whole engine: rates, waits and steps, at rest and under load.

Loads and stores stand beside what plain threads do in the same directory (fs tiers), or beside a memcpy. What load
costs stands beside the same without it: loads while the engine computes in Python, waits and steps beside stores.
"""

import ctypes
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvtier.bench.driving import Drive, compute, wait
from kvtier.bench.figures import Pair, Row, Setting, row_of
from kvtier.bench.memory import rate_of
from kvtier.bench.raw import RawFile, takes_direct
from kvtier.bench.rounds import Side, interleaved, steps_of
from kvtier.config import EngineConfig, tier_options
from kvtier.region import Region

WAITS = 100  # A round.
STEPS = 200
PRIMARY_SHARES = 4  # The primary is at most so many times what is moved: larger ones only take time to prepare.
SIDES = 9


def measure_tiers(config: EngineConfig, size_bytes: int, rounds: int, step: Callable[[], None]) -> Iterator[Row]:
    """Yield the rows of every tier of a configuration whose fs tiers have their roots; each tier is alone."""
    for tier in config.secondary_tiers:
        room = min(config.cpu_bytes_to_use, max(PRIMARY_SHARES * size_bytes, 64 * config.row_bytes))
        runner = "thread" if config.runner == "inline" else config.runner
        alone = replace(config, secondary_tiers=(tier,), cpu_bytes_to_use=room, runner=runner)
        with ExitStack() as stack:
            sides, moved_as = _sides(alone, size_bytes, stack)
            measured = interleaved(sides, rounds, step=step)
        yield from _rows(alone, moved_as, measured)


def whole_steps(config: EngineConfig, rounds: int) -> int:
    return len(config.secondary_tiers) * steps_of(SIDES, rounds)


def _sides(config: EngineConfig, size_bytes: int, stack: ExitStack) -> tuple[list[Side], str]:
    """Return what is measured, and what the limit of loads and stores is."""
    drive = Drive(config, size_bytes)
    stack.callback(drive.close)
    (read, write), limit_is = _limits(config, drive, stack)
    moved = partial(rate_of, moved_bytes=drive.moved_bytes)
    return [
        Side("store", moved(drive.store_new), tidy=drive.remove_new),
        Side("load", moved(lambda: drive.load(wait)), prepare=drive.forget),
        Side("load, busy", moved(lambda: drive.load(compute)), prepare=drive.forget),
        Side("wait", lambda: _p99(drive.waits(WAITS, flooded=False))),
        Side("wait, flooded", lambda: _p99(drive.waits(WAITS, flooded=True)), tidy=drive.remove_new),
        Side("step", lambda: _p99(drive.step_times(STEPS, busy=False))),
        Side("step, busy", lambda: _p99(drive.step_times(STEPS, busy=True)), tidy=drive.remove_new),
        Side("read limit", read),
        Side("write limit", write),
    ], limit_is


def _limits(
    config: EngineConfig, drive: Drive, stack: ExitStack
) -> tuple[tuple[Callable[[], float], Callable[[], float]], str]:
    """Return what measures how fast bytes can be read and written at all, as MB/s."""
    (tier,) = config.secondary_tiers
    region = stack.enter_context(Region.private(2 * drive.chunks, config.row_bytes))
    rows = [region.row(index) for index in range(2 * drive.chunks)]
    for row in rows:
        stack.callback(row.release)
    if tier.type == "fs":
        options: Any = tier_options(tier, "secondary_tiers[]")
        direct = options.io != "buffered" and takes_direct(options.root)
        raw = RawFile(os.path.join(options.root, f".kvtier-raw-{os.getpid()}"), rows[: drive.chunks], direct=direct)
        stack.enter_context(raw)
        sync = options.fsync
        return (
            lambda: raw.read(options.load_lanes) / 1e6,
            lambda: raw.write(options.store_lanes, sync=sync) / 1e6,
        ), "preadv and pwritev of one file"
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(row)) for row in rows]

    def copy() -> None:
        for target, source in zip(addresses[: drive.chunks], addresses[drive.chunks :], strict=True):
            ctypes.memmove(target, source, config.row_bytes)

    measure = rate_of(copy, drive.moved_bytes)
    return (measure, measure), "memcpy"


def _rows(config: EngineConfig, moved_as: str, measured: dict[str, list[float]]) -> Iterator[Row]:
    (tier,) = config.secondary_tiers
    settings: dict[str, Setting] = {"tier": tier.name, "runner": config.runner}
    alone = "the same with nothing beside it"
    for operation, unit, figure, limit, limit_is in (
        ("store", "MB/s", "store", "write limit", moved_as),
        ("load", "MB/s", "load", "read limit", moved_as),
        ("load, engine busy in Python", "MB/s", "load, busy", "load", "the same, engine idle"),
        ("p99 of waits for a load beside stores", "ms", "wait, flooded", "wait", alone),
        ("p99 of steps beside transfers", "ms", "step, busy", "step", alone),
    ):
        yield row_of(Pair(operation, config.row_bytes, settings, unit, figure, limit, limit_is), measured)


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]
