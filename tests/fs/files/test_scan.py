"""What was there before the tier is found beside its work, and nothing else is taken for a chunk."""

import asyncio
import errno
import os
from itertools import count

import pytest

from kvtier.backend.contract import Added, ScanDone
from kvtier.backend.namespace import FileMapper, Namespace, OffloadKey
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend

DEADLINE_S = 20.0


async def scanned(tier: FsBackend) -> tuple[set[OffloadKey], bool]:
    """Wait for the scan; return what it reported and whether that is all."""
    keys: set[OffloadKey] = set()
    async with asyncio.timeout(DEADLINE_S):
        async for event in tier.watch():
            if isinstance(event, ScanDone):
                return keys, event.complete
            assert isinstance(event, Added)
            keys.update(event.keys)
    raise AssertionError("the report ended")


async def test_what_was_stored_before_is_found(open_tier, lender) -> None:
    keys = [*keys_of(40), key_of(1, group=3)]
    before = await open_tier()
    await lender.keep(before, keys)
    occupied = before.occupancy()
    await before.aclose(DEADLINE_S)
    tier = await open_tier()
    assert await scanned(tier) == (set(keys), True)
    assert tier.occupancy() == occupied
    assert tier.counters().scan_skipped == 0


async def test_an_empty_directory_is_scanned_too(open_tier) -> None:
    assert await scanned(await open_tier()) == (set(), True)


async def test_strangers_and_temporaries_are_no_chunks(open_tier, lender, path_of) -> None:
    before = await open_tier()
    await lender.keep(before, [key_of(0)])
    await before.aclose(DEADLINE_S)
    path = path_of(key_of(0))
    whole = path.read_bytes()
    for name in (".0-1-2-3.tmp", "notes.txt", f"{path.name}_123.tmp", "zz.bin", path.name.upper()):
        path.with_name(name).write_bytes(whole)
    path.with_name(key_of(7)[:32].hex() + ".bin").write_bytes(whole)  # In a folder that is not its own.
    tier = await open_tier()
    assert await scanned(tier) == ({key_of(0)}, True)
    assert await lender.recall(tier, [key_of(0)]) == [label(key_of(0))]


async def test_other_namespaces_are_left_alone(open_tier, lender, root) -> None:
    tier = await open_tier()
    await lender.keep(tier, [key_of(0)])
    name = FileMapper(Namespace(model_name="org/model", rank=1)).name(key_of(0))
    (root / name).parent.mkdir(parents=True)
    (root / name).write_bytes(bytes(12_288))
    await tier.aclose(DEADLINE_S)
    assert await scanned(await open_tier()) == ({key_of(0)}, True)


@pytest.mark.parametrize(("unverified", "found"), [("accept", {1}), ("refuse", set())])
async def test_files_that_no_load_would_take_are_skipped_and_counted(
    open_tier, path_of, unverified, found, row_bytes
) -> None:
    lengths = {0: 0, 1: row_bytes, 2: row_bytes - 1, 3: row_bytes + 1, 4: row_bytes + 4_097}
    for number, length in lengths.items():
        path_of(key_of(number)).parent.mkdir(parents=True)
        path_of(key_of(number)).write_bytes(bytes(length))
    tier = await open_tier(unverified=unverified)
    assert await scanned(tier) == ({key_of(number) for number in found}, True)
    assert tier.counters().scan_skipped == len(lengths) - len(found)
    assert all(path_of(key_of(number)).exists() for number in lengths)


async def test_the_tier_answers_while_it_is_scanned(open_tier, lender, hurry, system_call) -> None:
    before = await open_tier()
    await lender.keep(before, keys_of(3))
    await before.aclose(DEADLINE_S)
    hurry()
    listing = system_call("scandir", sticks=True)
    tier = await open_tier()
    await listing.wait_entered()
    assert list(await tier.probe(keys_of(5))) == [True, True, True, False, False]
    assert await lender.recall(tier, keys_of(4)) == [*map(label, keys_of(3)), "ChunkMissing"]
    await lender.keep(tier, [key_of(9)])
    assert list(await tier.probe([key_of(9), key_of(8)])) == [True, False]
    listing.let_go()
    assert await scanned(tier) == ({*keys_of(3), key_of(9)}, True)


async def test_what_is_deleted_beside_the_scan_stays_deleted(open_tier, lender, hurry, system_call) -> None:
    """The scan has seen a file, but not told of it, when it is deleted."""
    before = await open_tier()
    await lender.keep(before, keys_of(2))
    await before.aclose(DEADLINE_S)
    folders = count(1)  # The namespace, then one folder of the last key's two: the first key's have been seen.
    hurry()
    listing = system_call("scandir", sticks=True, only=lambda folder: next(folders) > 4)
    tier = await open_tier()
    await listing.wait_entered()
    await tier.delete(keys_of(2))
    await lender.keep(tier, [key_of(1)])
    listing.let_go()
    assert await scanned(tier) == ({key_of(1)}, True)
    assert list(await tier.probe(keys_of(2))) == [False, True]


async def test_an_index_that_is_whole_answers_without_a_system_call(open_tier, lender, system_call) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(2))
    await scanned(tier)
    asked = system_call("stat")
    assert list(await tier.probe(keys_of(3))) == [True, True, False]
    assert asked.times == 0


async def test_a_folder_that_cannot_be_read_leaves_the_tier_asking(open_tier, lender, path_of, system_call) -> None:
    before = await open_tier()
    await lender.keep(before, keys_of(2))
    await before.aclose(DEADLINE_S)
    hidden = path_of(key_of(0)).parent.name

    def lists_it(name: str, flags: int, *args: int, **kwargs: int) -> bool:
        return bool(flags & os.O_DIRECTORY) and name.endswith(hidden)

    system_call("open", error=errno.EACCES, only=lists_it)
    tier = await open_tier()
    assert await scanned(tier) == ({key_of(1)}, False)
    assert tier.counters().scan_failed == 1
    assert list(await tier.probe(keys_of(3))) == [True, True, False]
    assert await lender.recall(tier, [key_of(0)]) == [label(key_of(0))]


async def test_closing_ends_a_scan_that_hangs(open_tier, system_call, row_bytes) -> None:
    listing = system_call("scandir", sticks=True)
    tier = await open_tier()
    await listing.wait_entered()
    assert await tier.aclose(0) == (0,)  # It holds no lent buffer.
    listing.let_go()
    assert await tier.aclose(DEADLINE_S) == (0,)


async def test_a_link_in_a_circle_does_not_hold_up_the_scan(open_tier, lender, path_of) -> None:
    before = await open_tier()
    await lender.keep(before, [key_of(0)])
    await before.aclose(DEADLINE_S)
    folder = path_of(key_of(0)).parent
    (folder / "again").symlink_to(folder.parent)
    assert await scanned(await open_tier()) == ({key_of(0)}, True)
