"""The outcome of each fault on each remote tier: a test holds the page on remote tiers to it, a suite the tiers."""

from enum import StrEnum
from typing import NamedTuple


class Fault(StrEnum):
    REFUSED = "refused"
    RESET = "reset"
    HUNG = "hung"
    SLOW = "slow"
    KILLED = "killed"
    RESTARTED = "restarted"
    FULL = "full"
    LENGTH = "wrong length"
    FLIPPED = "flipped byte"
    TORN = "torn"
    FOREIGN = "foreign value"


ON_THE_WAY = frozenset({Fault.REFUSED, Fault.RESET, Fault.SLOW})  # A proxy does them.
IN_THE_STORE = frozenset({Fault.LENGTH, Fault.FLIPPED, Fault.TORN, Fault.FOREIGN})

UNAVAILABLE, FAILED = frozenset({"unavailable"}), frozenset({"failed"})
AWAY = UNAVAILABLE | FAILED
"""Whether a call met the fault as a whole, or some of its chunks did, is chance where it was under way."""

SERVERS = ON_THE_WAY | {Fault.HUNG, Fault.KILLED, Fault.RESTARTED}


CORRUPT = frozenset({"corrupt"})
LOADED, STORED = frozenset({"loaded"}), frozenset({"stored"})
MISSING = frozenset({"missing"})
NO_SPACE = frozenset({"no_space"})


class Became(NamedTuple):
    """What may become of chunks while a fault lasts: `loaded`, `stored`, or reasons of `tier_failed`."""

    loads: frozenset[str]
    stores: frozenset[str]


GONE = Became(AWAY, AWAY)
ONE_PLACE = Became(UNAVAILABLE, UNAVAILABLE)  # Everything is behind one address.
ONLY_PLACE = dict.fromkeys((Fault.REFUSED, Fault.RESET, Fault.HUNG, Fault.SLOW, Fault.KILLED), ONE_PLACE)
PLANTED = Became(CORRUPT, STORED)
PLANTS = dict.fromkeys(sorted(IN_THE_STORE), PLANTED)
NO_SERVER = "it has no server of its own: see what a hung mount does, and `tests/nfs/run`"

OUTCOMES: dict[str, dict[Fault, Became | str]] = {
    "redis": {**ONLY_PLACE, Fault.RESTARTED: Became(MISSING, STORED), Fault.FULL: Became(LOADED, NO_SPACE), **PLANTS},
    "mooncake": {  # On the way is the way to the master; hung, killed and restarted is an owner of memory.
        Fault.REFUSED: GONE,
        Fault.RESET: GONE,
        Fault.HUNG: Became(FAILED | MISSING, FAILED | NO_SPACE),  # The latter once the master has dropped the owner.
        Fault.SLOW: Became(LOADED, STORED),  # The master is told little.
        Fault.KILLED: Became(FAILED | MISSING, FAILED | NO_SPACE),
        Fault.RESTARTED: Became(MISSING, STORED),
        Fault.FULL: Became(LOADED | MISSING, STORED | NO_SPACE),  # It evicts, and not always in time.
        **PLANTS,
    },
    "object": {
        **ONLY_PLACE,
        Fault.RESTARTED: Became(MISSING, STORED),
        Fault.FULL: "a bucket has no end",
        **PLANTS,
        Fault.FOREIGN: Became(MISSING, STORED),
    },
    "fs": {
        **dict.fromkeys(SERVERS, NO_SERVER),
        Fault.FULL: "it makes room: the chunks that were used least recently go",
        **PLANTS,
    },
}
"""By remote and fault; text: why there is no such fault."""
