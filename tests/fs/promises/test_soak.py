"""A cache of a twentieth of what is written: its room and the process's memory stay flat, its hits are the study's.

A few seconds as it comes. At full size, on the disk that is to be tried:

    export KVTIER_SOAK_S=600 KVTIER_SOAK_REQUESTS=3000
    .venv/bin/pytest -s tests/fs/promises/test_soak.py --basetemp=/mnt/nvme/soak
"""

import logging
import os
import time
from collections import Counter
from itertools import count, islice, takewhile
from pathlib import Path

import msgspec
import pytest

from kvtier.backend import Advice, Read, TierContext, Write, make_offload_key
from kvtier.errors import ChunkMissing
from kvtier.memory.region import Region
from kvtier.policies import LRU
from kvtier.tools.replay.study import policy_hits
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


def requests():
    """Give one workload after the other; no two share a block."""
    for seed in count():
        for request in generate(Workload(requests=REQUESTS, seed=seed)):
            blocks = tuple(block + (seed << 40) for block in request.hash_ids)
            yield msgspec.structs.replace(request, hash_ids=blocks)


def memory_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def ask(tier, rows, request, seen):
    """Use a tier as an engine without a primary: load the leading run of what is there, store the rest."""
    keys = [make_offload_key(block.to_bytes(8, "big") * 4) for block in dict.fromkeys(request.hash_ids)]
    there = list(await tier.probe(keys))
    run = len(list(takewhile(bool, there)))
    for start in range(0, run, BATCH):
        part = keys[start : min(start + BATCH, run)]
        outcomes = await tier.load([*map(Read, part, rows)])
        for place, (key, row, outcome) in enumerate(zip(part, rows, outcomes, strict=False)):
            if outcome is None:
                assert row[:36] == key
            else:  # It went for room between the look-up and the load.
                assert isinstance(outcome, ChunkMissing), outcome
                there[start + place] = False
    missing = [key for key, known in zip(keys, there, strict=True) if not known]
    for start in range(0, len(missing), BATCH):
        part = missing[start : start + BATCH]
        for key, row in zip(part, rows, strict=False):
            row[:36] = key
        outcomes = await tier.store([*map(Write, part, rows)])
        stored = list(outcomes).count(None)
        seen.update(stored=stored, refused=len(part) - stored)
    tier.advise(Advice("rank", keys))
    seen.update(requests=1, references=len(request.hash_ids), hits=len(list(takewhile(bool, there))))


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("laid_out", [{"naming": "flat"}, {"layout": "segments"}], ids=["files", "segments"])
async def test_room_and_memory_stay_flat_and_hits_are_as_predicted(root, mapper, laid_out):
    unique = len({block for request in generate(Workload(requests=REQUESTS)) for block in request.hash_ids})
    capacity_bytes = unique * FILE_BYTES // 20
    options = FsOptions(root=str(root), capacity_bytes=capacity_bytes, **laid_out)
    tier = await FsBackend.open(options, TierContext("0:fs", mapper, ROW_BYTES))
    region = Region.private(BATCH, ROW_BYTES)
    rows = [region.row(index) for index in range(BATCH)]
    seen, chunks, taken, memory = Counter[str](), list[int](), list[int](), list[int]()
    ends_at = time.monotonic() + SOAK_S
    for request in requests():
        if time.monotonic() > ends_at and seen["stored"] > unique:
            break
        await ask(tier, rows, request, seen)
        if seen["requests"] % LOOK_EVERY == 0 and tier.counters().evicted:
            taken.append(taken_bytes(root))
            chunks.append(tier.occupancy().chunks)
            memory.append(memory_bytes())
    rows.clear()
    region.close()
    assert await tier.aclose(30) == (0,)
    held = round(sum(chunks) / len(chunks))
    asked = islice(requests(), seen["requests"])  # Made again, for a list of them would be all that grows in memory.
    predicted = sum(policy_hits(asked, LRU(held), held)) / seen["references"]
    hit_ratio = seen["hits"] / seen["references"]
    logger.info("%s; hit ratio %.4f, predicted %.4f; %d chunks", seen, hit_ratio, predicted, held)
    assert max(taken) <= capacity_bytes
    assert min(taken) > 0.8 * capacity_bytes
    assert abs(hit_ratio - predicted) < 0.01
    assert seen["refused"] == 0
    assert max(memory) - memory[0] < MEMORY_BYTES_MAX
