"""What an outcome says of its tier: which chunks did not move and why, and whether that is a failure of the tier's."""

from collections.abc import Collection

from kvtier.bridge.messages import Code, Finished
from kvtier.bridge.packing import unpack_rows
from kvtier.tier import Tier

TIER_AT_FAULT = frozenset({Code.FAILED, Code.UNAVAILABLE, Code.DEADLINE})
NOT_TRIED = frozenset({Code.REFUSED, Code.LOST})  # Says nothing of the tier, nor of the chunk.
NO_FAILURE = frozenset({Code.MISSING, Code.REFUSED})  # Has no cause that anybody could mend.
_SAY_ALL = frozenset({Code.CORRUPT, Code.NO_SPACE, Code.DEADLINE, Code.LOST})


def failures(message: Finished) -> dict[int, Code]:
    """Return why chunks did not move, by their index."""
    if not message.codes:
        return {}
    return dict(zip(unpack_rows(message.failed), map(Code, message.codes), strict=True))


def judge(tier: Tier, codes: Collection[Code], now: float, cause: str = "") -> bool:
    """Tell the breaker how a transfer ended; say whether it failed, that is, whether anything was the tier's fault.

    What did not move is blamed on the `cause`, or without one on the worst of its codes.
    """
    if codes and not NO_FAILURE.issuperset(codes):
        worst = max(code for code in codes if code not in NO_FAILURE)
        tier.counters.blame(cause or (worst.name.lower() if worst in _SAY_ALL else "other"))
    if not TIER_AT_FAULT.isdisjoint(codes):
        tier.breaker.failed(now)
        return True
    if NOT_TRIED.isdisjoint(codes):
        tier.breaker.succeeded()
    return False


def unanswered(tier: Tier, cause: str, now: float) -> None:
    """Take note of a question that the tier did not answer."""
    tier.counters.probes_failed += 1
    tier.counters.blame(cause or "other")
    tier.breaker.failed(now)
