"""`kvtier selftest`: the checks and the rates of one device, as tables and as JSON."""

import os
import time
from typing import Annotated, Literal

import msgspec
import typer
from rich.markup import escape

from kvtier.errors import ConfigError
from kvtier.tools import statuses
from kvtier.tools.figures import Figures, Row, print_figures, this_machine
from kvtier.tools.options import JsonOption
from kvtier.tools.outputs import bar, check_outputs, plain_table, write_json


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    promise: str  # The promise that was checked.
    outcome: Literal["kept", "broken", "skipped"]  # `kept`, `broken` or `skipped`.
    detail: str  # What was found.
    seconds: float  # Duration.


class SelftestReport(Figures, frozen=True, kw_only=True):
    """The results of a self-test; the rows are its rates."""

    device: dict[str, str]  # The device, its driver and libraries.
    dry_run: bool  # It ran on the CPU: the rates say nothing about a device.
    checks: list[CheckResult]  # One for each promise.


def selftest(
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="Place of the KV caches: cuda, or cpu for a dry run.")
    ] = "cuda",
    json_path: JsonOption = None,
) -> None:
    """Prove on this machine's device that every byte comes back in order, and measure the rate each way."""
    check_outputs(json_path)
    try:
        from kvtier.tools import selftest_checks
    except (ImportError, OSError) as error:
        raise ConfigError(f"torch cannot be loaded ({error}); pip install 'kvtier[torch]'") from error
    place = selftest_checks.TorchDevice(device)
    before, begun = os.getloadavg(), time.perf_counter()
    rows, results = list[Row](), list[CheckResult]()

    def timed(_: object) -> str:
        rows.extend(selftest_checks.rates(place))
        return f"{len(rows)} rates"

    with bar() as progress:
        task = progress.add_task("kvtier selftest", total=None)
        for promise, check in (*selftest_checks.checks(), ("transfers are timed", timed)):
            progress.update(task, description=promise)
            check_begun = time.perf_counter()
            outcome, detail = selftest_checks.outcome_of(check, place)
            seconds = time.perf_counter() - check_begun
            results.append(CheckResult(promise=promise, outcome=outcome, detail=detail, seconds=seconds))
    report = SelftestReport(
        command="kvtier selftest",
        machine=this_machine(before),
        seconds=time.perf_counter() - begun,
        rows=rows,
        device=place.facts(),
        dry_run=not place.has_streams,
        checks=results,
    )
    console = write_json(json_path, report)
    table = plain_table("promise", "outcome", "detail")
    for result in results:
        table.add_row(escape(result.promise), result.outcome, escape(result.detail))
    console.print(table)
    console.print()
    print_figures(report, console)
    console.print(", ".join(f"{name} {value}" for name, value in report.device.items()), markup=False)
    if report.dry_run:
        console.print("[yellow]A dry run on the CPU: the rates say nothing about a device.[/]")
    if any(result.outcome == "broken" for result in results):
        raise typer.Exit(statuses.DATA_WRONG)
