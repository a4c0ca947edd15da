"""The `kvtier` command: its frame. What a command does is in a module of its own, imported when it is called.

So `kvtier --help` answers at once, whatever the commands need.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

import typer

from kvtier.errors import KVTierError
from kvtier.this_process import fill_standard_streams

EXIT_REFUSED = 2  # As for a wrong option: mend the call, then try again.
EXIT_INTERRUPTED = 130  # As shells have it: 128 and the number of the signal.


class Command(NamedTuple):
    """One command: where its function is, and its line in the help."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "policies": Command(
        "kvtier.replay.policies_command", "policies", "Compare eviction policies by their hit ratios over a trace."
    ),
    "verify": Command("kvtier.tools.verify_command", "verify", "Check every chunk in a tier's directory."),
    "du": Command("kvtier.tools.du_command", "du", "Show what each namespace in a tier's directory takes."),
    "ls": Command("kvtier.tools.ls_command", "ls", "List the chunks in a tier's directory."),
    "prune": Command("kvtier.tools.prune_command", "prune", "Remove chunks from a tier's directory."),
    "replay": Command(
        "kvtier.replay.replay_command", "replay", "Replay a trace through a whole engine, byte for byte."
    ),
    "bench lookup": Command("kvtier.bench.commands", "lookup", "Measure look-ups."),
    "bench steps": Command("kvtier.bench.commands", "steps", "Measure the whole step protocol."),
    "bench cpu": Command("kvtier.bench.commands", "cpu", "Measure memory copies and checksums."),
    "bench fs": Command("kvtier.bench.commands", "fs", "Measure a directory as an fs tier."),
    "bench tiers": Command("kvtier.bench.commands", "tiers", "Measure the tiers of a configuration, end to end."),
}
GROUPS = {"bench": "Measure what this machine can do, and what kvtier makes of it."}


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: with 0, with 2 and one line on stderr for what kvtier refuses, with 130 after Ctrl-C."""
    fill_standard_streams()
    given = list(sys.argv[1:] if args is None else args)
    try:
        command_line(given)(given, prog_name="kvtier")
    except KVTierError as error:
        typer.echo(f"kvtier: {error}", err=True)
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:  # While the command's module was imported; later ones are typer's.
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0)


def command_line(args: Sequence[str]) -> typer.Typer:
    """Return the commands, the one that these arguments call with its options, the others as names."""
    app = _app("Tier the KV cache of an LLM engine over host memory, file systems and slower tiers.")
    groups = {name: _app(summary) for name, summary in GROUPS.items()}
    words = [arg for arg in args if not arg.startswith("-")]
    for name, command in COMMANDS.items():
        *group, own_name = name.split()
        called = words[: len(group) + 1] == [*group, own_name]
        function = getattr(import_module(command.module), command.function) if called else _frame
        (groups[group[0]] if group else app).command(own_name, short_help=command.summary)(function)
    for name, group_app in groups.items():
        app.add_typer(group_app, name=name)
    return app


def _app(summary: str) -> typer.Typer:
    app = typer.Typer(help=summary, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_frame)
    return app


def _frame() -> None:
    """Stand for a command that is not called, and for what all have in common."""
