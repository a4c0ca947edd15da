"""Faults on top of any tier: by seeded rates, or call by call by a script.

Without faults the wrapper is transparent, and passes every suite that the inner tier passes. The buffer of a failed
chunk is overwritten, because the contract calls it undefined: code that reads it is found. As a configuration:

    type = "kvtier.testing.faults:FaultyBackend"
    inner = { type = "dummy", latency_s = "1ms" }
    faults = { unavailable = 0.01, hang = 0.001 }
    script = { load = ["hang", "none", "missing"] }
    seed = 7
"""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import msgspec

from kvtier import backend as api
from kvtier.config import TierConfig, tier_options
from kvtier.settings import Checked, Duration, decode, option_fields

__all__ = ["Fault", "Faults", "FaultyBackend", "FaultyOptions"]

T = TypeVar("T")
Operation = Literal["probe", "load", "store", "delete"]
FaultKind = Literal["unavailable", "late_unavailable", "delay", "hang", "failed", "missing", "corrupt", "no_space"]

OF_CALLS: tuple[FaultKind, ...] = ("unavailable", "late_unavailable", "delay", "hang")
OF_CHUNKS: Mapping[Operation, tuple[FaultKind, ...]] = {
    "probe": (),
    "load": ("failed", "missing", "corrupt"),
    "store": ("failed", "no_space"),
    "delete": (),
}

ERRORS: dict[FaultKind, type[api.ChunkError]] = {
    "failed": api.TransferFailed,
    "missing": api.ChunkMissing,
    "corrupt": api.ChunkCorrupt,
    "no_space": api.NoSpace,
}

Scripted = FaultKind | Literal["none"]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""A share, 0 to 1."""

Seed = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # The range of the message format.


class Faults(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rates of faults; zero by default."""

    # Of calls.
    unavailable: Rate = 0.0  # Raise BackendUnavailable; the inner tier is not called.
    late_unavailable: Rate = 0.0  # Raise it after the inner tier has done its work.
    delay: Rate = 0.0  # Wait up to `delay_s` before the inner tier is called.
    hang: Rate = 0.0  # Wait for `release`, or for `hang_s`, before the inner tier is called.

    # Of chunks, which the inner tier does not see.
    failed: Rate = 0.0  # TransferFailed, in loads and stores.
    missing: Rate = 0.0  # ChunkMissing, in loads.
    corrupt: Rate = 0.0  # ChunkCorrupt, in loads.
    no_space: Rate = 0.0  # NoSpace, in stores.

    delay_s: Duration = 1.0
    hang_s: Duration | None = None  # None: until released.


FAULTLESS = Faults()


class Fault(NamedTuple):
    """One fault of a script: of the whole call, of all its chunks, or of the chunks of these keys."""

    kind: FaultKind
    keys: frozenset[api.OffloadKey] | None = None


class Throw(NamedTuple):
    """The faults of one call, and of each of its chunks."""

    of_call: frozenset[FaultKind]
    delay_s: float
    of_chunks: Sequence[FaultKind | None]


class Dice:
    """Decides the faults of each call: by its script, and then by its seed."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self._random = random.Random(seed)
        self._scripts: dict[Operation, deque[Fault | None]] = {operation: deque() for operation in OF_CHUNKS}

    def script(self, operation: Operation, faults: Sequence[Fault | None]) -> None:
        """Append faults of an operation's next calls; None: no fault. ValueError for one that it cannot have."""
        for fault in faults:
            if fault is not None and fault.kind not in (*OF_CALLS, *OF_CHUNKS[operation]):
                raise ValueError(f"{operation}: {fault.kind!r} is no fault of a {operation}")
        self._scripts[operation].extend(faults)

    def throw(self, operation: Operation, keys: Sequence[api.OffloadKey]) -> Throw:
        if self._scripts[operation]:
            return self._scripted(self._scripts[operation].popleft(), keys)
        of_call: frozenset[FaultKind] = frozenset(kind for kind in OF_CALLS if self._happens(kind))
        delay_s = self._random.uniform(0, self.faults.delay_s) if "delay" in of_call else 0.0
        return Throw(of_call, delay_s, [self._first(OF_CHUNKS[operation]) for _ in keys])

    def _scripted(self, fault: Fault | None, keys: Sequence[api.OffloadKey]) -> Throw:
        kind = None if fault is None else fault.kind
        if kind is None or kind in OF_CALLS:
            of_call: frozenset[FaultKind] = frozenset() if kind is None else frozenset((kind,))
            return Throw(of_call, self.faults.delay_s if kind == "delay" else 0.0, [None] * len(keys))
        chosen = keys if fault is None or fault.keys is None else fault.keys
        return Throw(frozenset(), 0.0, [kind if key in chosen else None for key in keys])

    def _first(self, kinds: Sequence[FaultKind]) -> FaultKind | None:
        return next(filter(self._happens, kinds), None)

    def _happens(self, kind: FaultKind) -> bool:
        rate: float = getattr(self.faults, kind)
        return rate > 0 and self._random.random() < rate


class Script(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The faults of the first calls of each operation, in order."""

    probe: tuple[Scripted, ...] = ()
    load: tuple[Scripted, ...] = ()
    store: tuple[Scripted, ...] = ()
    delete: tuple[Scripted, ...] = ()


class FaultyOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    inner: dict[str, Any]  # Its type and its own options in one table.
    faults: Faults = FAULTLESS
    script: Script = Script()
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inner_tier()
        try:
            self.dice()
        except ValueError as error:
            raise api.ConfigError(f"script.{error}") from error

    def inner_tier(self) -> tuple[type[api.Backend], msgspec.Struct]:
        """Return the inner tier's class and its options. Raises `ConfigError`."""
        tier = decode(TierConfig, self.inner, "inner")
        for name in sorted(option_fields(TierConfig).keys() & self.inner.keys() - {"type"}):
            raise api.ConfigError(f"inner.{name}: given, only options of {tier.type!r} accepted: move it next to inner")
        options = tier_options(tier, "inner")  # First: its errors name the place.
        return api.backend_class(tier.type), options

    def dice(self) -> Dice:
        """Return dice with the script. Raises `ValueError` for an impossible fault."""
        dice = Dice(self.faults, self.seed)
        for operation in OF_CHUNKS:
            kinds: tuple[Scripted, ...] = getattr(self.script, operation)
            dice.script(operation, [None if kind == "none" else Fault(kind) for kind in kinds])
        return dice


class FaultyBackend(api.Wrapper[FaultyOptions]):
    options_type = FaultyOptions

    def __init__(
        self, inner: api.Backend, faults: Faults = FAULTLESS, seed: int = 0, *, dice: Dice | None = None
    ) -> None:
        """Wrap an open tier, which is closed with this one."""
        super().__init__(inner)
        self.met: Counter[FaultKind] = Counter()  # Calls or chunks with each fault.
        self.hanging = 0  # Calls that hang now.
        self._dice = Dice(faults, seed) if dice is None else dice
        self._calls = api.Calls(f"faulty {type(inner).__name__}")
        self._gate = asyncio.Event()
        self._hanging_changed = asyncio.Event()

    @classmethod
    async def open(cls, options: FaultyOptions, context: api.TierContext) -> Self:
        inner_class, inner_options = options.inner_tier()
        return cls(await inner_class.open(inner_options, context), dice=options.dice())

    def script(self, operation: Operation, *faults: Fault | FaultKind | None) -> None:
        """Set the faults of the next calls of an operation, one each; None: no fault. Later calls follow the rates.

        A kind by its name applies to the whole call, or to all its chunks.
        """
        self._dice.script(operation, [Fault(fault) if isinstance(fault, str) else fault for fault in faults])

    def release(self) -> None:
        self._gate.set()
        self._gate = asyncio.Event()

    async def until_hanging(self, calls: int) -> None:
        while self.hanging < calls:
            self._hanging_changed.clear()
            await self._hanging_changed.wait()

    async def probe(self, keys: Sequence[api.OffloadKey]) -> Sequence[bool]:
        with self._calls.one():
            return await self._meet(self._throw("probe", keys), lambda: self._inner.probe(keys))

    async def load(self, reads: Sequence[api.Read]) -> Sequence[api.Outcome]:
        with self._calls.one():
            throw = self._throw("load", [read.key for read in reads])
            sound = [read for read, kind in zip(reads, throw.of_chunks, strict=True) if kind is None]
            outcomes = iter(await self._meet(throw, lambda: self._inner.load(sound)))
            for read, kind in zip(reads, throw.of_chunks, strict=True):
                if kind is not None:
                    read.into[:] = b"\xdb" * len(read.into)  # Fills the buffer of a failed chunk.
            return [_outcome(read.key, kind, outcomes) for read, kind in zip(reads, throw.of_chunks, strict=True)]

    async def store(self, writes: Sequence[api.Write]) -> Sequence[api.Outcome]:
        with self._calls.one():
            throw = self._throw("store", [write.key for write in writes])
            sound = [write for write, kind in zip(writes, throw.of_chunks, strict=True) if kind is None]
            outcomes = iter(await self._meet(throw, lambda: self._inner.store(sound)))
            return [_outcome(write.key, kind, outcomes) for write, kind in zip(writes, throw.of_chunks, strict=True)]

    async def delete(self, keys: Sequence[api.OffloadKey]) -> None:
        with self._calls.one():
            await self._meet(self._throw("delete", keys), lambda: self._inner.delete(keys))

    async def aclose(self, deadline_s: float) -> api.Abandoned:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        ours = await self._calls.close(deadline_s)
        inner = await self._inner.aclose(max(0.0, ends_at - loop.time()))
        return max(ours, inner)  # A call in the inner tier is one of ours, too.

    def _throw(self, operation: Operation, keys: Sequence[api.OffloadKey]) -> Throw:
        throw = self._dice.throw(operation, keys)
        self.met.update(throw.of_call)
        self.met.update(kind for kind in throw.of_chunks if kind is not None)
        return throw

    async def _meet(self, throw: Throw, call: Callable[[], Awaitable[T]]) -> T:
        """Call the inner tier with the faults of the call. A wait that is cancelled ends before that."""
        if throw.delay_s:
            await asyncio.sleep(throw.delay_s)
        if "hang" in throw.of_call:
            await self._hang()
        if "unavailable" in throw.of_call:
            raise api.BackendUnavailable("the tier cannot be reached (a fault)")
        result = await call()
        if "late_unavailable" in throw.of_call:
            raise api.BackendUnavailable("the tier was lost before it answered (a fault)")
        return result

    async def _hang(self) -> None:
        self.hanging += 1
        self._hanging_changed.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._dice.faults.hang_s):
                    await self._gate.wait()
        finally:
            self.hanging -= 1


def _outcome(key: api.OffloadKey, kind: FaultKind | None, outcomes: Iterator[api.Outcome]) -> api.Outcome:
    """Return a chunk's fault, or the inner tier's next outcome."""
    return next(outcomes) if kind is None else ERRORS[kind](f"{key.hex()}: {kind} (a fault)")
