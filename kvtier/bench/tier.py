"""One fs tier as a benchmark drives it: whole batches from a synchronous caller, the tier's own threads beside it."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

from kvtier.backend import Backend, Outcome, Read, TierContext, Write
from kvtier.bench.figures import Setting
from kvtier.errors import ConfigError, NoSpace
from kvtier.fields import decode, struct_fields
from kvtier.keys import OffloadKey
from kvtier.namespace import FileMapper, Namespace
from kvtier.registry import backend_class

T = TypeVar("T")

CALL_CHUNKS = 64  # As an engine's `action_chunks`: it sends no more in one call.
CLOSE_S = 60.0

NAMESPACE = Namespace(model_name="bench")


class TierCase(NamedTuple):
    """Which tier is measured."""

    layout: str
    naming: str
    io: str  # "direct" or "buffered".
    depth: int  # Threads each way.
    fsync: bool

    @property
    def label(self) -> str:
        return " ".join([self.layout, self.naming, self.io, str(self.depth), "fsync" * self.fsync]).rstrip()

    @property
    def settings(self) -> dict[str, Setting]:
        """Return what tells its rows from others'."""
        return self._asdict() | ({} if self.layout == "files" else {"naming": None})

    def options(self, root: str, **more: Any) -> dict[str, Any]:
        """Return the tier's options as a configuration has them."""
        given = {
            "root": root,
            "io": self.io,
            "load_lanes": self.depth,
            "store_lanes": self.depth,
            "fsync": self.fsync,
            "checkpoint_s": 0.0,
        }
        if self.layout == "files":
            return given | {"naming": self.naming} | more  # Others have no names.
        return given | {"layout": self.layout} | more


class OpenTier:
    """An open tier on a loop that runs while a call does. Close it with `close`."""

    def __init__(
        self, runner: asyncio.Runner, options: dict[str, Any], chunk_bytes: int, *, call_chunks: int = CALL_CHUNKS
    ) -> None:
        """Open the tier, to be called with so many chunks at once; `ConfigError` if its options cannot be."""
        self._runner = runner
        self._call_chunks = call_chunks
        kind = backend_class("fs")
        context = TierContext("bench", FileMapper(NAMESPACE), chunk_bytes)
        self._tier: Backend = runner.run(kind.open(decode(kind.Options, options), context))

    def store(self, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> None:
        """Store all chunks; `ConfigError` if the disk is full."""
        writes = [Write(key, row) for key, row in zip(keys, rows, strict=True)]
        self._runner.run(self._all([self._tier.store(call) for call in self._calls(writes)]))

    def load(self, keys: Sequence[OffloadKey], rows: Sequence[memoryview]) -> None:
        reads = [Read(key, row) for key, row in zip(keys, rows, strict=True)]
        self._runner.run(self._all([self._tier.load(call) for call in self._calls(reads)]))

    def close(self) -> None:
        self._runner.run(self._tier.aclose(CLOSE_S))

    def _calls(self, batch: Sequence[T]) -> Iterator[Sequence[T]]:
        size = self._call_chunks
        return (batch[start : start + size] for start in range(0, len(batch), size))

    async def _all(self, calls: "list[Any]") -> None:
        for outcomes in await asyncio.gather(*calls):
            _check(outcomes)


def layouts() -> tuple[str, ...]:
    """Return the layouts that the fs tier has."""
    field = struct_fields(backend_class("fs").Options).get("layout")
    return ("files",) if field is None else tuple(map(str, get_args(field.type)))


def _check(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, NoSpace):
            raise ConfigError(f"the directory has no room: {outcome}; a smaller --size, or another directory, accepted")
        if outcome is not None:
            raise outcome
