"""What a tier promises to two models that share its storage: that they never meet."""

from kvtier.backend import Backend
from kvtier.testing.conformance.lender import Lender, keys_of, label
from kvtier.testing.conformance.promises import Promises


class NamespacedConformance(Promises):
    """Needs the fixture `neighbour`: a tier over the storage of `backend`, opened in another namespace."""

    async def test_namespaces_share_no_chunk(self, backend: Backend, neighbour: Backend, lender: Lender) -> None:
        """The same key in two namespaces is two chunks."""
        keys = keys_of(4)
        await lender.keep(backend, keys)
        assert await lender.recall(neighbour, keys) == ["BlockMissing"] * 4
        assert list(await neighbour.probe(keys)) == [False] * 4
        await lender.keep(neighbour, keys, version=1)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
        assert await lender.recall(neighbour, keys) == [label(key, 1) for key in keys]

    async def test_deleting_stays_in_its_namespace(self, backend: Backend, neighbour: Backend, lender: Lender) -> None:
        """Nobody deletes what is not theirs."""
        keys = keys_of(4)
        await lender.keep(backend, keys)
        await neighbour.delete(keys)
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
