"""The transfer worker: submitting never waits, its threads copy between caches and rows, results are polled."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Self

import torch

from kvtier.errors import ConfigError, TransferFailed
from kvtier.kvcache.layout.canonical import CanonicalKVCaches
from kvtier.kvcache.transfer.cuda import cuda_copiers
from kvtier.kvcache.transfer.jobs import Copier, CopyJob, CopyJobs, Finish, TransferResult
from kvtier.kvcache.transfer.pages import Direction, GroupBlocks, Sides, pages_of, pieces_of, slot_layout
from kvtier.kvcache.transfer.strided import HostCopier
from kvtier.memory import start_thread

CopiersOf = Callable[[Sides], Sequence[Copier]]
"""Makes the copiers between two sides: one for each direction, or one for both."""


class TransferWorker:
    """Stores and loads chunks: the LLM engine's blocks to and from rows.

    `slots` is (rows, slot_bytes), int8, in host memory. It is this worker's slot of every row (`CpuMemory.slots`). With
    `canonical` it is all of every row, and all workers share it. A row that is lent to a transfer is the worker's until
    the transfer's result is reported, even if it failed. Until then, the blocks of a store must not change, and those
    of a load must not be used. On a CUDA device, a transfer waits for work that was launched on the current stream
    before its submission.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        slots: torch.Tensor,
        *,
        blocks_per_chunk: int = 1,
        canonical: bool = False,
        copiers: CopiersOf | None = None,
    ) -> None:
        """Make `copiers`, by default those of the caches' device. `ConfigError` if chunks do not fit into slots."""
        self.layout = slot_layout(caches, blocks_per_chunk, canonical=canonical)
        in_host_memory = slots.device.type == "cpu" and slots.dtype == torch.int8
        if not in_host_memory or slots.ndim != 2 or slots.shape[1] < self.layout.slot_bytes or slots.stride(1) != 1:
            raise ConfigError(
                f"slots of {tuple(slots.shape)} {slots.dtype} on {slots.device}, strides {slots.stride()}: "
                f"(rows, {self.layout.slot_bytes:,} or more) int8 side by side in host memory accepted"
            )
        self._sides = Sides(pieces_of(caches, self.layout), slots, blocks_per_chunk, caches.num_blocks)
        self._jobs = CopyJobs()
        made = (copiers or _copiers)(self._sides)
        self._copiers: dict[Direction, Copier] = {way: copier for copier in made for way in copier.directions}
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs, copier), name="kvtier-copies", daemon=True)
            for copier in made
        ]
        with ExitStack() as undo:  # A process may have no more threads.
            undo.callback(self.close)
            for thread in self._threads:
                start_thread(thread)
            undo.pop_all()

    def submit_store(self, job_id: int, groups: Sequence[GroupBlocks]) -> None:
        """Begin to copy blocks into rows; one `GroupBlocks` for each of the model's groups, empty ones included.

        Raises `ValueError`, with nothing begun, for an id in use, or blocks and rows that do not exist.
        """
        self._submit(job_id, Direction.STORE, groups)

    def submit_load(self, job_id: int, groups: Sequence[GroupBlocks]) -> None:
        """Begin to copy rows into blocks; as `submit_store`."""
        self._submit(job_id, Direction.LOAD, groups)

    def poll(self) -> list[TransferResult]:
        """Return the results of transfers that ended since the last call, in that order; never waits."""
        return self._jobs.poll()

    def wait(self, job_ids: Collection[int], timeout_s: float | None = None) -> bool:
        """Block until these transfers have ended; False after `timeout_s`. Their results are still to be polled."""
        return self._jobs.wait(job_ids, timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse new transfers and block until the others have ended; False after `timeout_s`. May be called again.

        Caches and rows may be freed only after True: a thread that still freed tensors would end a process that exits.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        is_idle = self._jobs.close(timeout_s)  # An interrupted join would take a living thread for an ended one.
        for thread in filter(threading.Thread.is_alive, self._threads if is_idle else ()):
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return is_idle and not any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, job_id: int, direction: Direction, groups: Sequence[GroupBlocks]) -> None:
        sides = self._sides
        if len(groups) != len(sides.pieces):
            raise ValueError(f"blocks of {len(groups)} groups given, the caches have {len(sides.pieces)}")
        pages = tuple(
            pages_of(group, sides.blocks_per_chunk, num_blocks=sides.num_blocks, num_rows=sides.slots.shape[0])
            for group in groups
        )
        size_bytes = 0
        for pieces, moved in zip(sides.pieces, pages, strict=True):
            for piece in pieces:
                size_bytes += piece.page_bytes * len(sides.moved(direction, piece, moved).blocks)
        self._jobs.submit(CopyJob(job_id, direction, pages, size_bytes, self._copiers[direction].mark()))


def _copiers(sides: Sides) -> list[Copier]:
    devices = {piece.memory.device for group in sides.pieces for piece in group}
    if len(devices) > 1:
        raise ConfigError(f"caches on {' and '.join(sorted(map(str, devices)))}: one device accepted")
    device = devices.pop()
    if device.type == "cpu":
        return [HostCopier(sides)]
    if device.type != "cuda":
        raise ConfigError(f"caches on {device}: cpu or cuda accepted")
    return cuda_copiers(sides, device)


def _serve(jobs: CopyJobs, copier: Copier) -> None:
    """Run transfers until the queue is closed and empty."""
    begun = deque[tuple[CopyJob, Finish]]()
    while True:
        job = jobs.take(copier.directions, wait=not begun) if len(begun) < copier.ahead else None
        try:
            if job is not None:
                begun.append((job, copier.begin(job)))
            elif begun:
                job, finish = begun.popleft()
                finish()
                jobs.finish(job, None)
            else:
                return
        except Exception as error:  # noqa: BLE001  # A thread that ended would leave all waiting.
            assert job is not None
            failure = TransferFailed(f"{job.direction.value} {job.job_id} of {job.size_bytes:,} bytes: {error}")
            failure.__cause__ = error
            jobs.finish(job, failure)
