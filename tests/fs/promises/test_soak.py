"""A cache of a twentieth of what is written: its room and the process's memory stay flat, its hits are the study's.

A few seconds as it comes. At full size, on the disk that is to be tried:

    export KVTIER_SOAK_S=600 KVTIER_SOAK_REQUESTS=3000
    .venv/bin/pytest -s tests/fs/promises/test_soak.py --basetemp=/mnt/nvme/soak
"""

import logging
import os
import time
from collections.abc import Iterator
from itertools import count, islice, takewhile
from pathlib import Path

import msgspec
import pytest

from kvtier.backend import Advice
from kvtier.backend.contract import Read, TierContext, Write
from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.errors import ChunkMissing
from kvtier.memory.region import Region
from kvtier.policies import LRU
from kvtier.tools.replay.study import policy_hits
from kvtier.tools.replay.traces import TraceRequest
from kvtier.tools.replay.workload import Workload, generate
from kvtier_backends.fs import FsBackend, FsOptions
from tests.fs.conftest import taken_bytes

logger = logging.getLogger(__name__)

SOAK_S = float(os.environ.get("KVTIER_SOAK_S", "2"))
REQUESTS = int(os.environ.get("KVTIER_SOAK_REQUESTS", "150"))  # After which another workload follows.
ROW_BYTES = 32_768
FILE_BYTES = ROW_BYTES + 4_096
BATCH = 64
LOOK_EVERY = 50  # Requests.
MEMORY_BYTES_MAX = 16 << 20  # How much more a process may have at the end than when the cache was first full.


class Soak(msgspec.Struct):
    """What was seen."""

    requests: int = 0
    references: int = 0
    hits: int = 0
    stored: int = 0
    refused: int = 0
    chunks: list[int] = []
    taken: list[int] = []
    memory: list[int] = []


def requests() -> Iterator[TraceRequest]:
    """Give one workload after the other; no two share a block."""
    for seed in count():
        for request in generate(Workload(requests=REQUESTS, seed=seed)):
            blocks = tuple(block + (seed << 40) for block in request.hash_ids)
            yield msgspec.structs.replace(request, hash_ids=blocks)


def key_of(block: int) -> OffloadKey:
    return make_offload_key(block.to_bytes(8, "big") * 4)


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Engine:
    """Uses a tier as an engine without a primary: loads the leading run of what is there, stores the rest."""

    def __init__(self, tier: FsBackend) -> None:
        self._tier = tier
        self._region = Region.private(BATCH, ROW_BYTES)
        self._rows = [self._region.row(index) for index in range(BATCH)]

    async def ask(self, request: TraceRequest, soak: Soak) -> None:
        keys = list(dict.fromkeys(map(key_of, request.hash_ids)))
        there = list(await self._tier.probe(keys))
        run = len(list(takewhile(bool, there)))
        for start in range(0, run, BATCH):
            part = keys[start : min(start + BATCH, run)]
            outcomes = await self._tier.load([*map(Read, part, self._rows)])
            for place, (key, row, outcome) in enumerate(zip(part, self._rows, outcomes, strict=False)):
                if outcome is None:
                    assert row[:36] == key
                else:  # It went for room between the look-up and the load.
                    assert isinstance(outcome, ChunkMissing), outcome
                    there[start + place] = False
        run = len(list(takewhile(bool, there)))
        missing = [key for key, known in zip(keys, there, strict=True) if not known]
        for start in range(0, len(missing), BATCH):
            part = missing[start : start + BATCH]
            for key, row in zip(part, self._rows, strict=False):
                row[:36] = key
            outcomes = await self._tier.store([*map(Write, part, self._rows)])
            soak.stored += list(outcomes).count(None)
            soak.refused += len(part) - list(outcomes).count(None)
        self._tier.advise(Advice("rank", keys))
        soak.requests += 1
        soak.references += len(request.hash_ids)
        soak.hits += run

    def close(self) -> None:
        self._rows.clear()
        self._region.close()


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("laid_out", [{"naming": "flat"}, {"layout": "segments"}], ids=["files", "segments"])
async def test_room_and_memory_stay_flat_and_hits_are_as_predicted(root, mapper, laid_out) -> None:
    unique = len({block for request in generate(Workload(requests=REQUESTS)) for block in request.hash_ids})
    capacity_bytes = unique * FILE_BYTES // 20
    options = FsOptions(root=str(root), capacity_bytes=capacity_bytes, **laid_out)
    tier = await FsBackend.open(options, TierContext("0:fs", mapper, ROW_BYTES))
    engine, soak = Engine(tier), Soak()
    ends_at = time.monotonic() + SOAK_S
    for request in requests():
        if time.monotonic() > ends_at and soak.stored > unique:
            break
        await engine.ask(request, soak)
        if soak.requests % LOOK_EVERY == 0 and tier.counters().evicted:
            soak.taken.append(taken_bytes(root))
            soak.chunks.append(tier.occupancy().chunks)
            soak.memory.append(memory_bytes())
    engine.close()
    assert await tier.aclose(30) == (0,)
    held = round(sum(soak.chunks) / len(soak.chunks))
    asked = islice(requests(), soak.requests)  # Made anew, for a list of them would be all that grows in memory.
    predicted = sum(policy_hits(asked, LRU(held), held)) / soak.references
    logger.info(summary(soak, capacity_bytes, predicted, held))
    assert max(soak.taken) <= capacity_bytes
    assert min(soak.taken) > 0.8 * capacity_bytes
    assert abs(soak.hits / soak.references - predicted) < 0.01
    assert soak.refused == 0
    assert max(soak.memory) - soak.memory[0] < MEMORY_BYTES_MAX


def summary(soak: Soak, capacity_bytes: int, predicted: float, held: int) -> str:
    written = soak.stored * FILE_BYTES
    least, most = min(soak.taken) / capacity_bytes, max(soak.taken) / capacity_bytes
    return (
        f"{soak.requests:,} requests, {soak.references:,} blocks; {written / 1e9:.2f} GB written into "
        f"{capacity_bytes / 1e6:.1f} MB (1/{written / capacity_bytes:.0f}); taken {least:.3f} to {most:.3f} of it, "
        f"{held:,} chunks; hit ratio {soak.hits / soak.references:.4f}, predicted {predicted:.4f}; "
        f"memory {soak.memory[0] / 1e6:.1f} to {max(soak.memory) / 1e6:.1f} MB; {soak.refused:,} refused"
    )
