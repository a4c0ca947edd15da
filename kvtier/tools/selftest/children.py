"""The checks that take other processes: host memory that several register, and errors that end a CUDA context.

A child is this module, run with the name of its part. It reports its findings in lines of JSON, and lines tell it to go
on. It ends with its standard input, so none is left behind.
"""

import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self, cast

import torch

from kvtier.kvcache.layout import CanonicalKVCaches, DataRef, ParallelConfig
from kvtier.kvcache.layout.mapping import own_part
from kvtier.kvcache.transfer import CopiersOf, Direction, GroupBlocks, TransferResult, TransferWorker
from kvtier.kvcache.transfer.cuda import BatchedCopy, batched_copy, copiers_with
from kvtier.kvcache.transfer.jobs import Copier
from kvtier.kvcache.transfer.pages import Sides
from kvtier.memory import Region, RowLayout
from kvtier.tools.bench.copies import BACKEND, host_memory
from kvtier.tools.selftest.checks import WAIT_S, Check, row_memory, see_through, submit, worker_of
from kvtier.tools.selftest.device import Device, NotHere, Way, Wrong, device_named
from kvtier.tools.selftest.models import random_bytes, require_same

PROCESSES = 3
PAGES, PAGE_BYTES = 24, 64 << 10
SLICE_BYTES = 1 << 20  # Of registrations in a check: rows lie in several.
HUGE_BYTES = {"cpu": 256 << 20, "cuda": 32 << 30}
HUGE_SHARE = 0.4  # Of the memory that is free now: the rest is the machine's.
HUGE_ROW_BYTES = 2 << 20
CHILD_S = 120.0  # torch takes seconds to be imported, and a context as long to be made.
OUT_OF_MEMORY = 2  # As cudaHostRegister answers.
FAR = 1 << 46  # An address this much further on is nobody's.
DEVICE_BYTES = 256 << 20  # What a child without memory may have of the device: its caches, and not a buffer more.


def checks() -> list[Check]:
    """Return the checks of registration and of errors, in order."""
    shared = f"{PROCESSES} processes register one region, and one that is killed costs the others nothing"
    return [
        Check("memory", shared, share, each_way=False),
        Check(
            "memory", "a huge region is registered in slices, and rows at their edges come back", huge, each_way=False
        ),
        Check("memory", "memory that cannot be registered is said so, and copies are right", refused, each_way=False),
        Check("errors", "a copy with a bad address is never told as made, and does not hang", bad_address),
        Check("errors", "after a kernel's failed assertion transfers fail, and none hangs", _in_child("bad_kernel")),
        Check("errors", "after a reset of the device no transfer is told as made, and none hangs", reset),
        Check("errors", "without memory on the device a transfer works, or the next one does", _in_child("no_memory")),
    ]


def caches_of(pages: int, page_bytes: int, place: torch.device) -> CanonicalKVCaches:
    """Return one layer's pages, zero at first."""
    ref = DataRef(0, page_bytes, ("layer",), own_part(page_bytes, ParallelConfig()))
    return CanonicalKVCaches((torch.zeros((pages, page_bytes), dtype=torch.int8, device=place),), ((ref,),))


def known_bytes(pages: int, page_bytes: int, seed: int) -> torch.Tensor:
    return random_bytes(pages * page_bytes, seed).view(torch.int8).view(pages, page_bytes)


def first_transfers() -> Check:
    """Return the check that comes before all others: what fails there would end the context of this process."""
    return Check("first", "a first store and load work, tried in a process of their own", _in_child("first"))


def _first(device: Device, way: Way) -> Generator[dict[str, object]]:
    caches, right = caches_of(PAGES, PAGE_BYTES, device.place), known_bytes(PAGES, PAGE_BYTES, 1)
    everything = [GroupBlocks(range(PAGES), range(PAGES))]
    with row_memory(device, PAGES, PAGE_BYTES) as rows, worker_of(caches, rows[:, :PAGE_BYTES], way) as worker:
        caches.tensors[0].copy_(right)
        see_through(worker, Direction.STORE, everything)
        caches.tensors[0].zero_()
        see_through(worker, Direction.LOAD, everything)
        device.synchronize()
        require_same("blocks of the first load", caches.tensors[0], right)
    yield {"found": f"{right.nbytes:,} bytes, each way"}


# Registration.


def share(device: Device, way: Way) -> str:
    """Have processes register one region and use a slot of every row each; kill one of them on the way."""
    layout = RowLayout(slot_bytes=PAGE_BYTES, workers=PROCESSES)
    with Region.memfd(PAGES, layout.row_bytes) as region, ExitStack() as stack:
        assert region.fd is not None
        made = [
            stack.enter_context(Child("share", device.name, way.name, str(region.fd), str(rank), fds=(region.fd,)))
            for rank in range(PROCESSES)
        ]
        pinned = [child.says()["pinned"] for child in made]
        if device.pin_with is not None and not all(pinned):
            raise Wrong(f"of {PROCESSES} processes that registered one region, {pinned.count(True)} could")
        with host_memory(region, device.pin_with, pin_slice_bytes=SLICE_BYTES) as memory:  # And a fourth.
            for rank in range(PROCESSES):
                require_same(
                    f"slots of process {rank}", memory.slots(layout, rank), known_bytes(PAGES, PAGE_BYTES, rank)
                )
        made[-1].kill()
        for child in made[:-1]:
            child.tell("load")
            child.says()
    return f"{PROCESSES} processes, pinned: {'yes' if all(pinned) else 'no'}"


def _share(device: Device, way: Way, fd: str, rank: str) -> Generator[dict[str, object]]:
    layout = RowLayout(slot_bytes=PAGE_BYTES, workers=PROCESSES)
    caches, right = caches_of(PAGES, PAGE_BYTES, device.place), known_bytes(PAGES, PAGE_BYTES, int(rank))
    everything = [GroupBlocks(range(PAGES), list(reversed(range(PAGES))))]
    with (
        Region.attach(int(fd), PAGES, layout.row_bytes) as region,
        host_memory(region, device.pin_with, pin_slice_bytes=SLICE_BYTES) as memory,
        worker_of(caches, memory.slots(layout, int(rank)), way) as worker,
    ):
        caches.tensors[0].copy_(right.flip(0))
        see_through(worker, Direction.STORE, everything)
        yield {"pinned": memory.pinned}
        caches.tensors[0].zero_()
        see_through(worker, Direction.LOAD, everything)
        device.synchronize()
        require_same(f"blocks of process {rank}", caches.tensors[0], right.flip(0))
        yield {}


def huge(device: Device, way: Way) -> str:
    """Register as much as can be spared, and copy the rows at the edges of all slices."""
    size_bytes = int(min(HUGE_BYTES[device.name], HUGE_SHARE * _free_bytes()))
    rows = size_bytes // HUGE_ROW_BYTES
    slice_bytes = min(4 << 30, size_bytes // 4)
    slice_rows = slice_bytes // HUGE_ROW_BYTES
    edges = sorted({0, rows - 1, *(edge + side for edge in range(slice_rows, rows, slice_rows) for side in (-1, 0))})
    caches = caches_of(len(edges), HUGE_ROW_BYTES, device.place)
    right = known_bytes(len(edges), HUGE_ROW_BYTES, 1)
    request = [GroupBlocks(range(len(edges)), edges)]
    with (
        Region.private(rows, HUGE_ROW_BYTES) as region,
        host_memory(region, device.pin_with, pin_slice_bytes=slice_bytes) as memory,
    ):
        if device.pin_with is not None and not memory.pinned:
            raise Wrong(f"{size_bytes:,} bytes of host memory could not be pinned")
        with worker_of(caches, memory.rows, way) as worker:
            caches.tensors[0].copy_(right)
            see_through(worker, Direction.STORE, request)
            require_same("rows at edges", memory.rows[edges], right)
            caches.tensors[0].zero_()
            see_through(worker, Direction.LOAD, request)
            device.synchronize()
            require_same("blocks of rows at edges", caches.tensors[0], right)
    return f"{rows * HUGE_ROW_BYTES:,} bytes in slices of {slice_bytes:,}"


def _free_bytes() -> int:
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1_024


class Refusing:
    """Registers nothing: as a driver whose limit is reached."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:  # noqa: ARG002, N802
        return OUT_OF_MEMORY

    def cudaHostUnregister(self, address: int, /) -> int:  # noqa: ARG002, N802
        return 0


def refused(device: Device, way: Way) -> str:
    """Use rows whose registration is refused, as a worker does that chooses itself how to copy."""
    caches, right = caches_of(PAGES, PAGE_BYTES, device.place), known_bytes(PAGES, PAGE_BYTES, 1)
    everything = [GroupBlocks(range(PAGES), range(PAGES))]
    with (
        Region.private(PAGES, PAGE_BYTES) as region,
        _said() as said,
        host_memory(region, Refusing()) as memory,
        worker_of(caches, memory.rows, Way(way.name, None)) as worker,
    ):
        if memory.pinned or not said:
            raise Wrong(f"registration was refused; the log: {said}; the memory is pinned: {memory.pinned}")
        caches.tensors[0].copy_(right)
        see_through(worker, Direction.STORE, everything)
        require_same("rows that are not pinned", memory.rows, right)
        caches.tensors[0].zero_()
        see_through(worker, Direction.LOAD, everything)
        device.synchronize()
        require_same("blocks of rows that are not pinned", caches.tensors[0], right)
    return f"said: {said[0]}"


@contextmanager
def _said() -> Generator[list[str]]:
    """Give what is logged of host memory meanwhile, instead of showing it."""
    said = list[str]()
    heard = logging.getLogger(BACKEND)
    kept, heard.propagate = heard.propagate, False
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    heard.addHandler(listener)
    try:
        yield said
    finally:
        heard.removeHandler(listener)
        heard.propagate = kept


# Errors that a context does not survive. Each is made in a child of its own.


def _in_child(name: str, *, may_end: bool = False) -> Callable[[Device, Way], str]:
    """Return a check that is made in a child; with `may_end` the driver may end the child instead of failing."""

    def check(device: Device, way: Way) -> str:
        if device.name != "cuda":
            raise NotHere(f"{device.name} has no context that an error could end")
        with Child(name, device.name, way.name) as child:
            try:
                return str(child.says()["found"])
            except Ended as ended:
                if not may_end or ended.status >= 0:
                    raise
                return f"the driver ended the process: {signal.strsignal(-ended.status)}"

    return check


def bad_address(device: Device, way: Way) -> str:
    """Copy to addresses that are nobody's, which the driver may look at with the process's own eyes."""
    if device.name == "cuda" and way.name != "batched":
        raise NotHere("only batches are told addresses")
    return _in_child("bad_address", may_end=True)(device, way)


def reset(device: Device, way: Way) -> str:
    """Use streams that a reset has ended, of which CUDA promises nothing."""
    return _in_child("reset", may_end=True)(device, way)


def _bad_address(device: Device, way: Way) -> Generator[dict[str, object]]:  # noqa: ARG001  # A part has both.
    batches = batched_copy(device.place)
    assert batches is not None  # Else there was no such way.

    def astray(copies: Any, stream: int, stable: bool) -> None:
        batches(copies._replace(targets=copies.targets + FAR), stream, stable)

    def copiers(sides: Sides) -> Sequence[Copier]:
        return copiers_with(sides, device.place, cast("BatchedCopy", astray))

    yield {"found": _failure(device, copiers, lambda: None)}


def _bad_kernel(device: Device, way: Way) -> Generator[dict[str, object]]:
    """Have a kernel fail that was launched before a store."""

    def fail() -> None:
        private: Any = torch
        private._assert_async(torch.zeros(1, device=device.place))  # noqa: SLF001  # What compiled models call.

    yield {"found": _failure(device, way.copiers, fail)}


def _reset(device: Device, way: Way) -> Generator[dict[str, object]]:
    """End this process's context, as `cudaDeviceReset` does; other processes' go on."""
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:  # A torch that has it linked in.
        yield {"not_here": f"no shared CUDA runtime: {error}"}
        return
    yield {"found": _failure(device, way.copiers, lambda: runtime.cudaDeviceReset())}


def _failure(device: Device, copiers: CopiersOf | None, spoil: Callable[[], object]) -> str:
    """Spoil the context, or the copy, and store; return how that failed, and `Wrong` if it did not, or hangs."""
    caches = caches_of(PAGES, PAGE_BYTES, device.place)
    with row_memory(device, PAGES, PAGE_BYTES) as rows:
        worker = TransferWorker(caches, rows[:, :PAGE_BYTES], copiers=copiers)
        try:
            spoil()
            submit(worker, 1, Direction.STORE, [GroupBlocks(range(PAGES), range(PAGES))])
        except RuntimeError as error:  # It was refused at once, which is as well.
            return f"refused: {_first_line(error)}"
        if not worker.wait([1], WAIT_S):
            raise Wrong(f"a transfer has not ended after {WAIT_S:.0f} s")
        (result,) = worker.poll()
        if result.error is None:
            raise Wrong("a transfer that could not be made is said to have been made")
        return f"failed: {_first_line(result.error)}"


def _no_memory(device: Device, way: Way) -> Generator[dict[str, object]]:
    """Take all memory that torch may have of the device, store, give it back, and store again."""
    cuda: Any = torch.cuda
    total: int = cuda.get_device_properties(device.place).total_memory
    cuda.set_per_process_memory_fraction(DEVICE_BYTES / total, device.place)
    caches, right = caches_of(PAGES, PAGE_BYTES, device.place), known_bytes(PAGES, PAGE_BYTES, 1)
    caches.tensors[0].copy_(right)
    everything = [GroupBlocks(range(PAGES), range(PAGES))]
    with row_memory(device, PAGES, PAGE_BYTES) as rows, worker_of(caches, rows[:, :PAGE_BYTES], way) as worker:
        taken = _take_everything(device)
        first = _result_of(worker, everything)
        taken.clear()
        torch.cuda.empty_cache()
        rows.zero_()
        see_through(worker, Direction.STORE, everything)
        require_same("rows of a store after memory ran out", rows[:, :PAGE_BYTES], right)
    yield {"found": "worked" if first.error is None else f"failed: {_first_line(first.error)}; the next one worked"}


def _take_everything(device: Device) -> list[torch.Tensor]:
    taken, size_bytes = list[torch.Tensor](), 32 << 20
    while size_bytes >= 1 << 20:
        try:
            taken.append(torch.empty(size_bytes, dtype=torch.int8, device=device.place))
        except torch.OutOfMemoryError:
            size_bytes //= 2
    return taken


def _result_of(worker: TransferWorker, groups: list[GroupBlocks]) -> TransferResult:
    submit(worker, 1, Direction.STORE, groups)
    if not worker.wait([1], WAIT_S):
        raise Wrong(f"a transfer has not ended after {WAIT_S:.0f} s")
    (result,) = worker.poll()
    return result


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


# A child, from both sides.


class Ended(Wrong):
    """A child ended before it said anything."""

    def __init__(self, part: str, status: int) -> None:
        super().__init__(f"the process for {part!r} said nothing; exit status {status}")
        self.status = status


PARTS: dict[str, Callable[..., Generator[dict[str, object]]]] = {
    "first": _first,
    "share": _share,
    "bad_address": _bad_address,
    "bad_kernel": _bad_kernel,
    "reset": _reset,
    "no_memory": _no_memory,
}


class Child:
    """A child process that is gone at the end of a `with`, whatever happens."""

    def __init__(self, part: str, *arguments: str, fds: tuple[int, ...] = ()) -> None:
        self._part = part
        self._process = subprocess.Popen(  # noqa: S603  # Our own module.
            [sys.executable, "-m", "kvtier.tools.selftest.children", part, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            text=True,
        )

    def says(self) -> dict[str, Any]:
        """Return what it says next; `Wrong` if that is a fault, or nothing for too long; `Ended` if it has ended."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], CHILD_S)
        if not readable:
            raise Wrong(f"the process for {self._part!r} said nothing for {CHILD_S:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise Ended(self._part, self._process.wait())
        found: dict[str, Any] = json.loads(line)
        if "wrong" in found:
            raise Wrong(found["wrong"])
        if "not_here" in found:
            raise NotHere(found["not_here"])
        return found

    def tell(self, word: str) -> None:
        """Have it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main(part: str, device_name: str, way_name: str, *arguments: str) -> None:
    """Be a child: take the part's steps, one for each line that is read, and say what each found."""
    device = device_named(device_name)
    way = next(way for way in device.ways if way.name == way_name)
    steps = PARTS[part](device, way, *arguments)
    try:
        for found in steps:
            print(json.dumps(found), flush=True)  # noqa: T201  # A child speaks to its parent so.
            if not sys.stdin.readline():
                break
    except Exception as error:  # noqa: BLE001  # A device fails as it likes, and the parent says what came of it.
        wrong = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
        print(json.dumps({"wrong": wrong}), flush=True)  # noqa: T201
    os._exit(0)  # What is left of a context that has ended cannot be taken down in order.


if __name__ == "__main__":
    main(*sys.argv[1:])
