"""The self-test's checks hold on the device and on a modelled one, and see copies that are wrong."""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import pytest

from kvtier.kvcache.transfer.cuda import CudaCopier, Descriptors, batched, copiers_with
from kvtier.kvcache.transfer.jobs import Copier, Direction, Finish, Job
from kvtier.kvcache.transfer.pages import Sides
from kvtier.tools.selftest import checks, children
from kvtier.tools.selftest.checks import Check
from kvtier.tools.selftest.device import Device, NotHere, Way, Wrong
from tests.gpu.modelled import Modelled, Stream, batches

HERE, ELSEWHERE = checks.checks(), children.checks()
ORDER = [check for check in HERE if check.part == "order"]


def name_of(check: Check) -> str:
    return check.promise


@pytest.mark.usefixtures("outside")  # Some are made in children.
@pytest.mark.parametrize("check", [*HERE, *ELSEWHERE], ids=name_of)
def test_a_promise_is_kept_on_the_device_by_each_way_to_copy(check: Check, device: Device) -> None:
    reasons = list[str]()
    ways = device.ways if check.each_way else device.ways[:1]
    for way in ways:
        try:
            check.run(device, way)
        except NotHere as reason:
            reasons.append(f"{way.name}: {reason}")
    if len(reasons) == len(ways):
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize("check", HERE, ids=name_of)
def test_a_promise_is_kept_on_a_modelled_device_whose_streams_do_things_later(check: Check, modelled: Modelled) -> None:
    check.run(modelled, modelled.ways[0])


# Copies that are wrong, each in its own way, and the promise that breaks.


def altered(change: Callable[[Descriptors], Descriptors]) -> Callable[[Sides], Sequence[Copier]]:
    """Return copiers whose batches are changed on their way to the device."""

    def copy(copies: Descriptors, stream: int, stable: bool) -> None:
        batches(change(copies) if len(copies.sizes) else copies, stream, stable)

    return lambda sides: copiers_with(sides, Modelled().place, copy)


class Deaf(CudaCopier):
    """Begins before the device has done what it was told before the submission."""

    def mark(self) -> object:
        class Reached:
            def synchronize(self) -> None: ...

        return Reached()


class Hasty(CudaCopier):
    """Says that a copy has ended when it has begun."""

    def begin(self, job: Job) -> Finish:
        super().begin(job)
        return lambda: None


def copiers_of(kind: type[CudaCopier], *, at_once: bool = True) -> Callable[[Sides], Sequence[Copier]]:
    """Return copiers of this kind; without `at_once`, sources are read when the stream comes to it."""

    def copy(copies: Descriptors, stream: int, stable: bool) -> None:
        batches(copies, stream, stable and at_once)

    return lambda sides: [kind(direction, Modelled().place, batched(sides, copy)) for direction in Direction]


WRONG: dict[str, tuple[Callable[[Sides], Sequence[Copier]], Check]] = {
    "the last byte stays behind": (altered(lambda copies: copies._replace(sizes=copies.sizes - 1)), HERE[0]),
    "a byte too many": (altered(lambda copies: copies._replace(sizes=copies.sizes + 1)), HERE[0]),
    "two pages change places": (
        altered(lambda copies: copies._replace(targets=np.roll(copies.targets, 1))),
        HERE[0],
    ),
    "a page that is forgotten": (altered(lambda copies: Descriptors(*(column[1:] for column in copies))), HERE[0]),
    "a store that does not wait": (copiers_of(Deaf), ORDER[0]),
    "a load that does not wait": (copiers_of(Deaf), ORDER[1]),
    "a store that has not ended": (copiers_of(Hasty), ORDER[2]),
    "a load that has not ended": (copiers_of(Hasty, at_once=False), ORDER[3]),
    "a cancelled store that has not ended": (copiers_of(Hasty), ORDER[4]),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_copy_that_is_wrong_breaks_a_promise(fault: str, modelled: Modelled) -> None:
    copiers, check = WRONG[fault]
    with pytest.raises(Wrong):
        check.run(modelled, Way(fault, copiers))
    modelled.synchronize()  # Nothing is written any more when its memory goes.


def test_a_check_of_order_proves_nothing_when_the_kernel_had_ended(
    modelled: Modelled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelled, "spin", lambda seconds: Stream.synchronize(modelled_stream()))
    monkeypatch.setattr(modelled, "mark", lambda: lambda: True)
    with pytest.raises(Wrong, match="had ended before the transfer was submitted: nothing was proved"):
        ORDER[0].run(modelled, modelled.ways[0])


def modelled_stream() -> Stream:
    return next(iter(Stream.of_handle.values()))


class Ending:
    """A child that ends before it says anything."""

    status = -11

    def __init__(self, *arguments: str) -> None: ...

    def says(self) -> dict[str, object]:
        raise children.Ended("reset", self.status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_a_driver_may_end_a_process_after_a_reset_but_not_after_a_failed_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children, "Child", Ending)
    device = Modelled()
    device.name = "cuda"
    failed_kernel = next(check for check in ELSEWHERE if "failed assertion" in check.promise)
    told = children.reset(device, Way("batched", None))
    assert told == "the driver ended the process: Segmentation fault"
    with pytest.raises(Wrong, match="exit status -11"):
        failed_kernel.run(device, Way("batched", None))
    monkeypatch.setattr(Ending, "status", 1)  # Python's own end is none of the driver's.
    with pytest.raises(Wrong, match="exit status 1"):
        children.reset(device, Way("batched", None))
