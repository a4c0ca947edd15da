"""The contract of a secondary tier: five asynchronous methods, batches only.

A tier sees rows of the primary, lent for the length of one call, and answers for each chunk by itself. Everything is
abstract: a wrapper can forget to pass on a default, and nobody sees that bug. What else a tier may do (say what it
holds, or how full it is) is a small protocol of its own. `kvtier.testing.conformance` proves this page.

A tier's class is found by the name of its type. It is imported when it is first asked for, because its requirements may
not be installed.
"""

import inspect
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
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

from kvtier.backend.keys import OffloadKey
from kvtier.backend.namespace import FileMapper
from kvtier.errors import ChunkError, ConfigError
from kvtier.hints import Advice
from kvtier.settings import Checked, find_class, known_names

if TYPE_CHECKING:  # For the default, which only type checkers hear of: `Backend` alone takes any options.
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
    "mooncake": "kvtier_backends.mooncake:MooncakeBackend",
    "object": "kvtier_backends.object:ObjectBackend",
    "redis": "kvtier_backends.redis:RedisBackend",
}
BUILT_IN_TYPES = tuple(_BUILT_IN)

_MEANT = {
    **dict.fromkeys(("directory", "disk", "file", "files", "filesystem", "local", "nfs", "nvme", "ssd"), "'fs'"),
    **dict.fromkeys(("azure", "az", "bucket", "gcs", "gs", "minio", "s3"), "'object'"),
    **dict.fromkeys(("cluster", "keydb", "sentinel", "valkey"), "'redis'"),
    **dict.fromkeys(("cpu", "dram", "host", "memory", "ram"), "the primary, which cpu_bytes_to_use sizes"),
}
"""Names that people try for a tier's type, and what is meant."""


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


Outcome = ChunkError | None  # One chunk's; None: it moved.


class Abandoned(NamedTuple):
    """The calls that a tier left behind when its closing deadline passed: their lent buffers are still in use."""

    transfers: int


class EngineId(NamedTuple):
    """An engine, through all its runners."""

    pid: int  # Of the process that the LLM engine, or the program, runs in.
    number: int  # Above 0; drawn once for each engine.

    @classmethod
    def new(cls) -> Self:
        return cls(os.getpid(), secrets.randbits(62) + 1)


class TierContext(NamedTuple):
    """The context in which kvtier opens a tier."""

    name: str  # As in metrics and messages, e.g. "0:fs".
    mapper: FileMapper  # Names every chunk; two namespaces never share a name.
    row_bytes: int  # Length of every buffer that will be lent: a multiple of 4,096.
    retained_share: float = 0.25  # Of its chunks, for `Advised`: what may be retained at once.
    engine: EngineId | None = None  # A replaced runner opens its tiers for the same engine as the one before it.


class Options(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a tier's own options. They are checked when they come from a file, and when Python code makes them.

    class ShelfOptions(Options, frozen=True, kw_only=True):
        root: Path
        capacity_bytes: Size | None = None
    """

    meant: ClassVar[Mapping[str, str]] = {"backend": "'type'"}

    def doubts(self) -> Iterable[str]:
        """Yield what this machine will not bear out, such as a capacity above the disk's size. Blocks.

        Each begins with the option's name. `kvtier config check` shows them.
        """
        return ()


class Limit(ABC):
    """The limit of a tier: its bare client moves some rows. The client checks nothing and promises nothing."""

    limit_is: ClassVar[str]
    """A few words for it."""

    @abstractmethod
    def read(self) -> None:
        """Fill the rows with their stored chunks, as often as it is called. Blocks."""

    @abstractmethod
    def write(self) -> None:
        """Store the rows, as often as it is called. Blocks."""

    @abstractmethod
    def close(self) -> None:
        """Remove the stored chunks, and let the client go."""


class Backend(ABC, Generic[OptionsT]):
    """A secondary tier; generic in its options.

    Buffers: a lent buffer belongs to the call until the call returns or raises. Afterwards no thread, no task and no
    kernel request may touch it. This holds for cancelled calls, too.

    Concurrency: any number of calls may run at once, on one event loop. If two stores of one key run at the same time,
    one whole chunk wins. A load beside a store gives the old chunk, the new one, or `ChunkMissing`. It never gives a
    mixture.

    Cancellation: a cancelled call waits until its buffers are out of use and then raises `CancelledError`. Each of its
    chunks moved wholly or not at all.

    Errors: one chunk's failure is its `Outcome`, in the order of the batch. This holds for chunks that the tier could
    never hold, too. Their key is too long or too short, or the buffer is not one row long. For such a key a probe says
    absent, a load says `ChunkMissing`, a store says `NoSpace`, and a delete ignores it (`kvtier.backend.Fit` does
    that). A call raises for the whole only: `BackendClosed`, `BackendUnavailable`, cancellation. An empty batch is
    answered with an empty sequence. A key may appear twice in a batch: each place gets its outcome.
    """

    durability: Durability
    """The durability of a stored chunk, proved by tests. A class says what every tier of it promises; an open one may
    promise more, as its options have it."""

    locality: ClassVar[Literal["LOCAL", "REMOTE"] | None] = None
    """The place of its chunks, for requests that choose their tiers; a tier's own `locality` goes first."""

    runner: ClassVar[Literal["process"] | None] = None
    """The runner that it needs, if only one will do: a client that may crash belongs in a process of its own."""

    options_type: ClassVar[type[msgspec.Struct]]
    """The tier's own configuration fields: a frozen struct that forbids unknown fields, such as an `Options`."""

    @classmethod
    @abstractmethod
    async def open(cls, options: OptionsT, context: TierContext) -> Self:
        """Open the tier on the running loop. Raises `ConfigError` or `BackendUnavailable`, and then leaves nothing."""

    @abstractmethod
    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        """Say for each key whether a load would likely find it. The answer is a hint; `load` is the truth."""

    @abstractmethod
    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        """Fill each buffer with its chunk. A buffer whose outcome is not None is undefined."""

    @abstractmethod
    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        """Store each chunk wholly or not at all, in place of an older chunk of its key."""

    @abstractmethod
    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Forget the keys; unknown ones are ignored."""

    @abstractmethod
    async def aclose(self, deadline_s: float) -> Abandoned:
        """Refuse new calls at once, wait at most `deadline_s` seconds for calls under way, and say which were left.

        May be called again. Then it waits for the calls that are still there.
        """

    @classmethod
    def limit(cls, options: OptionsT, rows: Sequence[memoryview]) -> Limit | None:  # noqa: ARG003
        """Return the limit that `kvtier bench` puts beside the tier, with these rows stored; None: it has none.

        Blocks. Raises `ConfigError` and `BackendUnavailable`. It has a default, because it is no promise of an open
        tier.
        """
        return None


class Added(NamedTuple):
    """Keys that the tier holds; at most `INVENTORY_BATCH_KEYS`."""

    keys: Sequence[OffloadKey]


class Removed(NamedTuple):
    """Keys that the tier does not hold any more; at most `INVENTORY_BATCH_KEYS`."""

    keys: Sequence[OffloadKey]


class ScanDone(NamedTuple):
    """The end of the start-up report: every key that was there at the start has been reported.

    `complete` says whether the tier reports every later change, too, as a tier with one owner does. Then a key that was
    never reported and never stored is absent. Otherwise kvtier goes on asking.
    """

    complete: bool


InventoryEvent = Added | Removed | ScanDone


@runtime_checkable
class Inventory(Protocol):
    """A tier that says what it holds, so that a look-up needs no call."""

    def watch(self) -> AsyncIterator[InventoryEvent]:
        """Report the keys that are there, then `ScanDone` once, then changes that no `store` or `delete` call explains.

        An event is true when it is yielded: a key that was stored again is not reported as removed. One consumer; the
        iterator ends when the tier is closed.
        """
        ...


class Occupancy(NamedTuple):
    """A tier's occupancy."""

    chunks: int
    used_bytes: int
    capacity_bytes: int | None  # None: no limit of its own.
    reserved_bytes: int = 0  # Promised to stores that are under way.


@runtime_checkable
class Measured(Protocol):
    """A tier that knows how full it is, from memory, without a call to the device."""

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
        """Return totals since the tier was opened, by name, from memory; a name that is missing counts as zero.

        A total never falls. A mapping that was returned does not change later. A name is a word of a metric's label.
        """
        ...


@runtime_checkable
class Described(Protocol):
    """A tier that can say where and how it keeps chunks, for the line in the log that tells of its start."""

    def description(self) -> Mapping[str, str]:
        """Return a few words by name, such as a directory, in the order to be shown; from memory.

        The same words for as long as the tier is open, each on one line.
        """
        ...


OPTIONAL: tuple[type[Any], ...] = (Inventory, Measured, Advised, Counted, Described)
"""Every protocol that a tier may keep beside the contract: what a wrapper passes on."""


def known_types() -> tuple[str, ...]:
    """Return the names of all tier types, sorted: the built-in ones and those that distributions bring."""
    return known_names(_BUILT_IN, ENTRY_POINT_GROUP)


def backend_class(type_name: str) -> type[Backend]:
    """Return the class of a tier type: a built-in name, an entry point's, or `module:Class`.

    A built-in name always means the built-in tier. Raises `ConfigError` in three cases: there is no such type, its
    module or a requirement is not installed, or the class is no complete `Backend`. Any other error that the module
    raises is a bug there, and comes out as it was raised.
    """
    return _checked(type_name, find_class("tier type", type_name, _BUILT_IN, ENTRY_POINT_GROUP, _MEANT))


def _checked(type_name: str, found: object) -> type[Backend]:
    """Return the class that was found, if it is a whole backend."""
    if not _is_backend(found):
        raise ConfigError(f"tier type {type_name!r}: {found!r} is no subclass of kvtier.backend.Backend")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"tier type {type_name!r}: {found.__name__} does not implement {lacking}")
    if not isinstance(getattr(found, "durability", None), Durability):
        raise ConfigError(f"tier type {type_name!r}: {found.__name__}.durability is no Durability")
    if found.locality not in (None, "LOCAL", "REMOTE"):
        name, given = found.__name__, found.locality
        raise ConfigError(f"tier type {type_name!r}: {name}.locality is {given!r}; 'LOCAL', 'REMOTE' or None accepted")
    if found.runner not in (None, "process"):
        raise ConfigError(
            f"tier type {type_name!r}: {found.__name__}.runner is {found.runner!r}; 'process' or None accepted"
        )
    options = getattr(found, "options_type", None)
    if not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        raise ConfigError(f"tier type {type_name!r}: {found.__name__}.options_type is no msgspec.Struct")
    if not (options.__struct_config__.frozen and options.__struct_config__.forbid_unknown_fields):
        raise ConfigError(
            f"tier type {type_name!r}: {found.__name__}.options_type is not both frozen and closed to unknown fields"
        )
    return found


def _is_backend(found: object) -> TypeGuard[type[Backend]]:
    return isinstance(found, type) and issubclass(found, Backend)
