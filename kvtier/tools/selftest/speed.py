"""How fast copies are, each beside its limit in the same run: a plain copy of pinned memory, or a matmul left alone.

Every way to copy that the device has is measured in turn with the others. So the figures say which of them is the
fastest for pages of a size.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import torch

from kvtier.tools.bench.copies import Case, Copies, copies
from kvtier.tools.bench.figures import Pair, Row, Setting, Side, interleaved, row_of
from kvtier.tools.selftest.device import Device, Way

LAYERS = 8
BESIDE_PAGE_BYTES = 64 << 10  # Beside a matmul: the page of an 8B model's layer.
LEAD_S = 0.05  # Of Python, to launch what is timed: threads that compute may keep it waiting for as long.
PLAIN = "plain copy of as many bytes"


class Scale(NamedTuple):
    """How much is measured: all of it on a device, and a little in a dry run."""

    page_sizes: tuple[int, ...]
    moved_bytes: int
    rounds: int
    matmul: int  # The side of a square.
    matmul_s: float  # For which it runs.


SCALES = {
    "cuda": Scale(tuple(1 << power for power in (12, 14, 15, 16, 17, 18, 20, 21, 23)), 256 << 20, 7, 8_192, 0.3),
    "cpu": Scale((16 << 10, 64 << 10, 8 << 20), 16 << 20, 3, 256, 0.05),
}


def measure(device: Device) -> Iterator[Row]:
    """Yield rows of MB/s for each page size, way and direction, then of both ways at once, then of a matmul."""
    scale = SCALES[device.name]
    for page_bytes in scale.page_sizes:
        yield from _pages(device, scale, page_bytes)
    for way in device.ways:
        yield from _both(device, scale, way)
        yield from _beside_matmul(device, scale, way)


def _case(device: Device, scale: Scale, page_bytes: int) -> Case:
    return Case(page_bytes, LAYERS, device=device.name, moves=scale.moved_bytes)


def _pages(device: Device, scale: Scale, page_bytes: int) -> Iterator[Row]:
    case = _case(device, scale, page_bytes)
    with ExitStack() as stack:
        made = {way: stack.enter_context(copies(case, way.copiers)) for way in device.ways}
        plain = next(iter(made.values()))
        sides = [
            Side("to host", _rate(plain.memcpy, case.moved_bytes)),
            Side("to device", _rate(plain.memcpy_to_device or plain.memcpy, case.moved_bytes)),
        ]
        for way, each in made.items():
            sides.append(Side(f"store {way.name}", _rate(each.store, case.moved_bytes)))
            sides.append(Side(f"load {way.name}", _rate(each.load, case.moved_bytes)))
        measured = interleaved(sides, scale.rounds)
    for way in device.ways:
        settings: dict[str, Setting] = {"way": way.name, "page_bytes": page_bytes}
        for operation, limit in (("store", "to host"), ("load", "to device")):
            name = f"{operation} {way.name}"
            yield row_of(
                Pair(operation, page_bytes * LAYERS, settings, "MB/s", name, limit, f"{PLAIN}, {limit}"), measured
            )


def _both(device: Device, scale: Scale, way: Way) -> Iterator[Row]:
    """Measure stores and loads at once beside plain copies at once; of what each moves, both count."""
    case = _case(device, scale, BESIDE_PAGE_BYTES)
    with copies(case, way.copiers) as stores, copies(case, way.copiers) as loads:
        plain = plain_both(case, stores)
        sides = [
            Side("both", _rate(lambda: _at_once(stores.store, loads.load), 2 * case.moved_bytes)),
            Side("plain", _rate(plain, 2 * case.moved_bytes)),
        ]
        measured = interleaved(sides, scale.rounds)
    settings: dict[str, Setting] = {"way": way.name, "page_bytes": BESIDE_PAGE_BYTES}
    chunk_bytes = BESIDE_PAGE_BYTES * LAYERS
    yield row_of(
        Pair(
            "store and load at once", chunk_bytes, settings, "MB/s", "both", "plain", "plain copies, both ways at once"
        ),
        measured,
    )


def plain_both(case: Case, each: Copies) -> Callable[[], None]:
    """Return plain copies of as many bytes, both ways at once: on two streams, or two threads."""
    if case.device == "cpu":
        return lambda: _at_once(each.memcpy, each.memcpy)
    there, pinned = (
        torch.ones((2, case.moved_bytes), dtype=torch.int8, device=place) for place in (case.device, "cpu")
    )
    here = pinned.pin_memory()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]

    def copy() -> None:
        with torch.cuda.stream(streams[0]):
            here[0].copy_(there[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            there[1].copy_(here[1], non_blocking=True)
        torch.cuda.synchronize()

    return copy


def _at_once(one: Callable[[], None], other: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(other)
        one()
        beside.result()


def _beside_matmul(device: Device, scale: Scale, way: Way) -> Iterator[Row]:
    """Measure a matmul's rate while copies run both ways all the time, beside its rate when left alone."""
    case = _case(device, scale, BESIDE_PAGE_BYTES)
    dtype = torch.float32 if device.name == "cpu" else torch.bfloat16
    left, right = (torch.randn((scale.matmul, scale.matmul), device=device.place, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    times = _times(device, scale, lambda: torch.matmul(left, right, out=out))

    def work() -> None:
        for _ in range(times):
            torch.matmul(left, right, out=out)

    seconds = _seconds_of(device, work)

    def multiply() -> float:
        return 2 * scale.matmul**3 * times / 1e12 / seconds()

    with ThreadPoolExecutor(2) as threads, copies(case, way.copiers) as stores, copies(case, way.copiers) as loads:
        copying = _Copying(threads, stores.store, loads.load)
        sides = [Side("alone", multiply), Side("beside", multiply, copying.start, copying.stop)]
        measured = interleaved(sides, scale.rounds)
    settings: dict[str, Setting] = {"way": way.name, "page_bytes": BESIDE_PAGE_BYTES}
    chunk_bytes = BESIDE_PAGE_BYTES * LAYERS
    yield row_of(
        Pair("matmul beside copies both ways", chunk_bytes, settings, "TFLOP/s", "beside", "alone", "the matmul alone"),
        measured,
    )


class _Copying:
    """Copies on two threads, from `start` to `stop`."""

    def __init__(self, threads: Executor, *works: Callable[[], None]) -> None:
        self._threads = threads
        self._works = works
        self._going = list[Future[None]]()
        self._over = threading.Event()

    def start(self) -> None:
        self._over.clear()
        self._going = [self._threads.submit(self._go_on, work) for work in self._works]

    def stop(self) -> None:
        """End them; raises what ended one before: nothing was measured beside it."""
        self._over.set()
        for each in self._going:
            each.result()

    def _go_on(self, work: Callable[[], None]) -> None:
        while not self._over.is_set():
            work()


def _times(device: Device, scale: Scale, work: Callable[[], object]) -> int:
    """Return how often the work is done in the time of a measurement."""
    work()
    _wait(device)
    begun = time.perf_counter()
    work()
    _wait(device)
    return max(1, int(scale.matmul_s / (time.perf_counter() - begun)))


def _seconds_of(device: Device, work: Callable[[], object]) -> Callable[[], float]:
    """Return what does the work and says how long the device took.

    The device gets all work at once, by a graph behind a kernel that spins, and its own events tell the time. Threads
    that copy keep Python from launching work, and that would count as time of the device.
    """
    if not device.has_streams:
        return lambda: _timed(work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def measure() -> float:
        device.spin(LEAD_S)
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    return measure


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _wait(device: Device) -> None:
    """Wait for the current stream only: transfers on streams of their own go on."""
    if device.has_streams:
        torch.cuda.current_stream(device.place).synchronize()


def _rate(work: Callable[[], None], moved_bytes: int) -> Callable[[], float]:
    def measure() -> float:
        begun = time.perf_counter()
        work()
        return moved_bytes / 1e6 / (time.perf_counter() - begun)

    return measure
