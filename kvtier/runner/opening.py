"""Opens the tiers of a configuration, all or none."""

import asyncio
from collections.abc import Coroutine

from kvtier.backend import FileMapper, TierContext, backend_class
from kvtier.config import EngineConfig, TierConfig, tier_options
from kvtier.errors import BackendUnavailable
from kvtier.memory import is_of_a_limit, reason
from kvtier.runner.budget import Budget
from kvtier.runner.runner import RunnerTier

GIVEN_UP_S = 1.0  # A tier that is no longer wanted leaves nothing behind, if it can within this.


async def open_tiers(config: EngineConfig) -> list[RunnerTier]:
    """Open every tier on the running loop. If one fails, those before it are closed and its error is raised."""
    mapper = FileMapper(config.namespace)
    opened: list[RunnerTier] = []
    try:
        for index, tier in enumerate(config.secondary_tiers):
            opened.append(await _in_time(_open_tier(index, tier, mapper, config.row_bytes), tier, config.limits.open_s))
    except BaseException:
        closings = [tier.backend.aclose(config.limits.close_s) for tier in opened]
        await asyncio.shield(asyncio.gather(*closings, return_exceptions=True))
        raise
    return opened


async def _in_time(opening: Coroutine[None, None, RunnerTier], tier: TierConfig, deadline_s: float) -> RunnerTier:
    """Wait at most so long for a tier to open. One that hangs is left behind, with the thread that it hangs in."""
    task = asyncio.ensure_future(opening)
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GIVEN_UP_S)
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=GIVEN_UP_S)
        raise BackendUnavailable(f"{tier.name}: does not open within limits.open_s = {deadline_s:g} s")
    if task.cancelled():
        raise BackendUnavailable(f"{tier.name}: its opening was cancelled from within")
    return task.result()


async def _open_tier(index: int, tier: TierConfig, mapper: FileMapper, row_bytes: int) -> RunnerTier:
    options = tier_options(tier, f"secondary_tiers[{index}]")
    try:
        backend = await backend_class(tier.type).open(options, TierContext(tier.name, mapper, row_bytes))
    except Exception as error:
        if is_of_a_limit(error):
            raise BackendUnavailable(f"{tier.name}: cannot be opened: {reason(error)}") from error
        raise
    limits = tier.limits
    return RunnerTier(
        tier.name,
        backend,
        limits.deadline_s,
        Budget(limits.load_bytes_in_flight, limits.load_chunks_in_flight),
        Budget(limits.store_bytes_in_flight, limits.store_chunks_in_flight),
    )
