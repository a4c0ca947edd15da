"""`kvtier selftest`: the checks and the rates of one device, as tables and as JSON."""

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from rich.markup import escape

from kvtier.errors import ConfigError
from kvtier.tools import statuses
from kvtier.tools.bench.figures import Figures, Row, load, print_figures, this_machine
from kvtier.tools.options import JsonOption
from kvtier.tools.outputs import bar, check_outputs, plain_table, write_json

if TYPE_CHECKING:  # Imported when the command runs: it needs torch.
    from kvtier.tools.selftest.device import TorchDevice

LIMIT_S = 120.0  # All of it takes seconds. A device that hangs must be reported, too.

Outcome = Literal["kept", "broken", "skipped"]


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check on this device."""

    promise: str
    outcome: Outcome
    detail: str
    seconds: float


class SelftestReport(Figures, frozen=True, kw_only=True):
    """The results of a self-test; the rows are its rates."""

    device: dict[str, str]
    dry_run: bool  # On the CPU: the rates say nothing about a device.
    checks: list[CheckResult]


def selftest(
    device: Annotated[str, typer.Option(help="Place of the KV caches: cuda, or cpu for a dry run.")] = "cuda",
    json_path: JsonOption = None,
) -> None:
    """Prove on this machine's device that every byte comes back in order, and measure the rate each way."""
    check_outputs(json_path)
    try:
        from kvtier.tools.selftest.device import TorchDevice
    except (ImportError, OSError) as error:
        raise ConfigError(f"torch cannot be loaded ({error}); pip install 'kvtier[torch]'") from error
    testing = SelftestRun(TorchDevice(device), json_path)
    with bar() as progress:
        task = progress.add_task("kvtier selftest", total=None)

        def give_up() -> None:
            progress.stop()
            os._exit(testing.give_up())

        watchdog = threading.Timer(LIMIT_S, give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            testing.run(lambda promise: progress.update(task, description=promise))
        finally:
            watchdog.cancel()
    if status := testing.report(complete=True):
        raise typer.Exit(status)


class SelftestRun:
    """All checks in order, then the rates. A check that fails is a result; the others are made all the same."""

    def __init__(self, device: "TorchDevice", json_path: str | None) -> None:
        self._device, self._json_path = device, json_path
        self._load, self._begun = load(), time.perf_counter()
        self._current = "", self._begun  # The check in progress, and its start.
        self._checks = list[CheckResult]()
        self._rows = list[Row]()

    def run(self, begins: Callable[[str], None]) -> None:
        """Make all checks; call `begins` with the promise of each."""
        from kvtier.tools.selftest.checks import checks
        from kvtier.tools.selftest.device import NotHere

        for promise, check in (*checks(), ("transfers are timed", self._rates)):
            begins(promise)
            self._current = promise, time.perf_counter()
            try:
                self._add("kept", check(self._device))
            except NotHere as reason:
                self._add("skipped", str(reason))
            except Exception as error:  # noqa: BLE001  # Drivers raise what they like, and the report must be written.
                self._add("broken", f"{type(error).__name__}: {error}")

    def give_up(self) -> int:
        """Report the check in progress as broken, because it hangs."""
        self._add("broken", f"still running after {LIMIT_S:.0f} s")
        return self.report(complete=False)

    def report(self, *, complete: bool) -> int:
        """Write the report and return the exit status."""
        report = SelftestReport(
            command="kvtier selftest",
            machine=this_machine(self._load),
            seconds=time.perf_counter() - self._begun,
            complete=complete,
            rows=self._rows,
            device=self._device.facts(),
            dry_run=not self._device.has_streams,
            checks=self._checks,
        )
        console = write_json(self._json_path, report)
        table = plain_table("promise", "outcome", "detail")
        for check in self._checks:
            table.add_row(escape(check.promise), check.outcome, escape(check.detail))
        console.print(table)
        console.print()
        print_figures(report, console)
        console.print(", ".join(f"{name} {value}" for name, value in report.device.items()), markup=False)
        if report.dry_run:
            console.print("[yellow]A dry run on the CPU: the rates say nothing about a device.[/]")
        return statuses.DATA_WRONG if any(check.outcome == "broken" for check in self._checks) else statuses.DONE

    def _add(self, outcome: Outcome, detail: str) -> None:
        promise, begun = self._current
        seconds = time.perf_counter() - begun
        self._checks.append(CheckResult(promise=promise, outcome=outcome, detail=detail, seconds=seconds))

    def _rates(self, device: "TorchDevice") -> str:
        from kvtier.tools.selftest.checks import rates

        self._rows = rates(device)
        return f"{len(self._rows)} rates"
