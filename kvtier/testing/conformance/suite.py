"""The suites of whole tiers, and the promises of moving chunks: round trips, batches in order, and deletions."""

from collections.abc import Awaitable, Callable
from operator import attrgetter

import msgspec
import pytest

from kvtier.backend import Backend, Durability, OffloadKey, Read, Write, make_offload_key
from kvtier.errors import ChunkError
from kvtier.testing.conformance.calling import Cancellation, Concurrency, GoodManners, TheEnd
from kvtier.testing.conformance.lender import Lender, Promises, begun, ended, key_of, keys_of, label

Reopen = Callable[[], Awaitable[Backend]]

ODD_KEYS = (
    # Parts and ways of paths, control characters, invalid UTF-8, letters and digits in both cases, and lengths.
    *map(make_offload_key, (b"", b"/", b".", b"..", b"../../../etc/passwd", b"\0", b"\0\0", b"\n", b"%00")),
    *map(make_offload_key, (b"\xc3\x28", b"a", b"A", b"deadbeef", b"DEADBEEF", key_of(0)[:16], bytes(range(64)))),
    *(key_of(0, group) for group in (0, 1, 256, 0xFFFF_FFFF)),
    OffloadKey(b"\xff" * 36),
)
UNFIT_KEYS: dict[str, OffloadKey] = {
    "nothing": OffloadKey(b""),
    "less than a group": OffloadKey(b"\0\0\1"),
    "too long for a file's name": make_offload_key(b"\x11" * 200),
    "longer than a page": make_offload_key(b"\x22" * 5_000),
    "longer than 16 bits can say": make_offload_key(b"\x33" * 70_000),
}
CONTENTS = (b"\0", b"\xff", b"KV cache. ", bytes(range(256)))


class WhatGoesInComesOut(Promises):
    async def test_what_was_stored_is_loaded_bit_for_bit_again_and_again(
        self, backend: Backend, lender: Lender
    ) -> None:
        """`load` returns a chunk for which `store` answered None, and takes nothing away. A probe says the same."""
        keys = keys_of(8)
        await lender.keep(backend, keys)
        for _ in range(3):
            assert await lender.recall(backend, keys) == [label(key) for key in keys]
        assert list(await backend.probe(keys)) == [True] * len(keys)

    async def test_what_was_never_stored_is_missing(self, backend: Backend, lender: Lender) -> None:
        """`ChunkMissing` is the only answer for an unknown key. Without concurrent calls, a probe is right."""
        assert await lender.recall(backend, keys_of(4)) == ["ChunkMissing"] * 4
        assert list(await backend.probe(keys_of(4))) == [False] * 4

    async def test_the_last_store_of_a_key_counts(self, backend: Backend, lender: Lender) -> None:
        """A store replaces the chunk of its key."""
        keys = keys_of(4)
        for version in range(3):
            await lender.keep(backend, keys, version)
            assert await lender.recall(backend, keys) == [label(key, version) for key in keys]

    async def test_odd_keys_are_keys_like_any_other(self, backend: Backend, lender: Lender) -> None:
        """Keys are bytes: no value is special, and no two share a chunk, even with the same letters or beginning."""
        keys = list(ODD_KEYS)
        assert list(await backend.probe(keys)) == [False] * len(keys)
        await lender.keep(backend, keys)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
        await backend.delete(keys[::2])
        assert list(await backend.probe(keys)) == [index % 2 == 1 for index in range(len(keys))]
        await backend.delete(keys)
        assert await lender.recall(backend, keys) == ["ChunkMissing"] * len(keys)

    async def test_any_bytes_come_back(self, backend: Backend, lender: Lender) -> None:
        """A chunk's bytes have no meaning to the tier."""
        keys, rows = keys_of(len(CONTENTS)), lender.rows(len(CONTENTS))
        blocks = [(content * self.chunk_bytes)[: self.chunk_bytes] for content in CONTENTS]
        for row, block in zip(rows, blocks, strict=True):
            row[:] = block
        assert list(await backend.store(list(map(Write, keys, rows)))) == [None] * len(keys)
        reads = lender.reads(keys)
        assert list(await backend.load(reads)) == [None] * len(keys)
        assert [bytes(read.into) for read in reads] == blocks

    async def test_a_tier_says_what_it_promises_and_takes(self, backend: Backend) -> None:
        """`durability` and `options_type` are declared, and options are frozen and closed to unknown fields."""
        assert isinstance(backend.durability, Durability)
        levels = list(Durability)
        assert levels.index(type(backend).durability) <= levels.index(backend.durability)
        assert issubclass(backend.options_type, msgspec.Struct)
        settings = backend.options_type.__struct_config__
        assert (settings.frozen, settings.forbid_unknown_fields) == (True, True)


class Batches(Promises):
    async def test_an_empty_batch_is_answered_with_nothing(self, backend: Backend) -> None:
        """An empty batch is no error, and has no outcomes."""
        assert list(await backend.probe([])) == []
        assert list(await backend.load([])) == []
        assert list(await backend.store([])) == []
        await backend.delete([])

    async def test_outcomes_come_in_the_order_of_the_batch(self, backend: Backend, lender: Lender) -> None:
        """Each place of a batch gets its outcome and its chunk: a missing one costs its neighbours nothing."""
        keys = keys_of(24)
        await lender.keep(backend, [key for index, key in enumerate(keys) if index % 3])
        shuffled = sorted(keys)  # By hash: an order that has nothing to do with the one they were stored in.
        expected = [label(key) if keys.index(key) % 3 else "ChunkMissing" for key in shuffled]
        assert await lender.recall(backend, shuffled) == expected
        assert list(await backend.probe(shuffled)) == [answer != "ChunkMissing" for answer in expected]

    async def test_a_key_twice_in_a_batch_is_answered_twice(self, backend: Backend, lender: Lender) -> None:
        """Of two stores one whole chunk wins, both buffers of two loads are filled, and deleting twice is deleting."""
        writes = [*lender.writes(keys_of(3), version=0), *lender.writes(keys_of(2), version=1)]
        assert list(await backend.store(writes)) == [None] * 5
        batch = [key_of(0), key_of(1), key_of(0), key_of(7), key_of(7), key_of(2), key_of(0)]
        told = await lender.recall(backend, batch)
        assert told[0] in (label(key_of(0), 0), label(key_of(0), 1))
        assert told[1] in (label(key_of(1), 0), label(key_of(1), 1))
        assert told[2:] == [told[0], "ChunkMissing", "ChunkMissing", label(key_of(2)), told[0]]
        assert list(await backend.probe([key_of(0), key_of(7), key_of(0)])) == [True, False, True]
        await backend.delete([key_of(0), key_of(0)])
        assert list(await backend.probe([key_of(0), key_of(1), key_of(0)])) == [False, True, False]

    async def test_a_large_batch_moves_as_a_small_one_does(self, backend: Backend, lender: Lender) -> None:
        """The size of a batch is the caller's choice."""
        keys = keys_of(300)  # More than lanes, slots or queues usually hold.
        await lender.keep(backend, keys)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
        assert list(await backend.probe(keys)) == [True] * len(keys)
        await backend.delete(keys)
        assert list(await backend.probe(keys)) == [False] * len(keys)

    @pytest.mark.parametrize("unfit", UNFIT_KEYS)
    async def test_a_key_that_a_tier_cannot_hold_costs_its_neighbours_nothing(
        self, backend: Backend, lender: Lender, unfit: str
    ) -> None:
        """A tier may refuse a key, for that chunk alone. It holds exactly the chunks that it has not refused."""
        keys = [key_of(0), UNFIT_KEYS[unfit], key_of(1)]
        assert list(await backend.probe(keys)) == [False] * 3
        assert await lender.recall(backend, keys) == ["ChunkMissing"] * 3
        outcomes = list(await backend.store(lender.writes(keys)))
        assert (outcomes[0], outcomes[2]) == (None, None)
        assert outcomes[1] is None or isinstance(outcomes[1], ChunkError)
        taken = outcomes[1] is None
        assert list(await backend.probe(keys)) == [True, taken, True]
        told = [label(keys[0]), label(keys[1]) if taken else "ChunkMissing", label(keys[2])]
        assert await lender.recall(backend, keys) == told
        await backend.delete(keys[:2])
        assert list(await backend.probe(keys)) == [False, False, True]

    @pytest.mark.parametrize("excess_bytes", [-4_096, -1, 1, 4_096])
    async def test_a_buffer_of_the_wrong_length_is_refused(
        self, backend: Backend, lender: Lender, excess_bytes: int
    ) -> None:
        """A chunk that is not one row long is never stored, and one that is, not loaded; its neighbours move."""
        wrong = lender.rows(1, self.chunk_bytes + excess_bytes)[0]
        refused, outcome = await backend.store([Write(key_of(0), wrong), *lender.writes([key_of(1)])])
        assert isinstance(refused, ChunkError)
        assert outcome is None
        assert await lender.recall(backend, keys_of(2)) == ["ChunkMissing", label(key_of(1))]
        await lender.keep(backend, keys_of(2))
        reads = lender.reads([key_of(1)])
        refused, *outcomes = await backend.load([Read(key_of(0), wrong), *reads])
        assert isinstance(refused, ChunkError)
        assert lender.told(reads, outcomes) == [label(key_of(1))]
        assert lender.guards_are_intact()
        assert await lender.recall(backend, keys_of(2)) == [label(key) for key in keys_of(2)]

    async def test_a_batch_is_any_sequence(self, backend: Backend, lender: Lender) -> None:
        """Lists and tuples are both batches."""
        keys = tuple(keys_of(3))
        assert list(await backend.store(tuple(lender.writes(keys)))) == [None] * 3
        reads = tuple(lender.reads(keys))
        assert lender.told(reads, await backend.load(reads)) == [label(key) for key in keys]
        assert list(await backend.probe(keys)) == [True] * 3
        await backend.delete(tuple(map(attrgetter("key"), reads)))
        assert list(await backend.probe(keys)) == [False] * 3


class Deleting(Promises):
    async def test_deleting_takes_nothing_else(self, backend: Backend, lender: Lender) -> None:
        """The same hash in another group stays. Deleting an unknown key is no error, alone or among others."""
        keys = [key_of(number, group) for number in range(3) for group in range(3)]
        await backend.delete(keys)
        await lender.keep(backend, keys)
        for _ in range(2):
            await backend.delete([key_of(8), *keys[::2], key_of(9)])
        expected = ["ChunkMissing" if index % 2 == 0 else label(key) for index, key in enumerate(keys)]
        assert await lender.recall(backend, keys) == expected

    async def test_a_deleted_key_is_missing_and_can_be_stored_again(self, backend: Backend, lender: Lender) -> None:
        """A deleted key answers as one that was never stored. Nothing remembers it."""
        keys = keys_of(4)
        for version in range(3):
            await lender.keep(backend, keys, version)
            assert await lender.recall(backend, keys) == [label(key, version) for key in keys]
            await backend.delete(keys)
            assert await lender.recall(backend, keys) == ["ChunkMissing"] * 4
            assert list(await backend.probe(keys)) == [False] * 4


class BackendConformance(WhatGoesInComesOut, Batches, Deleting, Concurrency, Cancellation, GoodManners, TheEnd):
    """The promises of every tier. Needs the fixture `backend`: an open tier with nothing in it."""


class DurableBackendConformance(Promises):
    """Needs the fixture `reopen`, which closes the open tier, if any, and returns a new one over its storage."""

    async def test_chunks_outlive_the_tier(self, backend: Backend, reopen: Reopen, lender: Lender) -> None:
        """A stored chunk is present when the tier is opened again, more than once, under its exact key."""
        keys = [*keys_of(50), *ODD_KEYS]
        await lender.keep(backend, keys)
        for _ in range(2):
            backend = await reopen()
            assert list(await backend.probe(keys)) == [True] * len(keys)
            assert await lender.recall(backend, keys) == [label(key) for key in keys]

    async def test_the_last_store_or_delete_is_the_one_that_lasts(
        self, backend: Backend, reopen: Reopen, lender: Lender
    ) -> None:
        """Neither an older chunk nor a deleted one ever comes back."""
        keys = keys_of(9)
        await lender.keep(backend, keys)
        await lender.keep(backend, keys[:3], version=1)
        await backend.delete(keys[3:6])
        backend = await reopen()
        told = [*(label(key, 1) for key in keys[:3]), *["ChunkMissing"] * 3, *map(label, keys[6:])]
        assert await lender.recall(backend, keys) == told
        await lender.keep(backend, keys, version=2)
        assert await lender.recall(await reopen(), keys) == [label(key, 2) for key in keys]

    async def test_a_store_cut_short_leaves_whole_chunks(
        self, backend: Backend, reopen: Reopen, lender: Lender
    ) -> None:
        """Closing during a store leaves each chunk wholly or not at all."""
        keys = keys_of(32)
        store = await begun(backend.store(lender.writes(keys)))
        await backend.aclose(0)
        told = await lender.recall(await reopen(), keys)
        await ended(store)
        assert all(chunk in (label(key), "ChunkMissing") for key, chunk in zip(keys, told, strict=True)), told


class NamespacedConformance(Promises):
    """Needs the fixture `neighbour`: a tier over the storage of `backend`, opened in another namespace."""

    async def test_namespaces_share_no_chunk(self, backend: Backend, neighbour: Backend, lender: Lender) -> None:
        """The same key in two namespaces is two chunks, which are stored and deleted apart."""
        keys = keys_of(4)
        await lender.keep(backend, keys)
        assert await lender.recall(neighbour, keys) == ["ChunkMissing"] * 4
        assert list(await neighbour.probe(keys)) == [False] * 4
        await lender.keep(neighbour, keys, version=1)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
        assert await lender.recall(neighbour, keys) == [label(key, 1) for key in keys]
        await neighbour.delete(keys)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
