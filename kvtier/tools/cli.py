"""The `kvtier` command's outermost frame: how it ends, whatever happens in it.

Next to nothing is imported before Ctrl-C is heard: typer and the command's own modules take a third of a second.
"""

import io
import os
import sys

from kvtier.tools import statuses

TYPE_CHECKING = False  # As type checkers know it by name: see `kvtier/__init__.py`.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(args: "Sequence[str] | None" = None) -> "NoReturn":
    """Run a command and exit. The status says how it ended, and one line on stderr why, if not well."""
    try:
        status = _run(list(sys.argv[1:] if args is None else args))
    except KeyboardInterrupt:
        _give_up_output()
        status = statuses.INTERRUPTED
    sys.exit(status)


def _run(args: "list[str]") -> int:
    try:
        from kvtier.memory import fill_standard_streams

        fill_standard_streams()
        _prepare_output()
        from kvtier.tools.commands import run

        status = run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        return _ended(statuses.UNREAD)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # Rich's way to say so.
            raise
        return _ended(statuses.UNREAD)
    except OSError as error:
        where = None if error.filename is None else os.fsdecode(error.filename)
        return _ended(statuses.FAILED, error.strerror or str(error), where)
    except MemoryError as error:
        return _ended(statuses.FAILED, f"there is not enough memory for this{f' ({error})' if str(error) else ''}")
    except Exception as error:  # noqa: BLE001  # Python's own status for it, 1, would say that a byte was wrong.
        sys.excepthook(type(error), error, error.__traceback__)
        return _ended(statuses.FAULT, "this is a fault of kvtier's own; please report it with the lines above")
    return status


def _prepare_output() -> None:
    """Have what the terminal cannot show escaped, and what was closed lead nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # It stays open to the end.
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _ended(status: int, why: str = "", where: "str | None" = None) -> int:
    """Say why, if there is anybody to hear it."""
    if not _give_up_output() and where is None:
        where = "stdout"
    if why:
        from kvtier.errors import one_line

        try:
            sys.stderr.write(f"kvtier: {one_line(why if where is None else f'{where}: {why}')}\n")
            sys.stderr.flush()
        except OSError:
            pass
    return status


def _give_up_output() -> bool:
    """Have the interpreter's end not try again what could not be written; say whether all was."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return False
    return True
