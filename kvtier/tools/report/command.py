"""`kvtier report`: a page of what `--json` wrote, of one run or of several beside each other."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from kvtier.errors import ConfigError
from kvtier.settings import foreign
from kvtier.tools.bench.figures import FORMAT as BENCH_FORMAT
from kvtier.tools.bench.figures import Figures
from kvtier.tools.outputs import check_page, note
from kvtier.tools.replay.report import FORMAT as REPLAY_FORMAT
from kvtier.tools.replay.report import Report

if TYPE_CHECKING:
    from kvtier.tools.report.page import Page

OUTPUT = "report.html"
RUNS_MAX = 5  # More columns than this fit no page, and more lines no picture.
NAME_CHARACTERS_MAX = 48  # Of a run, as it heads a column.
READ_BYTES_MAX = 64 << 20  # A report is some kilobytes; one of ten thousand rows has a few MiB.
ACCEPTED = "a report of kvtier replay --json or kvtier bench --json accepted"


class Head(msgspec.Struct, frozen=True):
    """What says whose report a file is."""

    command: str = ""
    format: int = 0


class Kind(NamedTuple):
    """A kind of reports, and the format that is read."""

    struct: type[msgspec.Struct]
    format: int


KINDS = {
    "kvtier replay": Kind(Report, REPLAY_FORMAT),
    **dict.fromkeys(("kvtier bench cpu", "kvtier bench fs", "kvtier bench tiers"), Kind(Figures, BENCH_FORMAT)),
}


def report(
    reports: Annotated[
        list[str],
        typer.Argument(metavar="REPORT...", help="What --json of kvtier replay or kvtier bench wrote; at most five."),
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The page: .html.")] = OUTPUT,
) -> None:
    """Make a page of what replays or benchmarks found: one file to look at, without links to anywhere.

    Of several reports of one command it compares them. The first is what the others are measured by.
    """
    if len(reports) > RUNS_MAX:
        raise ConfigError(f"REPORT...: {len(reports)} given, at most {RUNS_MAX} accepted")
    check_page("--output", output)
    runs = {name: read_report(path) for name, path in zip(run_names(reports), reports, strict=True)}
    commands = list(dict.fromkeys(found.command for found in runs.values()))
    if len(commands) > 1:
        raise ConfigError(f"REPORT...: reports of {' and '.join(commands)} given, those of one command accepted")
    from kvtier.tools.report.page import write_page  # Extras: see `check_page`.

    write_page(output, page_of(commands[0])({"": next(iter(runs.values()))} if len(runs) == 1 else runs))
    note(f"{output}: {', '.join(runs)}")


def page_of(command: str) -> "Callable[[Mapping[str, Any]], Page]":
    """Return what makes the page of a command's reports."""
    if KINDS[command].struct is Report:
        from kvtier.tools.report.replays import replay_page

        return replay_page
    from kvtier.tools.report.benches import bench_page

    return bench_page


def run_names(paths: Sequence[str]) -> list[str]:
    """Name runs by their files: without folders and `.json`, unless two would then be the same."""
    short = [os.path.basename(path).removesuffix(".json") for path in paths]
    named = [
        name if len(name) <= NAME_CHARACTERS_MAX else f"{name[: NAME_CHARACTERS_MAX - 1]}…"
        for name in (short if len(set(short)) == len(short) else paths)
    ]
    if len(set(named)) == len(named):
        return named
    return [f"{name} ({number})" for number, name in enumerate(named, 1)]


def read_report(path: str) -> Any:
    """Read a report of whichever command. Raises `ConfigError` for another command's, and for another format."""
    text = _read(path)
    head: Head = _decoded(path, text, Head)
    kind = KINDS.get(head.command)
    if kind is None:
        given = f"a report of {head.command!r}" if head.command else "JSON that does not say which command wrote it"
        raise ConfigError(f"{path}: {given} given, {ACCEPTED}")
    if head.format != kind.format:
        raise ConfigError(
            f"{path}: format {head.format} of another version of kvtier given, format {kind.format} accepted; "
            f"write it anew with this version: {head.command} --json"
        )
    return _decoded(path, text, kind.struct)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            text = file.read(READ_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {ACCEPTED}") from error
    except ValueError as error:  # A name that no file can have.
        raise ConfigError(f"{path!r}: {error}; {ACCEPTED}") from error
    if len(text) > READ_BYTES_MAX:
        raise ConfigError(f"{path}: more than {READ_BYTES_MAX:,} bytes given, {ACCEPTED}")
    return text


def _decoded(path: str, text: bytes, kind: type[msgspec.Struct]) -> Any:
    try:
        return foreign(msgspec.json.Decoder(kind).decode, text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; {ACCEPTED}") from error
