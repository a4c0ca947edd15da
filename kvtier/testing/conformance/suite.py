"""The suites of whole tiers: every tier's, a durable tier's, and a shared tier's."""

from collections.abc import Awaitable, Callable

from kvtier.backend import Backend
from kvtier.testing.conformance.calling import Cancellation, Concurrency, GoodManners, TheEnd
from kvtier.testing.conformance.lender import Lender, Promises, begun, ended, keys_of, label
from kvtier.testing.conformance.moving import ODD_KEYS, Batches, Deleting, WhatGoesInComesOut

Reopen = Callable[[], Awaitable[Backend]]


class BackendConformance(WhatGoesInComesOut, Batches, Deleting, Concurrency, Cancellation, GoodManners, TheEnd):
    """The promises of every tier. Needs the fixture `backend`: an open tier with nothing in it."""


class DurableBackendConformance(Promises):
    """Needs the fixture `reopen`, which closes the open tier, if any, opens one over its storage, and returns it.

    The first call opens the first tier, so `backend` may be `await reopen()`.
    """

    async def test_chunks_outlive_the_tier(self, backend: Backend, reopen: Reopen, lender: Lender) -> None:
        """A stored chunk is present when the tier is opened again, more than once, under its exact key."""
        keys = [*keys_of(50), *ODD_KEYS.values()]
        await lender.keep(backend, keys)
        for _ in range(2):
            backend = await reopen()
            assert list(await backend.probe(keys)) == [True] * len(keys)
            assert await lender.recall(backend, keys) == [label(key) for key in keys]

    async def test_the_last_store_is_the_one_that_lasts(self, backend: Backend, reopen: Reopen, lender: Lender) -> None:
        """An older chunk never comes back."""
        keys = keys_of(6)
        await lender.keep(backend, keys)
        await lender.keep(backend, keys[:3], version=1)
        backend = await reopen()
        assert await lender.recall(backend, keys) == [label(key, int(index < 3)) for index, key in enumerate(keys)]
        await lender.keep(backend, keys, version=2)
        assert await lender.recall(await reopen(), keys) == [label(key, 2) for key in keys]

    async def test_what_was_deleted_stays_deleted(self, backend: Backend, reopen: Reopen, lender: Lender) -> None:
        """A deleted chunk never comes back."""
        keys = keys_of(6)
        await lender.keep(backend, keys)
        await backend.delete(keys[:3])
        backend = await reopen()
        assert await lender.recall(backend, keys) == ["ChunkMissing"] * 3 + [label(key) for key in keys[3:]]

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
        """The same key in two namespaces is two chunks."""
        keys = keys_of(4)
        await lender.keep(backend, keys)
        assert await lender.recall(neighbour, keys) == ["ChunkMissing"] * 4
        assert list(await neighbour.probe(keys)) == [False] * 4
        await lender.keep(neighbour, keys, version=1)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
        assert await lender.recall(neighbour, keys) == [label(key, 1) for key in keys]

    async def test_deleting_stays_in_its_namespace(self, backend: Backend, neighbour: Backend, lender: Lender) -> None:
        """A tier deletes no chunk of another namespace."""
        keys = keys_of(4)
        await lender.keep(backend, keys)
        await neighbour.delete(keys)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
