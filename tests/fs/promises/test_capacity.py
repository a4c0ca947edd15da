"""Never more on the disk than the capacity says, by the file system's own count: at any moment, after any kill.

`KVTIER_CAPACITY_LOOKS` sets how often it is looked at, `KVTIER_CAPACITY_KILLS` how many processes are killed.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.backend.namespace import FileMapper
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsBackend
from kvtier_backends.fs.disk.footer import FOOTER_BYTES

StartWriter = Callable[..., Awaitable[Any]]
TakenBytes = Callable[[Path], int]

LOOKS = int(os.environ.get("KVTIER_CAPACITY_LOOKS", "30"))
KILLS = int(os.environ.get("KVTIER_CAPACITY_KILLS", "5"))
SEED = int(os.environ.get("KVTIER_CAPACITY_SEED", "1"))
DEADLINE_S = 30.0
LAYOUTS = ["files", "segments"]
LAID_OUT = [{"naming": "vllm"}, {"naming": "flat"}, {"layout": "segments"}]
CHUNKS = 600  # Written again and again;
ROOM = 30  # a twentieth of them fits.
ROW_BYTES = 8_192
CHUNK_BYTES = ROW_BYTES + 4_096 + 8_192  # With its footer, and two folders of its own.
CAPACITY_BYTES = ROOM * CHUNK_BYTES + 262_144  # And what is being written.


def name_of(laid_out: dict[str, str]) -> str:
    return next(iter(laid_out.values()))


@pytest.mark.parametrize("laid_out", LAID_OUT, ids=name_of)
@pytest.mark.parametrize("policy", ["lru", "s3fifo", "density"])
async def test_stores_loads_and_deletes_at_once_never_exceed_it(
    start_writer: StartWriter, taken_bytes: TakenBytes, root: Path, laid_out: dict[str, str], policy: str
) -> None:
    """At random moments everything is held still, and what the directory takes is counted."""
    dice = random.Random(SEED)
    writer = await start_writer(CHUNKS, capacity_bytes=CAPACITY_BYTES, eviction_policy=policy, **laid_out)
    await writer.begin(SEED)
    await writer.works()
    most = looks = 0
    while looks < LOOKS or most <= CAPACITY_BYTES * 0.5:
        looks += 1
        assert looks < 100 * LOOKS, "it holds far less than it may"
        await asyncio.sleep(dice.random() * 0.02)  # Not to wait for anything: to stop at any moment of a call.
        await writer.stop()
        most = max(most, taken_bytes(root))
        assert most <= CAPACITY_BYTES
        writer.go_on()
    await writer.works()
    assert writer.wrong == []


@pytest.mark.parametrize("laid_out", LAID_OUT, ids=name_of)
async def test_it_holds_after_any_kill(
    start_writer: StartWriter, taken_bytes: TakenBytes, root: Path, open_tier, lender: Lender, laid_out: dict[str, str]
) -> None:
    """What is there was reserved, or was going: not before, not after a restart is there too much."""
    dice = random.Random(SEED)
    writer = await start_writer(CHUNKS, capacity_bytes=CAPACITY_BYTES, **laid_out)
    for seed in range(SEED, SEED + KILLS):
        await writer.begin(seed)
        await writer.works()
        await asyncio.sleep(dice.random() * 0.02)  # To kill at any moment of a call.
        await writer.kill()
        assert taken_bytes(root) <= CAPACITY_BYTES
    assert writer.wrong == []
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, **laid_out)
    await stored_and_loaded(tier, lender)
    assert taken_bytes(root) <= CAPACITY_BYTES


async def stored_and_loaded(tier: FsBackend, lender: Lender) -> None:
    keys = keys_of(8, start=5_000)
    await lender.keep(tier, keys)
    assert await lender.recall(tier, keys) == [label(key) for key in keys]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_too_much_at_the_start_goes_at_once(
    open_tier, lender: Lender, root: Path, taken_bytes: TakenBytes, layout: str
) -> None:
    first = await open_tier(layout=layout, capacity_bytes=4 * CAPACITY_BYTES)
    keys = keys_of(4 * ROOM)
    for start in range(0, len(keys), 8):
        await lender.keep(first, keys[start : start + 8])
    await first.aclose(DEADLINE_S)
    assert taken_bytes(root) > CAPACITY_BYTES
    tier = await open_tier(layout=layout, capacity_bytes=CAPACITY_BYTES)
    await until(lambda: taken_bytes(root) <= CAPACITY_BYTES)
    if layout == "segments":  # Room is given back a segment at a time, and here there is one.
        await lender.keep(tier, keys[-8:])
    assert (await lender.recall(tier, keys[-8:]))[:4] == [label(key) for key in keys[-8:-4]]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # A disk tells nobody that a file is gone.
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_chunk_that_does_not_fit_with_its_folder_is_no_space_and_costs_nothing(
    open_tier, lender: Lender, layout: str
) -> None:
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, layout=layout)
    await lender.keep(tier, keys_of(3))
    await tier.aclose(DEADLINE_S)
    small = await open_tier(capacity_bytes=ROW_BYTES + FOOTER_BYTES, layout=layout)  # And its folder.
    assert [type(outcome).__name__ for outcome in await small.store(lender.writes(keys_of(2, 90)))] == ["NoSpace"] * 2
    assert small.counters().refused == {"capacity": 2}


async def test_vllms_own_files_count_and_go_alike(
    open_tier, lender: Lender, root: Path, taken_bytes: TakenBytes, mapper: FileMapper
) -> None:
    """Also where they are refused: whoever wrote them, they take room."""
    for key in keys_of(4 * ROOM, start=1_000):
        path = root / mapper.name(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(ROW_BYTES))
        os.utime(path, (1, 1))
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, unverified="refuse")
    await lender.keep(tier, keys_of(8))
    await until(lambda: taken_bytes(root) <= CAPACITY_BYTES)
    assert await lender.recall(tier, keys_of(8)) == [label(key) for key in keys_of(8)]


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_room_is_kept_for_others(
    open_tier, lender: Lender, mount: Callable[[str, str], Path], layout: str
) -> None:
    root = mount("tmpfs", "size=1m")
    tier = await open_tier(root=str(root), min_free_bytes=512 << 10, layout=layout)
    for start in range(0, 120, 8):
        outcomes = await tier.store(lender.writes(keys_of(8, start)))
        assert outcomes.count(None) > 0
        found = os.statvfs(root)
        assert found.f_bavail * found.f_frsize >= 512 << 10
    assert tier.counters().evicted > 0
