"""`kvtier verify`: whether every chunk is what was stored."""

import json
from collections import Counter

import typer
from rich.console import Console
from rich.table import Table

from kvtier.contents import Kind, State
from kvtier.tools.walk import DirectoryArgument, JsonOption, NamespaceOption, chosen, opened, walked

EXIT_CORRUPT = 1
NAMED_MAX = 100  # Corrupt files listed for people; all of them are counted.


def verify(directory: DirectoryArgument, namespace: NamespaceOption = None, as_json: JsonOption = False) -> None:
    """Read every chunk and compare it with the checksum, key and length that were stored with it.

    Exit status 1 if any is corrupt. Files without a footer, which vLLM writes, cannot be verified and are counted.
    Nothing is changed: `kvtier prune --corrupt` removes what is found.
    """
    checked = unverified = 0
    corrupt: Counter[str] = Counter()
    named: list[tuple[str, str]] = []
    with opened(directory) as contents:
        for place, file in walked(contents, chosen(contents, namespace), "verifying"):
            if file.kind is not Kind.CHUNK:
                continue
            state, fault = contents.check(place, file)
            checked += state is not State.GONE
            unverified += state is State.UNVERIFIED
            if state is State.CORRUPT:
                corrupt[fault] += 1
                named += [(fault, file.name)] if len(named) < NAMED_MAX else []
    if as_json:
        typer.echo(json.dumps({"checked": checked, "corrupt": dict(corrupt), "unverified": unverified}))
    else:
        _show(checked, corrupt, unverified, named)
    if corrupt:
        raise typer.Exit(EXIT_CORRUPT)


def _show(checked: int, corrupt: Counter[str], unverified: int, named: list[tuple[str, str]]) -> None:
    console = Console()
    if named:
        table = Table("fault", "file")
        for fault, name in named:
            table.add_row(fault, name)
        console.print(table)
    if (left := corrupt.total() - len(named)) > 0:
        console.out(f"and {left:,} more", highlight=False)
    kinds = ", ".join(f"{fault} {count:,}" for fault, count in sorted(corrupt.items()))
    console.out(
        f"{checked:,} chunks checked, {corrupt.total():,} corrupt{f' ({kinds})' if kinds else ''}, "
        f"{unverified:,} without anything to verify them by",
        highlight=False,
    )
