"""`kvtier selftest`: the checks, the rates and the model on one device, as one report."""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.progress import TextColumn

from kvtier.errors import ConfigError
from kvtier.tools import statuses
from kvtier.tools.bench.commands import names, scratch_in
from kvtier.tools.bench.figures import Row, load, this_machine
from kvtier.tools.commands import JsonOption
from kvtier.tools.outputs import bar, check_outputs, check_writable, replacing, write_json

if TYPE_CHECKING:  # What needs torch is imported when the command runs.
    from kvtier.tools.selftest.checks import Check
    from kvtier.tools.selftest.device import Device, Way
    from kvtier.tools.selftest.report import CheckRow, Report

PARTS = ("bytes", "order", "memory", "errors", "speed", "model")
LIMIT_S = 420.0  # From then on nothing new is begun.
GRACE_S = 40.0  # For what is under way then: a device on which it hangs must be reported, too.

T = TypeVar("T")


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

    def tell(report: "Report") -> int:
        """Write the report and return the exit status."""
        text = as_markdown(report)
        console = write_json(json_path, report)
        if markdown_path is not None:
            with replacing(markdown_path) as file:
                file.write(text.encode())
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        wrong = report.broken or not all(each.same_tokens for each in report.first_tokens)
        return statuses.DATA_WRONG if wrong else statuses.DONE

    with ExitStack() as stack:
        report = tested(device_named(device), wanted, scratch_in(directory, stack), directory, tell)
    if status := tell(report):
        raise typer.Exit(status)


def tested(
    device: "Device", parts: Sequence[str], folder: str, directory: str, tell: Callable[["Report"], int]
) -> "Report":
    """Test these parts, with files in `folder`. Whatever fails, the report has all that was found.

    What hangs on the device cannot be ended: after a while `tell` gets what was found, and this process ends.
    """
    from kvtier.tools.selftest import model, speed
    from kvtier.tools.selftest.device import facts
    from kvtier.tools.selftest.report import FirstToken, Report, goals_of

    before, begun = load(), time.perf_counter()
    known, shape = facts(device), model.shape_for(device)
    figures, first_tokens = list[Row](), list[FirstToken]()
    with bar(TextColumn("{task.fields[doing]}")) as progress:
        task = progress.add_task("kvtier selftest", total=None, doing="")
        testing = Testing(device, parts, begun + LIMIT_S, lambda what: progress.update(task, doing=what))

        def report() -> Report:
            return Report(
                device=known,
                dry_run=device.name == "cpu",
                machine=this_machine(before, directory),
                seconds=time.perf_counter() - begun,
                checks=list(testing.found),
                figures=list(figures),
                model=shape.name if first_tokens else "",
                first_tokens=list(first_tokens),
                goals=goals_of(device.ways[0].name, figures, first_tokens) if device.ways else [],
            )

        def give_up() -> None:
            testing.give_up()
            progress.stop()
            os._exit(tell(report()))

        watch = threading.Timer(LIMIT_S + GRACE_S, give_up)
        watch.daemon = True
        watch.start()
        try:
            testing.choose_ways()
            testing.check_all(("bytes", "order", "memory"))
            testing.measure("speed", "rates of copies are measured", figures, lambda: speed.measure(device))
            testing.measure("model", "answers are timed", first_tokens, lambda: model.measure(device, shape, folder))
            testing.check_all(("errors",))  # Last: each takes a process of its own, and time may run out.
        finally:
            watch.cancel()
    return report()


class Testing:
    """Checks and measurements, one after the other: what fails, or has no time left, is a row like what is kept."""

    def __init__(self, device: "Device", parts: Sequence[str], until: float, doing: Callable[[str], None]) -> None:
        self.found: list[CheckRow] = []
        self._under_way: tuple[Check, Way, float] | None = None  # And since when.
        self._device, self._parts, self._until, self._doing = device, parts, until, doing

    def choose_ways(self) -> None:
        """Leave out those ways to copy whose first transfers fail."""
        from kvtier.tools.selftest import children
        from kvtier.tools.selftest.report import KEPT

        device = self._device
        if device.has_streams:
            first = children.first_transfers()
            device.ways = [way for way in device.ways if self._made(first, way) == KEPT]

    def check_all(self, parts: Collection[str]) -> None:
        """Make each check of those of these parts that are wanted, for each way to copy."""
        from kvtier.tools.selftest import checks, children

        device = self._device
        for check in (*checks.checks(), *children.checks()):
            if check.part in parts and check.part in self._parts:
                for way in device.ways if check.each_way else device.ways[:1]:
                    self._made(check, way)

    def measure(self, part: str, what: str, into: list[T], work: Callable[[], Iterator[T]]) -> None:
        """Measure, and keep what was found before something failed."""
        import torch

        from kvtier.tools.selftest.checks import Check
        from kvtier.tools.selftest.device import NotHere

        def run(_device: "Device", _way: "Way") -> str:
            try:
                for item in work():
                    into.append(item)  # noqa: PERF402  # What came before a failure is kept.
            except torch.OutOfMemoryError as error:
                raise NotHere(f"the device has no room: {error}") from error
            return f"{len(into)} figures"

        if part in self._parts and self._device.ways:
            self._made(Check(part, what, run), self._device.ways[0])

    def _made(self, check: "Check", way: "Way") -> str:
        """Make one check, note its outcome and return it."""
        from kvtier.tools.selftest.device import NotHere
        from kvtier.tools.selftest.report import BROKEN, KEPT, SKIPPED

        self._doing(check.promise)
        begun = time.perf_counter()
        self._under_way = check, way, begun
        try:
            if begun > self._until:
                raise NotHere(f"no time was left of {LIMIT_S:.0f} s")  # As a check would.
            outcome, detail = KEPT, check.run(self._device, way)
        except NotHere as reason:
            outcome, detail = SKIPPED, str(reason)
        except Exception as error:  # noqa: BLE001  # A device fails as it likes.
            outcome, detail = BROKEN, f"{type(error).__name__}: {error}"
        self._under_way = None
        self._note(check, way, outcome, detail, begun)
        return outcome

    def give_up(self) -> None:
        """Note what is under way as broken: it hangs, or takes too long."""
        from kvtier.tools.selftest.report import BROKEN

        if self._under_way is not None:
            check, way, begun = self._under_way
            self._note(check, way, BROKEN, f"still under way after {time.perf_counter() - begun:.0f} s", begun)

    def _note(self, check: "Check", way: "Way", outcome: str, detail: str, begun: float) -> None:
        from kvtier.tools.selftest.report import CheckRow

        seconds = time.perf_counter() - begun
        self.found.append(
            CheckRow(
                part=check.part, promise=check.promise, way=way.name, outcome=outcome, detail=detail, seconds=seconds
            )
        )
