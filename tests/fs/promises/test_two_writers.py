"""Two processes that write the same keys at once leave whole chunks, and readers see nothing else."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label

pytestmark = pytest.mark.usefixtures("outside")

KEYS = 4
ROUNDS = 60


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


async def test_two_processes_that_write_the_same_keys_leave_whole_chunks(
    open_tier, lender: Lender, root: Path, row_bytes: int
) -> None:
    tier = await open_tier(shared=True)
    keys = keys_of(KEYS)
    for version in (1, 2):
        lender.writes(keys, version)  # To know their chunks again.
    script = os.path.join(os.path.dirname(__file__), "..", "writer.py")
    arguments = [str(root), str(row_bytes)]
    writers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, script, *arguments, str(version), str(KEYS), str(ROUNDS)),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for version in (1, 2)
    ]
    ended = asyncio.gather(*(writer.wait() for writer in writers))
    seen: set[str] = set()
    while not ended.done():
        reads = lender.reads(keys)
        seen.update(lender.told(reads, await tier.load(reads)))
        del reads
        lender.take_back()
    assert await ended == [0, 0]
    whole = {label(key, version) for key in keys for version in (1, 2)}
    assert seen <= {*whole, "ChunkMissing"}
    after = await open_tier(shared=True)
    assert set(await lender.recall(after, keys)) <= whole
    assert tier.counters().corrupt == after.counters().corrupt == {}
    assert temporaries(root) == []
