"""Copies between a CUDA device and pinned host memory: streams of our own, one each way.

Many pages are copied in one call. By drivers that have no such call, whole chunks are copied through a buffer on the
device. A kernel is avoided where possible, because the copy engines move bytes while the device computes. Work that was
launched before a transfer was submitted may write the blocks that are stored, or clear those that are loaded. The
device waits for it, by an event, and never the host.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from kvtier.errors import Remedy
from kvtier.kvcache.layout.blocks import storage_of
from kvtier.kvcache.transfer.jobs import Copier, CopyJob, Direction, Finish
from kvtier.kvcache.transfer.pages import BlockPages, Indices, Mask, Piece, Sides, repeated
from kvtier.kvcache.transfer.strided import Strided, copy_alike, strided

BATCH_COPIES_MAX = 8_192  # In one call: its arguments become lists of as many addresses.
AHEAD = 4  # Transfers begun before the first has ended: the next one's addresses are ready when the device is.
BUFFER_BYTES_MAX = 64 << 20  # A few milliseconds of a PCIe link; taken from the memory that caches could have.
WITHOUT_BATCHES = "No batched copies, so chunks go through a buffer on the device: %s; see %s"

_SUCCESS = 0
_IN_STREAM_ORDER, _ANY_TIME = 1, 3  # cudaMemcpySrcAccessOrderStream and -Any.
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
    """The copier of one direction between a device and the host, on a stream of its own.

    Loads' stream goes before stores' and before kernels.
    """

    ahead = AHEAD

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
    """Return a copier for each direction: pages in batches or, without driver or pinned rows for them, whole chunks."""
    if not sides.slots.is_pinned():
        logger.warning(WITHOUT_BATCHES, "rows are not pinned", Remedy.UNPINNED)
        return copiers_with(sides, device, None)
    return copiers_with(sides, device, batched_copy(device))


def copiers_with(sides: Sides, device: torch.device, copy: BatchedCopy | None) -> list[Copier]:
    """Return a copier for each direction, with these batched copies; None: whole chunks through a buffer."""
    copiers = list[Copier]()
    for direction in Direction:
        begin: DeviceCopy = StagedCopies(sides) if copy is None else batched(sides, copy)
        copiers.append(CudaCopier(direction, device, begin))
    if copy is None:  # The buffers' memory may still be in use by the LLM engine's stream.
        torch.cuda.synchronize(device)
    return copiers


def batched(sides: Sides, copy: BatchedCopy) -> DeviceCopy:
    """Return a `DeviceCopy` that copies single pages, many in one call."""

    def begin(job: CopyJob) -> None:
        copies = descriptors(sides, job.direction, job.groups)
        stream = torch.cuda.current_stream().cuda_stream
        for first in range(0, len(copies.sizes), BATCH_COPIES_MAX):
            part = Descriptors(*(column[first : first + BATCH_COPIES_MAX] for column in copies))
            copy(part, stream, job.direction is Direction.LOAD)

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
        logger.warning(WITHOUT_BATCHES, f"{error} (kvtier[cuda] has them)", Remedy.UNBATCHED)
        return None
    return copy


def descriptors(sides: Sides, direction: Direction, groups: tuple[BlockPages, ...]) -> Descriptors:
    """Return a transfer's copies: page by page, neighbours joined."""
    slots, columns = sides.slots, [(_NONE, _NONE, _NONE, _NONE)]
    for group, pages in zip(sides.pieces, groups, strict=True):
        for piece in group:
            moved = pages
            if direction is Direction.STORE:
                moved = pages.written_by(sides.blocks_per_chunk, piece.writers, piece.writer_index)
            in_cache = storage_of(piece.memory) + piece.local + moved.blocks * piece.local_stride
            in_first = slots.data_ptr() + piece.host + moved.positions * piece.host_stride
            in_slots = in_first + moved.rows * slots.stride(0)
            columns.append(_fragments(piece, in_cache, piece.local_repeats, in_slots, moved.rows))
    local, host, sizes, rows = map(np.concatenate, zip(*columns, strict=True))
    return joined(local, host, sizes, rows) if direction is Direction.STORE else joined(host, local, sizes, rows)


def _fragments(
    piece: Piece, one: Indices, repeats: list[tuple[int, int]], slots: Indices, rows: Indices
) -> tuple[Indices, Indices, Indices, Indices]:
    """Return source and target addresses, sizes and rows of a piece's fragments, for pages at `one` and at `slots`.

    `repeats` are the piece's on the side of `one`.
    """
    places, in_slots = repeated(one, repeats), repeated(slots, piece.host_repeats)
    in_rows = repeated(rows, [(times, 0) for times, _ in repeats])
    return places, in_slots, np.full(len(places), piece.size_bytes), in_rows


def joined(sources: Indices, targets: Indices, sizes: Indices, rows: Indices) -> Descriptors:
    """Order copies by their targets, and make one of those that follow each other on both sides, within a row.

    Not beyond: rows are pinned in slices, and CUDA refuses a copy that reaches over two of them.
    """
    order = np.argsort(targets, kind="stable")
    sources, targets, sizes, rows = sources[order], targets[order], sizes[order], rows[order]
    follows = (sources[:-1] + sizes[:-1] == sources[1:]) & (targets[:-1] + sizes[:-1] == targets[1:])
    follows &= rows[:-1] == rows[1:]
    firsts = np.flatnonzero(np.concatenate((np.ones(min(1, len(sizes)), dtype=bool), ~follows)))
    return Descriptors(sources[firsts], targets[firsts], np.add.reduceat(sizes, firsts) if len(sizes) else sizes)


class StagedCopies:
    """Copies of whole chunks through a buffer on the device, where there are no batched copies.

    The device gathers pages into chunks, and whole chunks are copied to the host, or the other way round. So there is
    one copy a chunk, in place of one a page and layer. The price is a pass over the device's own memory. A call begins
    a transfer's copies on the current stream. The stream must be the same for all calls, because they use one buffer in
    turn.
    """

    def __init__(self, sides: Sides) -> None:
        slots = sides.slots
        rows = max(1, min(slots.shape[0], BUFFER_BYTES_MAX // slots.shape[1]))
        device = next(piece.memory.device for group in sides.pieces for piece in group)
        self._buffer = torch.empty((rows, slots.shape[1]), dtype=torch.int8, device=device)
        self._slots = slots
        self._blocks_per_chunk = sides.blocks_per_chunk
        buffered = sides._replace(slots=self._buffer)
        self._groups: list[list[tuple[Piece, Strided]]] = [
            # The writing worker follows from the row, which the buffer does not have.
            [(piece, strided(piece._replace(writers=1, writer_index=0), buffered)) for piece in group]
            for group in sides.pieces
        ]

    def __call__(self, job: CopyJob) -> None:
        for group, pages in zip(self._groups, job.groups, strict=True):
            for some, buffered in self._in_parts(pages):
                if job.direction is Direction.STORE:
                    self._store(group, some, buffered)
                else:
                    self._load(group, some, buffered)

    def _in_parts(self, pages: BlockPages) -> Iterator[tuple[BlockPages, BlockPages]]:
        """Yield parts whose chunks fit the buffer: the pages by their own rows, and by the buffer's."""
        starts = np.flatnonzero(np.diff(pages.rows, prepend=-1))
        chunks = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(pages.rows)))
        for first in range(0, len(starts), len(self._buffer)):
            part = (chunks >= first) & (chunks < first + len(self._buffer))
            some = pages.only(part)
            yield some, some._replace(rows=chunks[part] - first)

    def _store(self, group: list[tuple[Piece, Strided]], some: BlockPages, buffered: BlockPages) -> None:
        for piece, gather in group:
            moved = buffered.only(self._turn(piece, some))
            copy_alike(Direction.STORE, [gather], moved)
        copies = self._whole(group, some, buffered, stores=True)
        into, out_of = _bytes_of(self._slots), _bytes_of(self._buffer)
        for source, target, size in zip(*(column.tolist() for column in copies), strict=True):
            into[target : target + size].copy_(out_of[source : source + size], non_blocking=True)

    def _load(self, group: list[tuple[Piece, Strided]], some: BlockPages, buffered: BlockPages) -> None:
        copies = self._whole(group, some, buffered, stores=False)
        into, out_of = _bytes_of(self._buffer), _bytes_of(self._slots)
        for target, source, size in zip(*(column.tolist() for column in copies), strict=True):
            into[target : target + size].copy_(out_of[source : source + size], non_blocking=True)
        for _, scatter in group:
            copy_alike(Direction.LOAD, [scatter], buffered)

    def _whole(
        self, group: list[tuple[Piece, Strided]], some: BlockPages, buffered: BlockPages, *, stores: bool
    ) -> Descriptors:
        """Return the copies from the buffer to the slots, as offsets into each: whole chunks where pages make them."""
        columns = list[tuple[Indices, Indices, Indices, Indices]]()
        for piece, _ in group:
            turn = self._turn(piece, some) if stores else np.ones(len(some.rows), dtype=bool)
            within = piece.host + some.positions[turn] * piece.host_stride
            in_buffer = within + buffered.rows[turn] * self._buffer.stride(0)
            in_slots = within + some.rows[turn] * self._slots.stride(0)
            columns.append(_fragments(piece, in_buffer, piece.host_repeats, in_slots, some.rows[turn]))
        return joined(*map(np.concatenate, zip(*columns, strict=True)))

    def _turn(self, piece: Piece, some: BlockPages) -> Mask:
        return some.turn(self._blocks_per_chunk, piece.writers, piece.writer_index)


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
    """Copy a few bytes; RuntimeError if that fails. A driver that is too old fails only when called."""
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


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the rows, with the gaps between them, as one axis."""
    return rows.as_strided(((rows.shape[0] - 1) * rows.stride(0) + rows.shape[1],), (1,))
