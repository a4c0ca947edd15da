"""The commands that look at a tier's directory or bucket and change nothing: `verify`, `du` and `ls`."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvtier.backend import Contents, Finding, Kind, Place, State, StoredFile, chunk_hash, group_index
from kvtier.config import EngineConfig, tier_options
from kvtier.errors import ConfigError, one_line
from kvtier.tools.outputs import bar

EXIT_UNWELL = 1  # As a wrong byte: whoever reads the status alone is to look.
_PROGRESS_FILES = 256  # Between two changes of the bar's words.
LISTED_MAX = 1_000_000_000_000  # Chunks. No directory holds so many.
NAMED_MAX = 100  # Files listed for people; all of them are counted, and listed as JSON.
COUNTED = {
    Kind.CHUNK: ("chunks", "bytes"),
    Kind.TEMPORARY: ("temporaries", "temporary_bytes"),
    Kind.LEFTOVER: ("leftovers", "leftover_bytes"),
}
"""Names in `du` for the number of each kind's files, and for what they take."""

AT_ONCE = 256  # Files dealt with by several threads before the next are listed.
_KINDS = {
    "fs": ("kvtier_backends.fs.directory.files", "FsContents"),
    "object": ("kvtier_backends.object.contents", "ObjectContents"),
}
"""The types of tiers whose chunks these commands reach."""

T = TypeVar("T")

DirectoryArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="A tier's root directory; a bucket's URL; or CONFIG, with #TIER behind it where it has several.",
    ),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="Only this one: the name of a folder, as du shows it.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON to stdout instead of a table.")]


class LeftOut:
    """Files that a command could not look at, or not remove: it goes on, and says so at its end."""

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
def opened(where: str) -> Generator[Contents]:
    """Open a tier's directory, its bucket, or what a configuration says of it."""
    contents = _contents(where)
    try:
        yield contents
    finally:
        contents.close()


def _contents(where: str) -> Contents:
    path, _, name = where.partition("#")
    if "://" in where:
        return _kind("object").open(where)
    if not path.endswith((".toml", ".json")) or os.path.isdir(where):
        return _kind("fs").open(where)
    tiers = [(tier, index) for index, tier in enumerate(EngineConfig.load(path).secondary_tiers) if tier.type in _KINDS]
    named = [(tier, index) for tier, index in tiers if name in ("", tier.name)]
    if len(named) != 1:
        names = ", ".join(f"{path}#{tier.name}" for tier, _ in tiers) or "none"
        raise ConfigError(f"{where}: one tier of type {' or '.join(_KINDS)} accepted; the configuration has: {names}")
    tier, index = named[0]
    return _kind(tier.type).configured(tier_options(tier, f"{path}: secondary_tiers[{index}]"))


def _kind(tier_type: str) -> type[Contents]:
    module, name = _KINDS[tier_type]
    try:
        return cast("type[Contents]", getattr(import_module(module), name))
    except ImportError as error:
        raise ConfigError(f"a bucket needs the extra kvtier[{tier_type}]: {error}") from error


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
    with bar(TimeRemainingColumn()) as progress:
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


def side_by_side(
    contents: Contents, files: Iterable[tuple[Place, StoredFile]], call: Callable[[Place, StoredFile], T]
) -> Iterator[tuple[StoredFile, T]]:
    """Call for each file, by as many threads as its directory takes, and yield what was answered, in order."""
    if contents.lanes == 1:
        yield from ((file, call(place, file)) for place, file in files)
        return
    left = iter(files)
    with ThreadPoolExecutor(contents.lanes) as threads:
        while some := list(islice(left, AT_ONCE)):
            places, found = zip(*some, strict=True)
            yield from zip(found, threads.map(call, places, found), strict=True)


def shown_bytes(size_bytes: int) -> str:
    """Write a size for people, in binary units."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1_024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1_024
    return f"{size:.1f} TiB"


def du(directory: DirectoryArgument, namespace: NamespaceOption = None, as_json: JsonOption = False) -> None:
    """Show how many chunks each namespace has and what they take of the disk, in blocks rather than by their lengths.

    Leftovers are what killed processes had under way and corrupt files that were kept: `kvtier prune --leftovers`.
    """
    left_out = LeftOut()
    with opened(directory) as contents:
        places = chosen(contents, namespace)
        counted: dict[str, Counter[str]] = {place.name: Counter() for place in places}
        for place, file in readable(contents, places, "counting", left_out):
            if file.kind in COUNTED:
                files, size = COUNTED[file.kind]
                counted[place.name].update({files: 1, size: file.allocated_bytes})
    rows = {place: _usage_row(counted[place.name]) for place in places}
    total = _usage_row(sum(counted.values(), Counter[str]()))
    if as_json:
        namespaces = {place.name: {"model": place.model, **row} for place, row in rows.items()}
        typer.echo(json.dumps({"namespaces": namespaces, **total, "left_out": left_out.count}))
    else:
        _show_usage(rows, total)
    left_out.say()


def _usage_row(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for names in COUNTED.values() for name in names}


def _show_usage(rows: dict[Place, dict[str, int]], total: dict[str, int]) -> None:
    table = Table()
    for heading in ("namespace", "model"):
        table.add_column(heading, overflow="fold")  # Names of one model's folders differ at their ends only.
    for heading in ("chunks", "size", "temporaries", "leftovers", "size"):
        table.add_column(heading, justify="right")
    for place, row in rows.items():
        table.add_row(Text(place.name), Text(place.model), *_cells(row))
    if len(rows) != 1:
        table.add_section()
        table.add_row("total", "", *_cells(total))
    Console().print(table)


def _cells(row: dict[str, int]) -> list[str]:
    return [
        f"{row['chunks']:,}",
        shown_bytes(row["bytes"]),
        f"{row['temporaries']:,}",
        f"{row['leftovers']:,}",
        shown_bytes(row["leftover_bytes"]),
    ]


def ls(
    directory: DirectoryArgument,
    namespace: NamespaceOption = None,
    limit: Annotated[int | None, typer.Option(min=1, max=LISTED_MAX, help="Show at most this many.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the chunks, as they are found: hash, KV-cache group, size on the disk, time since the last use, namespace.

    A tier sets a file's time to the chunk's last use at most once an hour. A chunk in a segment or a bucket has only
    the time of its store. Nothing is kept in memory, so that a million chunks can be listed.
    """
    now_s, left_out = time.time(), LeftOut()
    with opened(directory) as contents:
        found = readable(contents, chosen(contents, namespace), "listing", left_out)
        chunks = ((place, file) for place, file in found if file.kind is Kind.CHUNK and file.key is not None)
        rows = islice((_chunk_row(place, file, now_s) for place, file in chunks), limit)
        if as_json:
            _write_rows(rows)
            typer.echo("")
        else:
            for row in rows:
                size, age = shown_bytes(row["bytes"]), _shown_age(row["age_s"])
                typer.echo(f"{row['hash']}  {row['group']:>3}  {size:>10}  {age:>8}  {row['namespace']}")
    left_out.say()


def _chunk_row(place: Place, file: StoredFile, now_s: float) -> dict[str, Any]:
    assert file.key is not None, file
    return {
        "hash": chunk_hash(file.key).hex(),
        "group": group_index(file.key),
        "bytes": file.allocated_bytes,
        "age_s": round(max(0.0, now_s - file.used_at_ns / 1e9), 3),
        "namespace": place.name,
        "file": file.name,
    }


def _write_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Write one array, a row a line, as they come: a million of them are not kept in memory."""
    typer.echo("[", nl=False)
    for number, row in enumerate(rows):
        typer.echo((",\n " if number else "") + json.dumps(row), nl=False)
    typer.echo("]", nl=False)


def _shown_age(age_s: float) -> str:
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.1f} {unit}"
    return f"{age_s:.0f} s"


class Unwell(NamedTuple):
    """A file that is not what was stored, or that there is no telling of."""

    file: StoredFile
    finding: Finding


def verify(directory: DirectoryArgument, namespace: NamespaceOption = None, as_json: JsonOption = False) -> None:
    """Read every chunk and compare it with the checksum, key and length that were stored with it.

    Exit status 1 if any is corrupt or cannot be read. Files without a footer, which vLLM writes, cannot be verified
    and are counted. Of encrypted chunks damage is found; who wrote them, only a tier with the key can tell. Nothing is
    changed: `kvtier prune --corrupt` removes what is corrupt.
    """
    states, faults = Counter[State](), Counter[str]()
    with opened(directory) as contents:
        unwell = _unwell(contents, chosen(contents, namespace), states, faults)
        if as_json:
            _write_json(unwell, states, faults)
        else:
            _show_findings(unwell, states, faults)
    if states[State.CORRUPT] or states[State.UNREADABLE]:
        raise typer.Exit(EXIT_UNWELL)


def _unwell(
    contents: Contents, places: Sequence[Place], states: Counter[State], faults: Counter[str]
) -> Iterator[Unwell]:
    """Look at everything: count it, and yield what is not well."""
    files = walked(contents, places, "verifying")
    for file, finding in side_by_side(contents, files, lambda place, file: _found(contents, place, file)):
        if finding is None:
            continue
        states[finding.state] += 1
        faults[finding.fault] += finding.state is State.CORRUPT
        if finding.state in (State.CORRUPT, State.UNREADABLE):
            yield Unwell(file, finding)


def _found(contents: Contents, place: Place, file: StoredFile) -> Finding | None:
    """Look at a file; None for what holds no chunk, and should not."""
    match file.kind:
        case Kind.CHUNK:
            return contents.check(place, file)
        case Kind.UNREADABLE:
            return Finding(State.UNREADABLE, file.fault)
        case Kind.LOST | Kind.LEFTOVER | Kind.TEMPORARY:
            return Finding(State.CORRUPT, file.fault) if file.fault else None


def _checked(states: Counter[State]) -> int:
    return states.total() - states[State.GONE] - states[State.UNREADABLE]


def _corrupt(faults: Counter[str]) -> dict[str, int]:
    return {fault: count for fault, count in sorted(faults.items()) if count}


def _write_json(unwell: Iterator[Unwell], states: Counter[State], faults: Counter[str]) -> None:
    typer.echo('{"files": ', nl=False)
    _write_rows(
        {
            "file": file.name,
            "key": None if file.key is None else file.key.hex(),
            "state": finding.state.value,
            "fault": finding.fault,
        }
        for file, finding in unwell
    )
    counts = {
        "checked": _checked(states),
        "corrupt": _corrupt(faults),
        "unverified": states[State.UNVERIFIED],
        "unreadable": states[State.UNREADABLE],
        "sealed": states[State.SEALED],
    }
    typer.echo(f",\n {json.dumps(counts)[1:]}")


def _show_findings(unwell: Iterator[Unwell], states: Counter[State], faults: Counter[str]) -> None:
    console = Console()
    table = Table("fault", "file")
    for file, finding in islice(unwell, NAMED_MAX):
        table.add_row(Text(finding.fault), Text(file.name))
    left = sum(1 for _ in unwell)
    if table.row_count:
        console.print(table)
    if left:
        console.out(f"and {left:,} more", highlight=False)
    kinds = ", ".join(f"{fault} {count:,}" for fault, count in _corrupt(faults).items())
    console.out(
        f"{_checked(states):,} chunks checked, {states[State.CORRUPT]:,} corrupt{f' ({kinds})' if kinds else ''}, "
        f"{states[State.UNVERIFIED]:,} without anything to verify them by"
        + (f", {states[State.UNREADABLE]:,} unreadable" if states[State.UNREADABLE] else "")
        + (
            f", {states[State.SEALED]:,} encrypted: undamaged; who wrote them, only a tier with the key can tell"
            if states[State.SEALED]
            else ""
        ),
        highlight=False,
    )
