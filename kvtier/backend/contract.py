"""The contract of a secondary tier: five asynchronous methods, batches only.

A tier sees rows of the primary, lent for the length of one call, and answers for each chunk by itself. Everything is
abstract: a wrapper that forgets to pass on a default is a silent bug. Optional abilities are small protocols.
`kvtier.testing.conformance` proves this page. A tier's class, with its requirements, is imported at its first use.
"""

import inspect
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeGuard,
    runtime_checkable,
)

import msgspec

from kvtier.backend.namespace import FileMapper, OffloadKey
from kvtier.errors import ChunkError, ConfigError
from kvtier.settings import Checked, find_class, known_names
from kvtier.settings.hints import Advice

if TYPE_CHECKING:  # With a default, for type checkers alone: a bare `Backend` takes any options.
    from typing_extensions import TypeVar

    OptionsT = TypeVar("OptionsT", bound=msgspec.Struct, default=Any)
else:
    from typing import TypeVar

    OptionsT = TypeVar("OptionsT")

INVENTORY_BATCH_KEYS = 4_096  # Decoding and indexing this many takes about a millisecond of an LLM engine's step.

ENTRY_POINT_GROUP = "kvtier.backends"

_BUILT_IN = {
    "dummy": "kvtier_backends.dummy:DummyBackend",
    "fs": "kvtier_backends.fs:FsBackend",
    "memory": "kvtier_backends.fs:MemoryBackend",
    "mooncake": "kvtier_backends.mooncake:MooncakeBackend",
    "object": "kvtier_backends.object:ObjectBackend",
    "redis": "kvtier_backends.redis:RedisBackend",
}
BUILT_IN_TYPES = tuple(_BUILT_IN)

_MEANT = {
    **dict.fromkeys(("directory", "disk", "file", "files", "filesystem", "local", "nfs", "nvme", "ssd"), "'fs'"),
    **dict.fromkeys(("azure", "az", "bucket", "gcs", "gs", "minio", "s3"), "'object'"),
    **dict.fromkeys(("cluster", "keydb", "sentinel", "valkey"), "'redis'"),
    **dict.fromkeys(("cpu", "dram", "host", "ram"), "'memory', or the primary, which cpu_bytes_to_use sizes"),
}
"""Names that users try for a tier's type, and the type that is meant."""


class Durability(Enum):
    """The events that a chunk survives once `store` has answered None for it; each level includes the ones before."""

    PROCESS = "process"  # Gone with the process.
    HOST = "host"  # Survives a killed process.
    POWER = "power"  # Survives a power cut.


class Read(NamedTuple):
    """One chunk to load: `into` is writable, page-aligned, and exactly one row long."""

    key: OffloadKey
    into: memoryview


class Write(NamedTuple):
    """One chunk to store: `row` is page-aligned and exactly one row long; the tier only reads it."""

    key: OffloadKey
    row: memoryview


Outcome = ChunkError | None  # Of one chunk; None: it moved.


class Abandoned(NamedTuple):
    """Calls still running at the closing deadline: their lent buffers are in use."""

    transfers: int


class EngineId(NamedTuple):
    """An engine, through all its runners."""

    pid: int  # Process of the LLM engine, or of the program.
    number: int  # Above 0; random for each engine.

    @classmethod
    def new(cls) -> Self:
        return cls(os.getpid(), secrets.randbits(62) + 1)


class TierContext(NamedTuple):
    name: str  # As in metrics and messages, e.g. "0:fs".
    mapper: FileMapper  # Names every chunk; two namespaces never share a name.
    row_bytes: int  # Length of every buffer that will be lent: a multiple of 4,096.
    retained_share: float = 0.25  # Of its chunks, for `Advised`: the most that are retained at once.
    engine: EngineId | None = None  # A replaced runner opens its tiers for the same engine.


class Options(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a tier's own options. They are checked both from a file and from Python code.

    class ShelfOptions(Options, frozen=True, kw_only=True):
        root: Path
        capacity_bytes: Size | None = None
    """

    meant: ClassVar[Mapping[str, str]] = {"backend": "'type'"}

    def doubts(self) -> Iterable[str]:
        """Yield options that do not fit this machine, each beginning with the option's name. Blocks."""
        return ()


class Backend(ABC, Generic[OptionsT]):
    """A secondary tier; generic in its options.

    Buffers: a lent buffer belongs to the call until the call returns or raises. Afterwards no thread, no task and no
    kernel request may touch it. This holds for cancelled calls, too.

    Concurrency: any number of calls may run at once, on one event loop. If two stores of one key run at the same time,
    one whole chunk wins. A load beside a store gives the old chunk, the new one, or `ChunkMissing`. It never gives a
    mixture.

    Cancellation: a cancelled call waits until its buffers are out of use and then raises `CancelledError`. Each of its
    chunks moved wholly or not at all.

    Errors: one chunk's failure is its `Outcome`, in the order of the batch. A chunk that the tier could never hold, by
    the length of its key or buffer, is absent in a probe, `ChunkMissing` in a load, `NoSpace` in a store, and ignored
    in a delete (`kvtier.backend.Fit` does that). A call raises only as a whole: `BackendClosed`, `BackendUnavailable`,
    cancellation. An empty batch returns an empty sequence. A key may appear twice in a batch: each place gets its
    outcome.
    """

    durability: Durability
    """The durability of a stored chunk, proved by tests. An open tier may promise more than its class."""

    locality: ClassVar[Literal["LOCAL", "REMOTE"] | None] = None
    """The place of its chunks, for requests that choose their tiers. A configured `locality` overrides it."""

    runner: ClassVar[Literal["process"] | None] = None
    """`process` for a tier whose client may crash."""

    options_type: ClassVar[type[msgspec.Struct]]
    """The tier's own options: a frozen struct that forbids unknown fields, such as an `Options`."""

    @classmethod
    @abstractmethod
    async def open(cls, options: OptionsT, context: TierContext) -> Self:
        """Open the tier on the running loop. Raises `ConfigError` or `BackendUnavailable`, and then leaves nothing."""

    @abstractmethod
    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Return for each key True if a load would likely find it. The answer is a hint."""

    @abstractmethod
    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        """Fill each buffer with its chunk. A buffer with an error as its outcome is undefined."""

    @abstractmethod
    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        """Store each chunk wholly or not at all, replacing an older chunk of its key."""

    @abstractmethod
    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Forget the keys; unknown ones are ignored."""

    @abstractmethod
    async def aclose(self, deadline_s: float) -> Abandoned:
        """Refuse new calls at once, wait up to `deadline_s` seconds for running calls, and return how many are left.

        May be called again, to wait for those.
        """


class Added(NamedTuple):
    """Keys that the tier holds; at most `INVENTORY_BATCH_KEYS`."""

    keys: Sequence[OffloadKey]


class Removed(NamedTuple):
    """Keys that the tier does not hold any more; at most `INVENTORY_BATCH_KEYS`."""

    keys: Sequence[OffloadKey]


class ScanDone(NamedTuple):
    """The end of the start-up report: every key that was there at the start has been reported.

    With `complete`, the tier also reports every later change, as a tier with one owner does. Then a key that was never
    reported and never stored is absent. Otherwise kvtier keeps probing.
    """

    complete: bool


InventoryEvent = Added | Removed | ScanDone


@runtime_checkable
class Inventory(Protocol):
    """A tier that reports its keys, so that a look-up needs no call."""

    def watch(self) -> AsyncIterator[InventoryEvent]:
        """Report the tier's keys, then `ScanDone` once, then changes that no `store` or `delete` call explains.

        An event is true when it is yielded: a key that was stored again is not reported as removed. There is one
        consumer. The iterator ends when the tier is closed.
        """
        ...


class Occupancy(NamedTuple):
    chunks: int
    used_bytes: int
    capacity_bytes: int | None  # None: unlimited.
    reserved_bytes: int = 0  # For stores in flight.


@runtime_checkable
class Measured(Protocol):
    """A tier that reports its occupancy from memory, without a call to the device."""

    def occupancy(self) -> Occupancy: ...


@runtime_checkable
class Advised(Protocol):
    """A tier with its own eviction order, which takes advice.

    A tier sees only its own loads and stores. It does not see loads that the primary answers, and it sees a long prompt
    piece by piece. So kvtier advises it at the end of each request, and passes on applications' hints.
    `kvtier.policies.HintedOrder` applies advice to any order.
    """

    def advise(self, advice: Advice[OffloadKey]) -> None:
        """Apply advice to those of its keys that the tier holds, at once and from memory. It counts no use.

        A tier may ignore a kind of advice. No store finds less room because of advice, and no chunk is kept forever.

        - `rank` renews recency; the head of the keys is evicted last. Not every request's end is reported. From the
          first hint on, each report has a hint, which may be empty. `over` demotes keys that no other session has used.
        - `demote` evicts the keys before all others, tail first, unless they are used again.
        - `retain` does not evict the keys for `seconds`; the head is evicted last. At most
          `TierContext.retained_share` of the tier is retained at once.
        """
        ...


@runtime_checkable
class Counted(Protocol):
    """A tier with counters for its users, such as corrupt chunks by their kind."""

    def counts(self) -> Mapping[str, int]:
        """Return totals since the tier was opened, by name, from memory. A missing name counts as zero.

        A total never falls, and a returned mapping never changes. A name is the value of a metric's label.
        """
        ...


@runtime_checkable
class Described(Protocol):
    """A tier that describes where and how it keeps chunks, for the log."""

    def description(self) -> Mapping[str, str]:
        """Return one-line words by name, such as a directory, in the order to be shown; constant, from memory."""
        ...


OPTIONAL: tuple[type[Any], ...] = (Inventory, Measured, Advised, Counted, Described)
"""Every optional protocol; a wrapper passes on each of them."""


class Wrapper(Backend[OptionsT]):
    """A tier that does what its inner tier does, offers what it offers, and promises what it promises.

    A forgotten call is a silent bug, because kvtier does without a protocol that a tier does not offer. So a subclass
    defines `options_type`, `open`, and the calls that it changes. A method of an optional protocol is
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
                for name in vars(protocol):
                    if not name.startswith("_"):
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


def known_types() -> tuple[str, ...]:
    """Return the names of all tier types, sorted: the built-in ones and those of installed distributions."""
    return known_names(_BUILT_IN, ENTRY_POINT_GROUP)


def backend_class(type_name: str) -> type[Backend]:
    """Return the class of a tier type: a built-in name (always the built-in tier), an entry point's, or `module:Class`.

    Raises `ConfigError` if there is no such type, if its module or a requirement is not installed, or if the class is
    no complete `Backend`. Any other error of the module is a bug there, and is raised unchanged.
    """
    return _checked(type_name, find_class("tier type", type_name, _BUILT_IN, ENTRY_POINT_GROUP, _MEANT))


def _checked(type_name: str, found: object) -> type[Backend]:
    if not _is_backend(found):
        raise ConfigError(f"tier type {type_name!r}: {found!r} is no subclass of kvtier.backend.Backend")
    options: Any = getattr(found, "options_type", None)
    if inspect.isabstract(found):
        why = f" does not implement {', '.join(sorted(found.__abstractmethods__))}"
    elif not isinstance(getattr(found, "durability", None), Durability):
        why = ".durability is no Durability"
    elif found.locality not in (None, "LOCAL", "REMOTE"):
        why = f".locality is {found.locality!r}; 'LOCAL', 'REMOTE' or None accepted"
    elif found.runner not in (None, "process"):
        why = f".runner is {found.runner!r}; 'process' or None accepted"
    elif not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        why = ".options_type is no msgspec.Struct"
    elif not (options.__struct_config__.frozen and options.__struct_config__.forbid_unknown_fields):
        why = ".options_type is not both frozen and closed to unknown fields"
    else:
        return found
    raise ConfigError(f"tier type {type_name!r}: {found.__name__}{why}")


def _is_backend(found: object) -> TypeGuard[type[Backend]]:
    return isinstance(found, type) and issubclass(found, Backend)
