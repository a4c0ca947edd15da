"""What a file server says of its disk is what it likes to send at once, and is no size of its blocks."""

import os

import pytest

from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs.files import layout as files_layout
from tests.fs.conftest import taken_bytes

MIB = 1 << 20
CAPACITY_BYTES = 24 * MIB
BATCH_CHUNKS = 16
WAYS = [{}, {"naming": "flat"}, {"layout": "segments"}, {"shared": True}]


@pytest.fixture
def nfs(monkeypatch):
    """Describe the file system as NFS does it: in fragments of 1 MiB, which Linux takes from `wtpref`."""
    real = os.fstatvfs

    def described(fd):
        found = list(real(fd))
        scale = MIB // found[1]
        return os.statvfs_result([MIB, MIB, *(count // scale for count in found[2:5]), *found[5:]])

    monkeypatch.setattr(os, "fstatvfs", described)


@pytest.mark.usefixtures("nfs", "thorough")
@pytest.mark.parametrize("options", WAYS, ids=str)
async def test_a_directory_on_nfs_is_filled_to_its_capacity(open_tier, lender, root, options):
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, **options)
    stored = 0
    while not tier.counters().evicted:
        assert list(await tier.store(lender.writes(keys_of(BATCH_CHUNKS, stored)))) == [None] * BATCH_CHUNKS
        stored += BATCH_CHUNKS
    assert CAPACITY_BYTES * 0.8 < taken_bytes(root) <= CAPACITY_BYTES


@pytest.mark.parametrize("options", [{"capacity_bytes": CAPACITY_BYTES}, {"min_free_bytes": MIB}], ids=str)
@pytest.mark.parametrize("shared", [False, True])
async def test_a_small_directory_has_room_before_its_count(open_tier, lender, monkeypatch, options, shared):
    monkeypatch.setattr(files_layout, "SCAN_PATIENCE_S", 0.0)
    for version in range(3):
        tier = await open_tier(shared=shared, **options)
        await lender.keep(tier, keys_of(BATCH_CHUNKS), version)
        await tier.aclose(20)
