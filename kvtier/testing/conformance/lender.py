"""The lender: page-aligned rows between guards, whose chunks identify themselves; the base of all promises."""

import asyncio
import mmap
from collections.abc import Coroutine, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar

import pytest

from kvtier import backend as api

PART_BYTES = 32  # Of a chunk: 24 unique to its key and version, and 8 with the index of the part.
GUARD = b"\x5a"
FRESH = b"\xa5"  # Fills a row before a load.
PATIENCE_S = 30.0  # Real seconds until a call counts as hung; an honest one needs a thousandth.


def tier_context(chunk_bytes: int, *, name: str = "0:tested", model_name: str = "conformance") -> api.TierContext:
    return api.TierContext(name, api.FileMapper(api.Namespace(model_name=model_name)), chunk_bytes)


def key_of(number: int, group: int = 0) -> api.OffloadKey:
    """Return a key as engines make it: 32 bytes of hash, and a group."""
    return api.make_offload_key(blake2b(number.to_bytes(8, "big"), digest_size=32).digest(), group)


def keys_of(count: int, start: int = 0) -> list[api.OffloadKey]:
    return [key_of(number) for number in range(start, start + count)]


def label(key: api.OffloadKey, version: int = 0) -> str:
    """Return a short, unique name of a chunk."""
    digits = key.hex()
    return f"{digits if len(digits) <= 24 else f'{digits[:12]}…{digits[-8:]} ({len(key)} bytes)'} v{version}"


@lru_cache(maxsize=512)
def chunk(key: api.OffloadKey, version: int, size_bytes: int) -> bytes:
    """Return a chunk of which every part is unique among all chunks."""
    tag = _tag(key, version)
    return (tag + tag.join(_indexes(-(-size_bytes // PART_BYTES))))[:size_bytes]


@lru_cache(maxsize=8)
def _indexes(parts: int) -> list[bytes]:
    return [index.to_bytes(8, "big") for index in range(parts)]


def _tag(key: api.OffloadKey, version: int) -> bytes:
    return blake2b(version.to_bytes(8, "big") + key, digest_size=PART_BYTES - 8).digest()


class Lender:
    """Owns rows as the primary does: lends them, inspects them, and takes them back."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._lent: list[tuple[mmap.mmap, list[slice]]] = []
        self._labels_of_tags: dict[bytes, str] = {}
        self._labels_of_chunks: dict[bytes, str] = {FRESH * chunk_bytes: "untouched"}

    def rows(self, count: int, size_bytes: int | None = None) -> list[memoryview]:
        """Map rows of one chunk's length, or of `size_bytes`, with guards around each. Keeps no views."""
        length = self.chunk_bytes if size_bytes is None else size_bytes
        guard_bytes = self.chunk_bytes
        stride = guard_bytes + -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
        mapping = mmap.mmap(-1, count * stride + guard_bytes)
        mapping[:] = GUARD * len(mapping)
        places = [slice(guard_bytes + index * stride, guard_bytes + index * stride + length) for index in range(count)]
        self._lent.append((mapping, places))
        whole = memoryview(mapping)
        for place in places:
            whole[place] = FRESH * length
        return [whole[place] for place in places]

    def writes(self, keys: Sequence[api.OffloadKey], version: int = 0) -> list[api.Write]:
        """Lend rows that hold these keys' chunks."""
        writes = [api.Write(key, row) for key, row in zip(keys, self.rows(len(keys)), strict=True)]
        for key, block in writes:
            block[:] = self.chunk(key, version)
        return writes

    def reads(self, keys: Sequence[api.OffloadKey]) -> list[api.Read]:
        """Lend rows to load these keys' chunks into."""
        return [api.Read(key, row) for key, row in zip(keys, self.rows(len(keys)), strict=True)]

    def chunk(self, key: api.OffloadKey, version: int = 0) -> bytes:
        """Return a chunk that `identify` will recognise."""
        block = chunk(key, version, self.chunk_bytes)
        self._labels_of_tags[_tag(key, version)] = self._labels_of_chunks[block] = label(key, version)
        return block

    def identify(self, row: memoryview) -> str:
        """Return the name of the chunk that a row holds, or the owner of each range of bytes."""
        if (found := bytes(row)) in self._labels_of_chunks:
            return self._labels_of_chunks[found]
        whose = [self._whose(found, start) for start in range(0, len(found), PART_BYTES)]
        changes = [0, *(index for index in range(1, len(whose)) if whose[index] != whose[index - 1])]
        return "no chunk: " + ", ".join(f"from byte {index * PART_BYTES:,} {whose[index]}" for index in changes[:8])

    def _whose(self, found: bytes, start: int) -> str:
        part = found[start : start + PART_BYTES]
        name = self._labels_of_tags.get(part[: PART_BYTES - 8])
        if name is not None and part[PART_BYTES - 8 :] == (start // PART_BYTES).to_bytes(8, "big"):
            return name
        if part == FRESH * len(part):
            return "untouched"
        return f"{name}, but another part" if name is not None else f"unknown bytes {part[:4].hex()}…"

    def told(self, reads: Sequence[api.Read], outcomes: Sequence[api.Outcome]) -> list[str]:
        """Return for each read the name of its chunk, or of its error."""
        assert len(outcomes) == len(reads), "one outcome for each place of the batch"
        return [
            self.identify(read.into) if outcome is None else type(outcome).__name__
            for read, outcome in zip(reads, outcomes, strict=True)
        ]

    async def keep(self, backend: api.Backend, keys: Sequence[api.OffloadKey], version: int = 0) -> None:
        """Store these keys' chunks; fail unless all were stored."""
        assert list(await backend.store(self.writes(keys, version))) == [None] * len(keys)

    async def recall(self, backend: api.Backend, keys: Sequence[api.OffloadKey]) -> list[str]:
        """Load these keys, and return what `told` returns."""
        reads = self.reads(keys)
        return self.told(reads, await backend.load(reads))

    def guards_are_intact(self) -> bool:
        """Return True if nothing was written outside of the rows."""
        for mapping, places in self._lent:
            ends = [0, *(place.stop for place in places)]
            for end, start in zip(ends, [*(place.start for place in places), len(mapping)], strict=True):
                if mapping[end:start] != GUARD * (start - end):
                    return False
        return True

    def take_back(self) -> bool:
        """Unmap all rows; return False if a view of one is in use."""
        try:
            while self._lent:
                self._lent[-1][0].close()
                self._lent.pop()
        except BufferError:
            return False
        return True


OWNER = key_of(1 << 40)  # Its chunk overwrites returned rows.


@pytest.mark.asyncio
class Promises:
    """Base of all groups. A subclass of a group provides the fixture `backend`."""

    chunk_bytes: ClassVar[int] = 16_384
    """Length of every row that is lent: `TierContext.row_bytes` of the tier under test."""

    settle_s: ClassVar[float] = 0.02
    """Time for traces of a call that should have ended."""

    @pytest.fixture
    def lender(self) -> Iterator[Lender]:
        lender = Lender(self.chunk_bytes)
        yield lender
        lender.take_back()

    async def look_later(self, lender: Lender, rows: Sequence[memoryview]) -> None:
        """Reuse returned rows, as an engine does, and check that nothing else writes into them."""
        for row in rows:
            row[:] = lender.chunk(OWNER)
        for _ in range(2):
            assert [lender.identify(row) for row in rows] == [label(OWNER)] * len(rows)
            await asyncio.sleep(self.settle_s)
        assert [lender.identify(row) for row in rows] == [label(OWNER)] * len(rows)


async def steps(count: int) -> None:
    """Run other tasks for `count` iterations of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def ended(task: asyncio.Task[Any]) -> None:
    """Wait for a task's end, with any result; fail if it does not end."""
    done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
    assert done, f"the call has not ended after {PATIENCE_S:g} s"
    if not task.cancelled():
        task.exception()  # Retrieved, or asyncio would log it.


async def begun(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a call, and run its first step."""
    task = asyncio.create_task(call)
    await steps(1)
    return task
