"""`kvtier help`: what a message means, by the code at its end; the page on troubleshooting comes with the package."""

import re
from pathlib import Path
from typing import Annotated

import typer

from kvtier.errors import ConfigError

NAME = "troubleshooting.md"
PLACES = (Path(__file__).with_name(NAME), Path(__file__).parents[2] / "docs" / "how-to" / NAME)
"""In an installed package; in a checkout."""


def explain(
    code: Annotated[str, typer.Argument(metavar="[CODE]", help="The code, or its beginning; none: list all.")] = "",
) -> None:
    """Explain a message by the code at its end: its meaning, and what to do. No network is needed."""
    sections = _sections(next(path for path in PLACES if path.exists()).read_text(encoding="utf-8"))
    if (found := next((name for name in sections if name.startswith(code)), None)) is None:
        raise ConfigError(f"{code!r}: no such code; `kvtier help` lists all")
    typer.echo(sections[found] if code else "\n".join(sections))


def _sections(page: str) -> dict[str, str]:
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", page)
    parts = (part.strip() for part in re.split(r"^(?=###? )", plain, flags=re.MULTILINE) if part.startswith("### "))
    return {re.sub(r"[^\w-]", "", part.splitlines()[0][4:].lower().replace(" ", "-")): part[4:] for part in parts}
