"""Traces whose requests say hints of all kinds, true and wrong."""

import random

from msgspec import structs

from kvtier.settings.hints import Hint
from tests.tools.replay.oracle import Saying, future, hinted

SAYING = Saying(over=0.6, returns=0.5, error=0.5, lies=0.2, seed=14)


def told(trace):
    """Give a trace's requests hints of all kinds; some say several things, and some say nothing."""
    dice = random.Random(14)
    known = future(trace, trace.block_tokens)
    return [structs.replace(each, hint=_more(each.hint, dice)) for each in hinted(trace, known, SAYING)]


def _more(hint, dice):
    said = Hint() if hint is None else hint
    if dice.random() < 0.2:
        said = structs.replace(said, retain_s=dice.choice((5.0, 60.0, 1e9)), priority=dice.randrange(3))
        said = structs.replace(said, tokens=dice.choice((None, 0, 700, 5_000)))
    if dice.random() < 0.2:
        said = structs.replace(said, class_=dice.choice("abc"))
    if dice.random() < 0.3:
        said = structs.replace(said, no_store=dice.choice((True, True, (), ("another",))))
    return hint if said == Hint() else said
