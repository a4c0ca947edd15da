"""The suite of sharing: engines find each other's chunks on one remote, and never those of another namespace."""

import asyncio
import uuid

import pytest

from tests.remote.kit import REST_S, at_rest, describe, found, opened, put

ROWS = 32
LIMITS = {"answer_ttl_s": "10ms"}


class Shared:
    """Several engines on one remote, which a subclass has as the fixture `remote`."""

    @pytest.fixture
    def chunks(self):
        first = uuid.uuid4().int >> 72
        return range(first, first + ROWS)

    async def test_what_one_engine_has_stored_another_one_finds(self, remote, chunks):
        """Also while both run: an engine asks again for chunks that were absent."""
        config = describe(ROWS, remote.tier(quick=False) | {"limits": LIMITS} | remote.forgets_absences)
        async with await opened(config) as one, await opened(config) as other:
            assert await found(other, chunks) == 0
            assert await put(one, chunks) == ROWS
            assert await at_rest(one)
            async with asyncio.timeout(REST_S):
                while await found(other, chunks) < ROWS:
                    await asyncio.sleep(0.02)
        async with await opened(config) as later:
            assert await found(later, chunks) == ROWS

    @pytest.mark.parametrize("other", [{"model_name": "other"}, {"weights_revision": "other"}], ids=str)
    async def test_engines_of_other_models_and_revisions_never_meet(self, remote, chunks, other):
        config = describe(ROWS, remote.tier(quick=False))
        async with await opened(config) as engine:
            assert await put(engine, chunks) == ROWS
            assert await at_rest(engine)
        async with await opened(config | {"namespace": config["namespace"] | other}) as engine:
            assert await found(engine, chunks) == 0
