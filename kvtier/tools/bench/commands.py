"""`kvtier bench`: tiers through a whole engine, each figure next to its limit, measured in turn in one run."""

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.progress import TimeElapsedColumn, TimeRemainingColumn

from kvtier.config import EngineConfig, TierConfig, read_config
from kvtier.errors import ConfigError
from kvtier.memory import PAGE_BYTES
from kvtier.settings import parse_size
from kvtier.tools.bench.figures import ROUNDS, ROUNDS_MAX, Figures, Row, load, print_figures, steps_of, this_machine
from kvtier.tools.bench.tiers import SIDES, measure_tier, primary_bytes
from kvtier.tools.options import JsonOption, listed
from kvtier.tools.outputs import Scratch, bar, check_directory, check_outputs, write_json

RoundsOption = Annotated[
    int, typer.Option(min=1, max=ROUNDS_MAX, help="Rounds, after a first one that does not count.")
]
CHUNK_SIZES = "2MiB"
LAYOUTS = ("segments", "files")
CHUNK_BYTES_MAX = 1 << 30  # A hundred times the largest in use; several are in memory at once.
MOVED_BYTES_MAX = 16 << 30  # Bytes of one measurement; they are in memory at once.

Work = Callable[[Callable[[], None]], Iterator[Row]]
"""Measures, and calls its argument after each measurement."""


def bench(
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="A directory to measure as fs tiers, or a configuration.")
    ],
    size: Annotated[str, typer.Option(help="Bytes that one measurement moves.")] = "64MiB",
    chunk_sizes: Annotated[
        str | None, typer.Option(help=f"Chunk sizes, comma-separated, for a directory: {CHUNK_SIZES} by default.")
    ] = None,
    rounds: RoundsOption = ROUNDS,
    json_path: JsonOption = None,
) -> None:
    """Measure each tier through a whole engine: stores, loads, waits and steps, at rest and busy, next to their limits.

    A directory is measured as an fs tier of each layout. The chunks of an fs tier lie in a temporary directory in its
    root. Other tiers get new random keys. All of them are removed at the end.
    """
    size_bytes = sizes("--size", size, most=MOVED_BYTES_MAX)[0]
    with ExitStack() as stack:
        if place.endswith((".toml", ".json")) and not os.path.isdir(place):
            if chunk_sizes is not None:
                raise ConfigError(f"--chunk-sizes: accepted with a directory only; {place} has chunk_bytes")
            config = read_config(place)
            check_outputs(json_path)
            engines, directory = _configured(config, place, stack)
        else:
            chunks = _chunk_sizes(CHUNK_SIZES if chunk_sizes is None else chunk_sizes)
            check_directory("PLACE", place)
            check_outputs(json_path)
            directory = scratch_in(place, stack)
            engines = [_of_layout(directory, layout, size_bytes, each) for each in chunks for layout in LAYOUTS]
        run_bench(
            "kvtier bench",
            lambda step: (row for engine in engines for row in measure_tier(engine, size_bytes, rounds, step)),
            len(engines) * steps_of(SIDES, rounds),
            json_path=json_path,
            directory=directory,
        )


def run_bench(command: str, work: Work, steps: int, *, json_path: str | None, directory: str | None = None) -> None:
    """Measure, print and write the figures. An error or Ctrl-C is raised after the completed rounds were written.

    `directory` is the one whose file system is named.
    """
    before, begun = load(), time.perf_counter()
    rows: list[Row] = []
    failure: BaseException | None = None
    try:
        with bar(TimeElapsedColumn(), TimeRemainingColumn()) as progress:
            task = progress.add_task(command, total=steps)
            rows.extend(work(lambda: progress.advance(task)))
    except BaseException as error:  # Ctrl-C, too: it is raised below.
        failure = _with_remedy(error, directory)
        if not rows:
            raise failure from error
    machine, seconds = this_machine(before, directory), time.perf_counter() - begun
    figures = Figures(command=command, machine=machine, seconds=seconds, complete=failure is None, rows=rows)
    print_figures(figures, write_json(json_path, figures))
    if failure is not None:
        raise failure


def _with_remedy(error: BaseException, directory: str | None) -> BaseException:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"{directory}: {error.strerror}; a smaller --size accepted")
    return error


def _configured(config: EngineConfig, path: str, stack: ExitStack) -> tuple[list[EngineConfig], str | None]:
    """Return an engine for each tier, with temporary roots for fs tiers, and one of these roots."""
    if not config.secondary_tiers:
        raise ConfigError(f"{path}: secondary_tiers: none given, at least one accepted: there is nothing to measure")
    directory = None
    engines: list[EngineConfig] = []
    for tier in config.secondary_tiers:
        alone = tier
        if tier.type == "fs":
            parent = tier.options.get("root")
            directory = scratch_in(parent if isinstance(parent, str) else tempfile.gettempdir(), stack)
            alone = replace(tier, options={**tier.options, "root": directory})
        engines.append(replace(config, secondary_tiers=(alone,)))
    return engines, directory


def _of_layout(directory: str, layout: str, size_bytes: int, chunk_bytes: int) -> EngineConfig:
    root = os.path.join(directory, f"{layout}-{chunk_bytes}")
    tier = TierConfig(type="fs", options={"root": root, "layout": layout})
    return EngineConfig(
        cpu_bytes_to_use=primary_bytes(size_bytes, chunk_bytes), chunk_bytes=chunk_bytes, secondary_tiers=(tier,)
    )


def scratch_in(directory: str, stack: ExitStack) -> str:
    """Return a temporary directory in this one, removed however the process ends. Raises `ConfigError`."""
    try:
        os.stat(directory)  # mkdtemp takes an empty name for the default directory.
        return stack.enter_context(Scratch(directory, ".kvtier-bench-")).path
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}; a directory that can be written to accepted") from error
    except ValueError as error:  # A null byte in the name, as configurations may have.
        raise ConfigError(f"{directory!r}: {error}; a directory that can be written to accepted") from error


def sizes(option: str, text: str, *, most: int) -> list[int]:
    """Parse comma-separated sizes; `ConfigError` names the option."""
    found = listed(option, text, _size, "sizes with commas between them, as 128KiB,2MiB")
    if max(found) > most:
        raise ConfigError(f"{option} {text!r}: expected sizes of at most {most:,} bytes")
    return found


def _size(part: str) -> int:
    return int(part) if part.isdecimal() else parse_size(part)


def _chunk_sizes(text: str) -> list[int]:
    found = sizes("--chunk-sizes", text, most=CHUNK_BYTES_MAX)
    if any(size < PAGE_BYTES or size % PAGE_BYTES for size in found):
        raise ConfigError(f"--chunk-sizes {text!r}: expected multiples of {PAGE_BYTES:,} bytes")
    return found
