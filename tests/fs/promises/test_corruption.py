"""Damaged, foreign and swapped files are misses, counted by kind and out of the way; their keys can be stored again."""

import itertools
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.backend.contract import Added, Removed, ScanDone, TierContext
from kvtier.backend.keys import OffloadKey
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.errors import ChunkCorrupt, ChunkMissing
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import Fault, FsBackend, FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES

KEY = key_of(1)
Damage = Callable[[Path, int], None]


def truncate_to(length: Callable[[int], int]) -> Damage:
    return lambda path, row_bytes: os.truncate(path, length(row_bytes))


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


DAMAGES: dict[str, tuple[Damage, Fault]] = {
    "empty": (truncate_to(lambda row_bytes: 0), Fault.TRUNCATED),
    "one byte": (truncate_to(lambda row_bytes: 1), Fault.TRUNCATED),
    "a page": (truncate_to(lambda row_bytes: 4_096), Fault.TRUNCATED),
    "a byte less than a row": (truncate_to(lambda row_bytes: row_bytes - 1), Fault.TRUNCATED),
    "a byte more than a row": (truncate_to(lambda row_bytes: row_bytes + 1), Fault.TRUNCATED),
    "a byte less than a footer": (truncate_to(lambda row_bytes: row_bytes + FOOTER_BYTES - 1), Fault.TRUNCATED),
    "a byte too long": (truncate_to(lambda row_bytes: row_bytes + FOOTER_BYTES + 1), Fault.OVERLONG),
    "a page too long": (truncate_to(lambda row_bytes: row_bytes + 2 * FOOTER_BYTES), Fault.OVERLONG),
    "much too long": (truncate_to(lambda row_bytes: row_bytes * 10), Fault.OVERLONG),
    "all zeros": (lambda path, row_bytes: path.write_bytes(bytes(row_bytes + FOOTER_BYTES)) and None, Fault.ZEROED),
    "a zeroed footer": (lambda path, row_bytes: overwrite(path, row_bytes, bytes(FOOTER_BYTES)), Fault.ZEROED),
    "a stranger": (lambda path, row_bytes: overwrite(path, row_bytes, b"PK\3\4" * 1_024), Fault.FOREIGN),
    "a damaged footer": (lambda path, row_bytes: overwrite(path, row_bytes + 70, b"\xff"), Fault.FOOTER),
    "a damaged payload": (lambda path, row_bytes: overwrite(path, 0, b"\xff"), Fault.PAYLOAD),
    "a zeroed page": (lambda path, row_bytes: overwrite(path, 4_096, bytes(4_096)), Fault.PAYLOAD),
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("io", ["direct", "buffered"])
async def test_a_damaged_file_is_a_miss(
    open_tier, lender: Lender, path_of: Callable[[OffloadKey], Path], kind: str, io: str, row_bytes: int
) -> None:
    damage, fault = DAMAGES[kind]
    tier = await open_tier(io=io)
    await lender.keep(tier, keys_of(3))
    damage(path_of(KEY), row_bytes)
    assert await lender.recall(tier, keys_of(3)) == [label(key_of(0)), "ChunkCorrupt", label(key_of(2))]
    assert tier.counters().corrupt == {fault.value: 1}
    assert not path_of(KEY).exists()
    assert await lender.recall(tier, [KEY]) == ["ChunkMissing"]
    assert list(await tier.probe(keys_of(3))) == [True, False, True]
    await lender.keep(tier, [KEY], version=1)
    assert await lender.recall(tier, keys_of(3)) == [label(key_of(0)), label(KEY, 1), label(key_of(2))]
    assert tier.counters().corrupt == {fault.value: 1}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
async def test_a_flipped_bit_anywhere_is_a_miss(open_tier, lender: Lender, path_of, row_bytes: int, data) -> None:
    bit = data.draw(st.integers(0, 8 * (row_bytes + FOOTER_BYTES) - 1))
    tier = await open_tier(io=data.draw(st.sampled_from(["direct", "buffered"])))
    await lender.keep(tier, [KEY])
    content = bytearray(path_of(KEY).read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    overwrite(path_of(KEY), bit // 8, bytes(content[bit // 8 : bit // 8 + 1]))
    assert await lender.recall(tier, [KEY]) == ["ChunkCorrupt"]
    assert await tier.aclose(10) == (0,)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
async def test_a_file_cut_off_anywhere_is_a_miss(open_tier, lender: Lender, path_of, row_bytes: int, data) -> None:
    length = data.draw(st.integers(0, row_bytes + FOOTER_BYTES - 1))
    tier = await open_tier()
    await lender.keep(tier, [KEY])
    os.truncate(path_of(KEY), length)
    expected = "ChunkMissing" if length == row_bytes else "ChunkCorrupt"  # Then it looks like one of vLLM's: refused.
    assert await lender.recall(tier, [KEY]) == [expected]
    assert await tier.aclose(10) == (0,)


async def test_a_file_of_a_later_format_is_a_miss_and_left_alone(
    open_tier, lender: Lender, path_of, row_bytes: int
) -> None:
    tier = await open_tier(corrupt="delete")
    await lender.keep(tier, keys_of(2))
    page = bytearray(path_of(KEY).read_bytes()[row_bytes:])
    struct.pack_into("<I", page, 8, 2)
    struct.pack_into("<Q", page, FOOTER_BYTES - 8, xxh3_64_intdigest(page[:-8]))
    overwrite(path_of(KEY), row_bytes, bytes(page))
    later = path_of(KEY).read_bytes()
    assert await lender.recall(tier, keys_of(2)) == [label(key_of(0)), "ChunkMissing"]
    assert path_of(KEY).read_bytes() == later
    assert tier.counters().corrupt == {}
    assert tier.counters().other_version == 1
    await lender.keep(tier, [KEY])
    assert await lender.recall(tier, [KEY]) == [label(KEY)]


async def test_swapped_files_are_misses(open_tier, lender: Lender, path_of) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(3))
    aside = path_of(key_of(0)).with_suffix(".aside")
    path_of(key_of(0)).rename(aside)
    path_of(key_of(1)).rename(path_of(key_of(0)))
    aside.rename(path_of(key_of(1)))
    assert await lender.recall(tier, keys_of(3)) == ["ChunkCorrupt", "ChunkCorrupt", label(key_of(2))]
    assert tier.counters().corrupt == {"swapped": 2}


@pytest.mark.parametrize("other", [{"layout": "LBHNC"}, {"row_bytes": 4_096}])
async def test_a_file_of_a_namespace_with_the_same_names_is_a_miss(
    open_tier, lender: Lender, root: Path, row_bytes: int, other: dict[str, object]
) -> None:
    """What vLLM leaves out of its names is in the footer's fingerprint."""
    ours = await open_tier()
    mapper = FileMapper(Namespace(model_name="org/model", **other))  # type: ignore[arg-type]
    theirs = await FsBackend.open(FsOptions(root=str(root), layout="files"), TierContext("1:fs", mapper, row_bytes))
    await lender.keep(theirs, [KEY])
    await theirs.aclose(10)
    assert await lender.recall(ours, [KEY]) == ["ChunkCorrupt"]
    assert ours.counters().corrupt == {"namespace": 1}


async def test_rows_of_another_length_are_misses(open_tier, lender: Lender, root: Path, mapper, row_bytes: int) -> None:
    ours = await open_tier()
    theirs = await FsBackend.open(FsOptions(root=str(root), layout="files"), TierContext("1:fs", mapper, 4 * row_bytes))
    longer = Lender(4 * row_bytes)
    await longer.keep(theirs, [KEY])
    await lender.keep(ours, [key_of(2)])
    assert await lender.recall(ours, [KEY]) == ["ChunkCorrupt"]
    assert await longer.recall(theirs, [key_of(2)]) == ["ChunkCorrupt"]
    await theirs.aclose(10)


async def test_quarantine_keeps_the_file_as_it_was(open_tier, lender: Lender, path_of, root: Path, mapper) -> None:
    tier = await open_tier(corrupt="quarantine")
    await lender.keep(tier, [KEY])
    overwrite(path_of(KEY), 5, b"?")
    bad = path_of(KEY).read_bytes()
    assert await lender.recall(tier, [KEY]) == ["ChunkCorrupt"]
    assert not path_of(KEY).exists()
    (kept,) = (root / mapper.folder / "quarantine").iterdir()
    assert kept.read_bytes() == bad
    assert tier.counters().quarantined == 1
    await tier.aclose(10)
    again = await open_tier(corrupt="quarantine")
    assert list(await again.probe([KEY])) == [False]


async def test_a_corrupt_file_that_cannot_be_moved_is_still_a_miss(
    open_tier, lender: Lender, path_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_tier()
    await lender.keep(tier, [KEY])
    overwrite(path_of(KEY), 5, b"?")

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


async def test_a_good_file_that_replaces_a_corrupt_one_while_it_is_read_stays(
    open_tier, lender: Lender, path_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_tier()
    await lender.keep(tier, [KEY], version=1)
    good = path_of(KEY).read_bytes()
    overwrite(path_of(KEY), 5, b"?")
    read, replacements = os.preadv, itertools.count()

    def read_and_replace(fd: int, buffers: object, at: int) -> int:
        done = read(fd, buffers, at)  # type: ignore[arg-type]
        if next(replacements) == 0:
            path_of(KEY).with_suffix(".new").write_bytes(good)
            path_of(KEY).with_suffix(".new").rename(path_of(KEY))
        return done

    monkeypatch.setattr(os, "preadv", read_and_replace)
    assert await lender.recall(tier, [KEY]) == ["ChunkCorrupt"]
    assert await lender.recall(tier, [KEY]) == [label(KEY, 1)]


async def test_the_inventory_hears_of_corrupt_chunks(open_tier, lender: Lender, path_of) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(2))
    report = tier.watch()
    assert [type(await anext(report)) for _ in range(2)] == [Added, ScanDone]
    overwrite(path_of(KEY), 5, b"?")
    await lender.recall(tier, keys_of(2))
    assert await anext(report) == Removed([KEY])
    await report.aclose()


async def test_what_was_wrong_is_in_the_outcome(open_tier, lender: Lender, path_of, row_bytes: int) -> None:
    tier = await open_tier()
    await lender.keep(tier, keys_of(2))
    os.truncate(path_of(key_of(0)), 100)
    path_of(KEY).unlink()
    corrupt, missing = await tier.load(lender.reads(keys_of(2)))
    assert isinstance(corrupt, ChunkCorrupt)
    assert str(corrupt) == f"{key_of(0).hex()}: truncated: a file of 100 bytes for a row of 8,192"
    assert isinstance(missing, ChunkMissing)
    assert KEY.hex() in str(missing)
