"""The suite of mixed operations: three engines, killed at random, on one disturbed remote."""

import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import uuid
from collections import Counter
from typing import Any

from tests.remote.kit import REST_S, describe, found_one_by_one, opened
from tests.remote.owner import A_LINE, CHUNKS, ROWS

OWNERS = 3
OPERATIONS = int(os.environ.get("KVTIER_MIXED_OPERATIONS", "600"))
LINES_BEFORE_A_KILL = max(20, OPERATIONS // 200)  # Of ten operations. An engine takes a second to start.
ERRORS_BYTES = 4_000  # Shown of what an owner has printed.
QUIET_S_MAX = 2.0  # Between two disturbances.
LIMITS: dict[str, Any] = {"breaker_cooldown_s": "100ms", "answer_ttl_s": "1s"}

logger = logging.getLogger(__name__)


class Mixed:
    """Faults of owners and of the remote at once. A subclass has the fixture `remote`."""

    async def test_mixed_operations_of_owners_that_are_killed_meet_no_wrong_byte(self, remote):
        seed, base = random.randrange(1 << 32), uuid.uuid4().int >> 72
        logger.info("seed %d", seed)
        dice = random.Random(seed)
        engine = describe(ROWS, remote.tier(by_proxy=True) | {"limits": LIMITS})
        async with asyncio.TaskGroup() as group:
            owners = [group.create_task(_owners(engine, random.Random(dice.random()), base)) for _ in range(OWNERS)]
            while not all(owner.done() for owner in owners):
                await asyncio.wait(owners, timeout=dice.uniform(0, QUIET_S_MAX))
                await asyncio.to_thread(remote.disturb, dice)
        met = sum((owner.result() for owner in owners), Counter[str]())
        logger.info("%s: %s", remote.name, dict(met))
        assert met["operations"] >= OPERATIONS
        assert met["fetched"] > 0
        async with await opened(engine) as last:
            await found_one_by_one(last, range(base, base + CHUNKS))


async def _owners(engine, dice, base):
    """Run one owner after another until a share of the operations is done; kill each but the last."""
    met = Counter[str]()
    while met["operations"] < OPERATIONS / OWNERS:
        met += await _owner(engine, dice, base, lines=dice.randint(1, LINES_BEFORE_A_KILL))
        met["killed"] += 1
    return met


async def _owner(engine, dice, base, *, lines):
    command = [sys.executable, "-m", "tests.remote.owner", json.dumps(engine), str(dice.randrange(1 << 32)), str(base)]
    met = Counter[str]()
    with tempfile.TemporaryFile() as errors:  # No pipe: nobody reads it meanwhile, and Mooncake prints a lot.
        owner = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=errors)
        assert owner.stdout is not None
        try:
            for _ in range(lines):
                async with asyncio.timeout(REST_S):
                    line = await owner.stdout.readline()
                if not line:
                    break
                met += Counter(json.loads(line))
            await asyncio.sleep(dice.uniform(0, 0.02))  # Some moment, whatever it is at.
        finally:
            if owner.returncode is None:
                owner.kill()
            await owner.communicate()
        errors.seek(0)
        assert met["operations"] == lines * A_LINE, errors.read()[-ERRORS_BYTES:].decode(errors="replace")
    return met
