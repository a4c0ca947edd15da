"""What an outcome says of its tier: which chunks did not move and why, and whether that is a failure of the tier's."""

from collections.abc import Collection

from kvtier.bridge.messages import Code, Finished
from kvtier.bridge.packing import unpack_rows
from kvtier.tier import Tier

TIER_AT_FAULT = frozenset({Code.FAILED, Code.UNAVAILABLE, Code.DEADLINE})
NOT_TRIED = frozenset({Code.REFUSED, Code.LOST})  # Says nothing of the tier, nor of the chunk.


def failures(message: Finished) -> dict[int, Code]:
    """Return why chunks did not move, by their index."""
    if not message.codes:
        return {}
    return dict(zip(unpack_rows(message.failed), map(Code, message.codes), strict=True))


def judge(tier: Tier, codes: Collection[Code], now: float) -> bool:
    """Tell the breaker how a transfer ended; say whether it failed, that is, whether anything was the tier's fault."""
    if not TIER_AT_FAULT.isdisjoint(codes):
        tier.breaker.failed(now)
        return True
    if NOT_TRIED.isdisjoint(codes):
        tier.breaker.succeeded()
    return False
