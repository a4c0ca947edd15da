"""Outputs of commands: the screen (lines break only on terminals), files (refused early, written whole), the log."""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvtier.errors import ConfigError, escaped, one_line

STDOUT = "-"  # As a file name.
COLUMNS_MAX = 1 << 16  # Longer than any line.
LOGGERS = ("kvtier", "kvtier_backends")
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # By the number of times that `--verbose` is given.

T = TypeVar("T")

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


class Screen(Console):
    """A console that escapes control characters and replaces no emoji names: names come from others."""

    def __init__(self, **how: Any) -> None:
        super().__init__(emoji=False, **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield escaped segments. Rich adds its own control sequences later."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=_lines(segment.text))


class _EscapedTable(Table):
    """A table whose cells are escaped before columns get a width."""

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        super().add_row(*map(_cell, cells), **how)


def _cell(cell: RenderableType | None) -> RenderableType | None:
    if isinstance(cell, Text):
        return Text(_lines(cell.plain), cell.style)
    return _lines(cell) if isinstance(cell, str) else cell


def _lines(text: str) -> str:
    """Escape unprintable characters except line feeds."""
    return "\n".join(map(escaped, text.split("\n")))


class _Log(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes escaped lines to the current stderr: a progress bar replaces it, and prints lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return _lines(super().format(record))


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


@contextmanager
def logged(*, verbose: int, quiet: bool) -> Generator[None]:
    """Apply the options of every command to the screen and the log until the block ends. Raises `ConfigError`."""
    if quiet and verbose:
        raise ConfigError("--quiet: accepted without --verbose only")
    handler = _Log()
    if verbose:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    token = _quiet.set(quiet)
    with log_levels(LOGGERS, logging.ERROR if quiet else LEVELS[min(verbose, len(LEVELS) - 1)]) as loggers:
        try:
            for logger in loggers:
                logger.addHandler(handler)
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            _quiet.reset(token)


@contextmanager
def log_levels(names: Iterable[str], level: int) -> Generator[list[logging.Logger]]:
    """Set the level of these loggers until the block ends."""
    loggers = list(map(logging.getLogger, names))
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield loggers
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return the console of stdout or stderr; a quiet one prints nothing."""
    given = os.environ.get("COLUMNS", "")
    columns = int(given) if given.isdecimal() and len(given) < len(str(COLUMNS_MAX)) else 0
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = max(20, columns) if columns else None if is_terminal else COLUMNS_MAX  # A narrower table is unreadable.
    return Screen(stderr=stderr, quiet=quiet, width=width)


def plain_table(*headings: str, show_header: bool = True) -> Table:
    """Return a table without lines. A heading that begins with `>` aligns its column right."""
    table = _EscapedTable(show_header=show_header, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading.startswith(">") else "left"
        table.add_column(heading.removeprefix(">"), justify=justify, overflow="fold")
    return table


def busy(words: str) -> AbstractContextManager[object]:
    return console(stderr=True, quiet=_quiet.get()).status(words)


def bar(*columns: ProgressColumn) -> Progress:
    """Return a transient progress bar on stderr, disabled if stderr is no terminal."""
    begin, screen = (TextColumn("{task.description}"), BarColumn()), Screen(stderr=True)
    return Progress(*begin, *columns, console=screen, transient=True, disable=not screen.is_terminal or _quiet.get())


def check_outputs(json_path: str | None, plot_path: str | None = None) -> None:
    """Raise `ConfigError` before any work if the files of `--json` and `--plot` cannot be written."""
    if json_path not in (None, STDOUT):
        check_writable("--json", json_path)
    if plot_path is None:
        return
    check_writable("--plot", plot_path)
    try:
        from matplotlib.figure import Figure  # An extra.
    except ModuleNotFoundError as error:
        raise ConfigError(f"--plot {plot_path}: {error.name} is not installed; pip install 'kvtier[plot]'") from error
    known = Figure().canvas.get_supported_filetypes()
    if picture_format(plot_path) not in known:
        raise ConfigError(f"--plot {plot_path}: expected a name that ends in one of {', '.join(sorted(known))}")


def check_writable(option: str, path: str) -> None:
    """Raise `ConfigError` with the option's name if `replacing` could not write this file. Leaves no file."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(None, "it is a directory")
        if not path:
            raise FileNotFoundError(None, "it is empty")
        if not _is_special(path):
            aside = _aside(path)
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.unlink(aside)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; expected a file that can be written") from error


def picture_format(path: str) -> str:
    return os.path.splitext(path)[1].removeprefix(".").lower()


def write_json(path: str | None, value: object) -> Console:
    """Write a value as JSON if `path` is given. Return the console for tables: a quiet one if stdout has the JSON."""
    with json_output(path) as file:
        if file is not None:
            file.write(msgspec.json.format(encoded(value), indent=1) + b"\n")
    return console(quiet=path == STDOUT)


@contextmanager
def json_output(path: str | None) -> Generator[BinaryIO | None]:
    """Yield the output of `--json` for writing in parts: a file that appears when it is whole, stdout, or None."""
    if path is None:
        yield None
    elif path == STDOUT:
        sys.stdout.flush()
        yield sys.stdout.buffer  # JSON is UTF-8, whatever the locale.
        sys.stdout.buffer.flush()  # Errors are reported before the command ends.
    else:
        with replacing(path) as file:
            yield file


def write_rows(
    file: BinaryIO | None, rows: Iterable[object], name: str = "", totals: Callable[[], object] | None = None
) -> None:
    """Consume rows and write them as they come, one a line: millions of them are not kept in memory.

    Without `totals` they become a JSON array. Otherwise they become the field `name` of an object, whose other fields
    are those of `totals()`, called after the last row. Without a file the rows are only consumed.
    """
    if file is None:
        for _ in rows:
            pass
        return
    file.write(f'{{"{name}": ['.encode() if totals else b"[")
    file.writelines((b",\n " if number else b"") + encoded(row) for number, row in enumerate(rows))
    file.write(b"],\n " + encoded(totals())[1:] + b"\n" if totals else b"]\n")


def printed(rows: Iterable[T], line: Callable[[T], str]) -> Iterator[T]:
    """Print the line of each row before it is yielded. A line is never broken, so that it can be searched."""
    for row in rows:
        typer.echo(one_line(line(row)))
        yield row


def encoded(value: object) -> bytes:
    """Return a value as JSON on one line, with all unprintable characters escaped."""
    text = msgspec.json.encode(value).decode()
    return (text if text.isprintable() else "".join(map(_escaped_in_json, text))).encode()


def _escaped_in_json(letter: str) -> str:
    return letter if letter.isprintable() else json.dumps(letter)[1:-1] if letter != "\x7f" else r"\u007f"


@contextmanager
def replacing(path: str) -> Generator[BinaryIO, None, None]:
    """Yield a file that replaces `path`, or a link's target, when the block ends well. Pipes are written directly."""
    special = _is_special(path)
    written = path if special else _aside(path)
    try:
        with open(written, "wb") as file:
            yield file
        if not special:
            os.replace(written, os.path.realpath(path))
    except OSError as error:
        if error.filename not in (None, written):
            raise
        raise OSError(error.errno, error.strerror, path) from error  # A failed write has no name.
    finally:
        if not special:
            with suppress(FileNotFoundError):
                os.unlink(written)


def _is_special(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


def _aside(path: str) -> str:
    """Return a temporary name in the directory of the link's target, for a rename."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}.{os.getpid()}.tmp")


def check_directory(what: str, path: str) -> None:
    """Raise `ConfigError` if there is no such directory: a mistyped path must not create one."""
    if not os.path.isdir(path):
        raise ConfigError(f"{what} {path!r}: no such directory; one that is there accepted")


@contextmanager
def temporary_directory(prefix: str, parent: str | None = None) -> Generator[str]:
    """Yield a temporary directory, removed at the end. SIGTERM and SIGHUP end the block as Ctrl-C does."""
    path = tempfile.mkdtemp(prefix=prefix, dir=parent)
    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ending:
            signal.signal(number, _interrupt)
        yield path
    finally:
        for _ in range(20):  # A runner may outlive its owner for a moment and still write.
            shutil.rmtree(path, ignore_errors=True)
            if not os.path.lexists(path):
                break
            time.sleep(0.1)
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(_: int, frame: FrameType | None) -> None:
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    if not callable(on_ctrl_c):  # Ignored, as in a shell's background job.
        raise KeyboardInterrupt
    on_ctrl_c(signal.SIGINT, frame)
