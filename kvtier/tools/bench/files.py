"""The benchmark of a directory as an fs tier: loads and stores beside what plain threads read and write there.

Everything of one chunk size is measured in turn. A store's chunks are always new ones, a load's lie there all the time.
Stores are measured twice: into a tier with room, of which nothing is removed before the end, and into one that is full,
where each evicts as much; what a file system does about deleted files is in the second only. The tier is alone: no
engine, no other work: whole batches come from a synchronous caller, beside the tier's own threads.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import uvloop

from kvtier.backend import (
    Backend,
    FileMapper,
    Namespace,
    OffloadKey,
    Outcome,
    Read,
    TierContext,
    Write,
    backend_class,
    make_offload_key,
)
from kvtier.errors import ConfigError, NoSpace
from kvtier.memory import Region
from kvtier.settings import decode, shown_bytes
from kvtier.tools.bench.figures import Measure, Pair, Row, Setting, Side, measured_rows, rate_of, rows_of, steps_of
from kvtier.tools.bench.raw import Fio, NewFiles, RawFile, Way, takes_direct
from kvtier.tools.outputs import check_directory
from kvtier.tools.replay.setup import taken_bytes

T = TypeVar("T")

CALL_CHUNKS = 64  # As an engine's `action_chunks`: it sends no more in one call.
CLOSE_S = 60.0

NAMESPACE = Namespace(model_name="bench")
LAYOUTS = ("files", "segments")
UNVERIFIED = "unverified"
FULL_SETS = 4  # What a full tier has room for, in what one measurement moves.
FULL_SPARE_BYTES = 64 << 20
OVERHEAD_BYTES = 12 << 10  # A footer, and the folders that nearly each file has to itself.


class TierCase(NamedTuple):
    """A tier to measure."""

    layout: str
    naming: str
    io: str  # "direct" or "buffered".
    depth: int  # Threads each way.
    fsync: bool

    @property
    def label(self) -> str:
        return " ".join([self.layout, self.naming, self.io, str(self.depth), "fsync" * self.fsync]).rstrip()

    @property
    def settings(self) -> dict[str, Setting]:
        """Return what tells its rows from others'."""
        return self._asdict() | ({} if self.layout == "files" else {"naming": None})

    def options(self, root: str, **more: Any) -> dict[str, Any]:
        """Return the tier's options as a configuration has them."""
        given = {
            "root": root,
            "io": self.io,
            "load_lanes": self.depth,
            "store_lanes": self.depth,
            "fsync": self.fsync,
        }
        if self.layout == "files":
            return given | {"layout": "files", "naming": self.naming} | more  # Others have no names.
        return given | {"layout": self.layout, "checkpoint_s": 0.0} | more

    def decoded(self, root: str) -> Any:
        """Return them as the tier reads them."""
        return decode(backend_class("fs").options_type, self.options(root))


class MeasuredTier:
    """An open tier on a loop that runs while a call does. Close it with `close`."""

    def __init__(
        self, runner: asyncio.Runner, options: dict[str, Any], chunk_bytes: int, *, call_chunks: int = CALL_CHUNKS
    ) -> None:
        """Open the tier, to be called with so many chunks at once; `ConfigError` if its options cannot be."""
        self._runner = runner
        self._call_chunks = call_chunks
        kind = backend_class("fs")
        context = TierContext("bench", FileMapper(NAMESPACE), chunk_bytes)
        self._tier: Backend = runner.run(kind.open(decode(kind.options_type, options), context))

    def store(self, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> None:
        """Store all chunks; `ConfigError` if the disk is full."""
        writes = [Write(key, row) for key, row in zip(keys, rows, strict=True)]
        self._runner.run(self._all([self._tier.store(call) for call in self._calls(writes)]))

    def load(self, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> None:
        reads = [Read(key, row) for key, row in zip(keys, rows, strict=True)]
        self._runner.run(self._all([self._tier.load(call) for call in self._calls(reads)]))

    def close(self) -> None:
        self._runner.run(self._tier.aclose(CLOSE_S))

    def _calls(self, batch: Sequence[T]) -> Iterator[Sequence[T]]:
        size = self._call_chunks
        return (batch[start : start + size] for start in range(0, len(batch), size))

    async def _all(self, calls: "list[Any]") -> None:
        for outcomes in await asyncio.gather(*calls):
            _check(outcomes)


def _check(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, NoSpace):
            raise ConfigError(f"the directory has no room: {outcome}; a smaller --size, or another directory, accepted")
        if outcome is not None:
            raise outcome


class Plan(NamedTuple):
    """The cases to measure, and the directory for them."""

    directory: str
    cases: Sequence[TierCase]
    size_bytes: int
    rounds: int
    fio: str | None  # Where it is.

    def chunks(self, chunk_bytes: int) -> int:
        return max(2, self.size_bytes // chunk_bytes)

    def modes(self) -> list[tuple[str, int, bool]]:
        """Return what the limits are measured for: I/O, threads, fsync."""
        return list(dict.fromkeys((case.io, case.depth, case.fsync) for case in self.cases))

    def written_bytes(self, chunk_bytes: int) -> int:
        """Return about what is on the disk when all is measured of one chunk size."""
        turns, footed_bytes = self.rounds + 1, self.chunks(chunk_bytes) * (chunk_bytes + OVERHEAD_BYTES)
        limits = len(self.modes()) * turns + len({case.io for case in self.cases}) + 2
        return limits * footed_bytes + sum(
            taken_bytes(case.decoded(self.directory), chunk_bytes, (turns + 1) * self.chunks(chunk_bytes))
            + FULL_SETS * footed_bytes
            + FULL_SPARE_BYTES
            for case in self.cases
        )

    @property
    def bare(self) -> TierCase | None:
        """Return the case whose loads are measured without verification, too."""
        plain = [case for case in self.cases if case.layout == "files" and not case.fsync]
        return plain[0] if plain else None

    def steps(self) -> int:
        """Return how many measurements one chunk size takes."""
        limits = len({(io, depth) for io, depth, _ in self.modes()}) + len(self.modes())
        fio = 2 * len({(io, depth) for io, depth, _ in self.modes()}) if self.fio else 0
        return steps_of(3 * len(self.cases) + limits + len(self.modes()) + fio + (self.bare is not None), self.rounds)


def io_modes(directory: str, asked: Sequence[str]) -> list[str]:
    """Return how files are to be read and written. `ConfigError` if it cannot be there, or there is no such place."""
    check_directory("DIR", directory)
    direct = takes_direct(directory)
    if "direct" in asked and not direct:
        raise ConfigError(f"--io direct: {directory} refuses direct I/O, or cannot be written to; auto accepted")
    return list(dict.fromkeys(("direct" if direct else "buffered") if mode == "auto" else mode for mode in asked))


def check_room(plan: Plan, chunk_sizes: Sequence[int]) -> None:
    """Raise `ConfigError` if what is written until the end would not fit."""
    needed = sum(plan.written_bytes(size) for size in chunk_sizes)
    free = shutil.disk_usage(plan.directory).free
    if needed > free:
        raise ConfigError(
            f"{plan.directory}: about {shown_bytes(needed)} are needed, {shown_bytes(free)} are free; "
            "a smaller --size, or fewer --rounds, accepted"
        )


def measure_files(plan: Plan, chunk_sizes: Sequence[int], step: Callable[[], None]) -> Iterator[Row]:
    """Yield rows of MB/s for each tier and chunk size. What was written stays in the plan's directory."""
    for chunk_bytes in chunk_sizes:
        folder = os.path.join(plan.directory, str(chunk_bytes))
        os.mkdir(folder)
        with ExitStack() as stack:
            bench = _ChunkSize(plan, chunk_bytes, folder, stack)
            yield from measured_rows(bench.sides, plan.rounds, partial(rows_of, bench.pairs), step)


class _ChunkSize:
    """The sides and the rows of one chunk size; what they need is closed with the stack."""

    def __init__(self, plan: Plan, chunk_bytes: int, folder: str, stack: ExitStack) -> None:
        self.sides: list[Side] = []
        self.pairs: list[Pair] = []
        self._plan, self._chunk_bytes, self._folder, self._stack = plan, chunk_bytes, folder, stack
        chunks = plan.chunks(chunk_bytes)
        self._moved_bytes = chunks * chunk_bytes
        self._numbers = count()
        self._kept = self._new_keys()
        self._runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        self._sources, self._targets = self._rows(chunks), self._rows(chunks)
        for number, row in enumerate(self._sources):
            row[:] = number.to_bytes(4, "big") * (chunk_bytes // 4)
        for io in dict.fromkeys(io for io, _, _ in plan.modes()):
            self._add_limits(io)
        for case in plan.cases:
            self._add_tier(case)
        if plan.bare is not None:
            self._add_unverified(plan.bare)

    def _rows(self, chunks: int) -> list[memoryview]:
        region = self._stack.enter_context(Region.private(chunks, self._chunk_bytes))
        rows = [region.row(index) for index in range(chunks)]
        for row in rows:
            self._stack.callback(row.release)
        return rows

    def _new_keys(self) -> list[OffloadKey]:
        chunks = self._plan.chunks(self._chunk_bytes)
        return [make_offload_key(os.urandom(24) + next(self._numbers).to_bytes(8, "big")) for _ in range(chunks)]

    def _add_limits(self, io: str) -> None:
        direct = io == "direct"
        raw = RawFile(f"{self._folder}/raw-{io}", self._targets, direct=direct)
        self._stack.callback(raw.close)
        for depth in dict.fromkeys(depth for mode, depth, _ in self._plan.modes() if mode == io):
            self._add(f"read {io} {depth}", _mb_per_s(partial(raw.read, depth)))
            if self._plan.fio is not None:
                fio = Fio(self._plan.fio, self._folder, size_bytes=self._moved_bytes, direct=direct)
                self._add_fio(fio, io, depth)
        new = NewFiles(f"{self._folder}/new-{io}", self._sources, direct=direct)
        for _, depth, sync in [mode for mode in self._plan.modes() if mode[0] == io]:
            name = _write_limit(io, depth, sync)
            self._add(name, _mb_per_s(partial(raw.write, depth, sync=sync)))
            self._add(_new(name), _mb_per_s(partial(new.write, depth, sync=sync)), prepare=new.prepare)

    def _add_fio(self, fio: Fio, io: str, depth: int) -> None:
        settings: dict[str, Setting] = {"io": io, "depth": depth}
        ways: tuple[tuple[Way, str], ...] = (
            ("read", f"read {io} {depth}"),
            ("write", _write_limit(io, depth, sync=False)),
        )
        for way, raw in ways:
            name = f"fio {way} {io} {depth}"
            self._add(name, _mb_per_s(partial(fio.rate, way, self._chunk_bytes, depth)))
            if raw in {side.name for side in self.sides} | _limits_of(self._plan):
                self.pairs.append(Pair(f"raw {way}", self._chunk_bytes, settings, "MB/s", raw, name, "fio"))

    def _add_tier(self, case: TierCase) -> None:
        capacity_bytes = 2 * (self._plan.rounds + 3) * self._moved_bytes + (256 << 20)  # Nothing is evicted.
        tier = self._open(case, "", capacity_bytes=capacity_bytes)
        self._keep(tier, case)
        self._add_store(tier, f"store {case.label}")
        self._add_full(case)
        self._add_load(tier, f"load {case.label}")
        limit = _write_limit(case.io, case.depth, case.fsync)
        self._compare("store", case, limit, "pwritev of one file")
        if case.layout == "files":
            self._compare("store", case, _new(limit), "pwritev of new files")
        elif (files := case._replace(layout="files")) in self._plan.cases:
            self._compare("store", case, f"store {files.label}", "the layout files")
        self._compare("load", case, f"read {case.io} {case.depth}", "preadv of one file")

    def _add_full(self, case: TierCase) -> None:
        """Measure stores into a tier that has to evict as much."""
        footed_bytes = self._moved_bytes + len(self._kept) * OVERHEAD_BYTES
        tier = self._open(case, "full-", capacity_bytes=FULL_SETS * footed_bytes + FULL_SPARE_BYTES)
        for _ in range(FULL_SETS + 1):
            tier.store(self._new_keys(), self._sources)
        name = f"store full {case.label}"
        self._add_store(tier, name)
        limit = _write_limit(case.io, case.depth, case.fsync)
        self._compare("store, evicting", case, limit, "pwritev of one file", figure=name)
        if case.layout != "files" and (files := case._replace(layout="files")) in self._plan.cases:
            self._compare("store, evicting", case, f"store full {files.label}", "the layout files", figure=name)

    def _add_unverified(self, case: TierCase) -> None:
        """Measure loads of files without a footer, as vLLM writes them: there is nothing to verify them by."""
        mapper = FileMapper(NAMESPACE, case.naming)  # type: ignore[arg-type]  # Checked as the tier's own option.
        for key, row in zip(self._kept, self._sources, strict=True):
            name = os.path.join(self._root(case, UNVERIFIED), mapper.name(key))
            os.makedirs(os.path.dirname(name), exist_ok=True)
            with open(name, "wb") as file:
                file.write(row)
        os.sync()  # Or the first direct reads would wait for it.
        tier = self._open(case, UNVERIFIED, unverified="accept")
        self._check(tier, case)
        name = f"load {UNVERIFIED}"
        self._add_load(tier, name)
        limit = f"read {case.io} {case.depth}"
        self._compare("load", case, limit, "preadv of one file", figure=name, checksum=False)

    def _root(self, case: TierCase, prefix: str) -> str:
        return f"{self._folder}/{prefix}{case.label.replace(' ', '-')}"

    def _open(self, case: TierCase, prefix: str, **options: Any) -> MeasuredTier:
        tier = MeasuredTier(self._runner, case.options(self._root(case, prefix), **options), self._chunk_bytes)
        self._stack.callback(tier.close)
        return tier

    def _add_store(self, tier: MeasuredTier, name: str) -> None:
        """Measure stores of chunks that are new in every round."""
        new: list[OffloadKey] = []

        def prepare() -> None:
            new[:] = self._new_keys()

        self._add(name, rate_of(lambda: tier.store(new, self._sources), self._moved_bytes), prepare)

    def _add_load(self, tier: MeasuredTier, name: str) -> None:
        self._add(name, rate_of(lambda: tier.load(self._kept, self._targets), self._moved_bytes))

    def _keep(self, tier: MeasuredTier, case: TierCase) -> None:
        """Store what loads will find, and see that it comes back as it was."""
        for start in range(0, len(self._kept), CALL_CHUNKS):
            part = slice(start, start + CALL_CHUNKS)
            tier.store(self._kept[part], self._sources[part])
        self._check(tier, case)

    def _check(self, tier: MeasuredTier, case: TierCase) -> None:
        tier.load(self._kept, self._targets)
        for key, source, target in zip(self._kept, self._sources, self._targets, strict=True):
            assert target == source, f"{case.label}: {key.hex()} came back with other bytes"

    def _add(self, name: str, measure: Measure, prepare: Callable[[], None] = lambda: None) -> None:
        self.sides.append(Side(name, measure, prepare))

    def _compare(
        self, operation: str, case: TierCase, limit: str, limit_is: str, *, figure: str = "", checksum: bool = True
    ) -> None:
        settings = case.settings
        if operation == "load":
            settings["checksum"] = checksum
        figure = figure or f"{operation} {case.label}"
        self.pairs.append(Pair(operation, self._chunk_bytes, settings, "MB/s", figure, limit, limit_is))


def _mb_per_s(rate: Callable[[], float]) -> Measure:
    return lambda: rate() / 1e6


def _write_limit(io: str, depth: int, sync: bool) -> str:
    return f"write {io} {depth}{' synced' if sync else ''}"


def _new(limit: str) -> str:
    return f"{limit} new"


def _limits_of(plan: Plan) -> set[str]:
    return {_write_limit(io, depth, sync) for io, depth, sync in plan.modes()}
