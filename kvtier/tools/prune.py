"""`kvtier prune`: remove chunks by age, by size, by namespace, or because they are corrupt."""

import json
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, TypeVar

import typer
from rich.console import Console

from kvtier.backend import Contents, Kind, Place, State, StoredFile
from kvtier.errors import ConfigError
from kvtier.settings import AGE_S_MAX, SIZE_BYTES_MAX, parse_duration, parse_size
from kvtier.tools.directory import (
    DirectoryArgument,
    JsonOption,
    LeftOut,
    NamespaceOption,
    chosen,
    opened,
    readable,
    shown_bytes,
    side_by_side,
)

T = TypeVar("T", int, float)


class Rule(NamedTuple):
    """The chunks and leftovers that go."""

    unused_since_ns: int  # What was not used since then.
    corrupt: bool
    leftovers: bool
    everything: bool

    def dooms(self, contents: Contents, place: Place, file: StoredFile) -> bool:
        """Say whether this file goes. Raises `OSError` if that cannot be told without reading it, nor by reading it."""
        match file.kind:
            case Kind.TEMPORARY | Kind.UNREADABLE:
                return False
            case Kind.LEFTOVER:
                return self.leftovers or self.everything or (self.corrupt and bool(file.fault))
            case Kind.LOST:
                return self.corrupt or self.everything
            case Kind.CHUNK:
                if self.everything or file.used_at_ns < self.unused_since_ns:
                    return True
                return self.corrupt and _is_corrupt(contents, place, file)


def _is_corrupt(contents: Contents, place: Place, file: StoredFile) -> bool:
    state, fault = contents.check(place, file)
    if state is State.UNREADABLE:
        raise OSError(None, fault)
    return state is State.CORRUPT


def prune(
    directory: DirectoryArgument,
    namespace: NamespaceOption = None,
    older_than: Annotated[str | None, typer.Option(help="Chunks that were not used for so long: 90min, 7d.")] = None,
    to_size: Annotated[
        str | None, typer.Option(help="The chunks longest unused, until the others take no more than this: 100GiB.")
    ] = None,
    corrupt: Annotated[bool, typer.Option("--corrupt", help="Chunks that are not what was stored; reads all.")] = False,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="What killed processes had under way, and corrupt files that were kept.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it. Without this, only say what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what any of the options names, of all namespaces or of one; a namespace alone goes as a whole.

    An engine may be using the directory: what it looks for and does not find is a miss, and what it stores anew while
    this runs stays. In a bucket, what is stored anew at the moment of its removal goes, too. A tier sets a file's time
    to its last use at most once an hour; a chunk in a segment or a bucket has only the time of its store.
    """
    age_s = _parsed("--older-than", older_than, parse_duration, AGE_S_MAX, "a time such as 90min or 7d")
    size_bytes = _parsed("--to-size", to_size, parse_size, SIZE_BYTES_MAX, "a size such as 100GiB")
    everything = age_s is None and size_bytes is None and not (corrupt or leftovers)
    if everything and namespace is None:
        raise ConfigError(
            "nothing says what to remove; expected --older-than, --to-size, --corrupt, --leftovers or --namespace"
        )
    since_ns = 0 if age_s is None else time.time_ns() - int(age_s * 1e9)
    left_out = LeftOut()
    with opened(directory) as contents:
        places = chosen(contents, namespace)
        if size_bytes is not None:
            since_ns = max(since_ns, _since(contents, places, size_bytes))
        rule = Rule(since_ns, corrupt, leftovers, everything)
        files, freed_bytes = _swept(contents, places, rule, left_out, remove=yes)
    if as_json:
        typer.echo(json.dumps({"files": files, "bytes": freed_bytes, "removed": yes, "left_out": left_out.count}))
    else:
        done = "removed" if yes else "would be removed; add --yes to remove them"
        Console().out(f"{files:,} files of {shown_bytes(freed_bytes)} {done}", highlight=False)
    left_out.say()


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


def _since(contents: Contents, places: Sequence[Place], size_bytes: int) -> int:
    """Return the time such that the chunks used since then take no more than this."""
    used_at_ns, taken_bytes = array("q"), array("q")  # 16 bytes a chunk, of a million or more.
    for _, file in readable(contents, places, "counting", LeftOut()):  # They are noted when the others are removed.
        if file.kind is Kind.CHUNK:
            used_at_ns.append(file.used_at_ns)
            taken_bytes.append(file.allocated_bytes)
    left_bytes = size_bytes
    for index in sorted(range(len(used_at_ns)), key=used_at_ns.__getitem__, reverse=True):
        left_bytes -= taken_bytes[index]
        if left_bytes < 0:
            return used_at_ns[index] + 1
    return 0


def _swept(
    contents: Contents, places: Sequence[Place], rule: Rule, left_out: LeftOut, *, remove: bool
) -> tuple[int, int]:
    """Remove the doomed, or only count them; return how many there were, and what they took."""

    def deal(place: Place, file: StoredFile) -> bool | OSError:
        try:
            return rule.dooms(contents, place, file) and (not remove or contents.remove(file))
        except OSError as error:
            return error

    files = freed_bytes = 0
    found = readable(contents, places, "removing" if remove else "looking", left_out)
    for file, gone in side_by_side(contents, found, deal):
        if isinstance(gone, OSError):
            left_out.add(file.name, gone.strerror or str(gone))
        elif gone:
            files += 1
            freed_bytes += file.allocated_bytes
    return files, freed_bytes
