"""`kvtier prune`: remove chunks by age, by size, by namespace, or because they are corrupt."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import typer

from kvtier.backend import Contents, Kind, Place, State, StoredFile
from kvtier.errors import ConfigError, one_line
from kvtier.settings import AGE_S_MAX, SIZE_BYTES_MAX, parse_duration, parse_size, shown_age, shown_bytes
from kvtier.tools.directory import (
    DirectoryArgument,
    LeftOut,
    NamespaceOption,
    chosen,
    opened,
    readable,
    share_of,
    side_by_side,
)
from kvtier.tools.options import JsonOption
from kvtier.tools.outputs import STDOUT, check_outputs, counted, encoded, json_array, json_output

T = TypeVar("T", int, float)


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """One file that goes, as `--list` shows it."""

    file: str  # Relative to the directory; in a segment with its slot.
    bytes: int
    age_s: float  # Since the last use, or the store.
    why: str  # `unused`, `corrupt`, `leftover` or `namespace`.


class PruneReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The JSON of `kvtier prune`."""

    listed: list[Removal] | msgspec.UnsetType = msgspec.field(name="list", default=msgspec.UNSET)  # By `--list` alone.
    files: int
    bytes: int
    namespaces: int  # That were empty then, and went with all that they leave.
    removed: bool  # False: all of it is only what would go.
    left_out: int  # Could not be read, or not be removed.


class Rule(NamedTuple):
    """The chunks and leftovers that go."""

    unused_since_ns: int  # What was not used since then.
    corrupt: bool
    leftovers: bool
    everything: bool

    def dooms(self, contents: Contents, place: Place, file: StoredFile) -> str:
        """Say why this file goes; empty if it stays. Raises `OSError` if that cannot be told, nor by reading it."""
        match file.kind:
            case Kind.TEMPORARY | Kind.UNREADABLE | Kind.BESIDE:
                return ""
            case Kind.LEFTOVER:
                return self._why(leftover=self.leftovers, corrupt=self.corrupt and bool(file.fault))
            case Kind.LOST:
                return self._why(corrupt=self.corrupt)
            case Kind.CHUNK:
                if why := self._why(unused=file.used_at_ns < self.unused_since_ns):
                    return why
                return self._why(corrupt=self.corrupt and _is_corrupt(contents, place, file))

    def _why(self, **reasons: bool) -> str:
        return next((why for why, holds in reasons.items() if holds), "namespace" if self.everything else "")


def _is_corrupt(contents: Contents, place: Place, file: StoredFile) -> bool:
    if file.fault:
        return True
    state, fault = contents.check(place, file)
    if state is State.UNREADABLE:
        raise OSError(None, fault)
    return state is State.CORRUPT


def prune(
    directory: DirectoryArgument,
    namespace: NamespaceOption = None,
    older_than: Annotated[str | None, typer.Option(help="Chunks that were not used for so long: 90min, 7d.")] = None,
    to_size: Annotated[
        str | None,
        typer.Option(help="The chunks longest unused, until the others take no more than this: 100GiB, or 50% of now."),
    ] = None,
    corrupt: Annotated[bool, typer.Option("--corrupt", help="Chunks that are not what was stored; reads all.")] = False,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="What killed processes had under way, and corrupt files that were kept.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Name each file that goes, and why.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Without this, only say what would go.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Remove what any of the options names, of all namespaces or of one; a namespace alone goes as a whole.

    A namespace that is empty afterwards goes with its folders and the tier's own files, unless an engine uses it. An
    engine may be using the directory. A chunk that it looks for and does not find is a miss, and chunks that it stores
    meanwhile stay. In a bucket, a chunk that is stored anew at the moment of its removal goes, too. A tier sets a
    file's time to its last use at most once an hour. A chunk in a segment or a bucket has only the time of its store.
    """
    age_s = _parsed("--older-than", older_than, parse_duration, AGE_S_MAX, "a time such as 90min or 7d")
    limit = _limit(to_size)
    everything = age_s is None and limit is None and not (corrupt or leftovers)
    if everything and namespace is None:
        raise ConfigError(
            "nothing says what to remove; expected --older-than, --to-size, --corrupt, --leftovers or --namespace"
        )
    check_outputs(json_path, None)
    since_ns = 0 if age_s is None else time.time_ns() - int(age_s * 1e9)
    with opened(directory) as contents, json_output(json_path) as file:
        places = chosen(contents, namespace)
        if limit is not None:
            since_ns = max(since_ns, _since(contents, places, limit))
        sweep = Sweep(contents, Rule(since_ns, corrupt, leftovers, everything), remove=yes)
        rows = sweep.run(places)
        if show and json_path != STDOUT:
            rows = _told(rows)
        if file is None or not show:
            for _ in rows:
                pass
        else:
            file.write(b'{"list": ')
            json_array(file, rows)
            file.write(b",\n ")
        if file is not None:
            file.write(encoded(sweep.report())[1 if show else 0 :] + b"\n")
    if json_path != STDOUT:
        typer.echo(sweep.told())
    sweep.left_out.say()


def _limit(text: str | None) -> int | float | None:
    """Read what the chunks that stay may take: bytes, or as a float a share of what they take now."""
    if text is not None and text.endswith("%"):
        return share_of("--to-size", text)
    return _parsed("--to-size", text, parse_size, SIZE_BYTES_MAX, "a size such as 100GiB, or a share such as 50%")


def _parsed(option: str, text: str | None, parse: Callable[[str], T], most: float, accepted: str) -> T | None:
    if text is None:
        return None
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: expected {accepted}") from error
    if value > most:
        raise ConfigError(f"{option} {text!r}: expected {accepted}, at most {most:,.0f} of its units")
    return value


def _told(rows: Iterator[Removal]) -> Iterator[Removal]:
    """Write each as a line for people, too."""
    for row in rows:
        line = f"{shown_bytes(row.bytes):>10}  {shown_age(row.age_s):>8}  {row.why:<9}  {row.file}"
        typer.echo(one_line(line))
        yield row


def _since(contents: Contents, places: Sequence[Place], limit: float) -> int:
    """Return the time such that the chunks used since then take no more than this."""
    used_at_ns, taken_bytes = array("q"), array("q")  # 16 bytes a chunk, of a million or more.
    for _, file in readable(contents, places, "counting", LeftOut()):  # They are noted when the others are removed.
        if file.kind is Kind.CHUNK:
            used_at_ns.append(file.used_at_ns)
            taken_bytes.append(file.allocated_bytes)
    left_bytes = limit if isinstance(limit, int) else int(limit * sum(taken_bytes))
    for index in sorted(range(len(used_at_ns)), key=used_at_ns.__getitem__, reverse=True):
        left_bytes -= taken_bytes[index]
        if left_bytes < 0:
            return used_at_ns[index] + 1
    return 0


class Sweep:
    """One sweep over the namespaces, and what came of it. `remove`: else the doomed are only counted."""

    def __init__(self, contents: Contents, rule: Rule, *, remove: bool) -> None:
        self.left_out = LeftOut()
        self._contents, self._rule, self._remove = contents, rule, remove
        self._files = self._freed_bytes = self._cleared = 0

    def run(self, places: Sequence[Place]) -> Iterator[Removal]:
        """Deal with all files, one namespace after the other, and yield those that go."""
        for place in places:
            files, left_out = self._files, self.left_out.count
            yield from self._swept(place)
            touched = self._files > files or self._rule.everything
            if self._remove and touched and self.left_out.count == left_out:
                self._cleared += self._contents.clear(place)

    def _swept(self, place: Place) -> Iterator[Removal]:
        now_s = time.time()
        found = readable(self._contents, [place], "removing" if self._remove else "looking", self.left_out)
        for file, dealt in side_by_side(self._contents, found, self._deal):
            if isinstance(dealt, OSError):
                self.left_out.add(file.name, dealt.strerror or str(dealt))
            elif dealt is not None:
                why, freed_bytes = dealt
                self._files += 1
                self._freed_bytes += freed_bytes
                age_s = round(max(0.0, now_s - file.used_at_ns / 1e9), 3)
                yield Removal(file=file.name, bytes=freed_bytes, age_s=age_s, why=why)

    def _deal(self, place: Place, file: StoredFile) -> tuple[str, int] | OSError | None:
        """Return why a file goes, and the bytes that this frees; None if it stays."""
        try:
            why = self._rule.dooms(self._contents, place, file)
            freed_bytes = self._contents.remove(file) if why and self._remove else file.allocated_bytes
        except OSError as error:
            return error
        return (why, freed_bytes) if why and freed_bytes is not None else None

    def report(self) -> PruneReport:
        return PruneReport(
            files=self._files,
            bytes=self._freed_bytes,
            namespaces=self._cleared,
            removed=self._remove,
            left_out=self.left_out.count,
        )

    def told(self) -> str:
        """Say it in a line."""
        what = f"{counted(self._files, 'file')} of {shown_bytes(self._freed_bytes)}"
        if not self._remove:
            return f"{what} would be removed; add --yes to remove them"
        return f"{what} removed" + (f", and {counted(self._cleared, 'empty namespace')}" if self._cleared else "")
