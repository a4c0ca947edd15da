"""What goes wrong with which call of a tier: decided in one synchronous step, by a script or from a seed."""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvtier.config import Checked, Duration
from kvtier.keys import OffloadKey

Operation = Literal["probe", "load", "store", "delete"]
Kind = Literal["unavailable", "late_unavailable", "delay", "hang", "failed", "missing", "corrupt", "no_space"]

OF_CALLS: tuple[Kind, ...] = ("unavailable", "late_unavailable", "delay", "hang")
OF_CHUNKS: Mapping[Operation, tuple[Kind, ...]] = {
    "probe": (),
    "load": ("failed", "missing", "corrupt"),
    "store": ("failed", "no_space"),
    "delete": (),
}

Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""How many of all, 0 to 1."""


class Faults(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often what goes wrong. With every rate at zero nothing does."""

    # Of calls.
    unavailable: Rate = 0.0  # Raise BackendUnavailable; the inner tier is not called.
    late_unavailable: Rate = 0.0  # Raise it when the inner tier has done its work: what was stored is stored.
    delay: Rate = 0.0  # Wait, anything up to `delay_s`, before the inner tier is called.
    hang: Rate = 0.0  # Do not go on to the inner tier before being released, or before `hang_s` have passed.

    # Of chunks; the inner tier does not see these.
    failed: Rate = 0.0  # TransferFailed, in loads and stores.
    missing: Rate = 0.0  # BlockMissing, in loads.
    corrupt: Rate = 0.0  # BlockCorrupt, in loads.
    no_space: Rate = 0.0  # NoSpace, in stores.

    delay_s: Duration = 1.0
    hang_s: Duration | None = None  # None: until released.


class Fault(NamedTuple):
    """One fault of a script: of the whole call, or of its chunks (of all, or only of these keys)."""

    kind: Kind
    keys: frozenset[OffloadKey] | None = None


class Throw(NamedTuple):
    """What is to happen to one call, and to each of its chunks."""

    of_call: frozenset[Kind]
    delay_s: float
    of_chunks: Sequence[Kind | None]


class Dice:
    """Decides what happens to each call: what its script says, and when that has ended, what its seed says."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self._random = random.Random(seed)
        self._scripts: dict[Operation, deque[Fault | None]] = {operation: deque() for operation in OF_CHUNKS}

    def script(self, operation: Operation, faults: Sequence[Fault | None]) -> None:
        """Decide the next calls of an operation that are not decided yet; None is a call without any fault.

        Raises `ValueError` for a fault that such a call cannot have.
        """
        for fault in faults:
            if fault is not None and fault.kind not in (*OF_CALLS, *OF_CHUNKS[operation]):
                raise ValueError(f"{operation}: {fault.kind!r} is no fault of a {operation}")
        self._scripts[operation].extend(faults)

    def throw(self, operation: Operation, keys: Sequence[OffloadKey]) -> Throw:
        """Decide one call of an operation over these keys."""
        script = self._scripts[operation]
        return self._scripted(script.popleft(), keys) if script else self._random_throw(operation, keys)

    def _scripted(self, fault: Fault | None, keys: Sequence[OffloadKey]) -> Throw:
        if fault is None:
            return Throw(frozenset(), 0.0, [None] * len(keys))
        kind = fault.kind
        if kind in OF_CALLS:
            return Throw(frozenset((kind,)), self.faults.delay_s if kind == "delay" else 0.0, [None] * len(keys))
        return Throw(frozenset(), 0.0, [kind if fault.keys is None or key in fault.keys else None for key in keys])

    def _random_throw(self, operation: Operation, keys: Sequence[OffloadKey]) -> Throw:
        of_call: frozenset[Kind] = frozenset(kind for kind in OF_CALLS if self._happens(kind))
        delay_s = self._random.uniform(0, self.faults.delay_s) if "delay" in of_call else 0.0
        return Throw(of_call, delay_s, [self._first(OF_CHUNKS[operation]) for _ in keys])

    def _first(self, kinds: Sequence[Kind]) -> Kind | None:
        for kind in kinds:
            if self._happens(kind):
                return kind
        return None

    def _happens(self, kind: Kind) -> bool:
        rate: float = getattr(self.faults, kind)
        return rate > 0 and self._random.random() < rate
