"""`kvtier bench`: tiers through a whole engine, each next to plain threads on a file (fs), or a memcpy, in one run."""

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, count
from typing import Annotated, Any

import numpy as np
import typer
from msgspec.structs import replace

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.backend.codec import CodecOptions
from kvtier.config import EngineConfig, TierConfig, read_config, tier_options
from kvtier.engine.answers import LookupResult
from kvtier.engine.steps import StepManager
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.memory import PAGE_BYTES, Region
from kvtier.settings import parse_size, shown_bytes
from kvtier.tools.figures import ROUNDS, Measure, Row, Setting, Side, interleaved, rate_of, row_of, run_bench
from kvtier.tools.options import JsonOption
from kvtier.tools.outputs import check_directory, check_outputs, temporary_directory

CHUNK_SIZES = "2MiB"
LAYOUTS = ("segments", "files")
ROUNDS_MAX = 10_000  # All figures are kept, and a round takes at least a tenth of a second.
CHUNK_BYTES_MAX = 1 << 30  # A hundred times the largest in use; several are in memory at once.
PRIMARY_SHARES = 4  # The primary has at most this multiple of the moved bytes; more only takes time to prepare.
PART_BYTES = 8 << 20  # Of one call, or of one thread's turn: any disk reaches its best rate.
KEYS_A_REQUEST = 64
DELETED_AT_ONCE = 256  # Four calls: a slow tier cannot answer thousands within its deadline.
CHUNKS_MIN = 16  # Fewer are no load to measure.
CHANNELS = 128  # Channels of synthetic KV.
STEP_S = 0.002  # Waited between two steps, unless a transfer ends first.
DRAIN_S = 60.0


def bench(
    place: Annotated[
        str, typer.Argument(metavar="PLACE", help="A directory to measure as fs tiers, or a configuration.")
    ],
    size: Annotated[str, typer.Option(help="Bytes that one measurement moves.")] = "64MiB",
    chunk_sizes: Annotated[
        str | None, typer.Option(help=f"Chunk sizes, comma-separated, for a directory: {CHUNK_SIZES} by default.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=ROUNDS_MAX, help="Rounds, after a first one that does not count.")
    ] = ROUNDS,
    json_path: JsonOption = None,
) -> None:
    """Measure stores and loads of each tier through a whole engine, next to their limits.

    A directory is measured as an fs tier of each layout. The chunks of an fs tier lie in a temporary directory in its
    root. Other tiers get new random keys. All of them are removed at the end.
    """
    size_bytes = _size("--size", size, most=16 << 30)  # Bytes of one measurement; they are in memory at once.
    if place.endswith((".toml", ".json")) and not os.path.isdir(place):
        if chunk_sizes is not None:
            raise ConfigError(f"--chunk-sizes: accepted with a directory only; {place} has chunk_bytes")
        configs = [read_config(place)]
        if not configs[0].secondary_tiers:
            raise ConfigError(f"{place}: secondary_tiers: none given, at least one accepted")
    else:
        sizes = dict.fromkeys((CHUNK_SIZES if chunk_sizes is None else chunk_sizes).split(","))
        chunks = [_size("--chunk-sizes", each.strip(), most=CHUNK_BYTES_MAX) for each in sizes]
        if any(each % PAGE_BYTES for each in chunks):
            raise ConfigError(f"--chunk-sizes {chunk_sizes!r}: expected multiples of {PAGE_BYTES:,} bytes")
        check_directory("PLACE", place)
        configs = [_of_directory(place, size_bytes, each) for each in chunks]
    check_outputs(json_path)
    with ExitStack() as stack:
        engines = [engine for config in configs for engine in _engines(config, stack)]
        work = partial(chain.from_iterable, (measure_tier(engine, size_bytes, rounds) for engine in engines))
        run_bench("kvtier bench", work, json_path)


def _size(option: str, text: str, *, most: int) -> int:
    try:
        size_bytes = int(text) if text.isdecimal() else parse_size(text)
    except ValueError:
        size_bytes = 0
    if not 0 < size_bytes <= most:
        raise ConfigError(f"{option} {text!r}: expected a size such as 2MiB, of at least 1 and at most {most:,} bytes")
    return size_bytes


def _of_directory(directory: str, size_bytes: int, chunk_bytes: int) -> EngineConfig:
    tiers = (TierConfig(type="fs", options={"root": directory, "layout": layout}) for layout in LAYOUTS)
    room = _primary_bytes(size_bytes, chunk_bytes)
    return EngineConfig(cpu_bytes_to_use=room, chunk_bytes=chunk_bytes, secondary_tiers=tuple(tiers))


def _primary_bytes(size_bytes: int, row_bytes: int) -> int:
    return max(PRIMARY_SHARES * size_bytes, 64 * row_bytes)


def _engines(config: EngineConfig, stack: ExitStack) -> Iterator[EngineConfig]:
    """Yield an engine for each tier; the stack removes the temporary directories of fs tiers."""
    for tier in config.secondary_tiers:
        alone = tier
        if tier.type == "fs":
            root = tier.options.get("root")
            directory = _scratch_in(root if isinstance(root, str) else tempfile.gettempdir(), stack)
            alone = replace(tier, options={**tier.options, "root": directory})
        yield replace(config, secondary_tiers=(alone,))


def _scratch_in(directory: str, stack: ExitStack) -> str:
    """Return a temporary directory in this one. Raises `ConfigError`."""
    try:
        os.stat(directory)  # mkdtemp takes an empty name for the default directory.
        return stack.enter_context(temporary_directory(".kvtier-bench-", directory))
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name, as configurations may have.
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{directory!r}: {why}; a directory that can be written to accepted") from error


def measure_tier(config: EngineConfig, size_bytes: int, rounds: int) -> Iterator[Row]:
    room = min(config.cpu_bytes_to_use, _primary_bytes(size_bytes, config.row_bytes))
    config = replace(config, cpu_bytes_to_use=room, runner="process")
    (tier,) = config.secondary_tiers
    options: Any = tier_options(tier, "secondary_tiers[]")
    with ExitStack() as stack:
        width = options.number_bytes(config.namespace.dtype) if isinstance(options, CodecOptions) else 0
        drive = Drive(config, size_bytes, synthetic_kv(config.row_bytes, width) if width else None)
        stack.callback(drive.close)
        read, write, limit_is, settings = _limits(tier, options, drive, stack)
        sides = [
            Side("store", rate_of(drive.store_new, drive.moved_bytes), tidy=drive.remove_new),
            Side("load", rate_of(drive.load, drive.moved_bytes), prepare=drive.forget),
            Side("read limit", read),
            Side("write limit", write),
        ]
        found = interleaved(sides, rounds)
        if width:
            settings |= {"codec": options.codec, **drive.stored()}
    named: dict[str, Setting] = {"tier": tier.name, **settings}
    for operation, limit in (("store", "write limit"), ("load", "read limit")):
        yield row_of(operation, found[operation], found[limit], limit_is, named, chunk_bytes=config.row_bytes)


def _limits(
    tier: TierConfig, options: Any, drive: "Drive", stack: ExitStack
) -> tuple[Measure, Measure, str, dict[str, Setting]]:
    """Return the fastest reads and writes in MB/s, their description, and settings that decide the figures."""
    region = stack.enter_context(Region.private(2 * drive.chunks, drive.row_bytes))
    rows = [region.row(index) for index in range(2 * drive.chunks)]
    for row in rows:
        stack.callback(row.release)
    used, rate = rows[: drive.chunks], partial(rate_of, amount=drive.moved_bytes)
    if tier.type == "fs":
        raw = RawFile(os.path.join(options.root, ".kvtier-raw"), used, direct=options.io != "buffered")
        stack.callback(raw.close)
        settings = {"layout": options.layout, "io": "direct" if raw.direct else "buffered", "fsync": options.fsync}
        return (
            rate(lambda: raw.read(options.load_lanes)),
            rate(lambda: raw.write(options.store_lanes, sync=options.fsync)),
            "preadv and pwritev of one file",
            settings | {"load_lanes": options.load_lanes, "store_lanes": options.store_lanes},
        )

    def copy() -> None:
        for target, source in zip(used, rows[drive.chunks :], strict=True):
            target[:] = source

    return rate(copy), rate(copy), "memcpy", {}


def synthetic_kv(row_bytes: int, width: int, seed: int = 0) -> memoryview:
    """Return a row of normal numbers with a scale for each channel; `width`: 2 for bfloat16, 1 for fp8 (e4m3)."""
    dice = np.random.default_rng(seed)
    numbers = dice.normal(size=(row_bytes // CHANNELS + 1, CHANNELS)) * np.exp(dice.normal(0, 0.6, CHANNELS))
    if width == 2:
        return memoryview(numbers.astype("<f4").view("<u2")[:, 1::2].tobytes())[:row_bytes]
    halves = (numbers / 256).astype("<f2").view("<u2")  # A 256th of e4m3's number: half precision has its exponent.
    return memoryview((halves >> 8 & 0x80 | halves >> 7 & 0x7F).astype(np.uint8).tobytes())[:row_bytes]


class RawFile:
    """The limit of a disk: threads with preadv and pwritev on one file: no names, metadata, new blocks or checksums."""

    def __init__(self, path: str, buffers: Sequence[memoryview], *, direct: bool) -> None:
        """Write a chunk for each buffer. O_DIRECT only if the file system takes it. On `OSError` no file is left."""
        self.direct = direct
        self._path, self._buffers, self._chunk_bytes = path, buffers, len(buffers[0])
        try:
            self._fd = self._filled()
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self.direct = False
            self._fd = self._filled()

    def read(self, threads: int) -> None:
        self._each(threads, os.preadv)

    def write(self, threads: int, *, sync: bool) -> None:
        self._each(threads, os.pwritev)
        if sync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        os.unlink(self._path)

    def _filled(self) -> int:
        fd = -1
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self.direct else 0), 0o600)
            size_bytes = len(self._buffers) * self._chunk_bytes
            part = memoryview(mmap.mmap(-1, PART_BYTES))
            part[:] = os.urandom(PAGE_BYTES) * (PART_BYTES // PAGE_BYTES)
            for start in range(0, size_bytes, PART_BYTES):
                os.pwritev(fd, [part[: min(PART_BYTES, size_bytes - start)]], start)
            os.fsync(fd)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            with suppress(FileNotFoundError):  # Linux creates the file before it refuses O_DIRECT.
                os.unlink(self._path)
            raise
        return fd

    def _each(self, threads: int, call: Callable[[int, list[memoryview], int], int]) -> None:
        """Call for each chunk. An interrupted call returns only when no thread uses the file any more."""

        def move(start: int) -> None:
            for index in range(start, min(start + size, len(self._buffers))):
                moved = call(self._fd, [self._buffers[index]], index * self._chunk_bytes)
                if moved != self._chunk_bytes:
                    raise OSError(None, f"{moved:,} bytes moved of {self._chunk_bytes:,}")

        size = max(1, min(-(-len(self._buffers) // threads), PART_BYTES // self._chunk_bytes))
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(move, range(0, len(self._buffers), size)):
                pass


class Drive:
    """One engine with one tier, and the chunks that stay in the tier to be loaded."""

    def __init__(self, config: EngineConfig, size_bytes: int, filling: memoryview | None = None) -> None:
        """Start the engine and store chunks, filled so or with zeros. Raises `ConfigError` if it is too small."""
        (tier,) = config.secondary_tiers
        limits = config.limits
        self.chunks = min(
            max(CHUNKS_MIN, size_bytes // config.row_bytes),
            int(config.rows * min(limits.lease_share, limits.cascade_share)) // 2,
            tier.limits.store_chunks_in_flight,
            tier.limits.store_bytes_in_flight // config.row_bytes,
        )
        if self.chunks < CHUNKS_MIN:
            raise ConfigError(
                f"cpu_bytes_to_use: {shown_bytes(config.cpu_bytes_to_use)} given, at least "
                f"{shown_bytes(4 * CHUNKS_MIN * config.row_bytes)} accepted: fewer rows are no load to measure"
            )
        self.row_bytes, self.moved_bytes = config.row_bytes, self.chunks * config.row_bytes
        self.manager = StepManager.start(config)
        if filling is not None:
            for row in range(config.rows):
                self.manager.region.row(row)[:] = filling
        self._requests = count()
        self._extra: list[OffloadKey] = []  # Stored by measurements, to be removed.
        self.kept = _new_keys(self.chunks)
        try:
            self.store(self.kept)
        except BaseException:
            self.close()
            raise

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store chunks and wait until they are in the tier. `ConfigError` if some are not."""
        (before,) = self.manager.stats().tiers
        request = self._begin()
        plan = self.manager.prepare_store(keys, request)
        assert plan is not None, f"no room for {len(keys)} chunks"
        for number, row in enumerate(plan.rows):
            self.manager.region.row(row)[:8] = number.to_bytes(8, "big")
        self.manager.complete_store(plan.keys, request)
        self.manager.on_request_finished(request)
        drained = self.manager.drain(DRAIN_S)
        (tier,) = self.manager.stats().tiers
        if not drained or tier.stored - before.stored != len(keys):
            reasons = {**tier.failed, **tier.dropped}
            raise ConfigError(f"tier {tier.name}: took {tier.stored - before.stored} of {len(keys)}: {reasons}")

    def store_new(self) -> None:
        self._extra = _new_keys(self.chunks)
        self.store(self._extra)

    def remove_new(self) -> None:
        self._delete(self._extra)
        self._extra = []

    def forget(self) -> None:
        """Empty the primary, so that loads come from the tier."""
        if not self.manager.reset():
            raise self._gone()
        self.manager.on_reset_flushed()

    def load(self) -> None:
        manager = self.manager
        parts = [self.kept[start : start + KEYS_A_REQUEST] for start in range(0, self.chunks, KEYS_A_REQUEST)]
        asked = [(keys, self._begin()) for keys in parts]
        while True:  # Twice; once more if the tier's answer has expired.
            results = {manager.lookup(key, request) for keys, request in asked for key in keys}
            if LookupResult.MISS in results:
                raise self._gone()
            if results == {LookupResult.HIT}:
                break
            manager.end_step()
            while manager.has_pending_work():
                manager.drain(STEP_S)
                manager.end_step()
        for _, request in asked:
            manager.on_request_finished(request)
        manager.end_step()

    def stored(self) -> dict[str, int]:
        """Return the bytes of all rows that were stored, and those that they have in the tier."""
        (tier,) = self.manager.stats().tiers
        raw_bytes = tier.stored * self.row_bytes
        return {"raw_bytes": raw_bytes, "stored_bytes": raw_bytes - tier.reported.get("coded_saved_bytes", 0)}

    def close(self) -> None:
        try:
            self._delete([*self.kept, *self._extra])
        finally:
            self.manager.close()

    def _gone(self) -> BackendUnavailable:
        (tier,) = self.manager.stats().tiers
        lost = self.manager.stats().runners_lost
        why = f"{lost} runners were lost" if lost else f"failures: {tier.failed}"
        return BackendUnavailable(f"tier {tier.name}: chunks that it had did not come back ({why})")

    def _begin(self) -> str:
        request = str(next(self._requests))
        self.manager.on_new_request(request)
        return request

    def _delete(self, keys: Sequence[OffloadKey]) -> None:
        for start in range(0, len(keys), DELETED_AT_ONCE):
            left: Sequence[OffloadKey] = keys[start : start + DELETED_AT_ONCE]
            while left := self.manager.delete(left):
                self.manager.drain(STEP_S)
            if not self.manager.drain(DRAIN_S):
                (tier,) = self.manager.config.secondary_tiers
                raise BackendUnavailable(
                    f"tier {tier.name}: deletions did not end within {DRAIN_S:g} s; up to {len(keys) - start:,} chunks "
                    "of this run are left in it"
                )


def _new_keys(number: int) -> list[OffloadKey]:
    """Return random keys, which no other engine uses."""
    return [make_offload_key(os.urandom(32)) for _ in range(number)]
