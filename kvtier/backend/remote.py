"""The shell of a remote tier: each chunk is a sealed value of a service, with its own name.

A tier on a service says how it asks for keys and how it moves chunks. Here it refuses calls once closed, answers for
chunks that it cannot hold, sends each key of a batch once, counts, and describes itself.
"""

import os
import sys
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar, Generic, TypeVar

from msgspec import Meta
from msgspec.structs import fields

from kvtier.backend.contract import Backend, Outcome, Read, TierContext, Write
from kvtier.backend.lending import Calls, Fit, load_each_once, store_each_once
from kvtier.backend.namespace import FileMapper, OffloadKey
from kvtier.backend.seal_options import SealOptions

PREFIX_BYTES_MAX = 128
PORT_MAX = (1 << 16) - 1

Text = Annotated[str, Meta(min_length=1)]
Prefix = Annotated[str, Meta(max_length=PREFIX_BYTES_MAX, pattern=r"^[!-~]*$")]  # Of names, in printable ASCII.

ErrorT = TypeVar("ErrorT", bound=Exception)
RemoteOptionsT = TypeVar("RemoteOptionsT", bound=SealOptions)


def name_prefix(prefix: str, mapper: FileMapper) -> str:
    """Return the beginning of every name in a namespace. Rows of another layout get other names."""
    return f"{prefix}{mapper.fingerprint.hex()[:8]}/"


def caused(error: ErrorT, number: int) -> ErrorT:
    """Give an error its cause by the system's number, by whose name failures are counted; 0: there is none."""
    if number:
        error.__cause__ = OSError(number, os.strerror(number))
    return error


class Totals:
    """Totals since the tier was opened, by name. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self._totals[what] += times

    def copy(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)


class RemoteBackend(Backend[RemoteOptionsT], Generic[RemoteOptionsT]):
    """A tier on a service. Offers `Counted` and `Described`."""

    locality = "REMOTE"

    described: ClassVar[tuple[str, ...]]
    """Options that describe the tier: the first always, the others where they differ from their defaults."""

    def __init__(self, options: RemoteOptionsT, context: TierContext, key_bytes_max: int = sys.maxsize) -> None:
        self._name = context.name
        self._options = options
        self._fit = Fit(context.row_bytes, key_bytes_max)
        self._calls = Calls(context.name)
        self._counts = Totals()

    @abstractmethod
    async def _probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]: ...

    @abstractmethod
    async def _load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        """Load chunks that fit the tier; no key comes twice."""

    @abstractmethod
    async def _store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        """Store chunks that fit the tier; no key comes twice."""

    @abstractmethod
    async def _delete(self, keys: Sequence[OffloadKey]) -> None: ...

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        with self._calls.one():
            return await self._fit.probe(keys, self._probe)

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        with self._calls.one():
            return await self._fit.load(reads, partial(load_each_once, call=self._load))

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        with self._calls.one():
            return await self._fit.store(writes, partial(store_each_once, call=self._store))

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Raises `BackendUnavailable` if the service may still have any of the keys."""
        with self._calls.one():
            await self._delete(list(dict.fromkeys(self._fit.keys(keys))))

    def counts(self) -> dict[str, int]:
        return self._counts.copy()

    def description(self) -> dict[str, str]:
        options, (first, *others) = self._options, self.described
        defaults = {field.name: field.default for field in fields(options)}
        unusual = [name for name in others if getattr(options, name) != defaults[name]]
        return {name: str(getattr(options, name)) for name in (first, *unusual, "seal")}
