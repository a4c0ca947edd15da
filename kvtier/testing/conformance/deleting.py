"""Deleting: what is gone is gone, and nothing else."""

from kvtier.backend import Backend
from kvtier.testing.conformance.lender import Lender, key_of, keys_of, label
from kvtier.testing.conformance.promises import Promises


class Deleting(Promises):
    async def test_what_was_deleted_is_missing(self, backend: Backend, lender: Lender) -> None:
        """A deleted key answers as one that was never stored."""
        keys = keys_of(4)
        await lender.keep(backend, keys)
        await backend.delete(keys)
        assert await lender.recall(backend, keys) == ["BlockMissing"] * 4
        assert list(await backend.probe(keys)) == [False] * 4

    async def test_deleting_takes_nothing_else(self, backend: Backend, lender: Lender) -> None:
        """Only the keys that were named go; the same hash in another group stays."""
        keys = [key_of(number, group) for number in range(3) for group in range(3)]
        await lender.keep(backend, keys)
        await backend.delete(keys[::2])
        expected = ["BlockMissing" if index % 2 == 0 else label(key) for index, key in enumerate(keys)]
        assert await lender.recall(backend, keys) == expected

    async def test_unknown_keys_are_ignored(self, backend: Backend, lender: Lender) -> None:
        """Deleting what is not there is no error, alone or among others, and may be repeated."""
        await backend.delete(keys_of(3))
        await lender.keep(backend, keys_of(2))
        for _ in range(2):
            await backend.delete([key_of(8), key_of(0), key_of(9)])
        assert await lender.recall(backend, keys_of(2)) == ["BlockMissing", label(key_of(1))]

    async def test_a_deleted_key_can_be_stored_again(self, backend: Backend, lender: Lender) -> None:
        """Nothing remembers that a key was deleted."""
        keys = keys_of(3)
        for version in range(3):
            await lender.keep(backend, keys, version)
            assert await lender.recall(backend, keys) == [label(key, version) for key in keys]
            await backend.delete(keys)
