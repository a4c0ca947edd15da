"""Corrupt files are kept while there is room for them, and go before any chunk when there is not."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.backend.namespace import FileMapper
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs.disk.quarantine import FOLDER_BYTES, Quarantine
from kvtier_backends.fs.disk.root import Folder
from tests.fs.conftest import MakeSystemCall

CAPACITY_BYTES = 24 * (8_192 + 4_096 + 8_192) + 65_536 + FOLDER_BYTES


KEPT = tuple(f"{name}.zeroed.01234567-1-2-3.tmp" for name in "abc")


def quarantine_of(root: Path, mapper: FileMapper) -> Path:
    return root / mapper.folder / "quarantine"


async def quarantined(tier, lender: Lender, path_of, count: int) -> None:
    """Have so many files be found corrupt."""
    keys = keys_of(count, start=500)
    await lender.keep(tier, keys)
    for key in keys:
        with path_of(key).open("r+b") as file:
            file.write(b"?")
    assert await lender.recall(tier, keys) == ["ChunkCorrupt"] * count


@pytest.mark.parametrize("shared", [False, True])
async def test_corrupt_files_go_before_any_chunk(
    open_tier, lender: Lender, path_of, root: Path, mapper, taken_bytes, shared: bool
) -> None:
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, corrupt="quarantine", shared=shared)
    await quarantined(tier, lender, path_of, 4)
    number, there = 0, 4
    while not tier.counters().evicted:
        before = len(os.listdir(quarantine_of(root, mapper)))
        assert before <= there, "nobody else takes any away"
        there = before
        await lender.keep(tier, [key_of(number)])
        assert taken_bytes(root) <= CAPACITY_BYTES
        number += 1
        assert number < 1_000
    assert os.listdir(quarantine_of(root, mapper)) == []
    assert tier.counters().quarantine_evicted == 4
    assert await lender.recall(tier, [key_of(number - 1)]) == [label(key_of(number - 1))]


@pytest.mark.usefixtures("thorough")
async def test_the_growth_of_its_folder_is_within_the_capacity(
    open_tier, lender: Lender, path_of, root: Path, taken_bytes
) -> None:
    capacity_bytes = 8 << 20
    tier = await open_tier(capacity_bytes=capacity_bytes, corrupt="quarantine", naming="flat", low_water=1.0)
    keys = keys_of(120)
    for start in range(0, 120, 40):
        await lender.keep(tier, keys[start : start + 40])
    for path in root.rglob("*.bin"):
        with path.open("r+b") as file:
            file.write(b"?" * 64)
    for start in range(0, 120, 40):
        assert await lender.recall(tier, keys[start : start + 40]) == ["ChunkCorrupt"] * 40
    assert tier.counters().quarantined == 100, "the rest was deleted"
    number = 1_000
    while not tier.counters().quarantine_evicted:
        await lender.keep(tier, [key_of(number)])
        assert taken_bytes(root) <= capacity_bytes
        number += 1


async def test_what_an_earlier_life_has_kept_goes_too(open_tier, lender: Lender, path_of, root: Path, mapper) -> None:
    before = await open_tier(corrupt="quarantine")
    await quarantined(before, lender, path_of, 3)
    await before.aclose(20)
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES)
    assert len(os.listdir(quarantine_of(root, mapper))) == 3
    for number in range(40):
        await lender.keep(tier, [key_of(number)])
    assert os.listdir(quarantine_of(root, mapper)) == []
    assert tier.counters().quarantine_evicted == 3


async def test_what_a_tier_of_files_has_kept_goes_before_any_chunk_in_segments(
    open_tier, lender: Lender, path_of, root: Path, mapper, taken_bytes
) -> None:
    before = await open_tier(corrupt="quarantine")
    await quarantined(before, lender, path_of, 8)
    await before.delete(keys_of(8, start=500))
    await before.aclose(20)
    kept_bytes = taken_bytes(quarantine_of(root, mapper))
    tier = await open_tier(layout="segments", capacity_bytes=kept_bytes + 65_536)
    await lender.keep(tier, keys_of(6))
    assert await lender.recall(tier, keys_of(6)) == [label(key) for key in keys_of(6)]
    assert len(os.listdir(quarantine_of(root, mapper))) < 8
    assert tier.counters().quarantine_evicted == 8 - len(os.listdir(quarantine_of(root, mapper)))
    assert tier.counters().evicted == 0


async def test_they_go_for_a_segment_too_where_the_disk_is_full(
    open_tier, lender: Lender, path_of, root: Path, mapper, system_call: MakeSystemCall
) -> None:
    before = await open_tier(corrupt="quarantine")
    await quarantined(before, lender, path_of, 8)
    await before.aclose(20)
    full = system_call(
        "posix_fallocate", error=errno.ENOSPC, only=lambda *_: len(os.listdir(quarantine_of(root, mapper))) > 3
    )
    tier = await open_tier(layout="segments")
    await lender.keep(tier, keys_of(6))
    assert full.times > 5
    assert len(os.listdir(quarantine_of(root, mapper))) == 3
    assert tier.counters().quarantine_evicted == 5
    assert tier.counters().disk_full == 0


@pytest.fixture
def kept(open_folder: Callable[..., Folder], root: Path, mapper: FileMapper) -> Quarantine:
    """Three files in quarantine, of which the second by name is the oldest there."""
    quarantine, came_ns = open_folder(corrupt="quarantine").quarantine, 0
    for name in KEPT[1], KEPT[0], KEPT[2]:
        path = quarantine_of(root, mapper) / name
        path.write_bytes(b"bad" * 4_096)
        while path.stat().st_ctime_ns <= came_ns:  # The kernel's clock for it has some milliseconds only.
            path.chmod(0o600)
        came_ns = path.stat().st_ctime_ns
        assert quarantine.admit()
    return quarantine


def test_the_oldest_goes_first_and_no_more_than_is_needed(kept: Quarantine, root: Path, mapper: FileMapper) -> None:
    assert kept.clear(12_288) == (1, 12_288)
    assert sorted(os.listdir(quarantine_of(root, mapper))) == [KEPT[0], KEPT[2]]
    assert kept.clear(12_289) == (2, 24_576)
    assert kept.empty


def test_what_people_have_tidied_away_is_no_room(kept: Quarantine, root: Path, mapper: FileMapper) -> None:
    for name in KEPT:
        (quarantine_of(root, mapper) / name).unlink()
    assert not kept.empty  # It has not looked.
    assert kept.clear(1) == (0, 0)
    assert kept.empty


def test_what_cannot_be_removed_is_left(kept: Quarantine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **kwargs: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert kept.clear(1) == (0, 0)
    assert not kept.empty
    assert kept.clear(1) == (1, 12_288)
