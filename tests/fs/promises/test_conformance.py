"""The file tier keeps the contract, as it comes and with every option the other way."""

import os
import tempfile
from functools import partial
from typing import Any

import pytest

from kvtier.policies import known_policies
from kvtier.testing import conformance
from kvtier.testing.conformance import Lender
from kvtier_backends.fs import FsBackend
from tests.fs.conftest import SECRETS
from tests.testing.suites import Reopened, open_with

__all__ = ["open_with"]

LAID_OUT = [{"naming": "vllm"}, {"naming": "flat"}, {"layout": "segments"}]


class Opening:
    chunk_bytes = 8_192

    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path)

    @pytest.fixture
    def open_one(self, open_with, root):
        return partial(open_with, FsBackend, root=root, chunk_bytes=self.chunk_bytes)


class Reopening(Opening, Reopened):
    options: dict[str, Any]

    @pytest.fixture
    def open_tier(self, open_one):
        return partial(open_one, **self.options)


class Suites(
    Reopening,
    conformance.BackendConformance,
    conformance.DurableBackendConformance,
    conformance.InventoryConformance,
    conformance.MeasuredConformance,
    conformance.DescribedConformance,
):
    """Every suite that fits; a subclass says how the directory is used."""


class TestFs(Suites):
    options = {"layout": "files"}  # noqa: RUF012

    @pytest.mark.usefixtures("thorough")  # It makes four thousand files.
    async def test_reports_come_in_batches(self, backend, lender):
        await super().test_reports_come_in_batches(backend, lender)


class TestSegments(Suites):
    options = {}  # noqa: RUF012


class TestEncryptedSegments(Suites):
    """The seal does not depend on the layout: `test_sealed.py` tries both."""

    many_chunks = 100  # Batches of reports do not depend on the seal.
    options = {"seal": "aes-256-gcm", "seal_key_env": SECRETS}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def secrets(self, monkeypatch):
        monkeypatch.setenv(SECRETS, "ab" * 32)


@pytest.mark.usefixtures("thorough")
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no file system in memory")
class InMemory(Suites):
    """In memory, because thousands of fsyncs take a disk minutes, and a segment's first bytes are all written."""

    @pytest.fixture
    def root(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
            yield root


OTHER_WAY = {"io": "buffered", "fsync": True, "load_lanes": 1, "store_lanes": 1}


class TestSegmentsInMemoryWithEveryOptionTheOtherWay(InMemory):
    options = {**OTHER_WAY, "layout": "segments", "capacity_bytes": "64MiB"}  # noqa: RUF012


class TestFsInMemoryWithEveryOptionTheOtherWay(InMemory):
    options = {**OTHER_WAY, "naming": "flat", "unverified": "accept"}  # noqa: RUF012


class TestFsShared(InMemory):
    options = {"shared": True, "capacity_bytes": "1GiB", "naming": "flat"}  # noqa: RUF012


class TestNamespacesOfASharedRoot(Reopening, conformance.NamespacedConformance):
    """A root that is not shared has one tier, and so one namespace at a time."""

    options = {"shared": True}  # noqa: RUF012


@pytest.mark.parametrize("laid_out", LAID_OUT, ids=lambda one: next(iter(one.values())))
class TestFsCounts(Opening, conformance.CountedConformance):
    @pytest.fixture
    async def backend(self, open_one, laid_out):
        return await open_one(**laid_out)

    @pytest.fixture
    def provoke(self, tmp_path, backend):
        lender, key = Lender(self.chunk_bytes), conformance.key_of(1_000)

        async def provoke():
            """Flip a bit in the middle of a chunk, in the one file where it is stored."""
            await lender.keep(backend, [key])
            chunk, found = lender.chunk(key), 0
            for path in filter(os.path.isfile, tmp_path.rglob("*")):
                stored = bytearray(path.read_bytes())
                if (at := stored.find(chunk)) >= 0:
                    found += 1
                    with path.open("r+b") as file:
                        file.seek(at + len(chunk) // 2)
                        file.write(bytes([stored[at + len(chunk) // 2] ^ 1]))
            assert found == 1
            assert await lender.recall(backend, [key]) == ["ChunkCorrupt"]

        return provoke


class Small(Opening):
    """Room for 16 chunks and their folders, and for 8 more that are being written."""

    chunk_bytes = 65_536

    @pytest.fixture
    def policy(self):
        return "lru"

    @pytest.fixture
    async def small(self, open_one, policy, laid_out):
        room_bytes = 24 * (self.chunk_bytes + 4_096 + 4 * 4_096)
        return await open_one(capacity_bytes=room_bytes, eviction_policy=policy, **laid_out)


@pytest.mark.parametrize(
    ("laid_out", "policy"),
    [
        *(({"naming": "vllm"}, policy) for policy in ("lru", "s3fifo")),
        *(({"layout": "segments"}, policy) for policy in known_policies()),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one.values())),
)
class TestFsWithinACapacity(Small, conformance.BoundedConformance):
    """With every policy; files tell only the one from the others that orders by time of use."""


@pytest.mark.parametrize("laid_out", LAID_OUT, ids=lambda one: next(iter(one.values())))
class TestFsByRecency(Small, conformance.AdvisedConformance):
    """As it comes."""
