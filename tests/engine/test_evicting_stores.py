"""Stores over a tier that is written when chunks leave: none waits, and none is refused for it, in virtual time."""

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import pytest

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.answers import HIT
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.steps import StepManager
from kvtier.engine.tier import TierMatcher
from kvtier.testing import virtual_time
from kvtier.tools.replay.workload import GeneratedTrace

TRACE = list(GeneratedTrace(limit=150))
CHUNK_BYTES = 4_096
CHUNKS_A_STEP = 16
STEP_S = 0.05
KEEPS_UP = CHUNK_BYTES * 10_000  # A second: all that may have left the order is written long before the next step.
SHORT = 6 * CHUNK_BYTES  # Of seventy chunks that are stored a second.
NOWHERE = (TierMatcher(medium="none"),)
EACH_SPEED = pytest.mark.parametrize("bytes_per_s", [KEEPS_UP, SHORT], ids=["keeps up", "slower than the stores"])

Granted = dict[tuple[int, int], bool]  # By request and step: whether there was room at once.


class Stores(NamedTuple):
    """The results of a trace's stores."""

    granted: Granted
    written: int
    unwritten: int  # Left the primary before the tier could take them.

    @property
    def refused(self) -> int:
        return sum(not granted for granted in self.granted.values())


def stored(rows: int, bytes_per_s: int | None = None) -> Stores:
    """Store the trace's requests at their times, over a tier of this speed or over none; nothing is loaded from it."""
    tier = {"type": "dummy", "medium": "STORAGE", "cascade": "evict", "bandwidth_bytes_per_s": bytes_per_s}
    config: dict[str, Any] = {"cpu_bytes_to_use": rows * CHUNK_BYTES, "chunk_bytes": CHUNK_BYTES}
    config["secondary_tiers"] = [] if bytes_per_s is None else [tier]
    return virtual_time.run(_stored(EngineConfig.from_dict(config)))


async def _stored(config: EngineConfig) -> Stores:
    granted: Granted = {}
    async with TieringOffloadingManager.open(config) as manager:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(TRACE):
                await asyncio.sleep(request.timestamp_ms / 1_000 - asyncio.get_running_loop().time())
                blocks = dict.fromkeys(request.hash_ids[: config.rows])
                keys = [make_offload_key(block.to_bytes(8, "big")) for block in blocks]
                group.create_task(_serve(manager.steps, number, keys, granted))
        tiers = manager.stats().tiers
    unwritten = sum(tier.skipped.get("pressure", 0) for tier in tiers)
    return Stores(granted, sum(tier.stored for tier in tiers), unwritten)


async def _serve(steps: StepManager, number: int, keys: Sequence[OffloadKey], granted: Granted) -> None:
    """Load a request's chunks from the primary, then store the others, some a step."""
    name = str(number)
    steps.on_new_request(name, load_matchers=NOWHERE)
    found = list(takewhile(lambda key: steps.lookup(key, name) is HIT, keys))
    steps.prepare_load(found, name)
    steps.end_step()
    await asyncio.sleep(STEP_S)
    steps.complete_load(found, name)
    for step, start in enumerate(range(len(found), len(keys), CHUNKS_A_STEP)):
        plan = steps.prepare_store(keys[start : start + CHUNKS_A_STEP], name)
        granted[number, step] = plan is not None
        steps.end_step()
        await asyncio.sleep(STEP_S)
        if plan is not None:
            steps.complete_store(plan.keys, name)
    steps.on_request_finished(name)
    steps.end_step()


@EACH_SPEED
@pytest.mark.parametrize("rows", [100, 800])
def test_every_store_that_has_room_without_tiers_has_it_in_the_same_step(rows: int, bytes_per_s: int) -> None:
    without, found = stored(rows), stored(rows, bytes_per_s)
    assert without.refused == found.refused == 0
    assert without.granted.keys() <= found.granted.keys()
