"""What a remote that fails comes to for an engine that uses it."""

import asyncio
from collections.abc import Callable

from kvtier.engine.manager import TieringOffloadingManager
from tests.engine.kit import PATIENCE_S, at_rest, found, put


async def costs_hits_alone(
    engine: TieringOffloadingManager, fail: Callable[[], object], mend: Callable[[], object]
) -> None:
    """Have the only tier of an engine of 16 rows fail: hits are lost, no row stays lent, and hits come back with it."""
    assert await put(engine, range(16)) == 16
    assert await at_rest(engine)
    assert await put(engine, range(100, 116)) == 16  # The first are in the tier only.
    assert await at_rest(engine)
    fail()
    assert await found(engine, range(16)) == 0
    assert await put(engine, range(200, 216)) == 16
    assert await at_rest(engine)  # No row is lent, though the service has not gone on.
    mend()
    async with asyncio.timeout(PATIENCE_S):
        while not await found(engine, [300]):
            await put(engine, [300])
            assert await at_rest(engine)
            await put(engine, range(400, 416))
            assert await at_rest(engine)
