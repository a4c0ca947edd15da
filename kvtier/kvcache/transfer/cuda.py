"""Copies between a CUDA device and pinned host memory: streams of our own, one each way, and many copies in one call.

Not a kernel where it can be helped: the copy engines move bytes while the device computes. What the device was told to
do before a transfer was submitted (write the blocks that are stored, clear those that are loaded) is waited for on the
device, by an event, never by the host.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from kvtier.kvcache.transfer.copiers import Copier, Finish
from kvtier.kvcache.transfer.descriptors import Descriptors, descriptors
from kvtier.kvcache.transfer.jobs import Job, Kind
from kvtier.kvcache.transfer.pieces import Piece
from kvtier.kvcache.transfer.staged import StagedCopies

BATCH_COPIES_MAX = 8_192  # Of one call; its arguments become lists and arrays of as many addresses.
AHEAD = 4  # Transfers begun before the first has ended: the next one's addresses are ready when the device is.

_SUCCESS = 0
_IN_STREAM_ORDER, _ANY_TIME = 1, 3  # cudaMemcpySrcAccessOrderStream and -Any.

logger = logging.getLogger(__name__)

BatchedCopy = Callable[[Descriptors, int, bool], None]
"""Begins the copies on a stream, by its handle; True: their sources do not change meanwhile."""

DeviceCopy = Callable[[Job], None]
"""Begins a transfer's copies on the current stream."""


class CudaCopier:
    """One way between a device and the host, on a stream of its own; loads' goes before stores' and kernels."""

    ahead = AHEAD

    def __init__(self, kind: Kind, device: torch.device, copy: DeviceCopy) -> None:
        self.kinds = (kind,)
        self._device = device
        self._copy = copy
        self._stream = torch.cuda.Stream(device, priority=-1 if kind is Kind.LOAD else 0)  # type: ignore[no-untyped-call]

    def mark(self) -> object:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self, job: Job) -> Finish:
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # Who waits for it sleeps.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(cast("torch.cuda.Event", job.mark))
            try:
                self._copy(job)
                end.record(self._stream)
            except BaseException:
                self._stream.synchronize()  # A part of it may be under way, and whoever is told takes the rows back.
                raise
        return end.synchronize


def cuda_copiers(
    pieces: tuple[tuple[Piece, ...], ...],
    slots: torch.Tensor,
    blocks_per_chunk: int,
    num_blocks: int,
    device: torch.device,
) -> list[Copier]:
    """Return a copier for either way: pages in batches or, where the driver has none, whole chunks."""
    copy = batched_copy(device)
    copiers = list[Copier]()
    for kind in Kind:
        begin: DeviceCopy = (
            StagedCopies(pieces, slots, blocks_per_chunk, num_blocks)
            if copy is None
            else batched(pieces, slots, blocks_per_chunk, copy)
        )
        copiers.append(CudaCopier(kind, device, begin))
    if (
        copy is None
    ):  # The buffers' memory was the engine's stream's, which may still work on it: not behind our streams.
        torch.cuda.synchronize(device)
    return copiers


def batched(
    pieces: tuple[tuple[Piece, ...], ...], slots: torch.Tensor, blocks_per_chunk: int, copy: BatchedCopy
) -> DeviceCopy:
    """Return what begins a transfer as copies of single pages, many in one call."""

    def begin(job: Job) -> None:
        copies = descriptors(pieces, slots, job.kind, job.groups, blocks_per_chunk)
        stream = torch.cuda.current_stream().cuda_stream
        for first in range(0, len(copies.sizes), BATCH_COPIES_MAX):
            part = Descriptors(*(column[first : first + BATCH_COPIES_MAX] for column in copies))
            copy(part, stream, job.kind is Kind.LOAD)

    return begin


def batched_copy(device: torch.device) -> BatchedCopy | None:
    """Return `cudaMemcpyBatchAsync` of cuda-python; None, and a warning, where that or the driver does not have it."""
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
        if not hasattr(runtime, "cudaMemcpyBatchAsync"):
            raise ImportError("cuda-bindings older than 12.8")
        copy = _through(runtime)
        _require_host_addresses(runtime, device)
        _try_out(copy, device)
    except (ImportError, RuntimeError) as error:
        reason = "No batched copies (kvtier[cuda] has them), so chunks go through a buffer on the device: %s"
        logger.warning(reason, error)
        return None
    return copy


def _require_host_addresses(runtime: Any, device: torch.device) -> None:
    """Raise RuntimeError where pinned memory has another address on the device: batches fault there."""
    attribute = runtime.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
    error, able = runtime.cudaDeviceGetAttribute(attribute, device.index or 0)
    if int(error) != _SUCCESS:
        raise RuntimeError(f"cudaDeviceGetAttribute: {error}")
    if not able:
        raise RuntimeError(f"{device} takes no addresses of registered host memory")


def _through(runtime: Any) -> BatchedCopy:
    orders = {}
    for stable, order in ((False, _IN_STREAM_ORDER), (True, _ANY_TIME)):
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder(order)
        orders[stable] = attributes

    def copy(copies: Descriptors, stream: int, stable: bool) -> None:
        count = len(copies.sizes)
        answer = runtime.cudaMemcpyBatchAsync(
            copies.targets.tolist(),
            copies.sources.tolist(),
            copies.sizes.tolist(),
            count,
            [orders[stable]],
            [0],
            1,
            stream,
        )
        if int(answer[0]) != _SUCCESS:  # Before CUDA 13 it also says which copy failed.
            raise RuntimeError(f"cudaMemcpyBatchAsync of {count} copies: {answer}")

    return copy


def _try_out(copy: BatchedCopy, device: torch.device) -> None:
    """Copy a few bytes; RuntimeError if that does not work. A driver that is too old says so only when called."""
    source = torch.arange(16, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        copy(_whole(source, target), stream.cuda_stream, False)
        stream.synchronize()
    if not torch.equal(source, target):
        raise RuntimeError("cudaMemcpyBatchAsync says that it copied, and did not")


def _whole(source: torch.Tensor, target: torch.Tensor) -> Descriptors:
    columns = (source.data_ptr(), target.data_ptr(), source.nbytes)
    return Descriptors(*(np.array([value]) for value in columns))
