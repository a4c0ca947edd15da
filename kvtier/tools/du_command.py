"""`kvtier du`: what each namespace takes of the disk."""

import json
from collections import Counter

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.contents import Kind, Place
from kvtier.tools.walk import (
    DirectoryArgument,
    JsonOption,
    LeftOut,
    NamespaceOption,
    chosen,
    opened,
    readable,
    shown_bytes,
)

_FIELDS = {Kind.CHUNK: "chunks", Kind.TEMPORARY: "temporaries", Kind.LEFTOVER: "leftovers"}


def du(directory: DirectoryArgument, namespace: NamespaceOption = None, as_json: JsonOption = False) -> None:
    """Show how many chunks each namespace has and what they take of the disk, in blocks rather than by their lengths.

    Leftovers are what killed processes had under way and corrupt files that were kept: `kvtier prune --leftovers`.
    """
    left_out = LeftOut()
    with opened(directory) as contents:
        places = chosen(contents, namespace)
        counted: dict[str, Counter[str]] = {place.name: Counter() for place in places}
        for place, file in readable(contents, places, "counting", left_out):
            if file.kind is Kind.LOST:
                continue
            counts, field = counted[place.name], _FIELDS[file.kind]
            counts[field] += 1
            counts[_bytes_of(field)] += file.allocated_bytes
    rows = {place: _row(counted[place.name]) for place in places}
    total = _row(sum(counted.values(), Counter[str]()))
    if as_json:
        namespaces = {place.name: {"model": place.model, **row} for place, row in rows.items()}
        typer.echo(json.dumps({"namespaces": namespaces, **total, "left_out": left_out.count}))
    else:
        _show(rows, total)
    left_out.say()


def _bytes_of(field: str) -> str:
    return {"chunks": "bytes", "temporaries": "temporary_bytes", "leftovers": "leftover_bytes"}[field]


def _row(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for field in _FIELDS.values() for name in (field, _bytes_of(field))}


def _show(rows: dict[Place, dict[str, int]], total: dict[str, int]) -> None:
    table = Table("namespace", "model")
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
