"""A full disk is an answer for each chunk that does not fit, on a disk that is really full."""

import os
from contextlib import suppress

import pytest

from kvtier.testing.conformance.lender import keys_of, label
from tests.fs.conftest import kinds, temporaries, whole

CHUNKS = 48  # More than fit.


@pytest.mark.parametrize("limit", ["size=256k", "nr_inodes=48"])
@pytest.mark.parametrize("io", ["direct", "buffered"])
async def test_a_full_disk_rejects_what_does_not_fit_and_keeps_the_rest(open_tier, lender, mount, limit, io):
    root = mount("tmpfs", limit)
    tier, keys = await open_tier(root=str(root), io=io), keys_of(CHUNKS)
    outcomes = list(await tier.store(lender.writes(keys)))
    assert set(kinds(outcomes)) == {"NoneType", "NoSpace"}
    assert all("No space left on device" in str(outcome) for outcome in outcomes if outcome)
    kept = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None]
    assert tier.counters().refused == {"disk": CHUNKS - len(kept)}
    assert temporaries(root) == []
    assert tier.occupancy().chunks == len(kept)
    assert await lender.recall(tier, keys) == [label(key) if key in kept else "ChunkMissing" for key in keys]

    replaced = await tier.store(lender.writes(kept, version=1))  # Each needs its room a second time, for a moment.
    expected = [label(key, int(outcome is None)) for key, outcome in zip(kept, replaced, strict=True)]
    assert await lender.recall(tier, kept) == expected

    await tier.delete(kept)
    await lender.keep(tier, kept[:2])
    assert await lender.recall(tier, kept[:2]) == whole(kept[:2])


@pytest.mark.parametrize(
    ("options", "scarce"), [({"capacity_bytes": "128KiB"}, "capacity"), ({"min_free_bytes": "900TiB"}, "disk")]
)
async def test_a_refused_chunk_says_what_is_scarce(open_tier, lender, layout, options, scarce):
    tier = await open_tier(layout=layout, **options)
    refused = [outcome for outcome in await tier.store(lender.writes(keys_of(CHUNKS))) if outcome]
    assert refused
    assert all(f": {scarce}: " in str(outcome) for outcome in refused)
    assert next(iter(options)) in str(refused[0])
    assert tier.counters().refused == {scarce: len(refused)}


async def test_room_promised_to_others_is_told_apart_from_a_full_directory(open_tier, lender, system_call):
    options = {"shared": True, "capacity_bytes": "256KiB", "naming": "flat"}
    first, second = await open_tier(**options), await open_tier(**options)
    stuck = system_call("pwritev", sticks=True)
    storing = await stuck.met_by(first.store(lender.writes(keys_of(CHUNKS))))
    (outcome,) = await second.store(lender.writes(keys_of(1, start=100)))
    assert ": others: " in str(outcome)
    assert second.counters().refused == {"others": 1}
    stuck.let_go()
    await storing


def fill(path):
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4_096))
    assert os.statvfs(path).f_bavail == 0


@pytest.mark.promise("The disk is full")
async def test_a_full_disk_still_serves_what_is_on_it(open_tier, lender, mount, layout):
    root, keys = mount("tmpfs", "size=128k"), keys_of(CHUNKS)
    first = await open_tier(layout=layout, root=str(root))
    outcomes = await first.store(lender.writes(keys))
    kept = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None]
    fill(root / "ballast")
    await first.aclose(10)
    again = await open_tier(layout=layout, root=str(root))
    assert await lender.recall(again, kept) == whole(kept)
    await lender.keep(again, keys[-1:])  # In place of what was used longest ago.
    assert await lender.recall(again, keys[-1:]) == whole(keys[-1:])
    told = await lender.recall(again, kept)
    assert {"ChunkMissing"} <= set(told) <= {"ChunkMissing", *whole(kept)}
    assert again.counters().disk_full > 0


@pytest.mark.promise("The disk is full")
@pytest.mark.parametrize("capacity_bytes", [None, "1GiB"])  # The latter is larger than the disk.
async def test_a_small_ext4_full_of_others_files_goes_on_without_the_oldest(
    open_tier, lender, mount, layout, capacity_bytes
):
    root = mount("ext4", image_bytes=4 << 20)
    tier = await open_tier(layout=layout, root=str(root / "tier"), capacity_bytes=capacity_bytes)
    for start in range(0, 600, 6):
        keys = keys_of(6, start)
        outcomes = await tier.store(lender.writes(keys))
        kept = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None]
        assert kept
        assert await lender.recall(tier, kept) == whole(kept)
    assert temporaries(root) == []
    assert tier.counters().evicted > 0
    assert tier.counters().disk_full > 0
