"""The table of kvtier's commands, each imported when it is called (`--help` imports none), and the run of one."""

import inspect
import os
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, NamedTuple, cast

import typer

from kvtier import __version__
from kvtier.errors import ConfigError, KVTierError, TraceError, one_line
from kvtier.tools import statuses
from kvtier.tools.options import COMMON, JSON

HELP_COLUMNS = 120  # Longer lines are hard to read.
PROGRAM = "kvtier"
COMPLETE = "_KVTIER_COMPLETE"  # Set by a shell's script when Tab is pressed.

# The error that typer raises for a wrong call. Its class has no public name.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])


class Command(NamedTuple):
    """One command: the place of its function, its line in the help, and calls that show its use."""

    place: str  # Module and function, below `kvtier.tools`.
    summary: str
    examples: tuple[str, ...]


COMMANDS = {
    "policies": Command(
        "replay.policies_command:policies",
        "Compare eviction policies by their hit ratios over a trace.",
        ("kvtier policies generated --limit 500 --policies lru,s3fifo,opt --sizes 0.05,0.2",),
    ),
    "config check": Command(
        "configuration:check",
        "Check a configuration, and show what holds in the end.",
        ("kvtier config check kvtier.toml --json",),
    ),
    "vllm-config": Command(
        "configuration:vllm_config",
        "Print vLLM's option for kvtier, checked on this machine.",
        ("kvtier vllm-config --memory 8G --disk /var/tmp/kvtier:100G",),
    ),
    "verify": Command(
        "directory:verify",
        "Check every chunk in a tier's directory.",
        ("kvtier verify tier --sample 1%", "kvtier verify kvtier.toml#disk --json found.json"),
    ),
    "du": Command(
        "directory:du", "Show what each namespace in a tier's directory takes.", ("kvtier du kvtier.toml#disk --json",)
    ),
    "ls": Command("directory:ls", "List the chunks in a tier's directory.", ("kvtier ls tier --limit 10",)),
    "prune": Command(
        "prune:prune",
        "Remove chunks from a tier's directory.",
        ("kvtier prune tier --older-than 7d --list", "kvtier prune tier --corrupt --leftovers --yes"),
    ),
    "top": Command(
        "top:top", "Watch a live engine: tiers, rates, hit ratio, breakers.", ("kvtier top 9400 --once --json",)
    ),
    "serve": Command(
        "serve:serve", "Run the keepers of a host's shared tiers.", ("kvtier serve kvtier.toml --port 9401",)
    ),
    "replay": Command(
        "replay.replay_command:replay",
        "Replay a trace through a whole engine with real bytes.",
        ("kvtier replay generated --limit 100", "kvtier replay trace.jsonl --config kvtier.toml --json report.json"),
    ),
    "simulate": Command(
        "replay.simulate:simulate",
        "Replay a trace in virtual time; show times to first token.",
        ("kvtier simulate trace.jsonl --config kvtier.toml --disk-speed 7GB/s,4GB/s",),
    ),
    "size": Command(
        "replay.size:size",
        "Compare sizes of memory and disk over a trace.",
        ("kvtier size trace.jsonl --kv-bytes-per-token 131072 --memory 1G --disk 4G,16G",),
    ),
    "bench": Command(
        "bench:bench",
        "Measure a directory or the tiers of a configuration.",
        ("kvtier bench . --chunk-sizes 128K --size 1M --rounds 1", "kvtier bench kvtier.toml --json bench.json"),
    ),
    "selftest": Command(
        "selftest:selftest",
        "Prove on this machine's GPU that every byte comes back.",
        ("kvtier selftest --device cpu --json report.json",),
    ),
    "help": Command(
        "remedies:explain", "Explain a message by the code at its end.", ("kvtier help breaker-open", "kvtier help")
    ),
}
GROUPS = {"config": "Check configurations, kvtier's own and what vLLM is given."}
HINT = "Exit status: 0 success, 1 bad data found, 2 usage error, 3 I/O or system error; the reference has all."
REMEDIES = "Remedies for each message: kvtier help CODE"


def run(args: Sequence[str]) -> int:
    """Run a command and return its exit status; an error of the caller or the machine is one line on stderr."""
    given = [*args, "--help"] if list(args) in ([], *([group] for group in GROUPS)) else _with_stdout(args)
    try:
        command = typer.main.get_command(command_line(given))
        if COMPLETE in os.environ:
            command.main(prog_name=PROGRAM)
        with command.make_context(PROGRAM, given) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except UsageError as error:
        return _failed(error.format_message() + _given(error, given), statuses.REFUSED)
    except (ConfigError, TraceError) as error:
        return _failed(str(error), statuses.REFUSED)
    except KVTierError as error:
        return _failed(str(error), statuses.FAILED)
    return statuses.DONE


def _with_stdout(args: Sequence[str]) -> list[str]:
    """Give `--json` its `-` if no file name follows: typer has no options with an optional value."""
    follows = [*args[1:], "--"]
    bare = (arg == JSON and after != "-" and after.startswith("-") for arg, after in zip(args, follows, strict=True))
    return [f"{JSON}=-" if alone else arg for arg, alone in zip(args, bare, strict=True)]


def _given(error: Exception, args: Sequence[str]) -> str:
    """Return the value that a wrong option was given, if typer's message lacks it."""
    if not isinstance(error, typer.BadParameter) or error.param is None:
        return ""
    for at, arg in reversed(list(enumerate(args))):
        name, equals, value = arg.partition("=")
        if name in error.param.opts and (equals or at + 1 < len(args)):
            value = value if equals else args[at + 1]
            return "" if repr(value) in error.message else f"; given {value!r}"
    return ""


def _failed(why: str, status: int) -> int:
    typer.echo(f"{PROGRAM}: {one_line(why)}", err=True)
    return status


def command_line(args: Sequence[str]) -> typer.Typer:
    """Return all commands. Only the one that the arguments call is imported; the others are names."""
    first = ("kvtier replay generated --limit 100", "kvtier du DIR", "kvtier COMMAND --help")
    app = _app("Tier the KV cache of an LLM engine over host memory, file systems and slower tiers.", first)
    app.callback()(_root)
    groups = {
        name: _app(summary, [command.examples[0] for own, command in COMMANDS.items() if own.startswith(f"{name} ")])
        for name, summary in GROUPS.items()
    }
    words, completing = [arg for arg in args if not arg.startswith("-")], COMPLETE in os.environ
    for name, command in COMMANDS.items():
        *group, own_name = name.split()
        called = completing or words[: len(group) + 1] == [*group, own_name]
        module, _, function_name = command.place.partition(":")
        function = _nothing
        if called:
            function = _with_common(getattr(import_module(f"kvtier.tools.{module}"), function_name))
        epilog = _epilog(command.examples)
        (groups[group[0]] if group else app).command(own_name, short_help=command.summary, epilog=epilog)(function)
    for name, group_app in groups.items():
        app.add_typer(group_app, name=name)
    return app


def _app(summary: str, examples: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        help=summary,
        epilog=_epilog(examples),
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # Boxes around options hinder a search for them.
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_COLUMNS},
    )
    app.callback()(_nothing)
    return app


def _epilog(examples: Sequence[str]) -> str:
    as_written = "\b"  # In the first line of a paragraph: click does not rewrap it.
    return "\n".join((as_written, "Examples:", *(f"  {line}" for line in examples), "", HINT, "", as_written, REMEDIES))


def _with_common(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options that all commands have; they apply while it runs."""

    @wraps(function)
    def call(verbose: int, quiet: bool, **given: Any) -> None:
        from kvtier.tools.outputs import logged  # Not for `--help`: rich takes long to import.

        with logged(verbose=verbose, quiet=quiet):
            function(**given)

    signature = inspect.signature(function)
    options = [
        inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for option, (kind, default) in COMMON.items()
    ]
    call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *options])  # type: ignore[attr-defined]
    call.__annotations__ = {**function.__annotations__, **{option: kind for option, (kind, _) in COMMON.items()}}
    return call


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Declare the options of `kvtier` itself."""


def _nothing() -> None:
    """Stand in for a command that is not called, and for a group's callback."""
