"""`kvtier bench`: figures of this machine, each beside its limit, measured in turn in one run.

All commands do alike: check what is to be written, run, and give the figures out.
"""

import errno
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.progress import TimeElapsedColumn, TimeRemainingColumn

from kvtier.config import EngineConfig, TierConfig, read_config
from kvtier.errors import ConfigError
from kvtier.memory import PAGE_BYTES
from kvtier.settings import parse_size
from kvtier.tools.bench import files, whole
from kvtier.tools.bench.figures import (
    ROUNDS,
    ROUNDS_MAX,
    ROUNDS_MIN,
    Figures,
    Row,
    load,
    print_by_chunk,
    print_figures,
    this_machine,
)
from kvtier.tools.bench.files import LAYOUTS, Plan, TierCase, check_room, io_modes
from kvtier.tools.bench.raw import fio_path
from kvtier.tools.options import JsonOption, listed
from kvtier.tools.outputs import Scratch, bar, check_outputs, write_json

SizeOption = Annotated[str, typer.Option(help="Bytes that one measurement moves.")]
RoundsOption = Annotated[
    int, typer.Option(min=ROUNDS_MIN, max=ROUNDS_MAX, help="Rounds, after a first one that is not counted.")
]
DEFAULT_ROUNDS = ROUNDS
DEPTH_MAX = 64  # As many lanes as a tier takes.
CHUNK_BYTES_MAX = 1 << 30  # A hundred times the largest in use; some of them are in memory at once.
MOVED_BYTES_MAX = 16 << 30  # By one measurement; it is in memory at once, and the first round tells enough.

Work = Callable[[Callable[[], None]], Iterator[Row]]
"""Measure, calling what is given after every measurement."""


def fs(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory on the disk to measure.")],
    chunk_sizes: Annotated[
        str, typer.Option(help="Chunk sizes, with commas between them.")
    ] = "128KiB,512KiB,2MiB,8MiB",
    size: SizeOption = "64MiB",
    depths: Annotated[str, typer.Option(help="Threads each way, with commas between them.")] = "4",
    io: Annotated[
        str, typer.Option(help="direct, buffered, or both with a comma; auto: direct if it can be.")
    ] = "auto",
    layouts: Annotated[
        str, typer.Option(help="Layouts of the tier, with commas between them; all: every one.")
    ] = "all",
    namings: Annotated[str, typer.Option(help="How chunks are named: vllm, flat, or both with a comma.")] = "vllm",
    fsync: Annotated[bool, typer.Option("--fsync", help="Measure synced stores, too.")] = False,
    rounds: RoundsOption = DEFAULT_ROUNDS,
    json_path: JsonOption = None,
) -> None:
    """Measure loads and stores of an fs tier, beside what plain threads (and fio, if installed) do on the same disk.

    Everything is written into a directory of its own in DIR, and removed at the end.
    """
    found = _chunk_sizes(chunk_sizes)
    size_bytes = sizes("--size", size, most=MOVED_BYTES_MAX)[0]
    counts = numbers("--depths", depths, least=1, most=DEPTH_MAX)
    kinds = LAYOUTS if layouts == "all" else names("--layouts", layouts, LAYOUTS)
    named = names("--namings", namings, ("vllm", "flat"))
    modes = io_modes(directory, names("--io", io, ("auto", "direct", "buffered")))
    cases = [
        TierCase(kind, naming, mode, depth, synced)
        for kind in kinds
        for naming in (named if kind == "files" else named[:1])
        for mode in modes
        for depth in counts
        for synced in ((False, True) if fsync else (False,))
    ]
    check_outputs(json_path)
    with ExitStack() as stack:
        plan = Plan(scratch_in(directory, stack), cases, size_bytes, rounds, fio_path())
        check_room(plan, found)
        run_bench(
            "kvtier bench fs",
            lambda step: files.measure_files(plan, found, step),
            len(found) * plan.steps(),
            json_path=json_path,
            directory=directory,
            show=print_by_chunk,
        )


def tiers(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The engine, in TOML or JSON.")],
    size: SizeOption = "64MiB",
    rounds: RoundsOption = DEFAULT_ROUNDS,
    json_path: JsonOption = None,
) -> None:
    """Measure each tier of a configuration through a whole engine: loads, stores, waits and steps, at rest and busy.

    An fs tier's chunks go into a directory of their own in its root, or where temporary ones belong; other tiers get
    keys that nobody else has. All of it is removed at the end.
    """
    size_bytes = sizes("--size", size, most=MOVED_BYTES_MAX)[0]
    engine = read_config(config)
    if not engine.secondary_tiers:
        raise ConfigError(f"{config}: secondary_tiers: none given, at least one accepted: there is nothing to measure")
    check_outputs(json_path)
    with ExitStack() as stack:
        placed, directory = _placed(engine, stack)
        run_bench(
            "kvtier bench tiers",
            lambda step: whole.measure_tiers(placed, size_bytes, rounds, step),
            whole.whole_steps(placed, rounds),
            json_path=json_path,
            directory=directory,
        )


def run_bench(
    command: str,
    work: Work,
    steps: int,
    *,
    json_path: str | None,
    directory: str | None = None,
    show: Callable[[Figures, Console], None] = print_figures,
) -> None:
    """Measure and write down what was found, also if an error or Ctrl-C ends it, which is raised after that.

    `directory` is what the machine's file system is looked up for.
    """
    before, begun = load(), time.perf_counter()
    rows: list[Row] = []
    failure: BaseException | None = None
    try:
        with bar(TimeElapsedColumn(), TimeRemainingColumn()) as progress:
            task = progress.add_task(command, total=steps)
            rows.extend(work(lambda: progress.advance(task)))
    except BaseException as error:  # Ctrl-C, too: it is raised when what was measured is written down.
        failure = _said(error, directory)
        if not rows:
            raise failure from error
    machine, seconds = this_machine(before, directory), time.perf_counter() - begun
    figures = Figures(command=command, machine=machine, seconds=seconds, complete=failure is None, rows=rows)
    console = write_json(json_path, figures)
    show(figures, console)
    if failure is not None:
        raise failure


def _said(error: BaseException, directory: str | None) -> BaseException:
    """Return what is raised for an error: a full disk has a remedy."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"{directory}: {error.strerror}; a smaller --size accepted")
    return error


def scratch_in(directory: str, stack: ExitStack) -> str:
    """Return a directory in this one that goes away however we end. `ConfigError` if none can be made there."""
    try:
        return stack.enter_context(Scratch(directory, ".kvtier-bench-")).path
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}; a directory that can be written to accepted") from error
    except ValueError as error:  # A name that no file can have, as configurations may.
        raise ConfigError(f"{directory!r}: {error}; a directory that can be written to accepted") from error


def sizes(option: str, text: str, *, most: int) -> list[int]:
    """Read sizes with commas between them; `ConfigError` names the option."""
    found = listed(option, text, _size, "sizes with commas between them, as 128KiB,2MiB")
    if max(found) > most:
        raise ConfigError(f"{option} {text!r}: expected sizes of at most {most:,} bytes")
    return found


def _size(part: str) -> int:
    return int(part) if part.isdecimal() else parse_size(part)


def numbers(option: str, text: str, *, least: int, most: int) -> list[int]:
    """Read whole numbers with commas between them likewise."""
    known = range(least, most + 1)
    accepted = f"numbers from {least:,} to {most:,} with commas between them"
    return listed(option, text, lambda part: known[known.index(int(part))], accepted)


def names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Read names of these likewise."""
    accepted = f"one or more of {', '.join(known)} with commas between them"
    return listed(option, text, lambda part: known[known.index(part)], accepted)


def _placed(engine: EngineConfig, stack: ExitStack) -> tuple[EngineConfig, str | None]:
    """Have every fs tier keep its chunks in a directory that goes away; return one of these, too."""
    directory = None
    tiers: list[TierConfig] = []
    for tier in engine.secondary_tiers:
        if tier.type != "fs":
            tiers.append(tier)
            continue
        parent = tier.options.get("root")
        directory = scratch_in(parent if isinstance(parent, str) else tempfile.gettempdir(), stack)
        tiers.append(replace(tier, options={**tier.options, "root": directory}))
    return replace(engine, secondary_tiers=tuple(tiers)), directory


def _chunk_sizes(text: str) -> list[int]:
    found = sizes("--chunk-sizes", text, most=CHUNK_BYTES_MAX)
    for size in found:
        if size < PAGE_BYTES or size % PAGE_BYTES:
            raise ConfigError(f"--chunk-sizes {text!r}: expected multiples of {PAGE_BYTES:,} bytes")
    return found
