"""The table of Mooncake's codes: each has its outcome, and says whether bytes may still come."""

from contextlib import nullcontext

import pytest

from kvtier.backend import BackendUnavailable, ChunkCorrupt, ChunkMissing, NoSpace, TransferFailed
from kvtier.testing.conformance import key_of
from kvtier_backends.mooncake import backend
from kvtier_backends.mooncake.client import Meaning, PoolClient, has_ended, meaning_of
from tests.remote.tiers import CHUNK_BYTES


class Answers(PoolClient):
    def __init__(self, code, removal=0):
        self._code, self._removal, self.removed = code, removal, []

    def get(self, names, addresses, size_bytes):
        return [self._code] * len(names)

    def put(self, names, addresses, size_bytes):
        return [self._code] * len(names)

    def remove(self, names):
        self.removed += names
        return [self._removal] * len(names)

    def close(self):
        """There is nothing to close."""


@pytest.fixture
async def answering(opened, monkeypatch):
    async def answering(code, removal=0):
        answers = Answers(code, removal)
        monkeypatch.setattr(backend, "connect", lambda options, tier_name: answers)
        return await opened(), answers

    return answering


@pytest.mark.parametrize(
    ("code", "loaded", "stored", "retired"),
    [
        (-200, TransferFailed, NoSpace, 0),
        (-600, ChunkCorrupt, TransferFailed, 0),
        (-703, ChunkMissing, TransferFailed, 0),
        (-704, ChunkMissing, TransferFailed, 0),
        (-705, TransferFailed, TransferFailed, 0),
        (-706, TransferFailed, TransferFailed, 0),
        (-707, ChunkMissing, TransferFailed, 1),
        (-708, TransferFailed, TransferFailed, 0),
        (-714, TransferFailed, TransferFailed, 0),
        (-800, TransferFailed, TransferFailed, 1),
        (-801, TransferFailed, TransferFailed, 1),
        (-12345, TransferFailed, TransferFailed, 1),
    ],
)
async def test_each_code_has_its_outcome(answering, lender, code, loaded, stored, retired):
    tier, answers = await answering(code)
    key = key_of(0)
    (read,) = lender.reads([key])
    (outcome,) = await tier.load([read])
    assert type(outcome) is loaded
    assert (tier._loads.staging.retired, len(answers.removed)) == (retired, loaded is ChunkCorrupt)
    (outcome,) = await tier.store(lender.writes([key]))
    assert type(outcome) is stored
    assert tier._stores.staging.retired == retired


@pytest.mark.parametrize("removal", [-600, -706, -708, -714, -800, -12345, 0, -703, -704])
async def test_only_a_chunk_that_the_pool_keeps_fails_the_deletion(answering, removal):
    tier, _ = await answering(0, removal)
    told = f"2 of 2 chunks are not deleted: Mooncake answers {removal}"
    with nullcontext() if removal in (0, -703, -704) else pytest.raises(BackendUnavailable, match=told):
        await tier.delete([key_of(0), key_of(1)])


def test_an_unknown_code_is_a_transfer_that_may_continue():
    assert meaning_of(-1) is Meaning.FAILED
    assert not has_ended(-1)
    assert has_ended(CHUNK_BYTES)
