"""What a tier promises that knows how full it is."""

from kvtier.backend import Backend, Measured, Occupancy
from kvtier.testing.conformance.lender import Lender, keys_of
from kvtier.testing.conformance.promises import Promises


class MeasuredConformance(Promises):
    async def test_an_empty_tier_holds_nothing(self, backend: Backend) -> None:
        """No chunks use no bytes."""
        assert occupancy(backend)[:2] == (0, 0)

    async def test_every_chunk_is_counted_once(self, backend: Backend, lender: Lender) -> None:
        """Storing a key again takes no second place."""
        keys = keys_of(10)
        await lender.keep(backend, keys)
        once = occupancy(backend)
        await lender.keep(backend, keys[:5], version=1)
        assert once.chunks == occupancy(backend).chunks == 10
        assert once.used_bytes > 0
        assert occupancy(backend).used_bytes <= once.used_bytes * 2

    async def test_what_was_deleted_uses_nothing(self, backend: Backend, lender: Lender) -> None:
        """Chunks give back what they took; deleting unknown keys gives back nothing."""
        keys = keys_of(10)
        await lender.keep(backend, keys)
        full = occupancy(backend)
        await backend.delete([*keys[5:], *keys_of(5, start=100)])
        half = occupancy(backend)
        assert half.chunks == 5
        assert 0 < half.used_bytes < full.used_bytes
        await backend.delete(keys)
        assert occupancy(backend)[:2] == (0, 0)

    async def test_loading_and_probing_change_nothing(self, backend: Backend, lender: Lender) -> None:
        """Hits and misses take no room."""
        await lender.keep(backend, keys_of(5))
        before = occupancy(backend)
        await lender.recall(backend, keys_of(10))
        await backend.probe(keys_of(10))
        assert occupancy(backend) == before


def occupancy(backend: Backend) -> Occupancy:
    """Ask how full a tier is, and check that the answer can be."""
    assert isinstance(backend, Measured), f"{type(backend).__name__} has no occupancy()"
    answer = backend.occupancy()
    assert answer.chunks >= 0
    assert 0 <= answer.used_bytes <= (answer.capacity_bytes or answer.used_bytes)
    return answer
