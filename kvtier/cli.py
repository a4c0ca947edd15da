"""The `kvtier` command: its frame. What a command does is in a module of its own, imported when it is called.

So `kvtier --help` answers at once, whatever the commands need.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

import typer

from kvtier.errors import KVTierError

EXIT_REFUSED = 2  # As for a wrong option: mend the call, then try again.


class Command(NamedTuple):
    """One command: where its function is, and its line in the help."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "policies": Command(
        "kvtier.replay.policies_command", "policies", "Compare eviction policies by their hit ratios over a trace."
    ),
    "replay": Command(
        "kvtier.replay.replay_command", "replay", "Replay a trace through a whole engine, byte for byte."
    ),
}


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: with 0, with 2 and one line on stderr for what kvtier refuses, with 130 after Ctrl-C."""
    given = list(sys.argv[1:] if args is None else args)
    try:
        command_line(given)(given, prog_name="kvtier")
    except KVTierError as error:
        typer.echo(f"kvtier: {error}", err=True)
        sys.exit(EXIT_REFUSED)
    sys.exit(0)


def command_line(args: Sequence[str]) -> typer.Typer:
    """Return the commands, the one that these arguments call with its options, the others as names."""
    app = typer.Typer(
        help="Tier the KV cache of an LLM engine over host memory, file systems and slower tiers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_frame)
    called = next((arg for arg in args if not arg.startswith("-")), None)
    for name, command in COMMANDS.items():
        function = getattr(import_module(command.module), command.function) if name == called else _frame
        app.command(name, short_help=command.summary)(function)
    return app


def _frame() -> None:
    """Stand for a command that is not called, and for what all have in common."""
