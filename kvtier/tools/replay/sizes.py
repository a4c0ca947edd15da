"""Caches of several sizes over one trace: each is simulated, several at once in their own processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager

import msgspec

from kvtier.testing.virtual_time import run
from kvtier.tools.replay.model import DiskSpeed, Figures, model_engine
from kvtier.tools.replay.report import Quantiles, make_report, quantiles
from kvtier.tools.replay.study import Extent
from kvtier.tools.replay.tiered import DISK_NAME, CascadeName
from kvtier.tools.replay.virtual import Servers, modelled
from kvtier.tools.replay.workload import open_trace

DAY_S = 86_400.0
ROWS_SPARE = 1_024  # For transfers in flight.


class SizeQuestion(msgspec.Struct, frozen=True):
    """All that the combinations of sizes have in common; it travels to other processes."""

    trace: str
    limit: int | None
    chunk_bytes: int
    extent: Extent
    servers: Servers
    disk: DiskSpeed
    cascade: CascadeName
    load_always: bool


class SizeCell(msgspec.Struct, frozen=True):
    """One combination of sizes. Bytes are those of chunks; ratios are shares of the block references."""

    memory_bytes: int
    disk_bytes: int
    hit_ratio: float
    hits: dict[str, float]  # By the tier that held them: `gpu`, `cpu`, `disk`.
    ttft_s: Quantiles
    gpu_seconds_saved: float  # For computing the tiers' hits, over the whole trace.
    written_bytes_per_day: float
    dropped_chunks: int  # Never sent: the disk was too slow.
    failed_chunks: int  # Sent, and not stored or loaded in time.


class SizeReport(msgspec.Struct, frozen=True):
    """The JSON of `kvtier size`."""

    trace: str
    kv_bytes_per_token: int
    chunk_bytes: int
    trace_bytes: int  # Of all unique blocks.
    best_hit_ratio: float
    without_tiering_ttft_s: Quantiles
    load_always: bool  # Every chunk that a tier had was loaded, even if computing was faster.
    sizes: list[SizeCell]
    warnings: list[str]  # Requests that are longer than the smallest primary.
    model: Mapping[str, Figures]  # Without the sizes.


def size_cell(question: SizeQuestion, memory_bytes: int, disk_bytes: int) -> SizeCell:
    """Simulate the trace through an engine of these sizes."""
    extent, chunk_bytes = question.extent, question.chunk_bytes
    requests = open_trace(question.trace, limit=question.limit, checked=True)
    used_bytes = (2 * extent.unique_blocks + ROWS_SPARE) * chunk_bytes
    memory = min(memory_bytes, used_bytes)  # More rows than the trace could ever use only cost time.
    config = model_engine(chunk_bytes, memory, disk_bytes, question.disk, question.cascade)
    _, replay = modelled(
        requests, config, question.servers, question.disk, extent.requests, load_always=question.load_always
    )
    tally = run(replay.run())
    report = make_report(tally, command="", trace="", seed=0, extent=extent, config=config)
    disk = report.tiers.get(DISK_NAME)
    return SizeCell(
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        hit_ratio=report.hit_ratio,
        hits={name: extent.hit_ratio(tier.hits) for name, tier in report.tiers.items()},
        ttft_s=quantiles(replay.times_to_first_token_s),
        gpu_seconds_saved=tally.tokens_found / question.servers.tokens_per_s,
        written_bytes_per_day=0.0 if disk is None else disk.bytes_stored / report.seconds * DAY_S,
        dropped_chunks=0 if disk is None else sum(disk.dropped.values()),
        failed_chunks=0 if disk is None else sum(disk.failed.values()),
    )


def size_cells(
    question: SizeQuestion, combinations: Sequence[tuple[int, int]], progress: Callable[[], None]
) -> list[SizeCell]:
    """Simulate each combination, several at once on several processors; call `progress` after each."""
    workers = min(len(combinations), len(os.sched_getaffinity(0)))
    cells: list[SizeCell] = []
    if workers == 1:
        for sizes in combinations:
            cells.append(size_cell(question, *sizes))
            progress()
        return cells
    with _processes(workers) as pool:
        futures = [pool.submit(size_cell, question, *sizes) for sizes in combinations]
        for done in as_completed(futures):
            done.result()
            progress()
        return [each.result() for each in futures]


@contextmanager
def _processes(count: int) -> Generator[ProcessPoolExecutor]:
    """Yield a pool whose processes end with the block; if it raises, they are terminated."""
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin_worker) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent process, and end when it ends, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
