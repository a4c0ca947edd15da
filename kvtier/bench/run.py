"""What all `kvtier bench` commands do alike: check what is to be written, run, and give the figures out."""

import errno
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Annotated

import typer

from kvtier.bench.figures import Figures, Row, figures_json
from kvtier.bench.machine import load, this_machine
from kvtier.bench.rounds import ROUNDS, ROUNDS_MAX, ROUNDS_MIN
from kvtier.bench.screen import bench_bar, print_figures
from kvtier.errors import ConfigError
from kvtier.replay.outputs import check_picture, check_writable, replacing
from kvtier.replay.scratch import Scratch
from kvtier.units import parse_size

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
    from kvtier.bench.picture import write_figures_picture  # An extra: see `check_picture`.

    return lambda figures: write_figures_picture(path, figures)
