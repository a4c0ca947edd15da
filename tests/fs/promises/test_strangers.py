"""What is not the tier's own takes no room of its, and is left alone: strangers' files and neighbours."""

import os

import pytest

from kvtier.backend.namespace import Namespace
from kvtier.testing.conformance.lender import key_of, keys_of
from tests.fs.conftest import DEADLINE_S, scanned, whole

CAPACITY_BYTES = 1 << 20
WAYS = {
    "vllm": {"layout": "files"},
    "flat": {"naming": "flat"},
    "shared": {"shared": True},
    "segments": {"layout": "segments"},
}
STRANGERS = ("{chunks}/README", "{chunks}/abc/README", "{folder}/backup.tar", "{folder}/backup/a/b")
LEFTOVERS = ("{chunks}/.00000000-1-1-1.tmp", "{folder}/index_r7")  # Named as the tier names its own.
CHUNK_NAMES = {
    "vllm": "{chunks}/aaa/aa_g0/" + "a" * 64 + ".bin",
    "flat": "{chunks}/aa/" + "a" * 64 + "_g0.bin",
    "shared": "{chunks}/aaa/aa_g0/" + "a" * 64 + ".bin",
    "segments": "{chunks}/00000077.seg",
}


@pytest.mark.parametrize("holes", [True, False], ids=["of holes", "of bytes"])
@pytest.mark.parametrize("way", WAYS)
async def test_strangers_files_cost_no_chunk(open_tier, stored, lender, root, mapper, way, holes):
    options = {"capacity_bytes": CAPACITY_BYTES, **WAYS[way]}
    await stored(keys_of(8), **options)
    chunks = mapper.chunks_folder + {"flat": "_flat", "segments": "_segments"}.get(way, "")
    for name in (*STRANGERS, *LEFTOVERS, CHUNK_NAMES[way]) if holes else STRANGERS:
        path = root / name.format(chunks=chunks, folder=mapper.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if holes else os.urandom(2 * CAPACITY_BYTES))
        if holes:
            os.truncate(path, 1 << 40)
    tier = await open_tier(**options, scanned=True)
    await lender.keep(tier, keys_of(8, start=8))
    assert await lender.recall(tier, keys_of(16)) == whole(keys_of(16))
    assert tier.counters().evicted == 0


async def test_neighbours_are_left_alone(open_tier, stored, lender, root):
    await stored([key_of(0)])
    neighbours = [
        (Namespace(model_name="other"), "vllm"),
        (Namespace(model_name="org/model", rank=1), "vllm"),
        (Namespace(model_name="org/model"), "flat"),
    ]
    for namespace, naming in neighbours:
        theirs = await open_tier(namespace=namespace, naming=naming)
        await lender.keep(theirs, [key_of(0)], version=1)
        await theirs.aclose(DEADLINE_S)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    tier = await open_tier()
    assert await scanned(tier) == {key_of(0)}
    assert tier.occupancy().chunks == 1
    assert await lender.recall(tier, [key_of(0)]) == whole([key_of(0)])
    await tier.aclose(DEADLINE_S)
    assert sorted(path for path in root.rglob("*") if path.is_file()) == files
