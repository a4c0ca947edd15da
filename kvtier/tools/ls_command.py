"""`kvtier ls`: the chunks that are there."""

import json
import time
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import typer

from kvtier.contents import Kind, Place, StoredFile
from kvtier.keys import chunk_hash, group_index
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

LISTED_MAX = 1_000_000_000_000  # Chunks. No directory holds so many.


def ls(
    directory: DirectoryArgument,
    namespace: NamespaceOption = None,
    limit: Annotated[int | None, typer.Option(min=1, max=LISTED_MAX, help="Show at most this many.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the chunks, as they are found: hash, KV-cache group, size on the disk, time since the last use, namespace.

    A tier sets a file's time to the chunk's last use at most once an hour. Nothing is kept in memory, so that a
    million chunks can be listed.
    """
    now_s, left_out = time.time(), LeftOut()
    with opened(directory) as contents:
        found = readable(contents, chosen(contents, namespace), "listing", left_out)
        chunks = ((place, file) for place, file in found if file.kind is Kind.CHUNK and file.key is not None)
        rows = islice((_row(place, file, now_s) for place, file in chunks), limit)
        if as_json:
            _write_json(rows)
        else:
            _write_lines(rows)
    left_out.say()


def _row(place: Place, file: StoredFile, now_s: float) -> dict[str, Any]:
    assert file.key is not None, file
    return {
        "hash": chunk_hash(file.key).hex(),
        "group": group_index(file.key),
        "bytes": file.allocated_bytes,
        "age_s": round(max(0.0, now_s - file.used_at_ns / 1e9), 3),
        "namespace": place.name,
        "file": file.name,
    }


def _write_json(rows: Iterator[dict[str, Any]]) -> None:
    """Write one array, an element a line, as the elements come."""
    typer.echo("[", nl=False)
    for number, row in enumerate(rows):
        typer.echo((",\n " if number else "") + json.dumps(row), nl=False)
    typer.echo("]")


def _write_lines(rows: Iterator[dict[str, Any]]) -> None:
    for row in rows:
        age = _shown_age(row["age_s"])
        typer.echo(f"{row['hash']}  {row['group']:>3}  {shown_bytes(row['bytes']):>10}  {age:>8}  {row['namespace']}")


def _shown_age(age_s: float) -> str:
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.1f} {unit}"
    return f"{age_s:.0f} s"
