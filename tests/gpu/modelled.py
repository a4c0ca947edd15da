"""A device that is modelled: host memory behind streams that are threads, and `torch.cuda` as far as transfers use it.

What is launched on a stream is done later, by the stream's thread, as on a real device; so what kvtier tells a device,
and in which order, runs here as it would there. How fast it is says nothing.
"""

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from kvtier.kvcache.transfer.cuda import Descriptors, copiers_with
from kvtier.tools.selftest.device import Way


class Stream:
    """A thread that does what it is told, one thing after the other."""

    of_handle: dict[int, "Stream"] = {}  # noqa: RUF012  # As a driver knows them.

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream = id(self)
        self.of_handle[self.cuda_stream] = self
        self._told = queue.SimpleQueue[Callable[[], None]]()
        threading.Thread(target=self._serve, daemon=True).start()

    def tell(self, work: Callable[[], None]) -> None:
        self._told.put(work)

    def wait_event(self, event: "Event") -> None:
        self.tell(event.synchronize)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()

    def _serve(self) -> None:
        while True:
            self._told.get()()


class Event:
    """A place in what a stream was told."""

    def __init__(self, blocking: bool = False) -> None:
        self._reached = threading.Event()

    def record(self, stream: Stream | None = None) -> None:
        (stream or current()).tell(self._reached.set)

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()


ENGINES = Stream()
HERE = threading.local()


def current(device: object = None) -> Stream:
    found: Stream = getattr(HERE, "stream", ENGINES)
    return found


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    before, HERE.stream = current(), stream
    try:
        yield
    finally:
        HERE.stream = before


def batches(copies: Descriptors, handle: int, stable: bool) -> None:
    """Copy on the stream, when its turn comes; what is stable may be read at once, and is."""
    each = list(zip(*(column.tolist() for column in copies), strict=True))
    read = [ctypes.string_at(source, size) for source, _, size in each] if stable else []

    def move() -> None:
        for number, (source, target, size) in enumerate(each):
            ctypes.memmove(target, read[number] if stable else source, size)

    Stream.of_handle[handle].tell(move)


class Modelled:
    """The device, with a way to copy of the test's own or the one that is right."""

    name = "modelled"
    has_streams = True
    pin_with: object | None = None

    def __init__(self, ways: Sequence[Way] = ()) -> None:
        self.place = torch.device("cpu")
        self.ways = ways or (Way("batched", lambda sides: copiers_with(sides, self.place, batches)),)

    def launch(self, work: Callable[[], None]) -> None:
        current().tell(work)

    def spin(self, seconds: float) -> None:
        current().tell(lambda: time.sleep(seconds))  # As a kernel that spins: it is what takes the time.

    def mark(self) -> Callable[[], bool]:
        event = Event()
        event.record()
        return event.query

    def synchronize(self) -> None:
        for stream in list(Stream.of_handle.values()):
            stream.synchronize()


def model(patch: pytest.MonkeyPatch) -> None:
    """Put the model in the place of `torch.cuda`."""
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "stream", on)
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(torch.cuda, "current_stream", current)
