"""Who goes for room and who does not: by policy, tail first, never what is in use, and told to whoever listens."""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.backend.contract import Added, Removed, ScanDone
from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.errors import BackendClosed
from kvtier.policies import LRU, Policy, known_policies, policy_class
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs.disk.capacity import Capacity, chunk_bytes_worst
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from tests.fs.conftest import MakeSystemCall

ROOM = 24
CAPACITY_BYTES = ROOM * (8_192 + 4_096 + 8_192) + 65_536
DEADLINE_S = 20.0


class NeverEvicts(LRU[OffloadKey]):
    """A policy with a bug."""

    def evict(
        self, count: int, keep: Callable[[OffloadKey], bool], incoming: Sequence[OffloadKey] = ()
    ) -> list[OffloadKey] | None:
        return None


async def fill(tier, lender: Lender, start: int = 1_000, chunks: int = 2 * ROOM) -> None:
    for number in range(start, start + chunks, 2):
        await lender.keep(tier, keys_of(2, number))


async def test_the_tail_of_a_prefix_goes_before_its_head(open_tier, lender: Lender) -> None:
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES)
    prefix = keys_of(8)
    await lender.keep(tier, prefix)
    start = 1_000
    while all(there := list(await tier.probe(prefix))):
        await lender.keep(tier, [key_of(start := start + 1)])
    assert there == sorted(there, reverse=True)


async def test_a_restart_keeps_the_order_of_last_use(open_tier, lender: Lender, path_of) -> None:
    """By the files' times, which are set to a use once an hour: here they were stored more than an hour ago."""
    before = await open_tier()
    for key in keys_of(12):
        await lender.keep(before, [key])
    await before.aclose(DEADLINE_S)
    for key in keys_of(12):
        found = path_of(key).stat()
        os.utime(path_of(key), ns=(found.st_atime_ns, found.st_mtime_ns - 4 * 3_600 * 10**9))
    used = await open_tier()
    await scanned(used)
    await lender.recall(used, keys_of(4))
    await used.aclose(DEADLINE_S)
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES)
    await scanned(tier)
    start = 1_000
    while sum(there := list(await tier.probe(keys_of(12)))) > 4:
        await lender.keep(tier, [key_of(start := start + 1)])
    assert there == [True] * 4 + [False] * 8


async def scanned(tier) -> None:
    report = tier.watch()
    async with asyncio.timeout(DEADLINE_S):
        while not isinstance(await anext(report), ScanDone):
            pass
    await report.aclose()


async def test_a_use_is_written_down_at_most_once_an_hour(open_tier, lender: Lender, path_of) -> None:
    tier = await open_tier()
    await lender.keep(tier, [key_of(0)])
    stored_ns = path_of(key_of(0)).stat().st_mtime_ns
    await lender.recall(tier, [key_of(0)])
    await tier.aclose(DEADLINE_S)
    assert path_of(key_of(0)).stat().st_mtime_ns == stored_ns


async def test_what_goes_is_reported(open_tier, lender: Lender) -> None:
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES)
    report = tier.watch()
    held: set[OffloadKey] = set()
    async with asyncio.timeout(DEADLINE_S):
        assert isinstance(await anext(report), ScanDone)
        await lender.keep(tier, keys_of(4))
        held.update(keys_of(4))
        await fill(tier, lender)
        while held:
            event = await anext(report)
            assert isinstance(event, Removed | Added)
            held.difference_update(event.keys)
    await report.aclose()
    assert tier.counters().evicted >= 4


async def test_a_file_that_is_being_read_does_not_go(
    open_tier, lender: Lender, monkeypatch: pytest.MonkeyPatch, path_of
) -> None:
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, load_lanes=1)
    await lender.keep(tier, [key_of(0)])
    entered, go_on, preadv = threading.Event(), threading.Event(), os.preadv

    def wait(*args: object) -> int:
        entered.set()
        assert go_on.wait(DEADLINE_S)
        return preadv(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", wait)
        loading = asyncio.create_task(lender.recall(tier, [key_of(0)]))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        await fill(tier, lender)
        assert path_of(key_of(0)).exists()
        go_on.set()
        assert await loading == [label(key_of(0))]


async def test_a_chunk_that_is_stored_while_its_old_file_goes_is_not_removed_with_it(
    open_tier, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the removal, chosen before, would meet the new file."""
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES)
    await lender.keep(tier, [key_of(0)])
    entered, go_on, unlink = threading.Event(), threading.Event(), os.unlink
    held_up = key_of(0)[:-4].hex()

    def wait(name: str, **kwargs: int) -> None:
        if held_up in name:
            entered.set()
            assert go_on.wait(DEADLINE_S)
        unlink(name, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", wait)
        filling = asyncio.create_task(fill(tier, lender))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        storing = asyncio.create_task(tier.store(lender.writes([key_of(0)], version=1)))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not storing.done()
        go_on.set()
        assert list(await storing) == [None]
        assert await lender.recall(tier, [key_of(0)]) == [label(key_of(0), 1)]
        await filling


async def test_what_cannot_be_removed_takes_its_room_still(
    open_tier, lender: Lender, monkeypatch: pytest.MonkeyPatch, root: Path, taken_bytes
) -> None:
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES)

    def refuse(name: str, **kwargs: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        kept = [key for start in range(0, 4 * ROOM, 4) for key in await stored(tier, lender, keys_of(4, start))]
        assert taken_bytes(root) <= CAPACITY_BYTES
        assert tier.counters().evictions_failed > 0
        assert tier.counters().refused["capacity"] > 0
        assert await lender.recall(tier, kept) == [label(key) for key in kept]


async def stored(tier, lender: Lender, keys: list[OffloadKey]) -> list[OffloadKey]:
    outcomes = await tier.store(lender.writes(keys))
    return [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None]


async def test_a_policy_that_never_evicts_costs_stores_and_nothing_else(
    open_tier, lender: Lender, root: Path, taken_bytes
) -> None:
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, eviction_policy=f"{__name__}:NeverEvicts")
    kept = [key for start in range(0, 3 * ROOM, 4) for key in await stored(tier, lender, keys_of(4, start))]
    assert taken_bytes(root) <= CAPACITY_BYTES
    assert await lender.recall(tier, kept) == [label(key) for key in kept]
    assert tier.counters().refused["capacity"] > 0


async def test_what_was_not_used_for_long_goes(open_tier, lender: Lender, path_of) -> None:
    before = await open_tier()
    await lender.keep(before, keys_of(3))
    await before.aclose(DEADLINE_S)
    os.utime(path_of(key_of(0)), (1, 1))
    tier = await open_tier(ttl_s=3_600)
    await scanned(tier)
    await lender.keep(tier, [key_of(5)])
    async with asyncio.timeout(DEADLINE_S):
        while path_of(key_of(0)).exists():  # A disk tells nobody that a file is gone.
            await asyncio.sleep(0.001)
    assert list(await tier.probe([key_of(0), key_of(1), key_of(5)])) == [False, True, True]


async def test_a_store_that_waits_for_what_goes_ends_with_the_tier(
    open_tier, lender: Lender, path_of, system_call: MakeSystemCall
) -> None:
    """Nobody removes any more what was chosen to go, and was not come to."""
    before = await open_tier()
    keys = keys_of(100)  # More than go in one hop.
    await lender.keep(before, keys)
    await before.aclose(DEADLINE_S)
    for key in keys:
        os.utime(path_of(key), (1, 1))
    stuck = system_call("unlink", sticks=True, only=lambda name, **kwargs: name.endswith(".bin"))
    tier = await open_tier(ttl_s=3_600)
    await scanned(tier)
    await stuck.wait_entered()
    storing = asyncio.create_task(tier.store(lender.writes(keys)))
    await asyncio.sleep(0)
    assert await tier.aclose(0) == (0,)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(BackendClosed):
            await storing


async def test_folders_of_what_goes_go_with_it(open_tier, lender: Lender, root: Path) -> None:
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES)
    await fill(tier, lender, chunks=10 * ROOM)
    assert sum(1 for _ in os.walk(root)) < 3 * ROOM


def test_the_worst_case_is_worse_than_what_ext4_does() -> None:
    assert chunk_bytes_worst(12_288, 4_096, 0) == 12_288 + 8_192  # New folders take nothing on XFS, and grow.
    assert chunk_bytes_worst(12_289, 4_096, 4_096) == 16_384 + 16_384
    assert chunk_bytes_worst((2 << 20) + 4_096, 4_096, 0) == (2 << 20) + 4_096 + 2 * 4_096 + 8_192


class NoDisk:
    used_bytes = 0
    free_bytes = 1 << 60
    size_bytes = 1 << 60
    block_bytes = 4_096

    def look(self) -> None:
        pass


class Accounting(RuleBasedStateMachine):
    """Stores in every order of reserve, write and note, against a directory that is a dictionary."""

    LIMIT, WORST, LEAST = 1_000, 100, 60

    def __init__(self) -> None:
        super().__init__()
        self.disk: dict[OffloadKey, int] = {}
        self.under_way: list[tuple[OffloadKey, int]] = []  # Keys and what is reserved for each.
        self.leaving: list[FileEntry] = []

    @initialize(policy=st.sampled_from(known_policies()))
    def begin(self, policy: str) -> None:
        kind: type[Policy[OffloadKey]] = policy_class(policy)
        self.index = FileIndex(None if policy == "lru" else kind(self.LIMIT // self.LEAST))
        self.capacity = Capacity(
            NoDisk(),  # type: ignore[arg-type]
            limit_bytes=self.LIMIT * 512,
            min_free_bytes=0,
        )
        self.capacity.count(self.index)

    @rule(number=st.integers(0, 30))
    def reserve(self, number: int) -> None:
        key = make_offload_key(bytes([number]))
        if any(victim.key == key for victim in self.leaving):
            return
        granted = self.capacity.reserve(self.WORST * 512)
        if granted < self.WORST * 512:
            self.capacity.release(granted)
        else:
            self.under_way.append((key, granted))

    @rule(sectors=st.integers(LEAST, WORST))
    def write(self, sectors: int) -> None:
        if self.under_way:
            key, granted = self.under_way.pop(0)
            self.disk[key] = sectors * 512
            self.index.stored(FileEntry(key, sectors * 512))
            self.capacity.release(granted)

    @rule()
    def fail(self) -> None:
        if self.under_way:
            self.capacity.release(self.under_way.pop()[1])

    @rule(count=st.integers(1, 4))
    def choose(self, count: int) -> None:
        busy = {key for key, _ in self.under_way}
        with self.index.claims.in_use(list(busy)):
            victims = self.index.victims(count)
        assert busy.isdisjoint(victim.key for victim in victims)
        self.capacity.leaving_bytes += sum(victim.allocated_bytes for victim in victims)
        self.leaving += victims

    @rule(gone=st.booleans())
    def remove(self, gone: bool) -> None:
        for victim in self.leaving:
            self.capacity.leaving_bytes -= victim.allocated_bytes
            if gone:
                del self.disk[victim.key]
            else:
                self.index.stays(victim)
        self.leaving = []

    @rule(number=st.integers(0, 30))
    def delete(self, number: int) -> None:
        key = make_offload_key(bytes([number]))
        if all(victim.key != key for victim in self.leaving):
            self.disk.pop(key, None)
            self.index.removed(key)

    @rule(number=st.integers(0, 30))
    def use(self, number: int) -> None:
        self.index.used([make_offload_key(bytes([number]))])

    @invariant()
    def nothing_is_counted_wrong(self) -> None:
        if hasattr(self, "capacity"):
            assert self.capacity.used_bytes == sum(self.disk.values())
            assert self.capacity.used_bytes + self.capacity.reserved_bytes <= self.LIMIT * 512
            assert self.capacity.reserved_bytes == sum(granted for _, granted in self.under_way)


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(stateful_step_count=60)


@pytest.mark.parametrize("shared", [False, True], ids=["its own", "shared"])
@pytest.mark.parametrize("noticed", ["as it is loaded", pytest.param("as it is evicted", marks=pytest.mark.outside)])
async def test_folders_that_somebody_has_emptied_go_when_their_chunks_are_found_missing(
    open_tier, lender: Lender, root: Path, shared: bool, noticed: str
) -> None:
    """Each takes a block or more: kept for ever, they would take the room of chunks."""
    tier = await open_tier(layout="files", capacity_bytes=2 << 20, shared=shared)
    await lender.keep(tier, keys_of(40))
    emptied = list(root.rglob("*.bin"))
    for path in emptied:
        path.unlink()
    if noticed == "as it is loaded":
        assert await lender.recall(tier, keys_of(40)) == ["ChunkMissing"] * 40
    else:
        for start in range(100, 400, 10):
            await tier.store(lender.writes(keys_of(10, start=start)))
    assert not [path.parent for path in emptied if path.parent.exists() and not any(path.parent.iterdir())]


async def test_a_store_makes_folders_anew_that_are_found_empty_while_it_makes_them(
    open_tier, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_tier(layout="files")
    mkdir, vanished = os.mkdir, []

    def contended(path: str, *arguments: Any, dir_fd: int | None = None) -> None:
        """Make a folder, but for the first times have somebody remove the one above it before."""
        if len(vanished) < 3:
            with suppress(OSError):
                os.rmdir(os.readlink(f"/proc/self/fd/{dir_fd}"))
                vanished.append(path)
        mkdir(path, *arguments, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", contended)
    await lender.keep(tier, keys_of(1))
    assert len(vanished) == 3
    assert await lender.recall(tier, keys_of(1)) == [label(key_of(0))]
