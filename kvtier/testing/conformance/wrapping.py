"""Promises of a tier that wraps another tier."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

import msgspec
import pytest

from kvtier.backend import (
    OPTIONAL,
    Abandoned,
    Advice,
    Advised,
    Backend,
    Calls,
    Counted,
    Described,
    Durability,
    Hint,
    Inventory,
    InventoryEvent,
    Measured,
    Occupancy,
    OffloadKey,
    Outcome,
    Read,
    ScanDone,
    TierContext,
    Write,
)
from kvtier.errors import ChunkMissing, NoSpace
from kvtier.testing.conformance.lender import Promises, keys_of

Wrap = Callable[[Backend], Backend]

each_protocol = pytest.mark.parametrize("protocol", OPTIONAL, ids=lambda protocol: protocol.__name__)


class WrapperConformance(Promises):
    """Needs the fixture `wrap`: a function that puts the wrapper around an open tier."""

    @each_protocol
    async def test_a_wrapper_offers_what_it_wraps(self, wrap: Wrap, protocol: type[Any]) -> None:
        """An engine sees only the wrapper's protocols."""
        wrapper = wrap(inner_tier(protocol))
        assert isinstance(wrapper, protocol), f"{type(wrapper).__name__} forgets {protocol.__name__}"

    @each_protocol
    async def test_a_wrapper_offers_nothing_else(self, wrap: Wrap, protocol: type[Any]) -> None:
        """A wrapper claims no protocol that its inner tier lacks."""
        wrapper = wrap(inner_tier(*(other for other in OPTIONAL if other is not protocol)))
        assert not isinstance(wrapper, protocol), f"{type(wrapper).__name__} claims {protocol.__name__}"

    async def test_a_wrapper_passes_on_reports_and_advice(self, wrap: Wrap) -> None:
        """Occupancy, description, events and advice pass unchanged. The wrapper may add counters."""
        inner = inner_tier(*OPTIONAL)
        wrapper = wrap(inner)
        assert isinstance(wrapper, Measured)
        assert isinstance(wrapper, Counted)
        assert isinstance(wrapper, Described)
        assert isinstance(wrapper, Inventory)
        assert isinstance(wrapper, Advised)
        assert wrapper.occupancy() == OCCUPANCY
        assert COUNTS.items() <= wrapper.counts().items()
        assert DESCRIPTION.items() <= wrapper.description().items()
        assert [event async for event in wrapper.watch()] == [ScanDone(complete=True)]
        given = [
            Advice("rank", keys_of(1)),
            Advice("rank", keys_of(1), Hint(over=True)),
            Advice("demote", keys_of(2)),
            Advice("retain", keys_of(3), seconds=60.0, priority=7),
        ]
        for advice in given:
            wrapper.advise(advice)
        assert inner.advice == given

    @pytest.mark.parametrize("durability", Durability, ids=lambda durability: durability.name)
    async def test_a_wrapper_promises_no_more_than_what_it_wraps(self, wrap: Wrap, durability: Durability) -> None:
        """A chunk is as durable as in the inner tier."""
        inner = inner_tier()
        inner.durability = durability
        levels = list(Durability)
        assert levels.index(wrap(inner).durability) <= levels.index(durability)


OCCUPANCY = Occupancy(chunks=7, used_bytes=7 << 14, capacity_bytes=1 << 20, reserved_bytes=1 << 14)
COUNTS: Mapping[str, int] = {"corrupt_checksum": 3, "evicted": 5}
DESCRIPTION: Mapping[str, str] = {"root": "/nowhere", "layout": "nothing"}


class Nothing(Backend):
    """A tier that is always empty, to test the wrapper around it."""

    durability = Durability.PROCESS
    options_type = msgspec.Struct

    def __init__(self) -> None:
        self.advice: list[Advice[OffloadKey]] = []
        self._calls = Calls("nothing")

    @classmethod
    async def open(cls, options: msgspec.Struct, context: TierContext) -> Self:
        raise NotImplementedError  # `inner_tier` makes it.

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [False] * len(keys)

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        return [ChunkMissing(key.hex()) for key, _ in reads]

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        return [NoSpace(key.hex()) for key, _ in writes]

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        pass

    async def aclose(self, deadline_s: float) -> Abandoned:
        return await self._calls.close(deadline_s)


class _Reports(Nothing):
    async def watch(self) -> AsyncIterator[InventoryEvent]:
        yield ScanDone(complete=True)


class _Measures(Nothing):
    def occupancy(self) -> Occupancy:
        return OCCUPANCY


class _Heeds(Nothing):
    def advise(self, advice: Advice[OffloadKey]) -> None:
        self.advice.append(advice)


class _Counts(Nothing):
    def counts(self) -> Mapping[str, int]:
        return dict(COUNTS)


class _Describes(Nothing):
    def description(self) -> Mapping[str, str]:
        return dict(DESCRIPTION)


OFFERING: Mapping[type[Any], type[Nothing]] = {
    Inventory: _Reports,
    Measured: _Measures,
    Advised: _Heeds,
    Counted: _Counts,
    Described: _Describes,
}


def inner_tier(*protocols: type[Any]) -> Nothing:
    """Return a tier with exactly these optional protocols."""
    bases = tuple(OFFERING[protocol] for protocol in protocols) or (Nothing,)
    tier: Nothing = type("Inner", bases, {})()
    return tier
