"""The ledger's answers, limits and counters."""

from enum import Enum
from typing import NamedTuple

from kvtier.backend import OffloadKey


class LookupResult(Enum):
    """What a look-up says of one key."""

    MISS = "miss"  # Compute it.
    HIT = "hit"  # Ready in the primary, and kept there until the step ends.
    HIT_PENDING = "hit_pending"  # On its way into the primary: look again.
    RETRY = "retry"  # A tier has yet to say: look again.

    __hash__ = object.__hash__  # Each is there once; the hash of an enum's name is a call in Python.


HIT, HIT_PENDING, MISS, RETRY = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS, LookupResult.RETRY


class StorePlan(NamedTuple):
    """What `prepare_store` decided: write the chunk of `keys[i]` into row `rows[i]`."""

    keys: list[OffloadKey]
    rows: list[int]
    evicted: list[OffloadKey]


class LedgerLimits(NamedTuple):
    """Rows are the primary's; seconds are of the clock whose times the ledger is given."""

    cascade_rows_max: int  # Pinned by cascades at once: beyond it cascades are dropped, so that stores go on.
    lease_rows_max: int  # Held for waiting requests at once.
    lease_s: float
    action_chunks: int  # Moved by one action at most.


class LedgerCounters:
    """Totals since the start, in chunks."""

    __slots__ = ("hits", "misses", "promotions_refused", "rows_kept", "stores", "stores_refused")

    def __init__(self) -> None:
        self.hits = 0  # Loaded from where they lay in the primary.
        self.misses = 0  # Looked up and found nowhere, once a request and key.
        self.promotions_refused = 0  # Had by a tier, but there was no row for them.
        self.rows_kept = 0  # Given back while something of the caller's still read them.
        self.stores = 0
        self.stores_refused = 0  # Offered in a call for which there was no room.
