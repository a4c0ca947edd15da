"""Two processes that write the same keys at once leave whole chunks, and readers see nothing else."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from tests.fs.conftest import ROW_BYTES, OpenTier

KEYS, ROUNDS, VERSIONS = 4, 60, (1, 2)

WRITER = """
import asyncio, sys
from kvtier.backend import FileMapper, Namespace, TierContext
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs import FsBackend, FsOptions

async def main(root, row_bytes, keys, rounds, version):
    context = TierContext("0:fs", FileMapper(Namespace(model_name="org/model")), row_bytes)
    tier = await FsBackend.open(FsOptions(root=root, layout="files", shared=True), context)
    writes = Lender(row_bytes).writes(keys_of(keys), version)
    for _ in range(rounds):
        assert list(await tier.store(writes)) == [None] * keys
    assert await tier.aclose(10) == (0,)

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


@pytest.mark.usefixtures("outside")
async def test_two_processes_that_write_the_same_keys_leave_whole_chunks(
    open_tier: OpenTier, lender: Lender, root: Path
) -> None:
    tier, keys = await open_tier(shared=True), keys_of(KEYS)
    whole = {label(key, version) for key in keys for version in VERSIONS}
    for version in VERSIONS:
        lender.writes(keys, version)  # The lender recognises their chunks from now on.
    writers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WRITER, str(root), *map(str, (ROW_BYTES, KEYS, ROUNDS, version))),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for version in VERSIONS
    ]
    ended = asyncio.gather(*(writer.wait() for writer in writers))
    seen: set[str] = set()
    while not ended.done():
        seen.update(await lender.recall(tier, keys))
        lender.take_back()
    assert await ended == [0, 0]
    assert seen <= whole | {"ChunkMissing"}
    assert set(await lender.recall(await open_tier(shared=True), keys)) <= whole
    assert tier.counters().corrupt == {}
    assert list(root.rglob("*.tmp")) == []
