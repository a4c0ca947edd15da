"""What is not the tier's own takes no room of its: its chunks do not pay for it, nor for bytes that are nowhere."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from tests.fs.conftest import scanned

DEADLINE_S = 20.0
CAPACITY_BYTES = 1 << 20
HUGE_BYTES = 1 << 40
WAYS = {"vllm": {}, "flat": {"naming": "flat"}, "shared": {"shared": True}, "segments": {"layout": "segments"}}
STRANGERS = ("{chunks}/README", "{chunks}/abc/README", "{folder}/backup.tar", "{folder}/backup/a/b")
LEFTOVERS = ("{chunks}/.00000000-1-1-1.tmp", "{folder}/index_r7")  # Named as the tier names its own.
CHUNK_NAMES = {
    "vllm": "{chunks}/aaa/aa_g0/" + "a" * 64 + ".bin",
    "flat": "{chunks}/aa/" + "a" * 64 + "_g0.bin",
    "shared": "{chunks}/aaa/aa_g0/" + "a" * 64 + ".bin",
    "segments": "{chunks}/00000077.seg",
}


@pytest.fixture
def lay(root, mapper) -> Callable[[str, str], Path]:
    """Return a path beside a tier's chunks, in a folder that is there."""

    def lay(way: str, name: str) -> Path:
        suffix = {"flat": "_flat", "segments": "_segments"}.get(way, "")
        path = root / name.format(chunks=mapper.chunks_folder + suffix, folder=mapper.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    return lay


async def costs_nothing(open_tier, lender: Lender, scanned, way: str, place: Callable[[], None]) -> None:
    """Assert that chunks stay, and others are stored, with something in the directory from before the start."""
    first = await open_tier(capacity_bytes=CAPACITY_BYTES, **WAYS[way])
    await lender.keep(first, keys_of(8))
    await first.aclose(DEADLINE_S)
    place()
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, **WAYS[way])
    await scanned(tier)
    await lender.keep(tier, keys_of(8, start=8))
    assert await lender.recall(tier, keys_of(16)) == [label(key) for key in keys_of(16)]
    assert tier.counters().evicted == 0


@pytest.mark.parametrize("way", WAYS)
async def test_files_of_holes_cost_no_chunk(open_tier, lender, lay, way) -> None:
    """Also under a chunk's own name, where they cost no other."""

    def place() -> None:
        for name in (*STRANGERS, *LEFTOVERS, CHUNK_NAMES[way]):
            path = lay(way, name)
            path.touch()
            os.truncate(path, HUGE_BYTES)

    await costs_nothing(open_tier, lender, scanned, way, place)


@pytest.mark.parametrize("way", WAYS)
async def test_chunks_do_not_pay_for_what_somebody_else_keeps_there(open_tier, lender, lay, way) -> None:
    def place() -> None:
        for name in STRANGERS:
            lay(way, name).write_bytes(os.urandom(2 * CAPACITY_BYTES))

    await costs_nothing(open_tier, lender, scanned, way, place)
