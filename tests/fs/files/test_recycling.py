"""A full tier of flat names writes into the files of what goes, and nobody ever sees one chunk under another's name."""

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.backend.keys import OffloadKey
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES

ROW_BYTES = 8_192
ROOM = 24
CAPACITY_BYTES = ROOM * (ROW_BYTES + FOOTER_BYTES + 4_096) + 65_536
DEADLINE_S = 20.0


@pytest.fixture
def mapper() -> FileMapper:
    return FileMapper(Namespace(model_name="org/model"), "flat")


@pytest.fixture
def open_full(open_tier, lender: Lender):
    """Open a tier that has no room left: what is stored from now on takes the place of something else."""

    async def open_full(**options: object):
        tier = await open_tier(**{"naming": "flat", "capacity_bytes": CAPACITY_BYTES, **options})
        for number in range(2 * ROOM):
            await lender.keep(tier, [key_of(number)])
        return tier

    return open_full


def inodes(root: Path) -> set[int]:
    return {path.stat().st_ino for path in root.rglob("*.bin")}


def oldest(paths: Callable[[OffloadKey], Path], within: range = range(2 * ROOM)) -> OffloadKey:
    """Return the key that goes next."""
    return next(key for key in map(key_of, within) if paths(key).exists())


async def test_what_comes_takes_the_files_of_what_goes(open_full, lender: Lender, root: Path) -> None:
    tier = await open_full()
    before, overwritten = inodes(root), tier.counters().overwritten
    await lender.keep(tier, keys_of(8, start=100))
    assert inodes(root) <= before
    assert tier.counters().overwritten == overwritten + 8
    assert await lender.recall(tier, keys_of(8, start=100)) == [label(key) for key in keys_of(8, start=100)]


@pytest.mark.parametrize("options", [{"naming": "vllm"}, {"shared": True}], ids=["vllm", "shared"])
async def test_where_others_read_no_file_changes(
    open_full, lender: Lender, root: Path, options: dict[str, object]
) -> None:
    """An open file stays what it was, whatever happens to its name."""
    tier = await open_full(**options)
    opened = [path.open("rb") for path in root.rglob("*.bin")]
    before = [file.read() for file in opened]
    for number in range(100, 100 + 2 * ROOM):
        await lender.keep(tier, [key_of(number)])
    for file, content in zip(opened, before, strict=True):
        file.seek(0)
        assert file.read() == content
        file.close()
    assert tier.counters().overwritten == 0


@pytest.mark.parametrize(
    ("options", "overwrites"),
    [
        ({"naming": "flat"}, True),
        ({"naming": "vllm"}, False),
        ({"naming": "flat", "shared": True}, False),
        ({"layout": "segments"}, False),
    ],
)
def test_files_are_overwritten_where_nobody_else_reads_them(options: dict[str, Any], overwrites: bool) -> None:
    """Anywhere else a tier keeps its low-water mark, and removes folders that are empty."""
    assert FsOptions(root="tier", **options).overwrites is overwrites


async def test_another_name_of_a_file_keeps_its_bytes(
    open_full, lender: Lender, path_of, tmp_path: Path, root: Path, taken_bytes
) -> None:
    """Such as a backup's that was made of links."""
    tier = await open_full()
    victim, backup = oldest(path_of), tmp_path / "backup"
    os.link(path_of(victim), backup)
    content = backup.read_bytes()
    await lender.keep(tier, keys_of(4, start=100))
    assert not path_of(victim).exists()
    assert backup.read_bytes() == content
    assert taken_bytes(root) <= CAPACITY_BYTES
    assert await lender.recall(tier, keys_of(4, start=100)) == [label(key) for key in keys_of(4, start=100)]


@pytest.mark.skipif(os.geteuid() != 0, reason="to give a file away needs root")
async def test_a_file_of_another_user_is_replaced(open_full, lender: Lender, path_of, root: Path) -> None:
    """Its room may count for somebody else, and not everybody who may write to it may set its time."""
    tier = await open_full()
    victim = oldest(path_of)
    inode = path_of(victim).stat().st_ino
    os.chown(path_of(victim), 12_345, 12_345)
    with path_of(victim).open("rb"):  # So that nobody else gets the number.
        await lender.keep(tier, keys_of(4, start=100))
        assert inode not in inodes(root)
    assert {path.stat().st_uid for path in root.rglob("*.bin")} == {0}
    assert await lender.recall(tier, keys_of(4, start=100)) == [label(key) for key in keys_of(4, start=100)]


async def test_a_link_at_a_chunks_name_is_not_followed(open_full, lender: Lender, path_of, tmp_path: Path) -> None:
    tier = await open_full()
    victim, treasure = oldest(path_of), tmp_path / "treasure"
    treasure.write_bytes(bytes(ROW_BYTES + FOOTER_BYTES))
    path_of(victim).unlink()
    path_of(victim).symlink_to(treasure)
    await lender.keep(tier, keys_of(4, start=100))
    assert treasure.read_bytes() == bytes(ROW_BYTES + FOOTER_BYTES)
    assert not path_of(victim).is_symlink()
    assert await lender.recall(tier, keys_of(4, start=100)) == [label(key) for key in keys_of(4, start=100)]


@pytest.mark.parametrize("length", [0, ROW_BYTES, ROW_BYTES + FOOTER_BYTES + 1])
async def test_a_file_of_another_length_is_replaced(
    open_full, lender: Lender, path_of, root: Path, taken_bytes, length: int
) -> None:
    tier = await open_full()
    os.truncate(path_of(oldest(path_of)), length)
    await lender.keep(tier, keys_of(4, start=100))
    assert await lender.recall(tier, keys_of(4, start=100)) == [label(key) for key in keys_of(4, start=100)]
    assert {path.stat().st_size for path in root.rglob("*.bin")} == {ROW_BYTES + FOOTER_BYTES}
    assert taken_bytes(root) <= CAPACITY_BYTES


async def test_a_queue_at_a_chunks_name_holds_up_nobody(open_full, lender: Lender, path_of) -> None:
    tier = await open_full()
    victim = oldest(path_of)
    path_of(victim).unlink()
    os.mkfifo(path_of(victim))
    async with asyncio.timeout(DEADLINE_S):
        await lender.keep(tier, keys_of(4, start=100))
    assert await lender.recall(tier, keys_of(4, start=100)) == [label(key) for key in keys_of(4, start=100)]


async def test_a_load_of_what_is_being_overwritten_is_a_miss_and_opens_nothing(
    open_full, lender: Lender, path_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would take the file for a corrupt one, and discard it."""
    tier = await open_full()
    victim = oldest(path_of)
    entered, go_on, rename = threading.Event(), threading.Event(), os.rename

    def wait(source: str, target: str, **kwargs: int) -> None:
        if victim[:-4].hex() in source:
            entered.set()
            assert go_on.wait(DEADLINE_S)
        rename(source, target, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", wait)
        storing = asyncio.create_task(tier.store(lender.writes(keys_of(1, start=100))))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        assert path_of(victim).exists()
        assert await lender.recall(tier, [victim]) == ["ChunkMissing"]
        go_on.set()
        assert list(await storing) == [None]
    assert tier.counters().corrupt == {}


async def test_a_file_that_is_being_read_is_not_overwritten(
    open_full, lender: Lender, path_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_full(load_lanes=1)
    read = oldest(path_of)
    entered, go_on, preadv = threading.Event(), threading.Event(), os.preadv

    def wait(*args: object) -> int:
        entered.set()
        assert go_on.wait(DEADLINE_S)
        return preadv(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", wait)
        loading = asyncio.create_task(lender.recall(tier, [read]))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        for number in range(100, 100 + 2 * ROOM):
            await lender.keep(tier, [key_of(number)])
        go_on.set()
        assert await loading == [label(read)]


async def test_a_file_that_cannot_be_taken_costs_a_chunk_and_takes_its_room_still(
    open_full, lender: Lender, root: Path, taken_bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_full()
    rename, unlink = os.rename, os.unlink

    def refuse(source: str, target: str, **kwargs: int) -> None:
        if source.endswith(".bin"):
            raise OSError(5, "Input/output error")
        rename(source, target, **kwargs)

    def keep(name: str, **kwargs: int) -> None:
        if name.endswith(".bin"):
            raise OSError(5, "Input/output error")
        unlink(name, **kwargs)

    before = inodes(root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        patch.setattr(os, "unlink", keep)
        outcomes = await tier.store(lender.writes(keys_of(4, start=100)))
        assert {type(outcome).__name__ for outcome in outcomes} == {"TransferFailed", "NoSpace"}
        while not tier.counters().evictions_failed:  # They are to be removed behind the store, which fails, too.
            await asyncio.sleep(0)
    assert inodes(root) == before
    assert tier.occupancy().used_bytes <= taken_bytes(root) <= CAPACITY_BYTES
    await lender.keep(tier, keys_of(4, start=100))
    assert taken_bytes(root) <= CAPACITY_BYTES


async def test_a_write_that_fails_leaves_neither_chunk(
    open_full, lender: Lender, path_of, root: Path, taken_bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_full()
    victim = oldest(path_of)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        outcomes = await tier.store(lender.writes(keys_of(1, start=100)))
        assert [type(outcome).__name__ for outcome in outcomes] == ["TransferFailed"]
    assert await lender.recall(tier, [victim, key_of(100)]) == ["ChunkMissing"] * 2
    assert list(root.rglob("*.tmp")) == []
    assert tier.occupancy().used_bytes <= taken_bytes(root) <= CAPACITY_BYTES


async def test_a_cancelled_store_leaves_whole_chunks_and_counts_what_is_there(
    open_full, lender: Lender, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_full(store_lanes=1)
    entered, go_on, pwritev = threading.Event(), threading.Event(), os.pwritev

    def wait(*args: object) -> int:
        entered.set()
        assert go_on.wait(DEADLINE_S)
        return pwritev(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", wait)
        storing = asyncio.create_task(tier.store(lender.writes(keys_of(4, start=100))))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        storing.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await storing
    everything = [*keys_of(2 * ROOM), *keys_of(4, start=100)]
    told = await lender.recall(tier, everything)
    assert set(told) <= {"ChunkMissing", *map(label, everything)}
    assert tier.occupancy().chunks == len(told) - told.count("ChunkMissing") == len(inodes(root))
    assert tier.counters().corrupt == {}


async def test_files_that_a_spent_write_budget_leaves_go_all_the_same(
    open_full, open_tier, lender: Lender, root: Path, taken_bytes
) -> None:
    """They were chosen, and whoever listens has heard that they are gone."""
    full = await open_full()
    await full.aclose(DEADLINE_S)
    budget_bytes = 32 * (ROW_BYTES + FOOTER_BYTES)  # Of which an eighth may come at once.
    tier = await open_tier(naming="flat", capacity_bytes=CAPACITY_BYTES, write_budget_bytes_per_day=budget_bytes)
    outcomes = list(await tier.store(lender.writes(keys_of(12, start=100))))
    (chunks,) = root.glob("*_flat")
    assert 0 < outcomes.count(None) < 12
    assert tier.counters().evicted > tier.counters().overwritten + outcomes.count(None)
    async with asyncio.timeout(DEADLINE_S):
        while sum(len(files) for _, _, files in os.walk(chunks)) > tier.occupancy().chunks:  # Behind the store.
            await asyncio.sleep(0)
        while tier.occupancy().used_bytes > taken_bytes(root):  # And is taken note of.
            await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        await tier.store(lender.writes(keys_of(2 * ROOM)))  # Among them, what has gone: nobody waits for it for ever.


async def test_what_only_an_old_checkpoint_names_leaves_no_room(
    open_tier, lender: Lender, root: Path, taken_bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill: its chunks have gone for others, of which nobody knows before the scan comes to them."""
    options = {"naming": "flat", "capacity_bytes": CAPACITY_BYTES}
    tier = await open_tier(**options)
    await lender.keep(tier, keys_of(12))
    await tier.aclose(DEADLINE_S)
    (index,) = root.glob("*/index*")
    old = index.read_bytes()
    tier = await open_tier(**options)
    for number in range(100, 100 + 2 * ROOM):
        await lender.keep(tier, [key_of(number)])
    await tier.aclose(DEADLINE_S)
    index.write_bytes(old)
    go_on, scandir = threading.Event(), os.scandir

    def wait(fd: int):
        assert go_on.wait(DEADLINE_S)
        return scandir(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", wait)
        tier = await open_tier(**options)
        await tier.store(lender.writes(keys_of(12, start=1_000)))
    try:
        assert tier.counters().evicted
        assert taken_bytes(root) <= CAPACITY_BYTES
    finally:
        go_on.set()


async def test_a_file_that_takes_more_than_is_wanted_is_counted_until_it_is_gone(
    open_tier, lender: Lender, path_of, root: Path, taken_bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though more go with it: what these leave is not taken off."""
    before = await open_tier(naming="flat", checkpoint_s=0)
    await lender.keep(before, keys_of(10))
    await before.aclose(DEADLINE_S)
    large = path_of(key_of(5))
    large.write_bytes(bytes(8 * ROW_BYTES))
    os.utime(large, (1, 1))
    tier = await open_tier(naming="flat", capacity_bytes=taken_bytes(root) + 8_192, checkpoint_s=0)
    async with asyncio.timeout(DEADLINE_S):
        while not tier.counters().scan_skipped:
            await asyncio.sleep(0)
    rename, seen = os.rename, list[tuple[int, int]]()

    def look(source: str, target: str, **kwargs: int) -> None:
        if source.endswith(large.name):
            told = tier.occupancy()
            there = sum(path.stat().st_blocks for path in root.rglob("*.bin")) * 512
            seen.append((there, told.used_bytes + told.reserved_bytes))
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", look)
    await lender.keep(tier, [key_of(100)])
    ((there_bytes, counted_bytes),) = seen
    assert tier.counters().evicted > 1
    assert counted_bytes >= there_bytes


async def test_a_full_tier_has_room_for_its_checkpoints(open_tier, lender: Lender, root: Path, taken_bytes) -> None:
    """Beside the last one, though chunks take all the room that they may."""
    capacity_bytes, numbers = 1_000 * (ROW_BYTES + FOOTER_BYTES), itertools.count()
    for _ in range(2):
        tier = await open_tier(naming="flat", capacity_bytes=capacity_bytes)
        while tier.counters().overwritten < 4:
            await lender.keep(tier, [key_of(next(numbers))])
        assert await tier.aclose(DEADLINE_S) == (0,)
        assert (tier.counters().checkpoints_written, tier.counters().checkpoints_failed) == (1, 0)
        assert taken_bytes(root) <= capacity_bytes


async def test_room_for_checkpoints_is_made_where_chunks_have_taken_it(open_tier, lender: Lender) -> None:
    """As by a tier that wrote none; and nobody stores anything more."""
    capacity_bytes, numbers = 300 * (ROW_BYTES + FOOTER_BYTES), itertools.count()
    before = await open_tier(naming="flat", capacity_bytes=capacity_bytes, checkpoint_s=0)
    while before.counters().overwritten < 4:
        await lender.keep(before, [key_of(next(numbers))])
    await before.aclose(DEADLINE_S)
    tier = await open_tier(naming="flat", capacity_bytes=capacity_bytes, checkpoint_s=0.05)
    async with asyncio.timeout(DEADLINE_S):
        while tier.counters().checkpoints_written < 3:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("naming", ["flat", "vllm"])
async def test_a_batch_larger_than_the_tier_keeps_its_head(
    open_full, lender: Lender, root: Path, taken_bytes, naming: str
) -> None:
    tier = await open_full(naming=naming)
    batch = keys_of(3 * ROOM, start=100)
    outcomes = list(await tier.store(lender.writes(batch)))
    kept = outcomes.index(next(outcome for outcome in outcomes if outcome is not None))
    assert kept > 0
    assert all(type(outcome).__name__ == "NoSpace" for outcome in outcomes[kept:])
    assert await lender.recall(tier, batch[:kept]) == [label(key) for key in batch[:kept]]
    assert taken_bytes(root) <= CAPACITY_BYTES


async def test_room_for_others_is_not_made_twice(open_full, lender: Lender, mount, root: Path) -> None:
    """What is overwritten takes nothing from the disk's free room, and nothing has to go for that."""
    place = mount("tmpfs", f"size={4 * CAPACITY_BYTES}")
    tier = await open_full(root=str(place), capacity_bytes=None, min_free_bytes=3 * CAPACITY_BYTES)
    for start in range(100, 100 + 4 * ROOM, 4):
        await lender.keep(tier, keys_of(4, start=start))
    settled = tier.occupancy().chunks
    evicted, overwritten = tier.counters().evicted, tier.counters().overwritten
    for start in range(1_000, 1_000 + 4 * ROOM, 4):
        await lender.keep(tier, keys_of(4, start=start))
    assert tier.counters().evicted - evicted <= tier.counters().overwritten - overwritten + 4
    assert abs(tier.occupancy().chunks - settled) <= 4
    assert os.statvfs(place).f_bavail * os.statvfs(place).f_frsize >= 3 * CAPACITY_BYTES


async def test_few_folders_of_a_large_tier_are_kept_when_they_are_empty(
    open_tier, lender: Lender, root: Path, taken_bytes
) -> None:
    """Making one again costs as much as making a file; those of a small tier would take too much of its room."""
    for capacity_bytes, kept in ((CAPACITY_BYTES, False), (512 << 20, True)):
        tier = await open_tier(naming="flat", capacity_bytes=capacity_bytes)
        await lender.keep(tier, keys_of(4))
        await tier.delete(keys_of(4))
        folders = [path for path in root.glob("*_flat/*") if path.is_dir()]
        assert bool(folders) == kept
        assert taken_bytes(root) <= capacity_bytes
        await tier.aclose(DEADLINE_S)
