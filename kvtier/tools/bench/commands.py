"""`kvtier bench`: figures of this machine, each beside its limit, measured in turn in one run.

All commands do alike: check what is to be written, run, and give the figures out.
"""

import errno
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Annotated

import typer
from msgspec.structs import replace

from kvtier.config import EngineConfig, TierConfig
from kvtier.errors import ConfigError
from kvtier.memory import PAGE_BYTES
from kvtier.settings import parse_size
from kvtier.tools.bench import files, memory, whole
from kvtier.tools.bench.figures import ROUNDS, ROUNDS_MAX, ROUNDS_MIN, Figures, Row, figures_json, load, this_machine
from kvtier.tools.bench.files import Plan, TierCase, check_room, io_modes
from kvtier.tools.bench.files import layouts as known_layouts
from kvtier.tools.bench.raw import fio_path
from kvtier.tools.bench.screen import bench_bar, print_figures
from kvtier.tools.replay.outputs import check_picture, check_writable, replacing
from kvtier.tools.replay.setup import Scratch

STDOUT = "-"
DIGITS_MAX = 20  # Of a number in a list; Python refuses to read very long ones.

RoundsOption = Annotated[
    int, typer.Option(min=ROUNDS_MIN, max=ROUNDS_MAX, help="Rounds, after a first one that is not counted.")
]
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="OUT", help="Write the figures there; - is stdout, without the table.")
]
PlotOption = Annotated[
    str | None, typer.Option("--plot", metavar="OUT", help="Draw the ratios there: .png, .pdf or .svg.")
]
DEFAULT_ROUNDS = ROUNDS

Work = Callable[[Callable[[], None]], Iterator[Row]]
"""Measure, calling what is given after every measurement."""


def run_bench(
    command: str,
    work: Work,
    steps: int,
    *,
    json_path: str | None,
    plot_path: str | None,
    directory: str | None = None,
) -> None:
    """Measure and write down what was found. `directory` is what the machine's file system is looked up for."""
    draw = _drawing(plot_path)
    before, begun = load(), time.perf_counter()
    try:
        with bench_bar(command, steps) as step:
            rows = list(work(step))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"{directory}: {error.strerror}; a smaller --size accepted") from error
    machine = this_machine(before, directory)
    figures = Figures(command=command, machine=machine, seconds=time.perf_counter() - begun, rows=rows)
    if json_path is not None and json_path != STDOUT:
        with replacing(json_path) as file:
            file.write(figures_json(figures))
    if draw is not None:
        draw(figures)
    if json_path == STDOUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(figures_json(figures))  # JSON is UTF-8, whatever the terminal takes.
    else:
        print_figures(figures)


def check_outputs(json_path: str | None, plot_path: str | None) -> None:
    """Raise `ConfigError` before anything is measured if what was found could not be written."""
    if json_path is not None and json_path != STDOUT:
        check_writable("--json", json_path)
    if plot_path is not None:
        check_picture("--plot", plot_path)


def scratch_in(directory: str, stack: ExitStack) -> str:
    """Return a directory in this one that goes away however we end. `ConfigError` if none can be made there."""
    try:
        scratch: AbstractContextManager[Scratch] = Scratch(directory, ".kvtier-bench-")
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}; a directory that can be written to accepted") from error
    except ValueError as error:  # A name that no file can have, as configurations may.
        raise ConfigError(f"{directory!r}: {error}; a directory that can be written to accepted") from error
    return stack.enter_context(scratch).path


def sizes(option: str, text: str, *, most: int) -> list[int]:
    """Read sizes with commas between them; `ConfigError` names the option."""
    try:
        found = [int(part) if _is_number(part) else parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: expected sizes with commas between them, as 128KiB,2MiB") from error
    if max(found) > most:
        raise ConfigError(f"{option} {text!r}: expected sizes of at most {most:,} bytes")
    return list(dict.fromkeys(found))


def numbers(option: str, text: str, *, least: int, most: int) -> list[int]:
    """Read whole numbers with commas between them likewise."""
    parts = text.split(",")
    found = [int(part) for part in parts if _is_number(part)]
    if len(found) < len(parts) or not all(least <= number <= most for number in found):
        raise ConfigError(f"{option} {text!r}: expected numbers from {least:,} to {most:,} with commas between them")
    return list(dict.fromkeys(found))


def _is_number(part: str) -> bool:
    digits = part.strip()
    return digits.isascii() and digits.isdigit() and len(digits) <= DIGITS_MAX


def names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Read names of these likewise."""
    found = [part.strip() for part in text.split(",")]
    if not set(found) <= set(known):
        raise ConfigError(f"{option} {text!r}: expected one or more of {', '.join(known)} with commas between them")
    return list(dict.fromkeys(found))


def _drawing(path: str | None) -> Callable[[Figures], None] | None:
    if path is None:
        return None
    from kvtier.tools.bench.picture import write_figures_picture  # An extra: see `check_picture`.

    return lambda figures: write_figures_picture(path, figures)


DEPTH_MAX = 64  # As many lanes as a tier takes.
CHUNK_BYTES_MAX = 1 << 30  # A hundred times the largest in use; some of them are in memory at once.
MOVED_BYTES_MAX = 16 << 30  # By one measurement; it is in memory at once, and the first round tells enough.


def cpu(
    chunk_sizes: Annotated[str, typer.Option(help="Chunk sizes, with commas between them.")] = "64KiB,512KiB,2MiB",
    pages: Annotated[
        bool, typer.Option("--pages/--no-pages", help="Copies between KV caches and rows, too, which takes torch.")
    ] = True,
    device: Annotated[str, typer.Option(help="Where the KV caches are: cpu, or cuda.")] = "cpu",
    rounds: RoundsOption = DEFAULT_ROUNDS,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """Measure memory copies and checksums, beside a plain memcpy."""
    found = _chunk_sizes(chunk_sizes)
    (place, *_) = names("--device", device, ("cpu", "cuda"))
    pages_on = place if pages else None
    check_outputs(json_path, plot_path)
    memory.check_pages(pages_on)
    run_bench(
        "kvtier bench cpu",
        lambda step: memory.measure_memory(found, rounds, step, pages_on=pages_on),
        memory.memory_steps(found, rounds, pages_on=pages_on),
        json_path=json_path,
        plot_path=plot_path,
    )


def fs(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory on the disk to measure.")],
    chunk_sizes: Annotated[
        str, typer.Option(help="Chunk sizes, with commas between them.")
    ] = "128KiB,512KiB,2MiB,8MiB",
    size: Annotated[str, typer.Option(help="Bytes that one measurement moves.")] = "64MiB",
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
    plot_path: PlotOption = None,
) -> None:
    """Measure loads and stores of an fs tier, beside what plain threads (and fio, if installed) do on the same disk.

    Everything is written into a directory of its own in DIR, and removed at the end.
    """
    found = _chunk_sizes(chunk_sizes)
    (size_bytes, *_) = sizes("--size", size, most=MOVED_BYTES_MAX)
    counts = numbers("--depths", depths, least=1, most=DEPTH_MAX)
    kinds = list(known_layouts()) if layouts == "all" else names("--layouts", layouts, known_layouts())
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
    check_outputs(json_path, plot_path)
    with ExitStack() as stack:
        plan = Plan(scratch_in(directory, stack), cases, size_bytes, rounds, fio_path())
        check_room(plan, found)
        run_bench(
            "kvtier bench fs",
            lambda step: files.measure_files(plan, found, step),
            len(found) * plan.steps(),
            json_path=json_path,
            plot_path=plot_path,
            directory=directory,
        )


def tiers(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The engine, in TOML or JSON.")],
    size: Annotated[str, typer.Option(help="Bytes that one measurement moves.")] = "64MiB",
    rounds: RoundsOption = DEFAULT_ROUNDS,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """Measure each tier of a configuration through a whole engine: loads, stores, waits and steps, at rest and busy.

    An fs tier's chunks go into a directory of their own in its root, or where temporary ones belong; other tiers get
    keys that nobody else has. All of it is removed at the end.
    """
    (size_bytes, *_) = sizes("--size", size, most=MOVED_BYTES_MAX)
    engine = EngineConfig.load(config)
    if not engine.secondary_tiers:
        raise ConfigError(f"{config}: secondary_tiers: none given, at least one accepted: there is nothing to measure")
    check_outputs(json_path, plot_path)
    with ExitStack() as stack:
        placed, directory = _placed(engine, stack)
        run_bench(
            "kvtier bench tiers",
            lambda step: whole.measure_tiers(placed, size_bytes, rounds, step),
            whole.whole_steps(placed, rounds),
            json_path=json_path,
            plot_path=plot_path,
            directory=directory,
        )


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
