"""Files that commands write: refused before the work if they cannot be written, whole or not there after it."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from kvtier.errors import ConfigError


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
        raise ConfigError(f"{option} {path}: {error.name} is not installed; pip install 'kvtier[report]'") from error
    known = Figure().canvas.get_supported_filetypes()
    if picture_format(path) not in known:
        raise ConfigError(f"{option} {path}: expected a name that ends in one of {', '.join(sorted(known))}")


def picture_format(path: str) -> str:
    """Return the format that a file's name asks for."""
    return os.path.splitext(path)[1].removeprefix(".").lower()


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
