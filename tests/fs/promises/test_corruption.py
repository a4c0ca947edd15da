"""Damaged, foreign and swapped files are misses, counted by kind and out of the way; their keys can be stored again."""

import os
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.backend.contract import Added, Removed, ScanDone, TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.errors import ChunkCorrupt, ChunkMissing
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import ChunkFault, FsBackend, FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from tests.fs.conftest import Place

KEY = key_of(1)
LAYOUTS = ["files", "segments"]
ROW_BYTES = 8_192
Damage = Callable[[Place], object]


def overwritten(at: int, content: bytes) -> Damage:
    return lambda place: place.overwrite(at, content)


def cut_to(length: int) -> Damage:
    return lambda place: os.truncate(place.path, length)


DAMAGES: dict[str, tuple[Damage, ChunkFault]] = {
    "a zeroed footer": (overwritten(ROW_BYTES, bytes(FOOTER_BYTES)), ChunkFault.ZEROED),
    "a stranger": (overwritten(ROW_BYTES, b"PK\3\4" * 1_024), ChunkFault.FOREIGN),
    "a damaged footer": (overwritten(ROW_BYTES + 70, b"\xff"), ChunkFault.FOOTER),
    "a damaged sequence number": (overwritten(ROW_BYTES + 4_085, b"\xff"), ChunkFault.FOOTER),
    "a damaged payload": (overwritten(0, b"\xff"), ChunkFault.PAYLOAD),
    "a zeroed page": (overwritten(4_096, bytes(4_096)), ChunkFault.PAYLOAD),
}
OF_FILES: dict[str, tuple[Damage, ChunkFault]] = {  # A slot has one length.
    "empty": (cut_to(0), ChunkFault.TRUNCATED),
    "one byte": (cut_to(1), ChunkFault.TRUNCATED),
    "a page": (cut_to(4_096), ChunkFault.TRUNCATED),
    "a byte less than a row": (cut_to(ROW_BYTES - 1), ChunkFault.TRUNCATED),
    "a byte more than a row": (cut_to(ROW_BYTES + 1), ChunkFault.TRUNCATED),
    "a byte less than a footer": (cut_to(ROW_BYTES + FOOTER_BYTES - 1), ChunkFault.TRUNCATED),
    "a byte too long": (cut_to(ROW_BYTES + FOOTER_BYTES + 1), ChunkFault.OVERLONG),
    "a page too long": (cut_to(ROW_BYTES + 2 * FOOTER_BYTES), ChunkFault.OVERLONG),
    "much too long": (cut_to(ROW_BYTES * 10), ChunkFault.OVERLONG),
    "all zeros": (overwritten(0, bytes(ROW_BYTES + FOOTER_BYTES)), ChunkFault.ZEROED),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("io", ["direct", "buffered"])
async def test_damaged_chunks_are_misses_beside_sound_ones_and_can_be_stored_again(
    open_tier, lender: Lender, place_of, seal, layout: str, io: str
) -> None:
    damages = DAMAGES | (OF_FILES if layout == "files" else {})
    keys = keys_of(2 * len(damages))
    damaged = dict(zip(keys[::2], damages, strict=True))  # Every second one.
    tier = await open_tier(layout=layout, io=io, capacity_bytes="4MiB", **seal)
    await lender.keep(tier, keys)
    for key, kind in damaged.items():
        damages[kind][0](place_of(key))
    told = dict(zip(keys, await lender.recall(tier, keys), strict=True))
    assert {kind: told[key] for key, kind in damaged.items()} == dict.fromkeys(damages, "ChunkCorrupt")
    assert [told[key] for key in keys[1::2]] == [label(key) for key in keys[1::2]]
    faults = Counter(fault.value for _, fault in damages.values())
    assert tier.counters().corrupt == faults
    assert list(await tier.probe(keys)) == [key not in damaged for key in keys]
    assert await lender.recall(tier, list(damaged)) == ["ChunkMissing"] * len(damaged)
    await lender.keep(tier, list(damaged), version=1)
    assert await lender.recall(tier, keys) == [label(key, int(key in damaged)) for key in keys]
    assert tier.counters().corrupt == faults


@pytest.fixture
def opened_once(open_tier) -> Callable[..., Awaitable[FsBackend]]:
    """Open one tier for all examples of a test."""
    opened: list[FsBackend] = []

    async def opened_once(**options: object) -> FsBackend:
        if not opened:
            opened.append(await open_tier(**options))
        return opened[0]

    return opened_once


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(bit=st.integers(0, 8 * (ROW_BYTES + FOOTER_BYTES) - 1))
async def test_a_flipped_bit_anywhere_is_a_miss(
    opened_once, lender: Lender, place_of, seal, layout: str, bit: int
) -> None:
    tier = await opened_once(layout=layout, capacity_bytes="1MiB", **seal)
    await lender.keep(tier, [KEY])
    place = place_of(KEY)
    place.overwrite(bit // 8, bytes([place.read()[bit // 8] ^ 1 << bit % 8]))
    assert await lender.recall(tier, [KEY]) == ["ChunkCorrupt"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(length=st.integers(0, ROW_BYTES + FOOTER_BYTES - 1))
async def test_a_file_cut_off_anywhere_is_a_miss(opened_once, lender: Lender, path_of, seal, length: int) -> None:
    tier = await opened_once(**seal)
    await lender.keep(tier, [KEY])
    os.truncate(path_of(KEY), length)
    expected = "ChunkMissing" if length == ROW_BYTES else "ChunkCorrupt"  # Then it looks like one of vLLM's: refused.
    assert await lender.recall(tier, [KEY]) == [expected]


async def test_a_file_of_a_later_format_is_a_miss_and_left_alone(
    open_tier, lender: Lender, path_of, row_bytes: int
) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(2))
    page = bytearray(path_of(KEY).read_bytes()[row_bytes:])
    struct.pack_into("<I", page, 8, 3)
    struct.pack_into("<Q", page, FOOTER_BYTES - 8, xxh3_64_intdigest(page[:-8]))
    Place(path_of(KEY), 0).overwrite(row_bytes, bytes(page))
    later = path_of(KEY).read_bytes()
    assert await lender.recall(tier, keys_of(2)) == [label(key_of(0)), "ChunkMissing"]
    assert path_of(KEY).read_bytes() == later
    assert tier.counters().corrupt == {}
    assert tier.counters().other_version == 1
    await lender.keep(tier, [KEY])
    assert await lender.recall(tier, [KEY]) == [label(KEY)]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_swapped_chunks_are_misses(open_tier, lender: Lender, place_of, seal, layout: str) -> None:
    tier = await open_tier(layout=layout, capacity_bytes="1MiB", **seal)
    await lender.keep(tier, keys_of(3))
    first, second = map(place_of, keys_of(2))
    was_first, was_second = first.read(), second.read()
    first.overwrite(0, was_second)
    second.overwrite(0, was_first)
    assert await lender.recall(tier, keys_of(3)) == ["ChunkCorrupt", "ChunkCorrupt", label(key_of(2))]
    assert tier.counters().corrupt == {"swapped": 2}


@pytest.mark.parametrize("other", [{"layout": "LBHNC"}, {"row_bytes": 4_096}])
async def test_a_file_of_a_namespace_with_the_same_names_is_a_miss(
    open_tier, lender: Lender, root: Path, row_bytes: int, other: dict[str, object]
) -> None:
    """What vLLM leaves out of its names is in the footer's fingerprint."""
    mapper = FileMapper(Namespace(model_name="org/model", **other))  # type: ignore[arg-type]
    theirs = await FsBackend.open(FsOptions(root=str(root), layout="files"), TierContext("1:fs", mapper, row_bytes))
    await lender.keep(theirs, [KEY])
    await theirs.aclose(10)
    ours = await open_tier()
    assert await lender.recall(ours, [KEY]) == ["ChunkCorrupt"]
    assert ours.counters().corrupt == {"namespace": 1}


async def test_rows_of_another_length_are_misses(open_tier, lender: Lender, root: Path, mapper, row_bytes: int) -> None:
    ours = await open_tier()
    await lender.keep(ours, [key_of(2)])
    await ours.aclose(10)
    theirs = await FsBackend.open(FsOptions(root=str(root), layout="files"), TierContext("1:fs", mapper, 4 * row_bytes))
    longer = Lender(4 * row_bytes)
    await longer.keep(theirs, [KEY])
    assert await longer.recall(theirs, [key_of(2)]) == ["ChunkCorrupt"]
    await theirs.aclose(10)
    assert await lender.recall(await open_tier(), [KEY]) == ["ChunkCorrupt"]


async def test_a_corrupt_file_that_cannot_be_moved_is_still_a_miss(
    open_tier, lender: Lender, path_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_tier()
    await lender.keep(tier, [KEY])
    Place(path_of(KEY), 0).overwrite(5, b"?")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        for _ in range(2):
            assert await lender.recall(tier, [KEY]) == ["ChunkCorrupt"]
    assert tier.counters().corrupt_left == 2
    assert list(await tier.probe([KEY])) == [False]
    await lender.keep(tier, [KEY])
    assert await lender.recall(tier, [KEY]) == [label(KEY)]


async def test_the_inventory_hears_of_corrupt_chunks(open_tier, lender: Lender, path_of) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(2))
    report = tier.watch()
    assert [type(await anext(report)) for _ in range(2)] == [Added, ScanDone]
    Place(path_of(KEY), 0).overwrite(5, b"?")
    await lender.recall(tier, keys_of(2))
    assert await anext(report) == Removed([KEY])
    await report.aclose()


@pytest.mark.parametrize(
    ("layout", "damage", "wrong"),
    [
        ("files", cut_to(100), "truncated: a file of 100 bytes for a row of 8,192"),
        ("segments", overwritten(0, b"?"), "payload: slot 0"),
    ],
)
async def test_what_was_wrong_is_in_the_outcome(
    open_tier, lender: Lender, place_of, layout: str, damage: Damage, wrong: str
) -> None:
    tier = await open_tier(layout=layout, capacity_bytes="1MiB")
    await lender.keep(tier, [KEY])
    damage(place_of(KEY))
    corrupt, missing = await tier.load(lender.reads([KEY, key_of(2)]))
    assert isinstance(corrupt, ChunkCorrupt)
    assert str(corrupt) == f"{KEY.hex()}: {wrong}"
    assert isinstance(missing, ChunkMissing)
    assert key_of(2).hex() in str(missing)
