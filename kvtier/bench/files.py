"""A directory as an fs tier: loads and stores beside what plain threads read and write there, chunk size by chunk size.

Everything of one chunk size is measured in turn. A store's chunks are always new ones, a load's lie there all the time.
Stores are measured twice: into a tier with room, of which nothing is removed before the end, and into one that is full,
where each evicts as much; what a file system does about deleted files is in the second only. The tier is alone: no
engine, no other work.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count

import uvloop

from kvtier.bench.figures import Pair, Row, Setting, row_of
from kvtier.bench.files_plan import FULL_SETS, OVERHEAD_BYTES, Plan
from kvtier.bench.fio import Fio, Way
from kvtier.bench.memory import rate_of
from kvtier.bench.raw import NewFiles, RawFile
from kvtier.bench.rounds import Measure, Side, interleaved
from kvtier.bench.tier import CALL_CHUNKS, NAMESPACE, OpenTier, TierCase
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.namespace import FileMapper
from kvtier.region import Region

UNVERIFIED = "unverified"


def measure_files(plan: Plan, chunk_sizes: Sequence[int], step: Callable[[], None]) -> Iterator[Row]:
    """Yield rows of MB/s for each tier and chunk size. What was written stays in the plan's directory."""
    for chunk_bytes in chunk_sizes:
        folder = os.path.join(plan.directory, str(chunk_bytes))
        os.mkdir(folder)
        with ExitStack() as stack:
            bench = _ChunkSize(plan, chunk_bytes, folder, stack)
            measured = interleaved(bench.sides, plan.rounds, step=step)
        yield from (row_of(pair, measured) for pair in bench.pairs)


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
        raw = self._stack.enter_context(RawFile(f"{self._folder}/raw-{io}", self._targets, direct=direct))
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
        root = f"{self._folder}/{case.label.replace(' ', '-')}"
        capacity_bytes = 2 * (self._plan.rounds + 3) * self._moved_bytes + (256 << 20)  # Nothing is evicted.
        tier = OpenTier(self._runner, case.options(root, capacity_bytes=capacity_bytes), self._chunk_bytes)
        self._stack.callback(tier.close)
        self._keep(tier, case)
        new: list[OffloadKey] = []

        def prepare() -> None:
            new[:] = self._new_keys()

        self._add(
            f"store {case.label}",
            rate_of(lambda: tier.store(new, self._sources), self._moved_bytes),
            prepare=prepare,
        )
        self._add_full(case)
        self._add(f"load {case.label}", rate_of(lambda: tier.load(self._kept, self._targets), self._moved_bytes))
        limit = _write_limit(case.io, case.depth, case.fsync)
        self._compare("store", case, limit, "pwritev of one file")
        if case.layout == "files":
            self._compare("store", case, _new(limit), "pwritev of new files")
        elif (files := case._replace(layout="files")) in self._plan.cases:
            self._compare("store", case, f"store {files.label}", "the layout files")
        self._compare("load", case, f"read {case.io} {case.depth}", "preadv of one file")

    def _add_full(self, case: TierCase) -> None:
        """Measure stores into a tier that has to evict as much."""
        root = f"{self._folder}/full-{case.label.replace(' ', '-')}"
        footed_bytes = self._moved_bytes + len(self._kept) * OVERHEAD_BYTES
        options = case.options(root, capacity_bytes=FULL_SETS * footed_bytes + (64 << 20))
        tier = OpenTier(self._runner, options, self._chunk_bytes)
        self._stack.callback(tier.close)
        new: list[OffloadKey] = []

        def prepare() -> None:
            new[:] = self._new_keys()

        for _ in range(FULL_SETS + 1):
            prepare()
            tier.store(new, self._sources)
        name = f"store full {case.label}"
        self._add(name, rate_of(lambda: tier.store(new, self._sources), self._moved_bytes), prepare)
        limit = _write_limit(case.io, case.depth, case.fsync)
        self._compare("store, evicting", case, limit, "pwritev of one file", figure=name)
        if case.layout != "files" and (files := case._replace(layout="files")) in self._plan.cases:
            self._compare("store, evicting", case, f"store full {files.label}", "the layout files", figure=name)

    def _add_unverified(self, case: TierCase) -> None:
        """Measure loads of files without a footer, as vLLM writes them: there is nothing to verify them by."""
        root = f"{self._folder}/{UNVERIFIED}"
        mapper = FileMapper(NAMESPACE, case.naming)  # type: ignore[arg-type]  # Checked as the tier's own option.
        for key, row in zip(self._kept, self._sources, strict=True):
            name = os.path.join(root, mapper.name(key))
            os.makedirs(os.path.dirname(name), exist_ok=True)
            with open(name, "wb") as file:
                file.write(row)
        os.sync()  # Or the first direct reads would wait for it.
        tier = OpenTier(self._runner, case.options(root, unverified="accept"), self._chunk_bytes)
        self._stack.callback(tier.close)
        self._check(tier, case)
        name = f"load {UNVERIFIED}"
        self._add(name, rate_of(lambda: tier.load(self._kept, self._targets), self._moved_bytes))
        limit = f"read {case.io} {case.depth}"
        self._compare("load", case, limit, "preadv of one file", figure=name, checksum=False)

    def _keep(self, tier: OpenTier, case: TierCase) -> None:
        """Store what loads will find, and see that it comes back as it was."""
        for start in range(0, len(self._kept), CALL_CHUNKS):
            part = slice(start, start + CALL_CHUNKS)
            tier.store(self._kept[part], self._sources[part])
        self._check(tier, case)

    def _check(self, tier: OpenTier, case: TierCase) -> None:
        tier.load(self._kept, self._targets)
        for key, source, target in zip(self._kept, self._sources, self._targets, strict=True):
            assert target == source, f"{case.label}: {key.hex()} came back with other bytes"

    def _add(
        self,
        name: str,
        measure: Measure,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
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
