"""Traces whose requests say hints of all kinds, true and wrong."""

import random
from collections.abc import Sequence

from msgspec import structs

from kvtier.settings.hints import Hint
from kvtier.tools.replay.traces import Trace, TraceRequest
from kvtier.tools.replay.workload import GeneratedTrace
from tests.tools.replay.oracle import Saying, future, hinted

SAYING = Saying(over=0.6, returns=0.5, error=0.5, lies=0.2, seed=14)
KINDS = ("over", "returns_in_s", "retain_s", "class", "no_store")


def told(trace: GeneratedTrace | Trace, kinds: Sequence[str] = KINDS, tiers: Sequence[str] = ()) -> list[TraceRequest]:
    """Give a trace's requests hints of these kinds; some say several things, and some say nothing.

    `tiers`: what `no_store` names, where it names tiers.
    """
    dice = random.Random(14)
    saying = SAYING._replace(over="over" in kinds and SAYING.over, returns="returns_in_s" in kinds and SAYING.returns)
    known = future(trace, trace.block_tokens)
    return [structs.replace(each, hint=_more(each.hint, dice, kinds, tiers)) for each in hinted(trace, known, saying)]


def _more(hint: Hint | None, dice: random.Random, kinds: Sequence[str], tiers: Sequence[str]) -> Hint | None:
    said = Hint() if hint is None else hint
    if "retain_s" in kinds and dice.random() < 0.2:
        said = structs.replace(said, retain_s=dice.choice((5.0, 60.0, 1e9)), priority=dice.randrange(3))
        said = structs.replace(said, tokens=dice.choice((None, 0, 700, 5_000)))
    if "class" in kinds and dice.random() < 0.2:
        said = structs.replace(said, class_=dice.choice("abc"))
    if "no_store" in kinds and dice.random() < 0.3:
        said = structs.replace(said, no_store=dice.choice((True, True, tuple(tiers), ("another",))))
    return hint if said == Hint() else said
