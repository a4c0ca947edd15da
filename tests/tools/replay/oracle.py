"""Hints for study: an oracle that knows a trace's future, and says some of it, with errors and with lies.

What a request does not share with other sessions is its session's own. A session returns when a later request uses
that, and it is over when no later request uses the last whole block.
"""

import math
import random
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kvtier.settings.hints import Hint

_OVER = Hint(over=True)


class Future(NamedTuple):
    last: Sequence[bool]  # Whether its session is over.
    returns_s: Sequence[float | None]  # When its session returns, from its own arrival on; None: never.


class Saying(NamedTuple):
    over: float = 0.0  # The share of the sessions' last requests that are said to be.
    returns: float = 0.0  # The share of the requests that return of which it is said when.
    error: float = 0.0  # The time is wrong by a factor of e to a normal variate with this standard deviation.
    lies: float = 0.0  # Of the hints of each kind; below 1.
    seed: int = 0


def future(requests, block_tokens):
    """Read a trace once. Takes some hundred bytes a distinct block."""
    user = {}  # Block -> the request that used it last.
    times_ms, shared, ends = array("d"), array("q"), list[int | None]()
    returns_s = []
    for number, request in enumerate(requests):
        blocks = request.hash_ids
        known = next((place for place, block in enumerate(blocks) if block not in user), len(blocks))
        own = known
        if known and known > shared[before := user[blocks[known - 1]]]:
            returns_s[before] = (request.timestamp_ms - times_ms[before]) / 1_000
            own = next(place for place, block in enumerate(blocks) if user[block] == before)
        whole = min(len(blocks), request.input_length // block_tokens)
        ends.append(blocks[whole - 1] if whole else None)
        times_ms.append(request.timestamp_ms)
        shared.append(own)
        returns_s.append(None)
        user.update(dict.fromkeys(blocks, number))
    return Future([end is not None and user[end] == number for number, end in enumerate(ends)], returns_s)


def hinted(requests, known, saying):
    for request, hint in zip(requests, hints(known, saying), strict=True):
        yield request if hint is None or request.hint is not None else replace(request, hint=hint)


def hints(known, saying):
    overs, returns = _overs(known, saying), _returns(known, saying)
    for over, returns_in_s in zip(overs, returns, strict=True):
        yield _OVER if over else None if returns_in_s is None else Hint(returns_in_s=returns_in_s)


def _overs(known, saying):
    """Yield, for each request, whether it is said to be the last: true for a share, and lies for as many as asked."""
    dice, ends = random.Random(f"{saying.seed} over"), sum(known.last)
    others = max(1, len(known.last) - ends)
    lies = saying.over * ends * saying.lies / (1 - saying.lies) / others
    for last in known.last:
        yield dice.random() < (saying.over if last else lies)


def _returns(known, saying):
    """Yield when a share of the requests is said to return. A lie has any time; one without a time gets lies, too."""
    dice = random.Random(f"{saying.seed} returns")
    times = [after_s for after_s in known.returns_s if after_s is not None]
    others = len(known.returns_s) - len(times)
    lies = saying.lies * len(times) / max(1.0, len(known.returns_s) - saying.lies * others)
    for after_s in known.returns_s:
        said, lied = dice.random() < saying.returns, dice.random() < lies
        another_s = dice.choice(times) if times else 0.0
        error = math.exp(dice.gauss(0.0, saying.error))
        if not said or (after_s is None and not lied):
            yield None
        else:
            yield round((another_s if lied or after_s is None else after_s) * error, 3)


ALL_KINDS = Saying(over=0.6, returns=0.5, error=0.5, lies=0.2, seed=14)


def told(trace):
    dice, known = random.Random(14), future(trace, trace.block_tokens)
    return [replace(each, hint=_more(each.hint, dice)) for each in hinted(trace, known, ALL_KINDS)]


def _more(hint, dice):
    said = Hint() if hint is None else hint
    if dice.random() < 0.2:
        said = replace(said, retain_s=dice.choice((5.0, 60.0, 1e9)), priority=dice.randrange(3))
        said = replace(said, tokens=dice.choice((None, 0, 700, 5_000)))
    if dice.random() < 0.2:
        said = replace(said, class_=dice.choice("abc"))
    if dice.random() < 0.3:
        said = replace(said, no_store=dice.choice((True, True, (), ("another",))))
    return hint if said == Hint() else said
