"""`kvtier selftest`: the checks, the rates and the model on one device, as one report."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import TextColumn

from kvtier.errors import ConfigError
from kvtier.tools import statuses
from kvtier.tools.bench.commands import names, scratch_in
from kvtier.tools.bench.figures import load, this_machine
from kvtier.tools.commands import JsonOption
from kvtier.tools.outputs import bar, check_outputs, check_writable, replacing, write_json

if TYPE_CHECKING:  # What needs torch is imported when the command runs.
    from kvtier.tools.selftest.device import Device, Way
    from kvtier.tools.selftest.report import CheckRow, Report

PARTS = ("bytes", "order", "memory", "errors", "speed", "model")


def selftest(
    device: Annotated[str, typer.Option(help="Where the KV caches are: cuda, or cpu for a dry run.")] = "cuda",
    parts: Annotated[str, typer.Option(help="What is tested, with commas between; all: everything.")] = "all",
    directory: Annotated[
        str, typer.Option("--dir", help="A directory on the disk that fs tiers are to be on.")
    ] = "/tmp",  # noqa: S108  # A scratch folder is made in it.
    markdown_path: Annotated[
        str | None, typer.Option("--markdown", metavar="OUT", help="Write the report for people there.")
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Prove on this machine's device that every byte comes back, how fast, and what a hit saves."""
    wanted = PARTS if parts == "all" else names("--parts", parts, PARTS)
    check_outputs(json_path, None)
    if markdown_path is not None:
        check_writable("--markdown", markdown_path)
    try:
        from kvtier.tools.selftest.device import device_named
        from kvtier.tools.selftest.report import as_markdown
    except (ImportError, OSError) as error:
        raise ConfigError(f"torch cannot be loaded ({error}); pip install 'kvtier[torch]'") from error
    with ExitStack() as stack:
        report = tested(device_named(device), wanted, scratch_in(directory, stack), directory)
    text = as_markdown(report)
    console = write_json(json_path, report)
    if markdown_path is not None:
        with replacing(markdown_path) as file:
            file.write(text.encode())
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if report.broken or not all(each.same_tokens for each in report.first_tokens):
        raise typer.Exit(statuses.DATA_WRONG)


def tested(device: "Device", parts: "list[str] | tuple[str, ...]", folder: str, directory: str) -> "Report":
    """Test these parts, with files in `folder`."""
    from kvtier.tools.selftest import model, speed
    from kvtier.tools.selftest.device import facts
    from kvtier.tools.selftest.report import Report, goals_of

    before, begun = load(), time.perf_counter()
    with bar(TextColumn("{task.fields[doing]}")) as progress:
        task = progress.add_task("kvtier selftest", total=None, doing="")

        def doing(what: str) -> None:
            progress.update(task, doing=what)

        checked = list(_checked(device, parts, doing))
        doing("rates of copies")
        figures = list(speed.measure(device)) if "speed" in parts else []
        doing("times to the first token")
        first_tokens = list(model.measure(device, folder)) if "model" in parts else []
    return Report(
        device=facts(device),
        dry_run=device.name == "cpu",
        machine=this_machine(before, directory),
        seconds=time.perf_counter() - begun,
        checks=checked,
        figures=figures,
        model=model.shape_for(device).name if first_tokens else "",
        first_tokens=first_tokens,
        goals=goals_of(device.ways[0].name, figures, first_tokens),
    )


def _checked(
    device: "Device", parts: "list[str] | tuple[str, ...]", doing: Callable[[str], None]
) -> "Iterator[CheckRow]":
    """Make each check of these parts for each way to copy."""
    from kvtier.tools.selftest import checks, children

    for check in (*checks.checks(), *children.checks()):
        if check.part in parts:
            for way in device.ways if check.each_way else device.ways[:1]:
                doing(check.promise)
                yield outcome_of(check.part, check.promise, check.run, device, way)


def outcome_of(
    part: str, promise: str, run: "Callable[[Device, Way], str]", device: "Device", way: "Way"
) -> "CheckRow":
    """Make one check. Whatever it raises is a promise that was broken: the report has the other checks, too."""
    from kvtier.tools.selftest.device import NotHere
    from kvtier.tools.selftest.report import BROKEN, KEPT, SKIPPED, CheckRow

    begun = time.perf_counter()
    try:
        outcome, detail = KEPT, run(device, way)
    except NotHere as reason:
        outcome, detail = SKIPPED, str(reason)
    except Exception as error:  # noqa: BLE001  # A device fails as it likes.
        outcome, detail = BROKEN, f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - begun
    return CheckRow(part=part, promise=promise, way=way.name, outcome=outcome, detail=detail, seconds=seconds)
