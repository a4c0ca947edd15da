"""What the commands over a directory have in common: its opening, which namespaces are meant, and the bar."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier.contents import Contents, Kind, Place, StoredFile
from kvtier.errors import ConfigError, one_line
from kvtier.plugins import find_class

EXIT_UNWELL = 1  # As a wrong byte: whoever reads the status alone is to look.
_PROGRESS_FILES = 256  # Between two changes of the bar's words.

DirectoryArgument = Annotated[str, typer.Argument(metavar="DIR", help="The directory that a tier has as its root.")]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="Only this one: the name of a folder, as du shows it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON to stdout instead of a table.")]


class LeftOut:
    """What a command could not look at, or not remove: it goes on, and says so at its end."""

    def __init__(self) -> None:
        self.count = 0
        self._first = ""

    def add(self, name: str, why: str) -> None:
        self._first = self._first or f"{name}: {why}"
        self.count += 1

    def say(self) -> None:
        """End the command, with one line on stderr and a status of its own, if anything was left out."""
        if self.count:
            typer.echo(f"kvtier: {one_line(self._first)}; {self.count:,} left out", err=True)
            raise typer.Exit(EXIT_UNWELL)


@contextmanager
def opened(directory: str) -> Generator[Contents]:
    """Open a directory, of the kind that there is: chunks as files."""
    kind = find_class("directory", "fs", {"fs": "kvtier_backends.fs.contents:FsContents"}, "kvtier.contents")
    contents = cast("type[Contents]", kind).open(directory)
    try:
        yield contents
    finally:
        contents.close()


def chosen(contents: Contents, namespace: str | None) -> list[Place]:
    """Return the namespaces that are meant. Raises `ConfigError` if there is none of that name."""
    places = contents.places()
    if namespace is None:
        return places
    found = [place for place in places if place.name == namespace]
    if not found:
        names = ", ".join(place.name for place in places) or "none"
        raise ConfigError(f"--namespace {namespace!r}: not in the directory, which holds: {names}")
    return found


def walked(contents: Contents, places: Sequence[Place], title: str) -> Iterator[tuple[Place, StoredFile]]:
    """Yield all files of these namespaces, with a bar on stderr where somebody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        parts = [(place, part) for place in places for part in contents.parts(place)]
        progress.update(task, total=len(parts))
        seen = 0
        for place, part in parts:
            for file in contents.files(place, part):
                yield place, file
                seen += 1
                if seen % _PROGRESS_FILES == 0:
                    progress.update(task, description=f"{title} {seen:,}")
            progress.advance(task)


def readable(
    contents: Contents, places: Sequence[Place], title: str, left_out: LeftOut
) -> Iterator[tuple[Place, StoredFile]]:
    """Yield likewise, but for what cannot be read."""
    for place, file in walked(contents, places, title):
        if file.kind is Kind.UNREADABLE:
            left_out.add(file.name, file.fault)
        else:
            yield place, file


def shown_bytes(size_bytes: int) -> str:
    """Write a size for people, in binary units."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1_024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1_024
    return f"{size:.1f} TiB"
