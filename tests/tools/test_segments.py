"""The commands see chunks in segments as they see files, and wipe none next to which an engine may be writing."""

import asyncio
import json
import os

import pytest

from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs.segments.segment import read_header
from tests.tools.command import run as run_command
from tests.tools.conftest import ROW_BYTES, opened
from tests.tools.test_damage import HEADER_BYTES, SLOT_BYTES, overwrite


async def recalled(root, count):
    async with opened(root, layout="segments") as (tier, lender):
        for key in keys_of(count):
            lender.chunk(key)
        return list(await lender.recall(tier, keys_of(count)))


def blocks_of(path):
    return path.stat().st_blocks * 512


def test_a_segment_that_is_cut_off_counts_what_it_lost(run, run_json, root, store):
    (segment,) = store(keys_of(5), layout="segments")
    slots = (segment.stat().st_size - HEADER_BYTES) // SLOT_BYTES
    os.truncate(segment, HEADER_BYTES + 2 * SLOT_BYTES + 100)
    told = run_json("verify", root, status=1)
    assert (told["checked"], told["corrupt"]) == (slots, {"truncated": slots - 2})
    names = [f"{segment.relative_to(root)}#{number}" for number in range(2, slots)]
    assert ([each["file"] for each in told["files"]], run_json("du", root)["chunks"]) == (names, 2)
    assert (run_json("prune", root, "--corrupt", "--yes")["files"], run("verify", root)[0]) == (slots - 2, 0)


def test_pruned_chunks_stay_away_and_an_empty_segment_is_removed(store, run_json, root):
    (segment,) = store(keys_of(4), layout="segments")
    overwrite(HEADER_BYTES + 3 * SLOT_BYTES + 5, b"\xff\xfe")(segment)
    assert run_json("prune", root, "--corrupt", "--yes")["files"] == 1
    assert run_json("prune", root, "--to-size", f"{2 * SLOT_BYTES}B", "--yes")["files"] == 1
    told = asyncio.run(recalled(root, 4))
    assert told[:2] == [label(key) for key in keys_of(2)], "the head of a batch was stored last"
    assert told[2:] == ["ChunkMissing"] * 2
    assert run_json("prune", root, "--namespace", segment.parent.name, "--yes")["files"] == 2
    assert not segment.exists()
    assert asyncio.run(recalled(root, 4)) == ["ChunkMissing"] * 4


def test_a_segment_of_a_live_engine_is_read_left_alone_and_the_others_are_pruned(root, store, capsys):
    others = store(keys_of(4), model="z", layout="segments")
    taken_bytes = sum(map(blocks_of, others))

    async def work():
        async with opened(root, model="a", layout="segments") as (tier, lender):
            await lender.keep(tier, keys_of(3))
            assert await asyncio.to_thread(run_command, "verify", root) == 0
            assert "7 chunks checked" in capsys.readouterr().out
            assert await asyncio.to_thread(run_command, "prune", root, "--to-size", "0B", "--yes", "--json") == 1
            assert await lender.recall(tier, keys_of(3)) == [label(key) for key in keys_of(3)]

    asyncio.run(work())
    told = capsys.readouterr()
    assert json.loads(told.out) == {"files": 4, "bytes": taken_bytes, "namespaces": 1, "removed": True, "left_out": 3}
    assert "an engine is writing to it" in told.err
    assert not any(path.exists() for path in others)


@pytest.mark.parametrize(("size", "pruned"), [("50%", 20), ("3%", 39), ("0B", 40)])
def test_a_prune_frees_what_it_reports_and_a_tier_stores_there_again(root, store, run_json, size, pruned):
    (segment,) = store(keys_of(40), layout="segments")
    before = blocks_of(segment)
    report = run_json("prune", root, "--to-size", size, "--yes")
    left = blocks_of(segment) if segment.exists() else 0
    assert report["files"] == pruned
    assert report["bytes"] == before - left >= pruned * SLOT_BYTES
    assert run_json("verify", root)["checked"] == 40 - pruned
    store(keys_of(40, 40), layout="segments")
    assert run_json("verify", root)["checked"] == 80 - pruned
    assert sum(map(blocks_of, root.glob("*_segments/*.seg"))) >= before


@pytest.mark.parametrize("option", ["--corrupt", "--leftovers"])
def test_a_segment_with_a_damaged_first_page_goes_when_its_engine_has_gone(root, capsys, run, run_json, option):
    async def work():
        async with opened(root, layout="segments") as (tier, lender):
            await lender.keep(tier, keys_of(3))
            (segment,) = root.glob("*_segments/*.seg")
            overwrite(40, b"?")(segment)
            assert await asyncio.to_thread(run_command, "prune", root, option, "--yes") == 1
            assert "an engine is writing to it" in capsys.readouterr().err
            assert await lender.recall(tier, keys_of(3)) == [label(key) for key in keys_of(3)]

    asyncio.run(work())
    assert run_json("verify", root, status=1)["corrupt"] == {"header": 1}
    assert (run_json("du", root)["leftovers"], run_json("prune", root, option, "--yes")["files"]) == (1, 1)
    assert run("verify", root)[0] == 0
    assert not list(root.glob("*_segments/*.seg"))


@pytest.mark.parametrize(
    ("row_bytes", "slots"),
    [(ROW_BYTES, 1 << 60), (ROW_BYTES, 1 << 27), (1 << 62, 1), (1 << 44, 2), (0, 1 << 30), (ROW_BYTES, 0), (100, 5)],
)
def test_a_first_page_that_claims_more_than_a_segment_can_hold_is_not_believed(
    root, store, run, run_json, row_bytes, slots
):
    """Its checksum is right: whoever may write there has made it. The file itself is empty except for some pages."""
    (segment,) = store(keys_of(2), layout="segments")
    header = read_header(segment.read_bytes()[:HEADER_BYTES])
    overwrite(0, header._replace(row_bytes=row_bytes, slots=slots).written())(segment)
    os.truncate(segment, 1 << 41)
    assert run_json("verify", root, status=1)["corrupt"] == {"header": 1}
    assert [run(command, root)[0] for command in ("ls", "du")] == [0, 0]
    assert asyncio.run(recalled(root, 2)) == ["ChunkMissing"] * 2


def test_a_segment_of_a_later_format_is_not_corrupt(root, store, run):
    (segment,) = store(keys_of(2), layout="segments")
    overwrite(8, (2).to_bytes(4, "little"))(segment)
    assert (run("verify", root)[0], run("prune", root, "--corrupt", "--yes")[0]) == (0, 0)
    assert segment.exists()
