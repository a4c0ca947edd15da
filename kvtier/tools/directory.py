"""The commands that look at a tier's directory or bucket and change nothing: `verify`, `du` and `ls`."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from typing import Annotated, TypeVar, cast

import msgspec
import typer
from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from kvtier.backend import Contents, Finding, Kind, Place, State, StoredFile, chunk_hash, group_index
from kvtier.config import read_config, tier_options
from kvtier.errors import ConfigError, one_line
from kvtier.settings import shown_age, shown_bytes
from kvtier.tools import statuses
from kvtier.tools.options import JsonOption
from kvtier.tools.outputs import (
    STDOUT,
    bar,
    check_outputs,
    console,
    counted,
    encoded,
    json_array,
    json_output,
    plain_table,
    watched,
    write_json,
)

_PROGRESS_FILES = 256  # Between two changes of the bar's words.
LISTED_MAX = 1_000_000_000_000  # Chunks. No directory holds so many.
NAMED_MAX = 100  # Files listed for people; all of them are counted, and listed as JSON.
SHARE = "a share such as 1% or 0.01, above 0 and at most 100%"
COUNTED = {
    Kind.CHUNK: ("chunks", "bytes"),
    Kind.TEMPORARY: ("temporaries", "temporary_bytes"),
    Kind.LEFTOVER: ("leftovers", "leftover_bytes"),
    Kind.BESIDE: ("beside", "beside_bytes"),
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
            raise typer.Exit(statuses.DATA_WRONG)


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
    tiers = [(tier, index) for index, tier in enumerate(read_config(path).secondary_tiers) if tier.type in _KINDS]
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
                seen += file.kind is not Kind.BESIDE
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


def share_of(option: str, text: str) -> float:
    """Read a share of a whole, with or without a percent sign. Raises `ConfigError`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{option} {text!r}: expected {SHARE}")
    return share


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The room that one namespace takes, or all of them. Bytes are those that the file system has allocated."""

    chunks: int
    bytes: int  # Of the chunks.
    temporaries: int  # Stores under way.
    temporary_bytes: int
    leftovers: int  # Of killed processes, and corrupt files that were kept.
    leftover_bytes: int
    beside_bytes: int  # Folders, the tier's own books, and room in segments that no chunk takes.
    allocated_bytes: int  # All of it.


class NamespaceUsage(Usage, frozen=True, kw_only=True):
    """One namespace."""

    model: str  # Empty where no configuration says it.


class DirectoryUsage(Usage, frozen=True, kw_only=True):
    """The JSON of `kvtier du`."""

    namespaces: dict[str, NamespaceUsage]  # By the names of their folders.
    left_out: int  # Files and folders that could not be read.


def du(directory: DirectoryArgument, namespace: NamespaceOption = None, json_path: JsonOption = None) -> None:
    """Show how many chunks each namespace has, and what the file system has allocated to it.

    Allocated is all of it: chunks, room in segments that no chunk takes, folders and the tier's own books. Leftovers
    are what killed processes had under way and corrupt files that were kept: `kvtier prune --leftovers`.
    """
    check_outputs(json_path, None)
    left_out = LeftOut()
    with opened(directory) as contents:
        places = chosen(contents, namespace)
        counted: dict[str, Counter[str]] = {place.name: Counter() for place in places}
        for place, file in readable(contents, places, "counting", left_out):
            if file.kind in COUNTED:
                files, size = COUNTED[file.kind]
                counted[place.name].update({files: 1, size: file.allocated_bytes})
    rows = {place.name: NamespaceUsage(model=place.model, **_usage(counted[place.name])) for place in places}
    total = _usage(sum(counted.values(), Counter[str]()))
    found = DirectoryUsage(namespaces=rows, left_out=left_out.count, **total)
    screen = write_json(json_path, found)
    table = plain_table(
        "namespace", "model", ">chunks", ">size", ">allocated", ">temporaries", ">leftovers", ">of which size"
    )
    for name, row in rows.items():
        table.add_row(Text(name), Text(row.model), *_cells(row))
    if len(rows) != 1:
        table.add_row("total", "", *_cells(found))
    screen.print(table)
    left_out.say()


def _usage(counts: Counter[str]) -> dict[str, int]:
    sizes = [size for _, size in COUNTED.values()]
    names = [name for names in COUNTED.values() for name in names if name != "beside"]
    return {**{name: counts[name] for name in names}, "allocated_bytes": sum(counts[size] for size in sizes)}


def _cells(row: Usage) -> list[str]:
    return [
        f"{row.chunks:,}",
        shown_bytes(row.bytes),
        shown_bytes(row.allocated_bytes),
        f"{row.temporaries:,}",
        f"{row.leftovers:,}",
        shown_bytes(row.leftover_bytes),
    ]


class ListedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of the list that `kvtier ls` writes as JSON."""

    hash: str | None  # In hexadecimal; null where the chunk does not say, or lies in the wrong place.
    group: int | None  # Of the KV cache; null likewise.
    bytes: int  # On the disk.
    age_s: float  # Since the last use, or the store.
    namespace: str
    file: str  # Relative to the directory; in a segment with its slot.
    fault: str  # Why no load takes it, as far as a look at its name and kind tells; empty for the others.


def ls(
    directory: DirectoryArgument,
    namespace: NamespaceOption = None,
    limit: Annotated[int | None, typer.Option(min=1, max=LISTED_MAX, help="Show at most this many.")] = None,
    json_path: JsonOption = None,
) -> None:
    """List the chunks, as they are found: hash, KV-cache group, size on the disk, time since the last use, namespace.

    A link in a chunk's place and a chunk in the wrong place have their fault at the end of the line. `kvtier verify`
    calls them corrupt. A tier sets a file's time to the chunk's last use at most once an hour. A chunk in a segment or
    a bucket has only the time of its store. Nothing is kept in memory, so that a million chunks can be listed.
    """
    check_outputs(json_path, None)
    now_s, left_out = time.time(), LeftOut()
    with opened(directory) as contents, json_output(json_path) as file:
        found = readable(contents, chosen(contents, namespace), "listing", left_out)
        rows: Iterator[ListedChunk] = islice(
            (_listed(place, each, now_s) for place, each in found if each.kind is Kind.CHUNK), limit
        )
        if json_path != STDOUT:
            rows = _told(rows)
        if file is None:
            for _ in rows:
                pass
        else:
            json_array(file, rows)
            file.write(b"\n")
    left_out.say()


def _listed(place: Place, file: StoredFile, now_s: float) -> ListedChunk:
    return ListedChunk(
        hash=None if file.key is None else chunk_hash(file.key).hex(),
        group=None if file.key is None else group_index(file.key),
        bytes=file.allocated_bytes,
        age_s=round(max(0.0, now_s - file.used_at_ns / 1e9), 3),
        namespace=place.name,
        file=file.name,
        fault=file.fault,
    )


def _told(rows: Iterable[ListedChunk]) -> Iterator[ListedChunk]:
    """Write each as a line for people, too. A line is never broken: it is to be searched."""
    for row in rows:
        name, group = (row.file, "-") if row.hash is None else (row.hash, row.group)
        size, age = shown_bytes(row.bytes), shown_age(row.age_s)
        line = f"{name}  {group:>3}  {size:>10}  {age:>8}  {row.namespace}"
        typer.echo(one_line(f"{line}  {row.fault}" if row.fault else line))
        yield row


class Unwell(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is not what was stored, or that there is no telling of."""

    file: str  # Relative to the directory; in a segment with its slot.
    key: str | None  # In hexadecimal.
    state: State  # `corrupt` or `unreadable`.
    fault: str  # The kind of corruption, or the system's reason.


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of `kvtier verify`."""

    checked: int
    corrupt: dict[str, int]  # By kind.
    unverified: int  # Nothing is stored with them that says what they should be.
    unreadable: int
    sealed: int  # Encrypted, and as they were written.
    skipped: int  # Not looked at, by `--sample`.
    read_bytes: int
    seconds: float


class VerifyReport(Verified, frozen=True, kw_only=True):
    """The JSON of `kvtier verify`."""

    files: list[Unwell]  # All that is corrupt or unreadable.


class Tally:
    """The counts of one `verify`, as it goes."""

    def __init__(self, share: float, dice: random.Random) -> None:
        self.states, self.faults = Counter[State](), Counter[str]()
        self.skipped = self.read_bytes = 0
        self._begun = time.monotonic()
        self.share, self._dice = share, dice

    def sampled(self, files: Iterable[tuple[Place, StoredFile]]) -> Iterator[tuple[Place, StoredFile]]:
        """Yield what is to be looked at: each chunk by chance, and all that is wrong at the first glance."""
        for place, file in files:
            if file.kind is Kind.CHUNK and not file.fault and self._dice.random() >= self.share:
                self.skipped += 1
            else:
                yield place, file

    def count(self, file: StoredFile, finding: Finding) -> None:
        self.states[finding.state] += 1
        self.faults[finding.fault] += finding.state is State.CORRUPT
        self.read_bytes += file.size_bytes if file.kind is Kind.CHUNK and not file.fault else 0

    def summed(self) -> Verified:
        return Verified(
            checked=self.states.total() - self.states[State.GONE] - self.states[State.UNREADABLE],
            corrupt={fault: count for fault, count in sorted(self.faults.items()) if count},
            unverified=self.states[State.UNVERIFIED],
            unreadable=self.states[State.UNREADABLE],
            sealed=self.states[State.SEALED],
            skipped=self.skipped,
            read_bytes=self.read_bytes,
            seconds=round(time.monotonic() - self._begun, 3),
        )


def verify(
    directory: DirectoryArgument,
    namespace: NamespaceOption = None,
    sample: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Only this share of the chunks, each by chance: 1%.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Read every chunk and compare it with the checksum, key and length that were stored with it.

    Exit status 1 if any is corrupt or cannot be read. Files without a footer, which vLLM writes, cannot be verified
    and are counted. Of encrypted chunks damage is found; who wrote them, only a tier with the key can tell. Nothing is
    changed: `kvtier prune --corrupt` removes what is corrupt.
    """
    check_outputs(json_path, None)
    tally = Tally(1.0 if sample is None else share_of("--sample", sample), random.Random())
    shown: list[Unwell] = []
    with opened(directory) as contents, json_output(json_path) as file:
        unwell = _noted(_unwell(contents, chosen(contents, namespace), tally), shown)
        if file is None:
            for _ in unwell:
                pass
        else:
            file.write(b'{"files": ')
            json_array(file, unwell)
            file.write(b",\n " + encoded(tally.summed())[1:] + b"\n")
    found = tally.summed()
    if json_path != STDOUT:
        _show_findings(shown, found)
    if found.corrupt or found.unreadable:
        raise typer.Exit(statuses.DATA_WRONG)


def _unwell(contents: Contents, places: Sequence[Place], tally: Tally) -> Iterator[Unwell]:
    """Look at everything that is to be looked at: count it, and yield what is not well."""
    total_bytes = _to_read(contents, places, tally) if watched() else None
    with bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("verifying", total=total_bytes)
        files = tally.sampled(_files(contents, places))
        for file, finding in side_by_side(contents, files, lambda place, file: _found(contents, place, file)):
            if finding is None:
                continue
            tally.count(file, finding)
            progress.update(task, completed=tally.read_bytes)
            if finding.state in (State.CORRUPT, State.UNREADABLE):
                key = None if file.key is None else file.key.hex()
                yield Unwell(file=file.name, key=key, state=finding.state, fault=finding.fault)


def _to_read(contents: Contents, places: Sequence[Place], tally: Tally) -> int:
    """Return how many bytes are to be read, more or less: what a bar is drawn by."""
    chunks = (file for _, file in walked(contents, places, "counting") if file.kind is Kind.CHUNK and not file.fault)
    return int(sum(file.size_bytes for file in chunks) * tally.share)


def _files(contents: Contents, places: Sequence[Place]) -> Iterator[tuple[Place, StoredFile]]:
    for place in places:
        for part in contents.parts(place):
            for file in contents.files(place, part):
                yield place, file


def _found(contents: Contents, place: Place, file: StoredFile) -> Finding | None:
    """Look at a file; None for what holds no chunk, and should not."""
    match file.kind:
        case Kind.CHUNK:
            return Finding(State.CORRUPT, file.fault) if file.fault else contents.check(place, file)
        case Kind.UNREADABLE:
            return Finding(State.UNREADABLE, file.fault)
        case Kind.LOST | Kind.LEFTOVER | Kind.TEMPORARY:
            return Finding(State.CORRUPT, file.fault) if file.fault else None
        case Kind.BESIDE:
            return None


def _noted(unwell: Iterator[Unwell], shown: list[Unwell]) -> Iterator[Unwell]:
    """Yield all of them, and note the first for people."""
    for each in unwell:
        if len(shown) < NAMED_MAX:
            shown.append(each)
        yield each


def _show_findings(shown: list[Unwell], found: Verified) -> None:
    screen = console()
    table = plain_table("fault", "file")
    for each in shown:
        table.add_row(Text(each.fault), Text(each.file))
    if shown:
        screen.print(table)
    corrupt = sum(found.corrupt.values())
    if left := corrupt + found.unreadable - len(shown):
        screen.out(f"and {left:,} more", highlight=False)
    kinds = ", ".join(f"{fault} {count:,}" for fault, count in found.corrupt.items())
    seen = f"{found.checked:,} of " if found.skipped else ""
    parts = [
        f"{seen}{counted(found.checked + found.skipped, 'chunk')} checked",
        f"{corrupt:,} corrupt{f' ({kinds})' if kinds else ''}",
        f"{found.unverified:,} without anything to verify them by",
    ]
    if found.unreadable:
        parts.append(f"{found.unreadable:,} unreadable")
    if found.sealed:
        parts.append(f"{found.sealed:,} encrypted: undamaged; who wrote them, only a tier with the key can tell")
    screen.out(", ".join(parts), highlight=False)
    rate = round(found.read_bytes / found.seconds) if found.seconds else found.read_bytes
    screen.out(
        f"{shown_bytes(found.read_bytes)} read in {found.seconds:,.1f} s, {shown_bytes(rate)}/s", highlight=False
    )
