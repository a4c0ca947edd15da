"""The commands of `kvtier`: which there are, and the options that several have.

What one does is in a module of its own, imported when it is called: so `kvtier --help` answers at once, whatever the
commands need.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, NamedTuple, TypeVar, cast

import typer

from kvtier import __version__
from kvtier.errors import ConfigError, KVTierError, TraceError, one_line

EXIT_REFUSED = 2  # As for a wrong option: mend the call, then try again.
EXIT_UNAVAILABLE = 3  # Mend what the call needs.

REQUESTS_MAX = 1_000_000_000  # Reading so many takes hours; a larger limit is a mistyped one.

JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="OUT", help="Write the figures there; - is stdout, and the table goes to stderr."),
]
PlotOption = Annotated[
    str | None, typer.Option("--plot", metavar="OUT", help="Draw the figures there: .png, .pdf or .svg.")
]
LimitOption = Annotated[int | None, typer.Option(min=1, max=REQUESTS_MAX, help="Read at most this many requests.")]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Refuse a trace that cannot be true, instead of warning of it.")
]

T = TypeVar("T")

# What typer raises for a wrong call: the class has no public name, and a different one in each version.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])


class Command(NamedTuple):
    """One command: where its function is, and its line in the help."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "policies": Command(
        "kvtier.tools.replay.policies_command",
        "policies",
        "Compare eviction policies by their hit ratios over a trace.",
    ),
    "verify": Command("kvtier.tools.directory", "verify", "Check every chunk in a tier's directory."),
    "du": Command("kvtier.tools.directory", "du", "Show what each namespace in a tier's directory takes."),
    "ls": Command("kvtier.tools.directory", "ls", "List the chunks in a tier's directory."),
    "prune": Command("kvtier.tools.prune", "prune", "Remove chunks from a tier's directory."),
    "replay": Command(
        "kvtier.tools.replay.replay_command", "replay", "Replay a trace through a whole engine, byte for byte."
    ),
    "size": Command(
        "kvtier.tools.replay.size_command", "size", "Say what caches of several sizes are worth for a trace."
    ),
    "trace info": Command("kvtier.tools.replay.trace_commands", "info", "Say what is in a trace."),
    "trace convert": Command(
        "kvtier.tools.replay.trace_commands", "convert", "Make a trace from token ids, or from what others log."
    ),
    "selftest": Command(
        "kvtier.tools.selftest.command", "selftest", "Prove on this machine's GPU that every byte comes back."
    ),
    "bench cpu": Command("kvtier.tools.bench.commands", "cpu", "Measure memory copies and checksums."),
    "bench fs": Command("kvtier.tools.bench.commands", "fs", "Measure a directory as an fs tier."),
    "bench tiers": Command("kvtier.tools.bench.commands", "tiers", "Measure the tiers of a configuration, end to end."),
}
GROUPS = {
    "trace": "Look at traces of requests, and make them.",
    "bench": "Measure what this machine can do, and what kvtier makes of it.",
}


def run(args: Sequence[str]) -> int:
    """Run a command and return its exit status; what kvtier refuses is said in one line on stderr."""
    given = [*args, "--help"] if list(args) in ([], *([group] for group in GROUPS)) else list(args)
    try:
        command = typer.main.get_command(command_line(given))
        with command.make_context("kvtier", given) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except UsageError as error:
        return _refused(error.format_message(), EXIT_REFUSED)
    except (ConfigError, TraceError) as error:
        return _refused(str(error), EXIT_REFUSED)
    except KVTierError as error:
        return _refused(str(error), EXIT_UNAVAILABLE)
    return 0


def _refused(why: str, status: int) -> int:
    typer.echo(f"kvtier: {one_line(why)}", err=True)
    return status


def command_line(args: Sequence[str]) -> typer.Typer:
    """Return the commands, the one that these arguments call with its options, the others as names."""
    app = _app("Tier the KV cache of an LLM engine over host memory, file systems and slower tiers.")
    app.callback()(_root)
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
    app = typer.Typer(
        help=summary,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_frame)
    return app


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Stand for what all commands have in common."""


def _frame() -> None:
    """Stand for a command that is not called, and for what a group's have in common."""


def listed(option: str, text: str, parse: Callable[[str], T], accepted: str) -> list[T]:
    """Read values with commas between them, each once; what `parse` refuses with `ValueError` is a `ConfigError`."""
    parts = [part.strip() for part in text.split(",")]
    try:
        if all(parts):
            return list(dict.fromkeys(map(parse, parts)))
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: expected {accepted}") from error
    raise ConfigError(f"{option} {text!r}: expected {accepted}, and none of them empty")
