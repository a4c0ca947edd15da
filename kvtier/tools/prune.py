"""`kvtier prune`: remove chunks by age, by size, by namespace, or because they are corrupt."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import typer

from kvtier.backend import Directory, Kind, Place, State, StoredFile
from kvtier.errors import ConfigError
from kvtier.settings import AGE_S_MAX, SIZE_BYTES_MAX, parse_duration, parse_size, shown_age, shown_bytes
from kvtier.tools.directory import SHARE, DirectoryArgument, LeftOut, NamespaceOption, chosen, opened, readable
from kvtier.tools.options import JsonOption, parse_share, parsed
from kvtier.tools.outputs import STDOUT, check_outputs, counted, encoded, json_output, printed, write_rows

T = TypeVar("T", int, float)


class PrunedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file to be removed, as `--list` shows it."""

    file: str  # Relative to the directory; in a segment with its slot.
    bytes: int  # Bytes that it takes.
    age_s: float  # Seconds since the last use, or the store.
    why: str  # `unused`, `corrupt`, `leftover` or `namespace`.


class PruneReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The JSON of `kvtier prune`."""

    listed: list[PrunedFile] | msgspec.UnsetType = msgspec.field(name="list", default=msgspec.UNSET)  # With `--list`.
    files: int  # Files, or slots of segments.
    bytes: int  # Bytes that they take; with `--yes`, bytes that the file system got back.
    namespaces: int  # Namespaces that are empty afterwards, and removed with their folders.
    removed: bool  # False without `--yes`.
    left_out: int  # Files that could not be read or removed.


class Rule(NamedTuple):
    unused_since_ns: int  # Chunks not used since then go.
    corrupt: bool
    leftovers: bool
    everything: bool

    def dooms(self, directory: Directory, place: Place, file: StoredFile) -> str:
        """Return the reason to remove a file; empty to keep it. Raises `OSError` if a chunk cannot be checked."""
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
                return self._why(corrupt=self.corrupt and _is_corrupt(directory, place, file))

    def _why(self, **reasons: bool) -> str:
        return next((why for why, holds in reasons.items() if holds), "namespace" if self.everything else "")


def _is_corrupt(directory: Directory, place: Place, file: StoredFile) -> bool:
    if file.fault:
        return True
    state, fault = directory.check(place, file)
    if state is State.UNREADABLE:
        raise OSError(None, fault)
    return state is State.CORRUPT


def prune(
    directory: DirectoryArgument,
    namespace: NamespaceOption = None,
    older_than: Annotated[str | None, typer.Option(help="Chunks not used for this time: 90min, 7d.")] = None,
    to_size: Annotated[
        str | None, typer.Option(help="The chunks longest unused, until the rest fits this: 100GiB, or 50% of now.")
    ] = None,
    corrupt: Annotated[bool, typer.Option("--corrupt", help="Corrupt chunks; reads every chunk.")] = False,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Unfinished stores of killed processes, and damaged segments.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Name each file to be removed, and why.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them. Without this option, nothing is removed.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Remove the chunks that any of the options selects. `--namespace` alone removes a whole namespace.

    A namespace that is empty afterwards is removed with its folders and the tier's own files, unless an engine uses it.
    An engine may be using the directory. It misses the removed chunks, and chunks that it stores meanwhile stay. A tier
    sets a file's time to its last use at most once an hour. A chunk in a segment has only the time of its store.
    """
    age_s = _parsed("--older-than", older_than, parse_duration, AGE_S_MAX, "a time such as 90min or 7d")
    limit = _limit(to_size)
    everything = age_s is None and limit is None and not (corrupt or leftovers)
    if everything and namespace is None:
        raise ConfigError(
            "nothing says what to remove; expected --older-than, --to-size, --corrupt, --leftovers or --namespace"
        )
    check_outputs(json_path)
    since_ns = 0 if age_s is None else time.time_ns() - int(age_s * 1e9)
    with opened(directory) as tier, json_output(json_path) as file:
        places = chosen(tier, namespace)
        if limit is not None:
            since_ns = max(since_ns, _since(tier, places, limit))
        sweep = PruneRun(tier, Rule(since_ns, corrupt, leftovers, everything), remove=yes)
        rows = sweep.run(places)
        if show and json_path != STDOUT:
            rows = printed(rows, _line)
        write_rows(file if show else None, rows, "list", sweep.report)
        if file is not None and not show:
            file.write(encoded(sweep.report()) + b"\n")
    if json_path != STDOUT:
        typer.echo(sweep.summary())
    sweep.left_out.report()


def _limit(text: str | None) -> int | float | None:
    """Parse the limit of `--to-size`: bytes as an int, or a share of the current size as a float."""
    if text is not None and text.endswith("%"):
        return parsed("--to-size", text, parse_share, SHARE)
    return _parsed("--to-size", text, parse_size, SIZE_BYTES_MAX, "a size such as 100GiB, or a share such as 50%")


def _parsed(option: str, text: str | None, parse: Callable[[str], T], most: float, accepted: str) -> T | None:
    if text is None:
        return None
    if (value := parsed(option, text, parse, accepted)) > most:
        raise ConfigError(f"{option} {text!r}: expected {accepted}, at most {most:,.0f} of its units")
    return value


def _line(row: PrunedFile) -> str:
    return f"{shown_bytes(row.bytes):>10}  {shown_age(row.age_s):>8}  {row.why:<9}  {row.file}"


def _since(directory: Directory, places: Sequence[Place], limit: float) -> int:
    """Return the time such that the chunks used since then take at most `limit`."""
    used_at_ns, taken_bytes = array("q"), array("q")  # 16 bytes a chunk, of a million or more.
    for _, file in readable(directory, places, "counting", LeftOut()):  # `PruneRun` reports the others.
        if file.kind is Kind.CHUNK:
            used_at_ns.append(file.used_at_ns)
            taken_bytes.append(file.allocated_bytes)
    left_bytes = limit if isinstance(limit, int) else int(limit * sum(taken_bytes))
    for index in sorted(range(len(used_at_ns)), key=used_at_ns.__getitem__, reverse=True):
        left_bytes -= taken_bytes[index]
        if left_bytes < 0:
            return used_at_ns[index] + 1
    return 0


class PruneRun:
    """One pass over the namespaces and its counts. Without `remove` the selected files are only counted."""

    def __init__(self, directory: Directory, rule: Rule, *, remove: bool) -> None:
        self.left_out = LeftOut()
        self._directory, self._rule, self._remove = directory, rule, remove
        self._files = self._freed_bytes = self._cleared = 0

    def run(self, places: Sequence[Place]) -> Iterator[PrunedFile]:
        for place in places:
            files, left_out = self._files, self.left_out.count
            yield from self._swept(place)
            if self._remove and (self._files > files or self._rule.everything) and self.left_out.count == left_out:
                self._cleared += self._directory.clear(place)

    def _swept(self, place: Place) -> Iterator[PrunedFile]:
        now_s = time.time()
        for _, file in readable(self._directory, [place], "removing" if self._remove else "looking", self.left_out):
            try:
                why = self._rule.dooms(self._directory, place, file)
                freed_bytes = self._directory.remove(file) if why and self._remove else file.allocated_bytes
            except OSError as error:
                self.left_out.add(file.name, error.strerror or str(error))
                continue
            if why and freed_bytes is not None:
                self._files += 1
                self._freed_bytes += freed_bytes
                age_s = round(max(0.0, now_s - file.used_at_ns / 1e9), 3)
                yield PrunedFile(file=file.name, bytes=freed_bytes, age_s=age_s, why=why)

    def report(self) -> PruneReport:
        return PruneReport(
            files=self._files,
            bytes=self._freed_bytes,
            namespaces=self._cleared,
            removed=self._remove,
            left_out=self.left_out.count,
        )

    def summary(self) -> str:
        what = f"{counted(self._files, 'file')} of {shown_bytes(self._freed_bytes)}"
        if not self._remove:
            return f"{what} would be removed; add --yes to remove them"
        return f"{what} removed" + (f", and {counted(self._cleared, 'empty namespace')}" if self._cleared else "")
