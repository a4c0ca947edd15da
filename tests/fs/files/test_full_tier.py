"""A full tier of files: what comes has others go for it, and whoever has a file open sees no change."""

import asyncio
import fnmatch
import glob
import os
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from tests.fs.conftest import MakeSystemCall

ROW_BYTES = 8_192
ROOM = 24
CAPACITY_BYTES = ROOM * (ROW_BYTES + FOOTER_BYTES + 4_096) + 65_536
DEADLINE_S = 20.0


@pytest.fixture
def mapper() -> FileMapper:
    return FileMapper(Namespace(model_name="org/model"), "flat")


@pytest.fixture
def open_full(open_tier, lender: Lender):
    """Open a tier that has no room left: what is stored from now on takes the place of something else."""

    async def open_full(**options: object):
        tier = await open_tier(**{"naming": "flat", "capacity_bytes": CAPACITY_BYTES, **options})
        for number in range(2 * ROOM):
            await lender.keep(tier, [key_of(number)])
        return tier

    return open_full


@contextmanager
def chunks_open(root: Path) -> Generator[list[BinaryIO]]:
    """Keep the chunks' files open in the block; one that goes for room meanwhile is not there."""
    opened: list[BinaryIO] = []
    with ExitStack() as stack:
        for folder, _, names in os.walk(root):
            for name in fnmatch.filter(names, "*.bin"):
                with suppress(FileNotFoundError):
                    opened.append(stack.enter_context(Path(folder, name).open("rb")))
        yield opened


def inodes(root: Path) -> set[int]:
    return {path.stat().st_ino for path in root.rglob("*.bin")}


@pytest.mark.parametrize(
    "options", [{"naming": "vllm"}, {"naming": "flat"}, {"shared": True}], ids=["vllm", "flat", "shared"]
)
async def test_a_file_that_somebody_has_open_never_changes(
    open_full, lender: Lender, root: Path, options: dict[str, object]
) -> None:
    """An open file stays what it was, whatever happens to its name."""
    tier = await open_full(**options)
    with chunks_open(root) as opened:
        before = [file.read() for file in opened]
        for number in range(100, 100 + 2 * ROOM):
            await lender.keep(tier, [key_of(number)])
        for file, content in zip(opened, before, strict=True):
            file.seek(0)
            assert file.read() == content
    assert tier.counters().evicted > 0


async def test_a_cancelled_store_leaves_whole_chunks_and_counts_what_is_there(
    open_full, lender: Lender, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = await open_full(store_lanes=1)
    entered, go_on, pwritev = threading.Event(), threading.Event(), os.pwritev

    def wait(*args: object) -> int:
        entered.set()
        assert go_on.wait(DEADLINE_S)
        return pwritev(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", wait)
        storing = asyncio.create_task(tier.store(lender.writes(keys_of(4, start=100))))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        storing.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await storing
    everything = [*keys_of(2 * ROOM), *keys_of(4, start=100)]
    told = await lender.recall(tier, everything)
    assert set(told) <= {"ChunkMissing", *map(label, everything)}
    assert tier.occupancy().chunks == len(told) - told.count("ChunkMissing") == len(inodes(root))
    assert tier.counters().corrupt == {}


async def test_a_file_that_takes_more_than_is_wanted_is_counted_until_it_is_gone(
    open_tier,
    lender: Lender,
    path_of,
    root: Path,
    taken_bytes,
    system_call: MakeSystemCall,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though more go with it: what these leave is not taken off."""
    before = await open_tier(naming="flat")
    await lender.keep(before, keys_of(10))
    await before.aclose(DEADLINE_S)
    large = path_of(key_of(5))
    large.write_bytes(bytes(8 * ROW_BYTES))
    os.utime(large, (1, 1))
    listing = system_call("scandir", sticks=True, only=lambda folder: isinstance(folder, int))  # A descriptor's.
    tier = await open_tier(naming="flat", capacity_bytes=taken_bytes(root) + 8_192)
    unlink, seen = os.unlink, list[tuple[int, int]]()

    def look(name: str, **kwargs: int) -> None:
        if name.endswith(large.name):
            told, there = tier.occupancy(), 0
            for path in glob.iglob(f"{root}/**/*.bin", recursive=True):
                with suppress(FileNotFoundError):  # Others are removed beside it.
                    there += os.stat(path).st_blocks * 512
            seen.append((there, told.used_bytes + told.reserved_bytes))
        unlink(name, **kwargs)

    monkeypatch.setattr(os, "unlink", look)
    listing.let_go()  # The end of the scan has the first ones removed.
    await lender.keep(tier, [key_of(100)])
    async with asyncio.timeout(DEADLINE_S):
        while large.exists():
            await asyncio.sleep(0.01)
    ((there_bytes, counted_bytes),) = seen
    assert tier.counters().evicted > 1
    assert counted_bytes >= there_bytes


@pytest.mark.parametrize("naming", ["flat", "vllm"])
async def test_a_batch_larger_than_the_tier_keeps_its_head(
    open_full, lender: Lender, root: Path, taken_bytes, naming: str
) -> None:
    tier = await open_full(naming=naming)
    batch = keys_of(3 * ROOM, start=100)
    outcomes = list(await tier.store(lender.writes(batch)))
    kept = outcomes.index(next(outcome for outcome in outcomes if outcome is not None))
    assert kept > 0
    assert all(type(outcome).__name__ == "NoSpace" for outcome in outcomes[kept:])
    assert await lender.recall(tier, batch[:kept]) == [label(key) for key in batch[:kept]]
    assert taken_bytes(root) <= CAPACITY_BYTES
