"""A modelled device: host memory behind streams that are threads, and the part of `torch.cuda` that transfers use.

A stream's thread does later what is launched on the stream, as a real device does. So kvtier's own calls, and their
order, run here as they would there.
"""

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from kvtier.kvcache.transfer.cuda import copiers_with
from kvtier.tools.selftest_checks import TorchDevice

SPIN_S = 0.2  # Longer than a thread waits for its turn, unless the machine is very busy: then a check tries again.


class Stream:
    of_handle: dict[int, "Stream"] = {}  # noqa: RUF012  # As a driver knows them.

    def __init__(self, device=None, priority=0):
        self.cuda_stream = id(self)
        self.of_handle[self.cuda_stream] = self
        self._told = queue.SimpleQueue[Callable[[], object]]()
        threading.Thread(target=self._serve, daemon=True).start()

    def tell(self, work):
        self._told.put(work)

    def wait_event(self, event):
        self.tell(event.synchronize)

    def synchronize(self):
        event = Event()
        event.record(self)
        event.synchronize()

    def _serve(self):
        while True:
            self._told.get()()


class Event:
    def __init__(self, blocking=False):
        self._reached = threading.Event()

    def record(self, stream=None):
        (stream or current()).tell(self._reached.set)

    def query(self):
        return self._reached.is_set()

    def synchronize(self):
        self._reached.wait()


ENGINES = Stream()
HERE = threading.local()


def current(device=None):
    return getattr(HERE, "stream", ENGINES)


@contextlib.contextmanager
def on(stream):
    before, HERE.stream = current(), stream
    try:
        yield
    finally:
        HERE.stream = before


def batches(copies, handle, stable):
    """Copy on the stream, when its turn comes; what is stable may be read at once, and is."""
    each = list(zip(*(column.tolist() for column in copies), strict=True))
    read = [ctypes.string_at(source, size) for source, _, size in each] if stable else []

    def move():
        for number, (source, target, size) in enumerate(each):
            ctypes.memmove(target, read[number] if stable else source, size)

    Stream.of_handle[handle].tell(move)


class Modelled(TorchDevice):
    def __init__(self):
        super().__init__("cpu")
        self.has_streams = True
        self.copiers, self.spin_s = partial(copiers_with, device=self.place, copy=batches), SPIN_S

    def launch_late(self, work):
        current().tell(lambda: time.sleep(self.spin_s))  # The kernel that spins: it is what takes the time.
        current().tell(work)
        done = Event()
        done.record()
        return lambda: not done.query()

    def synchronize(self):
        for stream in list(Stream.of_handle.values()):
            stream.synchronize()


def model(patch):
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "stream", on)
    patch.setattr(torch.cuda, "device", contextlib.nullcontext)
    patch.setattr(torch.cuda, "current_stream", current)
