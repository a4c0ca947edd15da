"""The sources of one key: which tiers a look-up can load it from, and which have not answered yet."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.engine.requests import Request, Search
from kvtier.engine.tier import Tier


class Sources(NamedTuple):
    """The tiers that a request may load from, in configured order."""

    having: tuple[Tier, ...]  # Hold the key, and loading may be worth it.
    too_slow: tuple[Tier, ...]  # Hold the key, but computing is expected to be faster.
    silent: tuple[Tier, ...]  # Have not answered a probe for the key.
    late: tuple[Tier, ...]  # Likewise, and the request's probe deadline is over: they count as not having it.
    admitted: Sequence[Tier]  # All of them, and those that lack the key.


_sources: Callable[[tuple[Sequence[Tier], ...]], Sources] = partial(
    tuple.__new__,  # pyright: ignore[reportUnknownMemberType]  # Typeshed leaves its items unknown.
    Sources,
)
"""Makes `Sources` without a frame of Python: it is called for every key that is looked up and not in the primary."""


def sources_of(
    key: OffloadKey,
    request: Request,
    search: Search,
    tiers: Sequence[Tier],
    holders: int,
    now: float,
    never: Callable[[Tier], bool] | None = None,
) -> Sources:
    """Sort the tiers by what is known of a key. Changes nothing.

    `holders` are the bits of the tiers that the location map names. `never` returns True for a tier of which no load
    is worth its time; None if loads are not weighed. A request probes each tier once: an answer that has expired since
    still counts for it, or answers older than a step would keep it waiting.
    """
    having: tuple[Tier, ...] = ()
    too_slow = silent = late = having
    admitted: list[Tier] = []
    asked = search.asked
    for tier in tiers:
        if not request.loads_from(tier.spec) or not tier.admits(now):
            continue
        admitted.append(tier)
        answer = tier.answer(key, holders & tier.bit, now)
        if answer is None and asked and (tier.index, key) in asked:
            if key not in tier.asking:
                answer = tier.last_answer(key)
            elif not search.awaits_probes(now):
                answer = False
                late = (*late, tier)
        if answer:
            if never is not None and (search.passed & tier.bit or never(tier)):
                too_slow = (*too_slow, tier)
            else:
                having = (*having, tier)
        elif answer is None:
            silent = (*silent, tier)
    return _sources((having, too_slow, silent, late, admitted))
