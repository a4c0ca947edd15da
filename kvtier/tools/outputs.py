"""Outputs of commands: the screen, files, the log and temporary directories.

Files are refused before the work begins, and appear when they are whole. On a terminal lines have its width, or
`COLUMNS`. In a pipe no line is broken, because a program reads it.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, BinaryIO, Literal, NamedTuple, Self

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from kvtier.errors import ConfigError, KVTierError, escaped
from kvtier.settings.units import SIZE_UNITS

STDOUT = "-"  # As a file name.
COLUMNS_MIN = 20  # A narrower table is unreadable.
COLUMNS_MAX = 1 << 16  # Longer than any line.
WRITTEN_UNITS = {name: int(unit) for name, unit in SIZE_UNITS.items() if name.endswith("B") and name not in ("B", "KB")}
WHOLE_MAX = 10_000  # Of a unit; a larger number gets a decimal point.
LOGGERS = ("kvtier", "kvtier_backends")
INTERRUPTED_WAIT_S = 0.1  # Ctrl-C ends a command within a second.
REMOVAL_WAIT_S = 60.0  # An idle disk removes 200,000 files in 20 s.

SWEEPER = """
import os, shutil, sys, time
sys.stdin.buffer.read()
for _ in range(20):  # A runner may outlive its owner for a moment and still write.
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.lexists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


class Wishes(NamedTuple):
    """The options of every command."""

    verbose: int = 0  # 1 logs at level info, 2 at debug.
    quiet: bool = False
    wide: bool = False
    log_file: str | None = None


NO_WISHES = Wishes()
_wishes: ContextVar[Wishes] = ContextVar("wishes", default=NO_WISHES)


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
    """A table whose cells are escaped before columns get a width. Its title may be wider than the table."""

    def __init__(self, heading: str | None, **how: Any) -> None:
        super().__init__(**how)
        self._heading = heading

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._heading is not None:
            yield Text(_lines(self._heading), style="table.title", overflow="fold")
        yield from super().__rich_console__(console, options)

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        super().add_row(*map(_cell, cells), style=style, end_section=end_section)


def _cell(cell: RenderableType | None) -> RenderableType | None:
    if isinstance(cell, Text):
        cell = cell.copy()
        cell.plain = _lines(cell.plain)
    return _lines(cell) if isinstance(cell, str) else cell


class _Format(logging.Formatter):
    """Log lines with escaped control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return _lines(super().format(record))


def _lines(text: str) -> str:
    """Escape unprintable characters except line feeds."""
    return "\n".join(map(escaped, text.split("\n")))


def counted(count: int, what: str) -> str:
    """Format a count with its noun, whose plural ends in -s."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def round_size(size_bytes: int) -> str:
    """Format a size as a small whole number of a unit if possible, else with a decimal point."""
    whole = [(size_bytes // unit, name) for name, unit in WRITTEN_UNITS.items() if size_bytes % unit == 0]
    count, name = min(whole, default=(WHOLE_MAX, ""))
    return f"{count:,} {name}" if count < WHOLE_MAX else decimal(size_bytes)


@contextmanager
def granted(wishes: Wishes) -> Generator[None]:
    """Apply the options of every command to the screen and the log until the block ends. Raises `ConfigError`."""
    if wishes.quiet and wishes.verbose:
        raise ConfigError("--quiet: accepted without --verbose only")
    if wishes.log_file is not None:
        check_writable("--log-file", wishes.log_file)
    token = _wishes.set(wishes)
    handlers = _handlers(wishes)
    before = [(logger, logger.level) for logger in map(logging.getLogger, LOGGERS)]
    try:
        for logger, _ in before:
            logger.setLevel(min(handler.level for handler in handlers))
            for handler in handlers:
                logger.addHandler(handler)
        yield
    except (KVTierError, OSError) as error:
        for handler in handlers[1:]:  # `commands.run` prints it on stderr.
            handler.handle(logging.LogRecord(LOGGERS[0], logging.ERROR, __file__, 0, str(error), None, None))
        raise
    finally:
        for logger, level in before:
            logger.setLevel(level)
            for handler in handlers:
                logger.removeHandler(handler)
        for handler in handlers:
            handler.close()
        _wishes.reset(token)


class _ToStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current stderr: a progress bar replaces it, and prints lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _handlers(wishes: Wishes) -> list[logging.Handler]:
    """Return the handlers of the log: stderr, at the wanted level, and the file."""
    with_time = _Format("%(asctime)s %(levelname)s %(name)s: %(message)s")
    level = logging.ERROR if wishes.quiet else logging.WARNING
    if wishes.verbose:
        level = logging.INFO if wishes.verbose == 1 else logging.DEBUG
    handlers: list[logging.Handler] = [_ToStderr()]
    handlers[0].setLevel(level)
    handlers[0].setFormatter(with_time if wishes.verbose else _Format())
    if wishes.log_file is not None:
        to_file = logging.FileHandler(wishes.log_file, encoding="utf-8", errors="backslashreplace")
        to_file.setLevel(min(level, logging.INFO))
        to_file.setFormatter(with_time)
        handlers.append(to_file)
    return handlers


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return the console of stdout or stderr; a quiet one prints nothing."""
    stream = sys.stderr if stderr else sys.stdout
    given = os.environ.get("COLUMNS", "")
    columns = int(given) if given.isdecimal() and len(given) < len(str(COLUMNS_MAX)) else 0
    width = max(COLUMNS_MIN, columns) if columns else None if stream.isatty() else COLUMNS_MAX
    return Screen(stderr=stderr, quiet=quiet, width=COLUMNS_MAX if _wishes.get().wide else width)


def plain_table(*headings: str, title: str | None = None, show_header: bool = True) -> Table:
    """Return a table without lines. A heading that begins with `>` aligns its column right."""
    table = _EscapedTable(title, show_header=show_header, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading.startswith(">") else "left"
        table.add_column(heading.removeprefix(">"), justify=justify, overflow="fold")
    return table


def busy(words: str) -> AbstractContextManager[object]:
    """Show a status on a terminal's stderr until the block ends."""
    return console(stderr=True, quiet=_wishes.get().quiet).status(words)


def note(words: str) -> None:
    """Print a note on stderr, unless `--quiet` is given."""
    console(stderr=True, quiet=_wishes.get().quiet).print(words, highlight=False, soft_wrap=True, markup=False)


def check_outputs(json_path: str | None, plot_path: str | None = None) -> None:
    """Raise `ConfigError` before any work if the files of `--json` and `--plot` cannot be written."""
    if json_path not in (None, STDOUT):
        check_writable("--json", json_path)
    if plot_path is not None:
        check_picture("--plot", plot_path)


def check_writable(option: str, path: str | os.PathLike[str]) -> None:
    """Raise `ConfigError` with the option's name if `replacing` could not write this file. Leaves no file."""
    if not os.fspath(path):
        raise ConfigError(f"{option} '': expected the name of a file that can be written")
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(None, "it is a directory")
        if not _is_special(path):
            aside = _aside(path)
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            os.unlink(aside)
    except OSError as error:
        raise ConfigError(
            f"{option} {os.fspath(path)}: {error.strerror}; expected a file that can be written"
        ) from error


def check_picture(option: str, path: str) -> None:
    """Raise `ConfigError` with the option's name if no picture could be written there. Leaves no file."""
    check_writable(option, path)
    try:
        from matplotlib.figure import Figure  # An extra.
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option} {path}: {error.name} is not installed; pip install 'kvtier[plot]'") from error
    known = Figure().canvas.get_supported_filetypes()
    if picture_format(path) not in known:
        raise ConfigError(f"{option} {path}: expected a name that ends in one of {', '.join(sorted(known))}")


def picture_format(path: str) -> str:
    """Return the format of a picture by its file name."""
    return os.path.splitext(path)[1].removeprefix(".").lower()


def write_json(path: str | None, value: object) -> Console:
    """Write a value as JSON if `path` is given. Return the console for tables: a quiet one if stdout has the JSON."""
    with json_output(path) as file:
        if file is not None:
            file.write(as_json(value))
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


def as_json(value: object) -> bytes:
    """Return a value as indented JSON with a final line feed."""
    return msgspec.json.format(encoded(value), indent=1) + b"\n"


def encoded(value: object) -> bytes:
    """Return a value as JSON on one line, with all unprintable characters escaped."""
    text = msgspec.json.encode(value).decode()
    return (text if text.isprintable() else "".join(map(_escaped_in_json, text))).encode()


def _escaped_in_json(letter: str) -> str:
    return letter if letter.isprintable() else json.dumps(letter)[1:-1] if letter != "\x7f" else r"\u007f"


def bar(*columns: ProgressColumn) -> Progress:
    """Return a transient progress bar on stderr, disabled if stderr is no terminal."""
    begin, screen = (TextColumn("{task.description}"), BarColumn()), Screen(stderr=True)
    return Progress(
        *begin, *columns, console=screen, transient=True, disable=not screen.is_terminal or _wishes.get().quiet
    )


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[BinaryIO, None, None]:
    """Yield a file that replaces `path` when the block ends. If the block raises, `path` stays as it was.

    The target of a link is replaced, not the link. Special files such as pipes are written directly.
    """
    if _is_special(path):
        with _named(path), open(path, "wb") as file:
            yield file
        return
    aside = _aside(path)
    try:
        with _named(path):
            with open(aside, "wb") as file:
                yield file
            os.replace(aside, os.path.realpath(path))
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)


@contextmanager
def _named(path: str | os.PathLike[str]) -> Generator[None]:
    """Put the file's name into `OSError`: a failed write has none, and a failed rename has the temporary name."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, _aside(path)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _is_special(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


def _aside(path: str | os.PathLike[str]) -> str:
    """Return a temporary name in the directory of the link's target, for a rename."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}.{os.getpid()}.tmp")


def check_directory(what: str, path: str) -> None:
    """Raise `ConfigError` if there is no such directory: a mistyped path must not create one."""
    if not os.path.isdir(path):
        raise ConfigError(f"{what} {path!r}: no such directory; one that is there accepted")


def make_directory(what: str, path: str) -> None:
    """Create a directory with mode 0700, or accept an existing one. Raises `ConfigError`."""
    try:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError) and path != ""
        why = "parent directory does not exist" if missing else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{what}: cannot create {path!r}: {why}") from error
    check_directory(what, path)


@contextmanager
def temporary_directory() -> Generator[str]:
    """Yield a temporary directory, removed at the end, in the background if that takes longer than a minute."""
    with Scratch() as scratch:
        yield scratch.path
        with busy(f"removing {scratch.path}"):
            removed = scratch.remove(REMOVAL_WAIT_S)
        if not removed:
            note(f"{scratch.path} is being removed in the background")


class Scratch:
    """A temporary directory that is removed however the process ends: by return, Ctrl-C or SIGKILL.

    A child process waits for the end of a pipe that only this process holds, and then removes the directory. So an
    interrupted command ends at once, although 100,000 files take seconds to remove.
    """

    def __init__(self, parent: str | None = None, prefix: str = "kvtier-replay-") -> None:
        """Create the directory in `parent`, by default in the system's directory of temporary files."""
        self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        try:
            self._sweeper = subprocess.Popen(  # noqa: S603  # A fixed program with one path as its argument.
                [sys.executable, "-I", "-S", "-c", SWEEPER, self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end it.
            )
        except BaseException:
            os.rmdir(self.path)
            raise

    def remove(self, wait_s: float | None) -> bool:
        """Start the removal and wait for it, at most `wait_s` seconds. Return True if it is done."""
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        try:
            self._sweeper.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        refused = kind is not None and issubclass(kind, KVTierError)  # There is little to remove.
        self.remove(None if kind is None or refused else INTERRUPTED_WAIT_S)
