"""The ledger that a configuration describes: shares become rows, bytes become chunks."""

from kvtier.answers import LedgerLimits
from kvtier.config import EngineConfig
from kvtier.events import EventLog
from kvtier.inbox import Observe
from kvtier.ledger import Ledger
from kvtier.policies.named import policy_class
from kvtier.tier import TierSpec


def ledger_of(config: EngineConfig, events: EventLog | None, observe: Observe) -> Ledger:
    """Build the ledger that a configuration describes. Raises `ConfigError` for an unknown policy."""
    rows, limits = config.rows, config.limits
    policy = policy_class(config.eviction_policy)(rows)
    bounds = LedgerLimits(
        cascade_rows_max=rows_of_share(limits.cascade_share, rows),
        lease_rows_max=rows_of_share(limits.lease_share, rows),
        lease_s=limits.lease_s,
        action_chunks=limits.action_chunks,
    )
    tiers = [
        TierSpec(
            name=tier.name,
            store_chunks_max=min(
                tier.limits.store_chunks_in_flight, tier.limits.store_bytes_in_flight // config.row_bytes
            ),
            answer_ttl_s=tier.limits.answer_ttl_s,
            asked_keys_max=tier.limits.probe_keys_in_flight,
            breaker_failures=tier.limits.breaker_failures,
            breaker_cooldown_s=tier.limits.breaker_cooldown_s,
            trial_chunks=limits.action_chunks,
            overdue_rows_max=rows_of_share(limits.quarantine_share, rows),
            request_level=tier.request_level,
            medium=tier.medium,
            locality=tier.locality,
        )
        for tier in config.secondary_tiers
    ]
    return Ledger(rows, policy, tiers, bounds, events, observe)


def rows_of_share(share: float, rows: int) -> int:
    return max(1, int(share * rows))
