"""Never more on the disk than the capacity says, by the file system's own count: at any moment, after any kill.

`KVTIER_CAPACITY_LOOKS` sets how often it is looked at, `KVTIER_CAPACITY_SEED` how.
"""

import asyncio
import os
import random

import pytest

from kvtier.backend.namespace import Namespace
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs.segments import room
from tests.fs.conftest import ROW_BYTES, SLOT_BYTES, kinds, segments, taken_bytes, until, whole

LOOKS = int(os.environ.get("KVTIER_CAPACITY_LOOKS", "24"))
SEED = int(os.environ.get("KVTIER_CAPACITY_SEED", "1"))
CHUNKS = 600  # Written again and again;
ROOM = 30  # a twentieth of them fits.
CAPACITY_BYTES = ROOM * (SLOT_BYTES + 8_192) + 262_144  # With two folders each, and what is being written.

VLLM, FLAT, SEGMENTS, SHARED = {"naming": "vllm"}, {"naming": "flat"}, {"layout": "segments"}, {"shared": True}
ENGINES = {
    **{f"vllm {policy}": (VLLM | {"eviction_policy": policy}, 1) for policy in ("lru", "s3fifo", "density")},
    **{f"flat {policy}": (FLAT | {"eviction_policy": policy}, 1) for policy in ("lru", "s3fifo", "density")},
    **{f"segments {policy}": (SEGMENTS | {"eviction_policy": policy}, 1) for policy in ("lru", "s3fifo", "density")},
    **{f"{engines} share it": (SHARED, engines) for engines in (2, 4)},
}


@pytest.mark.parametrize(("options", "engines"), ENGINES.values(), ids=ENGINES)
async def test_stores_loads_and_deletes_at_once_never_exceed_it_whoever_is_killed(
    launch, open_tier, lender, root, options, engines
):
    dice, options = random.Random(SEED), {"capacity_bytes": CAPACITY_BYTES, **options}
    children = [launch("hammer", keys=CHUNKS, options=options) for _ in range(engines)]
    for number, child in enumerate(children):
        child.begin(SEED + number)
        child.works()
    most = looks = 0
    while looks < LOOKS or most <= CAPACITY_BYTES / (2 if engines == 1 else 4):  # Of several, most is promised.
        looks += 1
        assert looks < 100 * LOOKS, "it holds far less than it may"
        await asyncio.sleep(dice.random() * 0.02)  # Not to wait for anything: to stop at any moment of a call.
        for child in children:
            child.stop()
        most = max(most, taken_bytes(root))
        assert most <= CAPACITY_BYTES
        for child in children:
            child.go_on()
        if looks % 6 == 5:
            (victim := dice.choice(children)).kill()
            assert taken_bytes(root) <= CAPACITY_BYTES
            victim.begin(1_000 + looks)
            victim.works()
    for child in children:
        child.works()
        child.kill()
    tier = await open_tier(**options, holds=keys_of(4, start=5_000))
    assert await lender.recall(tier, keys_of(4, start=5_000)) == whole(keys_of(4, start=5_000))
    assert taken_bytes(root) <= CAPACITY_BYTES


async def test_too_much_at_the_start_goes_at_once(open_tier, stored, lender, root, layout):
    keys = keys_of(4 * ROOM)
    await stored(keys, layout=layout, capacity_bytes=5 * CAPACITY_BYTES)
    assert taken_bytes(root) > CAPACITY_BYTES
    tier = await open_tier(layout=layout, capacity_bytes=CAPACITY_BYTES)
    await until(lambda: taken_bytes(root) <= CAPACITY_BYTES)
    if layout == "segments":  # Room is given back a segment at a time, and here there is one.
        await lender.keep(tier, keys[:8])
    assert (await lender.recall(tier, keys[:4])) == whole(keys[:4])


async def test_segments_of_other_namespaces_count_and_go_before_any_chunk(open_tier, stored, lender, root, monkeypatch):
    monkeypatch.setattr(room, "SEGMENT_BYTES_LEAST", 128 << 10)
    options, seen = {"layout": "segments", "capacity_bytes": 1 << 20}, {}
    for name in ("older", "old"):
        await stored(keys_of(4), **options, namespace=Namespace(model_name=name))
    tier = await open_tier(**options, scanned=True)
    for start in range(0, 72, 4):
        await lender.keep(tier, keys_of(4, start))
        assert taken_bytes(root) <= 1 << 20
        seen[frozenset(path.parent.name.partition("_")[0] for path in segments(root))] = None
    assert list(seen) == [{"org", "old", "older"}, {"org", "old"}, {"org"}]
    assert await lender.recall(tier, keys_of(72)) == whole(keys_of(72))
    assert tier.counters().evicted == 0


async def test_a_chunk_that_does_not_fit_with_its_folder_costs_nothing(open_tier, stored, lender, layout):
    await stored(keys_of(3), capacity_bytes=CAPACITY_BYTES, layout=layout)
    small = await open_tier(capacity_bytes=SLOT_BYTES, layout=layout)  # And its folder.
    assert kinds(await small.store(lender.writes(keys_of(2, 90)))) == ["NoSpace"] * 2
    assert small.counters().refused == {"capacity": 2}


async def test_files_that_vllm_wrote_count_and_go_as_others_do(open_tier, lender, root, mapper):
    for key in keys_of(4 * ROOM, start=1_000):
        path = root / mapper.name(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(ROW_BYTES))
        os.utime(path, (1, 1))
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, holds=keys_of(8))
    await until(lambda: taken_bytes(root) <= CAPACITY_BYTES)
    assert await lender.recall(tier, keys_of(8)) == whole(keys_of(8))


async def test_room_is_kept_for_others(open_tier, lender, mount, layout):
    root = mount("tmpfs", "size=1m")
    tier = await open_tier(root=str(root), min_free_bytes=512 << 10, layout=layout, capacity_bytes=None)
    for start in range(0, 120, 8):
        outcomes = await tier.store(lender.writes(keys_of(8, start)))
        assert outcomes.count(None) > 0
        found = os.statvfs(root)
        assert found.f_bavail * found.f_frsize >= 512 << 10
    assert tier.counters().evicted > 0
