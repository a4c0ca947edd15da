"""The entry point of the `kvtier` command, its exit status and last line; Ctrl-C is handled before slow imports."""

import io
import os
import sys

from kvtier.tools import statuses

TYPE_CHECKING = False  # Type checkers know the name: see `kvtier/__init__.py`.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(args: "Sequence[str] | None" = None) -> "NoReturn":
    """Run a command and exit with its status; for a failure, one line on stderr gives the reason."""
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
        if not isinstance(end.__context__, BrokenPipeError):  # Rich exits on a broken pipe.
            raise
        return _ended(statuses.UNREAD)
    except OSError as error:
        where = None if error.filename is None else os.fsdecode(error.filename)
        return _ended(statuses.FAILED, error.strerror or str(error), where)
    except MemoryError as error:
        return _ended(statuses.FAILED, f"there is not enough memory for this{f' ({error})' if str(error) else ''}")
    except Exception as error:  # noqa: BLE001  # Python's own status, 1, would mean bad data.
        sys.excepthook(type(error), error, error.__traceback__)
        return _ended(statuses.FAULT, "this is a fault of kvtier's own; please report it with the lines above")
    return status


def _prepare_output() -> None:
    """Escape characters that the terminal lacks, and replace closed outputs by the null device."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # It stays open to the end.
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _ended(status: int, why: str = "", where: "str | None" = None) -> int:
    """Write the reason to stderr if it can be written; return the status."""
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
    """Flush stdout; return False if that fails. The interpreter's exit then does not try again."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return False
    return True
