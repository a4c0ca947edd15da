"""The wrapper: a tier around another tier that passes on every call and every optional protocol.

A forgotten call is a silent bug, because kvtier does without a protocol that a tier does not offer. So a subclass
defines only the calls that it changes.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from kvtier.backend.contract import (
    OPTIONAL,
    Abandoned,
    Backend,
    Durability,
    InventoryEvent,
    Occupancy,
    OptionsT,
    Outcome,
    Read,
    Write,
)
from kvtier.backend.keys import OffloadKey
from kvtier.settings.hints import Advice


class Wrapper(Backend[OptionsT]):
    """A tier that does what its inner tier does, offers what it offers, and promises what it promises.

    A subclass defines `options_type`, `open`, and the calls that it changes. A method of an optional protocol is
    changed on the instance, after this constructor, and only where the inner tier has it:

        if isinstance(inner, Inventory):
            self.watch = self._watch
    """

    durability = Durability.PROCESS  # The least; an instance promises what its inner tier does.

    # Of the instance, and there only if the inner tier has them. A method of the class would claim them for every
    # inner tier: `isinstance` looks for a protocol's methods without asking `__getattr__`.
    watch: Callable[[], AsyncIterator[InventoryEvent]]
    occupancy: Callable[[], Occupancy]
    advise: Callable[[Advice[OffloadKey]], None]
    counts: Callable[[], Mapping[str, int]]
    description: Callable[[], Mapping[str, str]]

    def __init__(self, inner: Backend) -> None:
        """Take over an open tier, which is closed with this one."""
        self._inner = inner
        self.durability = inner.durability
        for protocol in OPTIONAL:
            if isinstance(inner, protocol):
                for name in methods_of(protocol):
                    setattr(self, name, getattr(inner, name))

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return await self._inner.probe(keys)

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        return await self._inner.load(reads)

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        return await self._inner.store(writes)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._inner.delete(keys)

    async def aclose(self, deadline_s: float) -> Abandoned:
        return await self._inner.aclose(deadline_s)


def methods_of(protocol: type) -> list[str]:
    """Return the names of the methods that an optional protocol asks for."""
    return [name for name in vars(protocol) if not name.startswith("_")]
