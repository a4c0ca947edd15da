"""`kvtier verify`: whether every chunk is what was stored."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.contents import Contents, Finding, Kind, Place, State, StoredFile
from kvtier.tools.walk import EXIT_UNWELL, DirectoryArgument, JsonOption, NamespaceOption, chosen, opened, walked

NAMED_MAX = 100  # Files listed for people; all of them are counted, and listed as JSON.


class Unwell(NamedTuple):
    """A file that is not what was stored, or that there is no telling of."""

    file: StoredFile
    finding: Finding


def verify(directory: DirectoryArgument, namespace: NamespaceOption = None, as_json: JsonOption = False) -> None:
    """Read every chunk and compare it with the checksum, key and length that were stored with it.

    Exit status 1 if any is corrupt or cannot be read. Files without a footer, which vLLM writes, cannot be verified
    and are counted. Nothing is changed: `kvtier prune --corrupt` removes what is corrupt.
    """
    states, faults = Counter[State](), Counter[str]()
    with opened(directory) as contents:
        unwell = _unwell(contents, chosen(contents, namespace), states, faults)
        if as_json:
            _write_json(unwell, states, faults)
        else:
            _show(unwell, states, faults)
    if states[State.CORRUPT] or states[State.UNREADABLE]:
        raise typer.Exit(EXIT_UNWELL)


def _unwell(
    contents: Contents, places: Sequence[Place], states: Counter[State], faults: Counter[str]
) -> Iterator[Unwell]:
    """Look at everything: count it, and yield what is not well."""
    for place, file in walked(contents, places, "verifying"):
        finding = _found(contents, place, file)
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
    """Write one object, a file a line, as they are found: a million of them are not kept in memory."""
    typer.echo('{"files": [', nl=False)
    for number, (file, finding) in enumerate(unwell):
        key = None if file.key is None else file.key.hex()
        row = {"file": file.name, "key": key, "state": finding.state.value, "fault": finding.fault}
        typer.echo((",\n " if number else "") + json.dumps(row), nl=False)
    counts = {
        "checked": _checked(states),
        "corrupt": _corrupt(faults),
        "unverified": states[State.UNVERIFIED],
        "unreadable": states[State.UNREADABLE],
    }
    typer.echo(f"],\n {json.dumps(counts)[1:]}")


def _show(unwell: Iterator[Unwell], states: Counter[State], faults: Counter[str]) -> None:
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
        + (f", {states[State.UNREADABLE]:,} unreadable" if states[State.UNREADABLE] else ""),
        highlight=False,
    )
