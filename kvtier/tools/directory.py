"""The commands that read a tier's directory and change nothing: `verify`, `du` and `ls`."""

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib import import_module
from itertools import islice
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import TimeRemainingColumn
from rich.text import Text

from kvtier.backend import Directory, Finding, Kind, Place, State, StoredFile, chunk_hash, group_index
from kvtier.config import read_config, tier_options
from kvtier.errors import ConfigError, one_line
from kvtier.settings import shown_age, shown_bytes
from kvtier.tools import outputs, statuses
from kvtier.tools.options import JsonOption, parse_share, parsed

LISTED_MAX = 1_000_000_000_000  # Chunks; no directory holds more.
NAMED_MAX = 100  # Corrupt files named on the screen; the JSON names all of them.
SHARE = "a share such as 1% or 0.01, above 0 and at most 100%"
COUNTED = {
    Kind.CHUNK: ("chunks", "bytes"),
    Kind.TEMPORARY: ("temporaries", "temporary_bytes"),
    Kind.LEFTOVER: ("leftovers", "leftover_bytes"),
    Kind.BESIDE: ("beside", "beside_bytes"),
}
"""Fields of `du` with the number of files of each kind, and their bytes."""

fs: Any = import_module("kvtier_backends.fs.directory")  # By name: tools know no tier.

DirectoryArgument = Annotated[
    str,
    typer.Argument(metavar="DIR", help="The root of an fs tier, or CONFIG; CONFIG#TIER names one of several fs tiers."),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="Only this namespace: the name of a folder, as du shows it.")
]


class LeftOut:
    """The files that a command could not read or remove. The command goes on, and reports them at its end."""

    def __init__(self) -> None:
        self.count = 0
        self._first = ""

    def add(self, name: str, why: str) -> None:
        self._first = self._first or f"{name}: {why}"
        self.count += 1

    def report(self) -> None:
        """End the command with one line on stderr and status 1 if any file was left out."""
        if self.count:
            typer.echo(f"kvtier: {one_line(self._first)}; {self.count:,} left out", err=True)
            raise typer.Exit(statuses.DATA_WRONG)


def opened(where: str) -> "closing[Directory]":
    """Open the directory of an fs tier, by its path or by a configuration. Raises `ConfigError`."""
    return closing(fs.FilesDirectory.open(_root(where)))


def _root(where: str) -> str:
    path, _, name = where.partition("#")
    if not path.endswith((".toml", ".json")) or os.path.isdir(where):
        return where
    tiers = [(tier, index) for index, tier in enumerate(read_config(path).secondary_tiers) if tier.type == "fs"]
    named = [(tier, index) for tier, index in tiers if name in ("", tier.name)]
    if len(named) != 1:
        names = ", ".join(f"{path}#{tier.name}" for tier, _ in tiers) or "none"
        raise ConfigError(f"{where}: one tier of type fs accepted; the configuration has: {names}")
    tier, index = named[0]
    options: Any = tier_options(tier, f"{path}: secondary_tiers[{index}]")
    return str(options.root)


def chosen(directory: Directory, namespace: str | None) -> list[Place]:
    """Return all namespaces, or the one of this name. Raises `ConfigError` if there is none of this name."""
    places = directory.places()
    if namespace is None:
        return places
    found = [place for place in places if place.name == namespace]
    if not found:
        names = ", ".join(place.name for place in places) or "none"
        raise ConfigError(f"--namespace {namespace!r}: not in the directory, which holds: {names}")
    return found


def walked(directory: Directory, places: Sequence[Place], title: str) -> Iterator[tuple[Place, StoredFile]]:
    """Yield all files of these namespaces; show a bar on a terminal."""
    with outputs.bar(TimeRemainingColumn()) as progress:
        task = progress.add_task(title, total=None)
        parts = [(place, part) for place in places for part in directory.parts(place)]
        progress.update(task, total=len(parts))
        seen = 0
        for place, part in parts:
            for file in directory.files(place, part):
                yield place, file
                seen += file.kind is not Kind.BESIDE
                if seen % 256 == 0:  # Between two updates of the bar.
                    progress.update(task, description=f"{title} {seen:,}")
            progress.advance(task)


def readable(
    directory: Directory, places: Sequence[Place], title: str, left_out: LeftOut
) -> Iterator[tuple[Place, StoredFile]]:
    """Yield the files that `walked` yields, except unreadable ones, which are added to `left_out`."""
    for place, file in walked(directory, places, title):
        if file.kind is Kind.UNREADABLE:
            left_out.add(file.name, file.fault)
        else:
            yield place, file


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The space used by one namespace, or by all. Bytes are those that the file system has allocated."""

    chunks: int  # Chunks.
    bytes: int  # Bytes of the chunks.
    temporaries: int  # Files of stores in progress.
    temporary_bytes: int  # Their bytes.
    leftovers: int  # Unfinished stores of killed processes, and damaged segments.
    leftover_bytes: int  # Their bytes.
    beside_bytes: int  # Bytes of folders, the tier's own files, and free space in segments.
    allocated_bytes: int  # The sum of all bytes: that of `du -s DIR`, without `DIR` itself.


class NamespaceUsage(Usage, frozen=True, kw_only=True):
    model: str  # Name of the model; empty if the namespace has no `config.json`.


class DirectoryUsage(Usage, frozen=True, kw_only=True):
    """The JSON of `kvtier du`."""

    namespaces: dict[str, NamespaceUsage]  # The same of each namespace, by the name of its folder.
    left_out: int  # Files and folders that could not be read.


def du(directory: DirectoryArgument, namespace: NamespaceOption = None, json_path: JsonOption = None) -> None:
    """Show the number of chunks of each namespace, and the space that the file system has allocated to it.

    Allocated space has chunks, free space in segments, folders and the tier's own files. Leftovers are unfinished
    stores of killed processes, and segments whose first page is damaged. `kvtier prune --leftovers` removes them.
    """
    outputs.check_outputs(json_path)
    left_out = LeftOut()
    with opened(directory) as tier:
        places = chosen(tier, namespace)
        counted: dict[str, Counter[str]] = {place.name: Counter() for place in places}
        for place, file in readable(tier, places, "counting", left_out):
            if file.kind in COUNTED:
                files, size = COUNTED[file.kind]
                counted[place.name].update({files: 1, size: file.allocated_bytes})
    rows = {place.name: NamespaceUsage(model=place.model, **_usage(counted[place.name])) for place in places}
    found = DirectoryUsage(namespaces=rows, left_out=left_out.count, **_usage(sum(counted.values(), Counter[str]())))
    screen = outputs.write_json(json_path, found)
    table = outputs.plain_table(
        "namespace", "model", ">chunks", ">size", ">allocated", ">temporaries", ">leftovers", ">of which size"
    )
    for name, row in rows.items():
        table.add_row(Text(name), Text(row.model), *_cells(row))
    if len(rows) != 1:
        table.add_row("total", "", *_cells(found))
    screen.print(table)
    left_out.report()


def _usage(counts: Counter[str]) -> dict[str, int]:
    sizes = [size for _, size in COUNTED.values()]
    names = [name for names in COUNTED.values() for name in names if name != "beside"]
    return {**{name: counts[name] for name in names}, "allocated_bytes": sum(counts[size] for size in sizes)}


def _cells(row: Usage) -> list[str]:
    sizes = map(shown_bytes, (row.bytes, row.allocated_bytes))
    return [f"{row.chunks:,}", *sizes, f"{row.temporaries:,}", f"{row.leftovers:,}", shown_bytes(row.leftover_bytes)]


class ListedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of the list that `kvtier ls` writes as JSON."""

    hash: str | None  # Chunk's hash in hexadecimal; null if its footer is damaged or its place is wrong.
    group: int | None  # KV-cache group; null if `hash` is.
    bytes: int  # Bytes on the disk.
    age_s: float  # Seconds since the last use, to the hour; in a segment, since the store.
    namespace: str  # Name of the folder.
    file: str  # Relative to the directory; in a segment with its slot.
    fault: str  # Why no load takes it, without reading it: `foreign`, `misplaced` or `namespace`; or empty.


def ls(
    directory: DirectoryArgument,
    namespace: NamespaceOption = None,
    limit: Annotated[int | None, typer.Option(min=1, max=LISTED_MAX, help="Show at most this many.")] = None,
    json_path: JsonOption = None,
) -> None:
    """List the chunks: hash, KV-cache group, size on the disk, time since the last use, namespace.

    A link in a chunk's place and a chunk in the wrong place have their fault at the end of the line. `kvtier verify`
    calls them corrupt. A tier sets a file's time to the chunk's last use at most once an hour. A chunk in a segment
    has only the time of its store.
    """
    outputs.check_outputs(json_path)
    now_s, left_out = time.time(), LeftOut()
    with opened(directory) as tier, outputs.json_output(json_path) as file:
        found = readable(tier, chosen(tier, namespace), "listing", left_out)
        rows: Iterator[ListedChunk] = islice(
            (_listed(place, each, now_s) for place, each in found if each.kind is Kind.CHUNK), limit
        )
        if json_path != outputs.STDOUT:
            rows = outputs.printed(rows, _line)
        outputs.write_rows(file, rows)
    left_out.report()


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


def _line(row: ListedChunk) -> str:
    name, group = (row.file, "-") if row.hash is None else (row.hash, row.group)
    line = f"{name}  {group:>3}  {shown_bytes(row.bytes):>10}  {shown_age(row.age_s):>8}  {row.namespace}"
    return f"{line}  {row.fault}" if row.fault else line


class BadFile(msgspec.Struct, frozen=True, kw_only=True):
    file: str  # Relative to the directory; in a segment with its slot.
    key: str | None  # The chunk's key in hexadecimal; null if unknown.
    state: State  # `corrupt` or `unreadable`.
    fault: str  # The kind of corruption, or the system's reason.


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of `kvtier verify`."""

    checked: int  # Chunks compared with their footer.
    corrupt: dict[str, int]  # Corrupt chunks by kind.
    unverified: int  # Files without a footer, or of a later format.
    unreadable: int  # Files and folders that could not be read.
    sealed: int  # Chunks encrypted and undamaged: only the key tells who wrote them.
    skipped: int  # Chunks left out by `--sample`.
    read_bytes: int  # Bytes read.
    seconds: float  # Duration.


class VerifyReport(Verified, frozen=True, kw_only=True):
    """The JSON of `kvtier verify`."""

    files: list[BadFile]  # Every corrupt or unreadable file.


class Verification:
    """One run of `verify`: its findings and their counts. The first bad files are kept for the screen."""

    def __init__(self, directory: Directory, share: float, dice: random.Random) -> None:
        self.bad: list[BadFile] = []
        self._directory, self._share, self._dice = directory, share, dice
        self._states, self._faults = Counter[State](), Counter[str]()
        self._skipped = self._read_bytes = 0
        self._begun = time.monotonic()

    def run(self, places: Sequence[Place]) -> Iterator[BadFile]:
        for place, file in walked(self._directory, places, "verifying"):
            if (finding := self._check(place, file)) is None:
                continue
            self._states[finding.state] += 1
            self._faults[finding.fault] += finding.state is State.CORRUPT
            if finding.state in (State.CORRUPT, State.UNREADABLE):
                key = None if file.key is None else file.key.hex()
                bad = BadFile(file=file.name, key=key, state=finding.state, fault=finding.fault)
                if len(self.bad) < NAMED_MAX:
                    self.bad.append(bad)
                yield bad

    def _check(self, place: Place, file: StoredFile) -> Finding | None:
        """Check one file. Return None for a chunk that is not in the sample, and for a file that holds no chunk."""
        match file.kind:
            case Kind.CHUNK if not file.fault:
                if self._dice.random() >= self._share:
                    self._skipped += 1
                    return None
                self._read_bytes += file.size_bytes
                return self._directory.check(place, file)
            case Kind.UNREADABLE:
                return Finding(State.UNREADABLE, file.fault)
            case Kind.CHUNK | Kind.LOST | Kind.LEFTOVER | Kind.TEMPORARY:
                return Finding(State.CORRUPT, file.fault) if file.fault else None
            case Kind.BESIDE:
                return None

    def summed(self) -> Verified:
        return Verified(
            checked=self._states.total() - self._states[State.GONE] - self._states[State.UNREADABLE],
            corrupt={fault: count for fault, count in sorted(self._faults.items()) if count},
            unverified=self._states[State.UNVERIFIED],
            unreadable=self._states[State.UNREADABLE],
            sealed=self._states[State.SEALED],
            skipped=self._skipped,
            read_bytes=self._read_bytes,
            seconds=round(time.monotonic() - self._begun, 3),
        )


def verify(
    directory: DirectoryArgument,
    namespace: NamespaceOption = None,
    sample: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Only this share of the chunks, at random: 1%.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Read every chunk and compare it with the checksum, key and length that were stored with it.

    Exit status 1 if any is corrupt or cannot be read. Files without a footer, which vLLM writes, cannot be verified
    and are counted. Damage to encrypted chunks is found; only a tier with the key can tell who wrote them. Nothing is
    changed: `kvtier prune --corrupt` removes corrupt chunks.
    """
    outputs.check_outputs(json_path)
    share = 1.0 if sample is None else parsed("--sample", sample, parse_share, SHARE)
    with opened(directory) as tier, outputs.json_output(json_path) as file:
        verification = Verification(tier, share, random.Random())
        outputs.write_rows(file, verification.run(chosen(tier, namespace)), "files", verification.summed)
    found = verification.summed()
    if json_path != outputs.STDOUT:
        _print_findings(verification.bad, found)
    if found.corrupt or found.unreadable:
        raise typer.Exit(statuses.DATA_WRONG)


def _print_findings(bad: list[BadFile], found: Verified) -> None:
    screen = outputs.console()
    table = outputs.plain_table("fault", "file")
    for each in bad:
        table.add_row(Text(each.fault), Text(each.file))
    if bad:
        screen.print(table)
    corrupt = sum(found.corrupt.values())
    if left := corrupt + found.unreadable - len(bad):
        screen.out(f"and {left:,} more", highlight=False)
    kinds = ", ".join(f"{fault} {count:,}" for fault, count in found.corrupt.items())
    seen = f"{found.checked:,} of " if found.skipped else ""
    parts = [
        f"{seen}{outputs.counted(found.checked + found.skipped, 'chunk')} checked",
        f"{corrupt:,} corrupt{f' ({kinds})' if kinds else ''}",
        f"{found.unverified:,} without anything to verify them by",
    ]
    if found.unreadable:
        parts.append(f"{found.unreadable:,} unreadable")
    if found.sealed:
        parts.append(f"{found.sealed:,} encrypted: undamaged; only a tier with the key can tell who wrote them")
    screen.out(", ".join(parts), highlight=False)
    rate = round(found.read_bytes / found.seconds) if found.seconds else found.read_bytes
    screen.out(
        f"{shown_bytes(found.read_bytes)} read in {found.seconds:,.1f} s, {shown_bytes(rate)}/s", highlight=False
    )
