"""Outputs of commands: files that are refused before the work or are whole, the screen, the log, scratch folders.

A screen's lines are as long as the terminal is wide, or as `COLUMNS` says. In a pipe no line is broken: who reads it
there is a program.
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

STDOUT = "-"  # As the name of a file, in other programs, too.
COLUMNS_MIN = 20  # Narrower, a table is a column of letters.
COLUMNS_MAX = 1 << 16  # No line is longer.
WRITTEN_UNITS = {name: int(unit) for name, unit in SIZE_UNITS.items() if name.endswith("B") and name not in ("B", "KB")}
WHOLE_MAX = 10_000  # Of a unit. A larger number is read less easily than one with a decimal point.
PAGE_SUFFIXES = ("html", "htm")
LOGGERS = ("kvtier", "kvtier_backends")
INTERRUPTED_WAIT_S = 0.1  # Enough for what a short run left; a part of the second in which Ctrl-C is to be obeyed.
REMOVAL_WAIT_S = 60.0  # Two hundred thousand files take twenty seconds of a disk that has nothing else to do.

SWEEPER = """
import os, shutil, sys, time
sys.stdin.buffer.read()
for _ in range(20):  # A runner that outlives its owner for a moment may still write.
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.lexists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


class Wishes(NamedTuple):
    """The options that every command has."""

    verbose: int = 0  # 1: what happens, 2: everything.
    quiet: bool = False
    wide: bool = False
    log_file: str | None = None


NO_WISHES = Wishes()
_wishes: ContextVar[Wishes] = ContextVar("wishes", default=NO_WISHES)


class Screen(Console):
    """A console that shows what a terminal would obey, and takes no name for an emoji: names come from others."""

    def __init__(self, **how: Any) -> None:
        super().__init__(emoji=False, **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is to be written; rich puts its own orders to the terminal around it later."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=_lines(segment.text))


class _Words(Table):
    """A table whose cells are escaped before their columns get a width, under a heading that may be wider than it."""

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
    """A log line that a terminal obeys nothing in."""

    def format(self, record: logging.LogRecord) -> str:
        return _lines(super().format(record))


def _lines(text: str) -> str:
    """Escape what cannot be shown, but for the ends of lines."""
    return "\n".join(map(escaped, text.split("\n")))


def counted(count: int, what: str) -> str:
    """Write how many there are of something, whose plural ends in -s."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def round_size(size_bytes: int) -> str:
    """Write a size as people give it: as a small whole number of some unit, if it is one; else with a decimal point."""
    whole = [(size_bytes // unit, name) for name, unit in WRITTEN_UNITS.items() if size_bytes % unit == 0]
    count, name = min(whole, default=(WHOLE_MAX, ""))
    return f"{count:,} {name}" if count < WHOLE_MAX else decimal(size_bytes)


@contextmanager
def granted(wishes: Wishes) -> Generator[None]:
    """Have the screen and the log be as this call wants them, until the block ends. Raises `ConfigError`."""
    if wishes.quiet and wishes.verbose:
        raise ConfigError("--quiet: accepted without --verbose only: it asks for the opposite")
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
        for handler in handlers[1:]:  # On stderr it is said by who called.
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
    """Writes to what stderr is at that moment: a bar puts itself in its place, and lets lines through above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _handlers(wishes: Wishes) -> list[logging.Handler]:
    """Return where the log goes: to stderr from warnings on, or as was asked for, and to the file."""
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
    """Return the console of stdout or stderr; `quiet`: of neither."""
    stream = sys.stderr if stderr else sys.stdout
    given = os.environ.get("COLUMNS", "")
    columns = int(given) if given.isdecimal() and len(given) < len(str(COLUMNS_MAX)) else 0
    width = max(COLUMNS_MIN, columns) if columns else None if stream.isatty() else COLUMNS_MAX
    return Screen(stderr=stderr, quiet=quiet, width=COLUMNS_MAX if _wishes.get().wide else width)


def plain_table(*headings: str, title: str | None = None, show_header: bool = True) -> Table:
    """Return a table of words alone, without lines around them. Headings that begin with `>` are of numbers."""
    table = _Words(
        title,
        show_header=show_header,
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading.startswith(">") else "left"
        table.add_column(heading.removeprefix(">"), justify=justify, overflow="fold")
    return table


def busy(words: str) -> AbstractContextManager[object]:
    """Show on stderr what is being done, until the block ends, where somebody watches."""
    return console(stderr=True, quiet=_wishes.get().quiet).status(words)


def note(words: str) -> None:
    """Say on stderr what is good to know but no result, unless nobody wants to hear it."""
    console(stderr=True, quiet=_wishes.get().quiet).print(words, highlight=False, soft_wrap=True, markup=False)


def watched() -> bool:
    """Say whether somebody watches how far a command is."""
    return Console(stderr=True).is_terminal and not _wishes.get().quiet


def check_outputs(json_path: str | None, plot_path: str | None = None) -> None:
    """Raise `ConfigError` before any work if what `--json` and `--plot` ask for could not be written."""
    if json_path not in (None, STDOUT):
        check_writable("--json", json_path)
    if plot_path is not None:
        check_picture("--plot", plot_path)


def check_writable(option: str, path: str | os.PathLike[str]) -> None:
    """Raise `ConfigError`, naming the command's option, if `replacing` could not write there. Leaves nothing behind."""
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
    """Raise `ConfigError`, naming the command's option, if no picture could be drawn there. Leaves nothing behind."""
    check_writable(option, path)
    try:
        from matplotlib.figure import Figure  # An extra: most machines that serve have no use for pictures.
    except ModuleNotFoundError as error:
        raise ConfigError(f"{option} {path}: {error.name} is not installed; pip install 'kvtier[plot]'") from error
    known = Figure().canvas.get_supported_filetypes()
    if picture_format(path) not in known:
        raise ConfigError(f"{option} {path}: expected a name that ends in one of {', '.join(sorted(known))}")


def picture_format(path: str) -> str:
    """Return the format that a file's name asks for."""
    return os.path.splitext(path)[1].removeprefix(".").lower()


def write_json(path: str | None, value: object) -> Console:
    """Write a value there, if anywhere, and return the console for tables: a silent one where stdout has the JSON."""
    with json_output(path) as file:
        if file is not None:
            file.write(as_json(value))
    return console(quiet=path == STDOUT)


@contextmanager
def json_output(path: str | None) -> Generator[BinaryIO | None]:
    """Give what `--json` asks for, to be written to bit by bit: a file that is whole at the end, stdout, or nothing."""
    if path is None:
        yield None
    elif path == STDOUT:
        sys.stdout.flush()
        yield sys.stdout.buffer  # JSON is UTF-8, whatever the terminal takes.
        sys.stdout.buffer.flush()  # Who cannot have it is told before the command ends.
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
    """Return a value as indented JSON, which ends with a line's end."""
    return msgspec.json.format(encoded(value), indent=1) + b"\n"


def encoded(value: object) -> bytes:
    """Return a value as JSON on one line, in which a terminal obeys nothing: such as C1 is escaped as C0 is."""
    text = msgspec.json.encode(value).decode()
    return (text if text.isprintable() else "".join(map(_escaped_in_json, text))).encode()


def _escaped_in_json(letter: str) -> str:
    return letter if letter.isprintable() else json.dumps(letter)[1:-1] if letter != "\x7f" else r"\u007f"


def bar(*columns: ProgressColumn) -> Progress:
    """Return a bar on stderr with these columns behind it, which goes away at its end. Where nobody watches is none."""
    begin = TextColumn("{task.description}"), BarColumn()
    return Progress(*begin, *columns, console=Screen(stderr=True), transient=True, disable=not watched())


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[BinaryIO, None, None]:
    """Give a file to write that takes the place of `path` when the block ends; if it raises, `path` stays as it was.

    A link stays one: what it leads to is replaced. What is no regular file (a pipe, `/dev/stdout`) is written directly.
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
    """Have what fails say which file it was: a write that fails does not, and a rename names what nobody knows."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, _aside(path)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _is_special(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


def _aside(path: str | os.PathLike[str]) -> str:
    """Return a name beside the file that is really meant, so that a rename can put it in place."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}.{os.getpid()}.tmp")


def check_directory(what: str, path: str) -> None:
    """Raise `ConfigError` if there is no such directory: a mistyped path must not become one."""
    if not os.path.isdir(path):
        raise ConfigError(f"{what} {path!r}: no such directory; one that is there accepted")


def make_directory(what: str, path: str) -> None:
    """Make a directory for the user alone, if its parent is there; raise `ConfigError` if it is none in the end."""
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
    """Give a directory that is removed at the end: while one waits, or in the background if that takes long."""
    with Scratch() as scratch:
        yield scratch.path
        with busy(f"removing {scratch.path}"):
            removed = scratch.remove(REMOVAL_WAIT_S)
        if not removed:
            note(f"{scratch.path} is being removed in the background")


class Scratch:
    """A temporary directory that goes away however we end: by return, by Ctrl-C or by SIGKILL. Use it in a `with`.

    A small process waits for the end of a pipe that only we hold, and then removes the directory. It also is what lets
    an interrupted command end at once: a hundred thousand files take seconds to remove, and it goes on removing them.
    """

    def __init__(self, parent: str | None = None, prefix: str = "kvtier-replay-") -> None:
        """Make the directory in `parent`; None: where temporary ones belong."""
        self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        try:
            self._sweeper = subprocess.Popen(  # noqa: S603  # Our own few lines, with one path for an argument.
                [sys.executable, "-I", "-S", "-c", SWEEPER, self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # A terminal's Ctrl-C is for us, not for it.
            )
        except BaseException:
            os.rmdir(self.path)
            raise

    def remove(self, wait_s: float | None) -> bool:
        """Have the directory removed; wait for it so long (None: until it is done) and say whether it is gone."""
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
        refused = kind is not None and issubclass(kind, KVTierError)  # Then there is little to remove.
        self.remove(None if kind is None or refused else INTERRUPTED_WAIT_S)
