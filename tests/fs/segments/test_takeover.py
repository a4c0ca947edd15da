"""A replaced runner takes over its predecessor's segments once the kernel has released their locks."""

import asyncio
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvtier.backend import EngineId, FileMapper, OffloadKey, TierContext
from kvtier.errors import NoSpace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.segments import start
from kvtier_backends.fs.segments.folder import SegmentFolder
from tests.fs.conftest import ROW_BYTES, OpenTier, Place, segments

DEADLINE_S = 20.0
ENGINE = EngineId(os.getpid(), 7)
CAPACITY_BYTES = 1 << 20
CHUNKS = 40
NEW = keys_of(200, start=1_000)  # More than the capacity holds.

PREDECESSOR = """
import asyncio, json, sys
from kvtier.backend import EngineId, FileMapper, Namespace, TierContext
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs import FsBackend, FsOptions

async def main(options, engine, row_bytes, chunks):
    mapper = FileMapper(Namespace(model_name="org/model"))
    context = TierContext("0:fs", mapper, row_bytes, engine=EngineId(*engine))
    tier = await FsBackend.open(FsOptions(**options), context)
    assert list(await tier.store(Lender(row_bytes).writes(keys_of(chunks)))) == [None] * chunks
    print("full", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main(*json.loads(sys.argv[1])))
"""


@pytest.fixture
def predecessor(outside: None, root: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a runner of this engine that has filled its tier and hangs."""
    asked = json.dumps([{"root": str(root), "capacity_bytes": CAPACITY_BYTES}, ENGINE, ROW_BYTES, CHUNKS])
    process = subprocess.Popen(
        [sys.executable, "-c", PREDECESSOR, asked],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"full\n"
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    with process:
        pass


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "AGAIN_S", 0.02)


@pytest.fixture
async def successor(root: Path, mapper: FileMapper) -> AsyncIterator[Callable[[], Awaitable[FsBackend]]]:
    opened: list[FsBackend] = []

    async def successor() -> FsBackend:
        options = FsOptions(root=str(root), capacity_bytes=CAPACITY_BYTES)
        opened.append(await FsBackend.open(options, TierContext("0:fs", mapper, ROW_BYTES, engine=ENGINE)))
        return opened[-1]

    yield successor
    for tier in opened:
        assert await tier.aclose(DEADLINE_S) == (0,)


async def until_stored(tier: FsBackend, lender: Lender, keys: list[OffloadKey]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while any(await tier.store(lender.writes(keys))):
            await asyncio.sleep(0.02)


async def test_a_replaced_runner_stores_again_once_its_predecessor_is_dead(
    predecessor: "subprocess.Popen[bytes]",
    successor: Callable[[], Awaitable[FsBackend]],
    lender: Lender,
    root: Path,
    taken_bytes: Callable[[Path], int],
) -> None:
    tier, old, new = await successor(), keys_of(CHUNKS), NEW[:10]
    for key in old:
        lender.chunk(key)  # As its predecessor stored it.
    assert await lender.recall(tier, old) == [label(key) for key in old]  # Read from the locked segments.
    refused = await tier.store(lender.writes(NEW))
    assert any(isinstance(outcome, NoSpace) and "others" in str(outcome) for outcome in refused)
    predecessor.kill()
    predecessor.wait()
    await until_stored(tier, lender, new)
    assert await lender.recall(tier, new + old) == [label(key) for key in new + old]
    assert list(await tier.store(lender.writes(NEW[:60]))) == [None] * 60  # Evicts what was taken over.
    assert taken_bytes(root) <= CAPACITY_BYTES
    await tier.aclose(DEADLINE_S)
    again = await successor()
    assert await lender.recall(again, NEW[:60]) == [label(key) for key in NEW[:60]]


async def test_a_segment_is_taken_over_as_its_footers_say(
    open_tier: OpenTier, lender: Lender, root: Path, place_of: Callable[[OffloadKey], Place]
) -> None:
    """A chunk that was deleted or stored again meanwhile does not come back; a wiped slot is free."""
    first = await open_tier(layout="segments", capacity_bytes="1MiB")
    kept, deleted, stored, wiped = keys = keys_of(4)
    await lender.keep(first, keys)
    await first.aclose(DEADLINE_S)
    (segment,) = segments(root)
    with segment.open("r+b") as pruned:
        fcntl.flock(pruned, fcntl.LOCK_EX)
        second = await open_tier(layout="segments", capacity_bytes="4MiB", checkpoint_s=0)
        await lender.keep(second, [stored], version=1)
        await second.delete([deleted])
        place = place_of(wiped)
        place.overwrite(ROW_BYTES, bytes(FOOTER_BYTES))
        assert await lender.recall(second, [kept]) == [label(kept)]
    async with asyncio.timeout(DEADLINE_S):
        while (await second.probe([wiped]))[0]:
            await asyncio.sleep(0.02)
    expected = [label(kept), "ChunkMissing", label(stored, 1), "ChunkMissing"]
    assert await lender.recall(second, keys) == expected
    await second.aclose(DEADLINE_S)
    third = await open_tier(layout="segments", capacity_bytes="4MiB")
    assert await lender.recall(third, keys) == expected
    assert third.counters().corrupt == {}


async def test_a_segment_that_could_not_be_opened_at_the_start_is_read_once_it_can_be(
    open_tier: OpenTier, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(20)
    first = await open_tier(layout="segments", capacity_bytes="1MiB")
    await lender.keep(first, keys)
    await first.aclose(DEADLINE_S)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as erring:
        erring.setattr(SegmentFolder, "open", fails)
        erring.setattr(SegmentFolder, "unopened_bytes", fails)
        second = await open_tier(layout="segments", capacity_bytes="1MiB")
        assert list(await second.probe(keys)) == [False] * 20
    async with asyncio.timeout(DEADLINE_S):
        while not all(await second.probe(keys)):
            await asyncio.sleep(0.02)
    assert await lender.recall(second, keys) == [label(key) for key in keys]
    await second.aclose(DEADLINE_S)
    third = await open_tier(layout="segments", capacity_bytes="1MiB")
    assert await lender.recall(third, keys) == [label(key) for key in keys]
