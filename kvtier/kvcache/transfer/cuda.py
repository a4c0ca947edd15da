"""Copies between a CUDA device and pinned host memory: streams of our own, one each way.

Many pages are copied in one call, or one by one where the driver is older. There is no kernel: copy engines move bytes
while the device computes. The device, never the host, waits by an event for work launched before the submission.
"""

import ctypes
import logging
from bisect import bisect
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import torch

from kvtier.errors import Remedy
from kvtier.kvcache.layout.axes import storage_of, view_of
from kvtier.kvcache.transfer.jobs import Copier, CopyJob, Finish
from kvtier.kvcache.transfer.pages import BlockPages, Direction, Indices, Sides, repeated

BATCH_COPIES_MAX = 8_192  # In one call: the first are under way while the next are submitted.
WITHOUT_BATCHES = "No batched copies, so pages are copied one by one: %s; see %s"

_DRIVER = "libcuda.so.1"
_SUCCESS = 0
_HOST_ADDRESSES = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM.
_IN_STREAM_ORDER, _ANY_TIME = 1, 3  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM and _ANY.
_NONE = np.empty(0, dtype=np.int64)

logger = logging.getLogger(__name__)


class Descriptors(NamedTuple):
    """Copy i moves `sizes[i]` bytes from `sources[i]` to `targets[i]`. No two share bytes of their targets."""

    sources: Indices
    targets: Indices
    sizes: Indices


BatchedCopy = Callable[[Descriptors, int, bool], None]
"""Begins the copies on a stream, by its handle; True: their sources do not change meanwhile."""

DeviceCopy = Callable[[CopyJob], None]
"""Begins a transfer's copies on the current stream."""


class CudaCopier:
    """The copier of one direction between a device and the host; loads' stream goes before stores' and kernels."""

    ahead = 4  # Transfers begun before the first has ended: the next one's addresses are ready when the device is.

    def __init__(self, direction: Direction, device: torch.device, copy: DeviceCopy) -> None:
        self.directions = (direction,)
        self._device = device
        self._copy = copy
        self._stream = torch.cuda.Stream(device, priority=-1 if direction is Direction.LOAD else 0)  # type: ignore[no-untyped-call]

    def mark(self) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self, job: CopyJob) -> Finish:
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # Who waits for it sleeps.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(cast("torch.cuda.Event", job.mark))
            try:
                self._copy(job)
                end.record(self._stream)
            except BaseException:
                self._stream.synchronize()  # A part may be in flight, and the caller will reuse the rows.
                raise
        return end.synchronize


def cuda_copiers(sides: Sides, device: torch.device) -> list[Copier]:
    """Return a copier for each direction: pages in batches or, without driver or pinned rows for them, one by one."""
    if not sides.slots.is_pinned():
        logger.warning(WITHOUT_BATCHES, "rows are not pinned", Remedy.UNPINNED)
        return copiers_with(sides, device, None)
    return copiers_with(sides, device, batched_copy(device))


def copiers_with(sides: Sides, device: torch.device, copy: BatchedCopy | None) -> list[Copier]:
    """Return a copier for each direction, with these batched copies; None: one by one."""
    begin = one_by_one(sides) if copy is None else batched(sides, copy)
    return [CudaCopier(direction, device, begin) for direction in Direction]


def batched(sides: Sides, copy: BatchedCopy) -> DeviceCopy:
    """Return a `DeviceCopy` that copies single pages, many in one call."""

    def begin(job: CopyJob) -> None:
        copies = descriptors(sides, job.direction, job.groups)
        stream = torch.cuda.current_stream().cuda_stream
        for first in range(0, len(copies.sizes), BATCH_COPIES_MAX):
            part = Descriptors(*(column[first : first + BATCH_COPIES_MAX] for column in copies))
            copy(part, stream, job.direction is Direction.LOAD)

    return begin


def one_by_one(sides: Sides) -> DeviceCopy:
    """Return a `DeviceCopy` by torch's own copies, which take any memory: slower, by a call for each page."""
    tensors = [sides.slots, *(piece.memory for group in sides.pieces for piece in group)]
    memories = {
        storage_of(each): view_of(each, torch.int8, (each.untyped_storage().nbytes(),), (1,), 0) for each in tensors
    }
    starts = sorted(memories)

    def at(address: int, size_bytes: int) -> torch.Tensor:
        start = starts[bisect(starts, address) - 1]
        return memories[start][address - start :][:size_bytes]

    def begin(job: CopyJob) -> None:
        copies = descriptors(sides, job.direction, job.groups)
        for source, target, size_bytes in zip(*(column.tolist() for column in copies), strict=True):
            at(target, size_bytes).copy_(at(source, size_bytes), non_blocking=True)

    return begin


def batched_copy(device: torch.device) -> BatchedCopy | None:
    """Return the driver's `cuMemcpyBatchAsync`; None, and a warning, where it has none, or fails."""
    try:
        driver = ctypes.CDLL(_DRIVER)
        copy = _through(driver)
        _require_host_addresses(driver, device)
        _try_out(copy, device)
    except (AttributeError, OSError, RuntimeError) as error:  # AttributeError: a driver older than CUDA 12.0.
        logger.warning(WITHOUT_BATCHES, error, Remedy.UNBATCHED)
        return None
    return copy


def descriptors(sides: Sides, direction: Direction, groups: tuple[BlockPages, ...]) -> Descriptors:
    """Return a transfer's copies: page by page, neighbours joined."""
    slots, columns, allocations = sides.slots, [(_NONE, _NONE, _NONE, _NONE)], dict[int, int]()
    for group, pages in zip(sides.pieces, groups, strict=True):
        for piece in group:
            moved = sides.moved(direction, piece, pages)
            storage = storage_of(piece.memory)
            in_one = moved.rows + allocations.setdefault(storage, len(allocations)) * len(slots)
            in_cache = storage + piece.local + moved.blocks * piece.local_stride
            in_slots = (
                slots.data_ptr() + piece.host + moved.positions * piece.host_stride + moved.rows * slots.stride(0)
            )
            places = repeated(in_cache, [(repeat.times, repeat.local) for repeat in piece.repeats])
            wholes = repeated(in_one, [(repeat.times, 0) for repeat in piece.repeats])
            in_slots = repeated(in_slots, [(repeat.times, repeat.host) for repeat in piece.repeats])
            columns.append((places, in_slots, np.full(len(places), piece.size_bytes), wholes))
    local, host, sizes, wholes = map(np.concatenate, zip(*columns, strict=True))
    return joined(local, host, sizes, wholes) if direction is Direction.STORE else joined(host, local, sizes, wholes)


def joined(sources: Indices, targets: Indices, sizes: Indices, wholes: Indices) -> Descriptors:
    """Order copies by their targets, and make one of those that follow each other on both sides, within a whole.

    A whole is a row and an allocation of the device, by number. Rows are pinned in slices, and CUDA refuses a copy that
    reaches over two of them. Two allocations may lie side by side, too.
    """
    order = np.argsort(targets, kind="stable")
    sources, targets, sizes, wholes = sources[order], targets[order], sizes[order], wholes[order]
    follows = (sources[:-1] + sizes[:-1] == sources[1:]) & (targets[:-1] + sizes[:-1] == targets[1:])
    follows &= wholes[:-1] == wholes[1:]
    firsts = np.flatnonzero(np.concatenate((np.ones(min(1, len(sizes)), dtype=bool), ~follows)))
    return Descriptors(sources[firsts], targets[firsts], np.add.reduceat(sizes, firsts) if len(sizes) else sizes)


def _require_host_addresses(driver: ctypes.CDLL, device: torch.device) -> None:
    """Raise RuntimeError where pinned memory has another address on the device: batches fault there."""
    handle, able = ctypes.c_int(), ctypes.c_int()
    error = driver.cuDeviceGet(ctypes.byref(handle), device.index or 0)
    error = error or driver.cuDeviceGetAttribute(ctypes.byref(able), _HOST_ADDRESSES, handle)
    if error != _SUCCESS:
        raise RuntimeError(f"cuDeviceGetAttribute: {error}")
    if not able.value:
        raise RuntimeError(f"{device} takes no addresses of registered host memory")


def _through(driver: ctypes.CDLL) -> BatchedCopy:
    """Call the driver itself: cuda-bindings makes an object of each address, which takes as long as copying 64 KiB."""
    address = ctypes.c_void_p()
    error = driver.cuGetProcAddress_v2(b"cuMemcpyBatchAsync", ctypes.byref(address), 12_080, ctypes.c_uint64(), None)
    if error != _SUCCESS or not address.value:
        raise RuntimeError(f"no cuMemcpyBatchAsync in a driver older than CUDA 12.8: error {error}")
    pointer, count = ctypes.c_void_p, ctypes.c_size_t
    begin = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, count, pointer, pointer, count, pointer, pointer)(
        address.value
    )

    def copy(copies: Descriptors, stream: int, stable: bool) -> None:
        targets, sources, sizes = map(np.ascontiguousarray, (copies.targets, copies.sources, copies.sizes))
        attributes = (ctypes.c_int * 6)(_ANY_TIME if stable else _IN_STREAM_ORDER)  # Then no hints, no flags.
        first, failed = ctypes.c_size_t(), ctypes.c_size_t()
        error = begin(
            *(each.ctypes.data for each in (targets, sources, sizes)), len(sizes),
            attributes, ctypes.byref(first), 1, ctypes.byref(failed), stream,
        )  # fmt: skip
        if error != _SUCCESS:
            raise RuntimeError(f"cuMemcpyBatchAsync of {len(sizes)} copies: error {error} at copy {failed.value}")

    return copy


def _try_out(copy: BatchedCopy, device: torch.device) -> None:
    """Copy a few bytes; RuntimeError if that fails. A driver that is too old fails only when called."""
    source = torch.arange(16, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    whole = Descriptors(*(np.array([value]) for value in (source.data_ptr(), target.data_ptr(), source.nbytes)))
    with torch.cuda.device(device):
        copy(whole, stream.cuda_stream, False)
        stream.synchronize()
    if not torch.equal(source, target):
        raise RuntimeError("cuMemcpyBatchAsync says that it copied, and did not")
