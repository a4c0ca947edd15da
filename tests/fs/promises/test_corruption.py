"""Damaged, foreign and swapped chunks are misses, counted by kind and removed; their keys can be stored again."""

import os
import struct
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.backend.namespace import Namespace
from kvtier.testing.conformance import Lender, key_of, keys_of, label
from kvtier_backends.fs import ChunkFault
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.segments.segment import HEADER_BYTES
from tests.fs.conftest import ROW_BYTES, SLOT_BYTES, Place, segments, taken_bytes, until, whole

KEY = key_of(1)
Damage = Callable[[Place], object]


def overwritten(at, content):
    return lambda place: place.overwrite(at, content)


def cut_to(length):
    return lambda place: os.truncate(place.path, length)


def flipped(at):
    """Damage a byte whatever it is: ciphertext and times may have any."""

    def damage(place):
        place.overwrite(at, bytes([place.read()[at] ^ 0xFF]))

    return damage


DAMAGES = {
    "a zeroed footer": (overwritten(ROW_BYTES, bytes(FOOTER_BYTES)), ChunkFault.ZEROED),
    "a stranger": (overwritten(ROW_BYTES, b"PK\3\4" * 1_024), ChunkFault.FOREIGN),
    "a damaged footer": (overwritten(ROW_BYTES + 70, b"\xff"), ChunkFault.FOOTER),
    "a damaged sequence number": (flipped(ROW_BYTES + 4_085), ChunkFault.FOOTER),
    "a damaged payload": (flipped(0), ChunkFault.PAYLOAD),
    "a zeroed page": (overwritten(4_096, bytes(4_096)), ChunkFault.PAYLOAD),
}
OF_FILES = {  # A slot has one length.
    "empty": (cut_to(0), ChunkFault.TRUNCATED),
    "a byte more than a row": (cut_to(ROW_BYTES + 1), ChunkFault.TRUNCATED),
    "a byte too long": (cut_to(SLOT_BYTES + 1), ChunkFault.OVERLONG),
    "a page too long": (cut_to(SLOT_BYTES + FOOTER_BYTES), ChunkFault.OVERLONG),
    "much too long": (cut_to(ROW_BYTES * 10), ChunkFault.OVERLONG),
    "all zeros": (overwritten(0, bytes(SLOT_BYTES)), ChunkFault.ZEROED),
}


@pytest.mark.promise("Stored bytes are damaged, torn, cut off, or another chunk's")
@pytest.mark.parametrize("io", ["direct", "buffered"])
async def test_damaged_chunks_are_misses_and_can_be_stored_again(open_tier, lender, place_of, seal, layout, io):
    damages = DAMAGES | (OF_FILES if layout == "files" else {})
    keys = keys_of(2 * len(damages))
    damaged = dict(zip(keys[::2], damages, strict=True))  # Every second one.
    tier = await open_tier(layout=layout, io=io, **seal, holds=keys)
    for key, kind in damaged.items():
        damages[kind][0](place_of(key))
    told = dict(zip(keys, await lender.recall(tier, keys), strict=True))
    assert {kind: told[key] for key, kind in damaged.items()} == dict.fromkeys(damages, "ChunkCorrupt")
    assert [told[key] for key in keys[1::2]] == whole(keys[1::2])
    faults = Counter(fault.value for _, fault in damages.values())
    assert tier.counters().corrupt == faults
    assert list(await tier.probe(keys)) == [key not in damaged for key in keys]
    assert await lender.recall(tier, list(damaged)) == ["ChunkMissing"] * len(damaged)
    await lender.keep(tier, list(damaged), version=1)
    assert await lender.recall(tier, keys) == [label(key, int(key in damaged)) for key in keys]
    assert tier.counters().corrupt == faults


@pytest.fixture
def opened_once(open_tier):
    opened = []

    async def opened_once(**options):
        if not opened:
            opened.append(await open_tier(**options))
        return opened[0]

    return opened_once


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(bit=st.integers(0, 8 * SLOT_BYTES - 1))
async def test_a_flipped_bit_anywhere_is_a_miss(opened_once, lender, place_of, seal, layout, bit):
    tier = await opened_once(layout=layout, **seal)
    await lender.keep(tier, [KEY])
    place = place_of(KEY)
    place.overwrite(bit // 8, bytes([place.read()[bit // 8] ^ 1 << bit % 8]))
    assert await lender.recall(tier, [KEY]) == ["ChunkCorrupt"]


@pytest.mark.promise("Segments: a slot or footer is damaged")
@pytest.mark.parametrize(
    ("damage", "told", "faults"),
    [
        (overwritten(0, b"half of another chunk"), "ChunkCorrupt", {"payload": 1}),  # Its footer is whole.
        (overwritten(ROW_BYTES + 70, b"\xff"), "ChunkMissing", {"footer": 1}),  # The start has seen that.
    ],
)
async def test_a_slot_torn_before_a_start_is_a_miss(open_tier, stored, lender, place_of, damage, told, faults):
    await stored(keys_of(3), layout="segments", checkpoint_s=0)
    damage(place_of(KEY))
    tier = await open_tier(layout="segments", checkpoint_s=0, scanned=True)
    assert list(await tier.probe(keys_of(3))) == [True, told == "ChunkCorrupt", True]
    assert await lender.recall(tier, keys_of(3)) == [label(key_of(0)), told, label(key_of(2))]
    assert tier.counters().corrupt == faults


async def test_a_start_wipes_the_slots_that_it_found_torn(open_tier, stored, place_of):
    await stored(keys_of(3), layout="segments", checkpoint_s=0)
    torn = place_of(KEY)
    torn.overwrite(ROW_BYTES + 70, b"\xff")
    await open_tier(layout="segments", checkpoint_s=0, scanned=True)
    await until(lambda: torn.read()[ROW_BYTES:] == bytes(FOOTER_BYTES))


@pytest.mark.promise("Segments: a segment's first page is damaged, or it cannot be opened")
@pytest.mark.parametrize(
    "damage",
    [
        lambda page: page[:40] + bytes([page[40] ^ 1]) + page[41:],
        lambda page: bytes(HEADER_BYTES),
        lambda page: page[:8] + (2).to_bytes(4, "little") + page[12:],  # A later format: its checksum is wrong here.
    ],
    ids=["a flipped bit", "zeros", "another version"],
)
async def test_a_segment_with_a_damaged_header_goes_first(open_tier, stored, lender, root, damage, caplog):
    await stored(keys_of(4), layout="segments")
    (old,) = segments(root)
    content = old.read_bytes()
    old.write_bytes(damage(content[:HEADER_BYTES]) + content[HEADER_BYTES:])
    tier = await open_tier(layout="segments")
    assert await lender.recall(tier, keys_of(4)) == ["ChunkMissing"] * 4
    assert (tier.counters().scan_skipped, tier.counters().corrupt) == (1, {})
    (said,) = (record.getMessage() for record in caplog.records if "hold nothing for this tier" in record.message)
    assert old.name in said
    await lender.keep(tier, keys_of(4), version=1)
    assert await lender.recall(tier, keys_of(4)) == whole(keys_of(4), 1)
    assert len(segments(root)) == 1, "the damaged one has gone for the new one's room"
    assert taken_bytes(root) <= 1 << 20


async def test_a_file_of_a_later_format_is_a_miss_and_left_alone(open_tier, lender, path_of):
    tier = await open_tier(holds=keys_of(2))
    page = bytearray(path_of(KEY).read_bytes()[ROW_BYTES:])
    struct.pack_into("<I", page, 8, 3)
    struct.pack_into("<Q", page, FOOTER_BYTES - 8, xxh3_64_intdigest(page[:-8]))
    Place(path_of(KEY), 0).overwrite(ROW_BYTES, bytes(page))
    later = path_of(KEY).read_bytes()
    assert await lender.recall(tier, keys_of(2)) == [label(key_of(0)), "ChunkMissing"]
    assert path_of(KEY).read_bytes() == later
    assert (tier.counters().other_version, tier.counters().corrupt) == (1, {})
    await lender.keep(tier, [KEY])
    assert await lender.recall(tier, [KEY]) == [label(KEY)]


async def test_swapped_chunks_are_misses(open_tier, lender, place_of, seal, layout):
    tier = await open_tier(layout=layout, **seal, holds=keys_of(3))
    first, second = map(place_of, keys_of(2))
    was_first, was_second = first.read(), second.read()
    first.overwrite(0, was_second)
    second.overwrite(0, was_first)
    assert await lender.recall(tier, keys_of(3)) == ["ChunkCorrupt", "ChunkCorrupt", label(key_of(2))]
    assert tier.counters().corrupt == {"swapped": 2}


@pytest.mark.parametrize("other", [{"layout": "LBHNC"}, {"row_bytes": 4_096}])
async def test_a_file_of_a_namespace_with_the_same_names_is_a_miss(open_tier, lender, other):
    """What vLLM leaves out of its names is in the footer's fingerprint."""
    theirs = await open_tier(namespace=Namespace(model_name="org/model", **other), holds=[KEY])
    await theirs.aclose(10)
    ours = await open_tier()
    assert await lender.recall(ours, [KEY]) == ["ChunkCorrupt"]
    assert ours.counters().corrupt == {"namespace": 1}


async def test_rows_of_another_length_are_misses(open_tier, stored, lender, root, layout):
    await stored([key_of(2)], layout=layout)
    theirs = await open_tier(layout=layout, capacity_bytes="1MiB", row_bytes=4 * ROW_BYTES)
    longer = Lender(4 * ROW_BYTES)
    await longer.keep(theirs, [KEY])
    miss = "ChunkCorrupt" if layout == "files" else "ChunkMissing"
    assert await longer.recall(theirs, [key_of(2)]) == [miss]
    await theirs.aclose(10)
    tier = await open_tier(layout=layout)
    assert await lender.recall(tier, [KEY]) == [miss]
    await lender.keep(tier, keys_of(4))
    assert await lender.recall(tier, keys_of(4)) == whole(keys_of(4))
    assert taken_bytes(root) <= 1 << 20


async def test_a_corrupt_file_that_cannot_be_removed_is_still_a_miss(open_tier, lender, path_of, monkeypatch):
    tier = await open_tier(holds=[KEY])
    Place(path_of(KEY), 0).overwrite(5, b"?")

    def refuse(*args, **kwargs):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        for _ in range(2):
            assert await lender.recall(tier, [KEY]) == ["ChunkCorrupt"]
    assert tier.counters().corrupt_left == 2
    assert list(await tier.probe([KEY])) == [False]
    await lender.keep(tier, [KEY])
    assert await lender.recall(tier, [KEY]) == [label(KEY)]


# A corrupt file goes; a good one that has taken its place as it was read stays.


@pytest.mark.parametrize("replaced", ["as it is judged", "as it goes", "as it goes, and once more", "removed"])
async def test_a_good_file_in_a_corrupt_ones_place_stays(open_tier, lender, path_of, monkeypatch, replaced):
    tier, path = await open_tier(queue_bytes=0), path_of(KEY)
    await lender.keep(tier, [KEY])
    path = path_of(KEY)
    Place(path, 0).overwrite(5, b"?")

    def put(content):
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").replace(path)

    preadv, rename = os.preadv, os.rename

    def read_and_replace(*args):
        done = preadv(*args)
        path.unlink() if replaced == "removed" else put(b"good")
        return done

    def replace_around(*args, **kwargs):
        monkeypatch.undo()
        put(b"good")
        rename(*args, **kwargs)
        if replaced.endswith("more"):
            put(b"better")

    if replaced in ("as it is judged", "removed"):
        monkeypatch.setattr(os, "preadv", read_and_replace)
    else:
        monkeypatch.setattr(os, "rename", replace_around)
    assert await lender.recall(tier, [KEY]) == ["ChunkCorrupt"]
    monkeypatch.undo()
    left = [entry.read_bytes() for entry in path.parent.iterdir()] if path.parent.exists() else []
    assert left == ([] if replaced == "removed" else [b"better" if replaced.endswith("more") else b"good"])


async def test_each_kind_of_fault_is_warned_of_once(open_tier, lender, path_of, caplog):
    tier = await open_tier(holds=keys_of(5))
    for number, length in enumerate((5, 5, SLOT_BYTES + 1, 5)):
        os.truncate(path_of(key_of(number)), length)
        await lender.recall(tier, [key_of(number)])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split("(")[1].split(")")[0] for message in warnings] == ["truncated", "overlong"]
