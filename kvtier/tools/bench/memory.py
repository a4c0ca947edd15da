"""Memory copies: rows written and read as an engine does it, and sums of their bytes, beside plain memcpy."""

import ctypes
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

from kvtier.errors import ConfigError
from kvtier.memory import Region
from kvtier.settings import find_class
from kvtier.tools.bench.figures import Pair, Row, Side, measured_rows, rows_of, steps_of

MOVED_BYTES = 64 << 20  # A round of one side: more than any cache holds, a hundredth of a second.
SIDES = 4  # For each chunk size.
LIMIT_IS = "memcpy of as many bytes"

Checksum = Callable[[memoryview], int]


def measure_memory(
    chunk_sizes: Sequence[int], rounds: int, step: Callable[[], None], *, pages_on: str | None = None
) -> Iterator[Row]:
    """Yield a row for each operation and chunk size: MB/s of the bytes that were moved, counted once.

    `pages_on`: the device of KV caches whose pages are copied to and from rows, too; None: no such copies.
    """
    for chunk_bytes in chunk_sizes:
        chunks = max(1, MOVED_BYTES // chunk_bytes)
        with _sides(chunk_bytes, chunks) as sides:
            pairs = [
                Pair(operation, chunk_bytes, {}, "MB/s", operation, "memcpy", LIMIT_IS)
                for operation in ("write rows", "read rows", "checksum")
            ]
            yield from measured_rows(sides, rounds, partial(rows_of, pairs), step)
    if pages_on is not None:
        from kvtier.tools.bench import copies  # Importing torch takes longer than all of the above.

        yield from copies.measure_copies(copies.cases_for(pages_on), rounds, step)


def check_pages(device: str | None) -> None:
    """Raise `ConfigError` if no KV caches can be made there; None: none are wanted."""
    if device is None:
        return
    try:
        from kvtier.tools.bench import copies
    except (ImportError, OSError) as error:
        why = f"torch cannot be loaded ({error})"
        raise ConfigError(f"--pages: {why}; pip install 'kvtier[torch]', or --no-pages") from error
    if not copies.has_device(device):
        raise ConfigError(f"--device {device}: torch {copies.TORCH} finds no such device; cpu accepted, or --no-pages")


def memory_steps(chunk_sizes: Sequence[int], rounds: int, *, pages_on: str | None = None) -> int:
    """Return how often `measure_memory` calls its `step`."""
    own = len(chunk_sizes) * steps_of(SIDES, rounds)
    if pages_on is None:
        return own
    from kvtier.tools.bench import copies

    return own + copies.copies_steps(copies.cases_for(pages_on), rounds)


@contextmanager
def _sides(chunk_bytes: int, chunks: int) -> Generator[list[Side]]:
    checksum = fs_checksum()
    with Region.private(chunks, chunk_bytes) as rows, Region.private(chunks, chunk_bytes) as others:
        sources = [others.row(index) for index in range(chunks)]
        targets = [rows.row(index) for index in range(chunks)]
        for number, source in enumerate(sources):
            source[:] = number.to_bytes(4, "big") * (chunk_bytes // 4)

        def write() -> None:
            for index, source in enumerate(sources):
                rows.row(index)[:chunk_bytes] = source

        def read() -> None:
            for index, source in enumerate(sources):
                source[:] = rows.row(index)[:chunk_bytes].toreadonly()

        def add_up() -> None:
            for source in sources:
                checksum(source)

        yield [
            Side("write rows", rate_of(write, chunks * chunk_bytes)),
            Side("read rows", rate_of(read, chunks * chunk_bytes)),
            Side("checksum", rate_of(add_up, chunks * chunk_bytes)),
            Side("memcpy", rate_of(plain_copies(sources, targets), chunks * chunk_bytes)),
        ]
        for view in (*sources, *targets):
            view.release()


def rate_of(
    work: Callable[[], None], moved_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Return what does the work and gives MB/s."""

    def measure() -> float:
        begun = clock()
        work()
        return moved_bytes / 1e6 / (clock() - begun)

    return measure


def plain_copies(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Callable[[], None]:
    """Return what copies buffer by buffer with nothing but memcpy, addresses known beforehand."""
    pairs = [(_address(target), _address(source)) for target, source in zip(targets, sources, strict=True)]
    size = len(sources[0])

    def copy() -> None:
        for target, source in pairs:
            ctypes.memmove(target, source, size)

    return copy


def fs_checksum() -> Checksum:
    """Return the checksum that the fs tier verifies chunks with."""
    found = find_class("checksum", "fs", {"fs": "kvtier_backends.fs.disk.footer:payload_checksum"}, "kvtier.checksums")
    return cast("Checksum", found)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
