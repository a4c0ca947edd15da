"""Batches: one answer for each place, in order, and one bad chunk costs nobody else."""

from operator import attrgetter

import pytest

from kvtier.backend import Backend, Read, Write
from kvtier.errors import BlockError
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.testing.conformance.lender import Lender, key_of, keys_of, label
from kvtier.testing.conformance.promises import Promises

LARGE_BATCH_CHUNKS = 300  # More than lanes, slots or queues usually hold.
UNFIT_KEYS: dict[str, OffloadKey] = {
    "nothing": OffloadKey(b""),
    "less than a group": OffloadKey(b"\0\0\1"),
    "too long for a file's name": make_offload_key(b"\x11" * 200),
    "longer than a page": make_offload_key(b"\x22" * 5_000),
    "longer than 16 bits can say": make_offload_key(b"\x33" * 70_000),
}


class Batches(Promises):
    async def test_an_empty_batch_is_answered_with_nothing(self, backend: Backend) -> None:
        """An empty batch is no error, and has no outcomes."""
        assert list(await backend.probe([])) == []
        assert list(await backend.load([])) == []
        assert list(await backend.store([])) == []
        await backend.delete([])

    async def test_outcomes_come_in_the_order_of_the_batch(self, backend: Backend, lender: Lender) -> None:
        """Each place of a batch gets its own outcome, and each buffer its own chunk."""
        keys = keys_of(24)
        await lender.keep(backend, [key for index, key in enumerate(keys) if index % 3])
        shuffled = sorted(keys)  # By hash: an order that has nothing to do with the one they were stored in.
        expected = [label(key) if keys.index(key) % 3 else "BlockMissing" for key in shuffled]
        assert await lender.recall(backend, shuffled) == expected
        assert list(await backend.probe(shuffled)) == [answer != "BlockMissing" for answer in expected]

    async def test_a_missing_chunk_costs_its_neighbours_nothing(self, backend: Backend, lender: Lender) -> None:
        """One chunk's failure is its own outcome; the others move."""
        keys = keys_of(9)
        await lender.keep(backend, [key for key in keys if key != keys[4]])
        reads = lender.reads(keys)
        outcomes = await backend.load(reads)
        assert [outcome is None for outcome in outcomes] == [key != keys[4] for key in keys]
        assert isinstance(outcomes[4], BlockError)
        assert lender.told(reads, outcomes) == [label(key) if key != keys[4] else "BlockMissing" for key in keys]

    async def test_a_key_twice_in_a_load_fills_both_buffers(self, backend: Backend, lender: Lender) -> None:
        """A key may appear twice in a batch: each place gets its outcome."""
        await lender.keep(backend, keys_of(2))
        batch = [key_of(0), key_of(1), key_of(0), key_of(7), key_of(7), key_of(0)]
        first, second = label(key_of(0)), label(key_of(1))
        assert await lender.recall(backend, batch) == [first, second, first, "BlockMissing", "BlockMissing", first]

    async def test_a_key_twice_in_a_store_leaves_one_whole_chunk(self, backend: Backend, lender: Lender) -> None:
        """Of two chunks for one key in one batch one wins, and both places are answered."""
        writes = [*lender.writes(keys_of(3), version=0), *lender.writes(keys_of(2), version=1)]
        assert list(await backend.store(writes)) == [None] * 5
        first, second, third = await lender.recall(backend, keys_of(3))
        assert first in (label(key_of(0), 0), label(key_of(0), 1))
        assert second in (label(key_of(1), 0), label(key_of(1), 1))
        assert third == label(key_of(2), 0)

    async def test_a_key_twice_in_a_probe_or_a_delete_is_nothing_special(
        self, backend: Backend, lender: Lender
    ) -> None:
        """Each place of a probe is answered, and deleting twice is deleting."""
        await lender.keep(backend, [key_of(0)])
        assert list(await backend.probe([key_of(0), key_of(1), key_of(0)])) == [True, False, True]
        await backend.delete([key_of(0), key_of(0)])
        assert list(await backend.probe([key_of(0), key_of(0)])) == [False, False]

    async def test_a_large_batch_moves_as_a_small_one_does(self, backend: Backend, lender: Lender) -> None:
        """The size of a batch is the caller's choice."""
        keys = keys_of(LARGE_BATCH_CHUNKS)
        await lender.keep(backend, keys)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
        assert list(await backend.probe(keys)) == [True] * len(keys)
        await backend.delete(keys)
        assert list(await backend.probe(keys)) == [False] * len(keys)

    @pytest.mark.parametrize("unfit", UNFIT_KEYS)
    async def test_a_key_that_a_tier_cannot_hold_costs_its_neighbours_nothing(
        self, backend: Backend, lender: Lender, unfit: str
    ) -> None:
        """A tier may refuse a key, for that chunk alone: what it refused it does not have, what it took it has."""
        keys = [key_of(0), UNFIT_KEYS[unfit], key_of(1)]
        assert list(await backend.probe(keys)) == [False] * 3
        assert await lender.recall(backend, keys) == ["BlockMissing"] * 3
        outcomes = list(await backend.store(lender.writes(keys)))
        assert (outcomes[0], outcomes[2]) == (None, None)
        assert outcomes[1] is None or isinstance(outcomes[1], BlockError)
        taken = outcomes[1] is None
        assert list(await backend.probe(keys)) == [True, taken, True]
        told = [label(keys[0]), label(keys[1]) if taken else "BlockMissing", label(keys[2])]
        assert await lender.recall(backend, keys) == told
        await backend.delete(keys[:2])
        assert list(await backend.probe(keys)) == [False, False, True]

    @pytest.mark.parametrize("excess_bytes", [-4_096, -1, 1, 4_096])
    async def test_a_load_into_a_buffer_of_the_wrong_length_is_refused(
        self, backend: Backend, lender: Lender, excess_bytes: int
    ) -> None:
        """A buffer that is not one row long gets no chunk, and costs its neighbours nothing."""
        await lender.keep(backend, keys_of(2))
        wrong = Read(key_of(0), lender.rows(1, self.chunk_bytes + excess_bytes)[0])
        reads = lender.reads([key_of(1)])
        refused, *outcomes = await backend.load([wrong, *reads])
        assert isinstance(refused, BlockError)
        assert lender.told(reads, outcomes) == [label(key_of(1))]
        assert lender.guards_are_intact()
        assert await lender.recall(backend, keys_of(2)) == [label(key) for key in keys_of(2)]

    @pytest.mark.parametrize("excess_bytes", [-4_096, -1, 1, 4_096])
    async def test_a_store_from_a_buffer_of_the_wrong_length_is_refused(
        self, backend: Backend, lender: Lender, excess_bytes: int
    ) -> None:
        """A chunk that is not one row long is never stored, since no load could give it back; its neighbours are."""
        wrong = Write(key_of(0), lender.rows(1, self.chunk_bytes + excess_bytes)[0])
        refused, outcome = await backend.store([wrong, *lender.writes([key_of(1)])])
        assert isinstance(refused, BlockError)
        assert outcome is None
        assert await lender.recall(backend, keys_of(2)) == ["BlockMissing", label(key_of(1))]
        await lender.keep(backend, keys_of(2))
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
