"""The file tier keeps the contract, as it comes and with every option the other way."""

import os
import tempfile
from pathlib import Path

import pytest

from kvtier.policies import known_policies
from kvtier.testing.conformance import (
    AdvisedConformance,
    BackendConformance,
    BoundedConformance,
    CountedConformance,
    DescribedConformance,
    DurableBackendConformance,
    InventoryConformance,
    Lender,
    MeasuredConformance,
    NamespacedConformance,
    key_of,
    tier_context,
)
from kvtier_backends.fs import FsBackend, FsOptions
from tests.fs.conftest import SECRETS

LAID_OUT = [{"naming": "vllm"}, {"naming": "flat"}, {"layout": "segments"}]


class Suites(
    BackendConformance, DurableBackendConformance, InventoryConformance, MeasuredConformance, DescribedConformance
):
    """Every suite that fits, over one directory; a subclass says how it is used."""

    chunk_bytes = 8_192

    def options(self, root: str) -> FsOptions:
        return FsOptions(root=root, layout="files")

    @pytest.fixture
    def root(self, tmp_path):
        return str(tmp_path)

    @pytest.fixture
    async def reopen(self, root):
        opened = []

        async def reopen():
            if opened:
                await opened[-1].aclose(10)
            opened.append(await FsBackend.open(self.options(root), tier_context(self.chunk_bytes)))
            return opened[-1]

        yield reopen
        for tier in opened:
            await tier.aclose(10)

    @pytest.fixture
    async def backend(self, reopen):
        return await reopen()


class TestFs(Suites):
    """One file a chunk."""

    @pytest.mark.usefixtures("thorough")  # It makes four thousand files.
    async def test_reports_come_in_batches(self, backend, lender):
        await super().test_reports_come_in_batches(backend, lender)


class TestNamespacesOfASharedRoot(NamespacedConformance):
    """A root that is not shared has one tier, and so one namespace at a time."""

    chunk_bytes = 8_192

    @pytest.fixture
    async def open_one(self, tmp_path):
        opened = []

        async def open_one(**named):
            options = FsOptions(root=str(tmp_path), shared=True)
            opened.append(await FsBackend.open(options, tier_context(self.chunk_bytes, **named)))
            return opened[-1]

        yield open_one
        for tier in opened:
            await tier.aclose(10)

    @pytest.fixture
    async def backend(self, open_one):
        return await open_one()

    @pytest.fixture
    async def neighbour(self, backend, open_one):
        return await open_one(model_name="other")


class TestSegments(Suites):
    """The default: chunks in slots of segments."""

    def options(self, root: str) -> FsOptions:
        return FsOptions(root=root)


class TestEncryptedSegments(Suites):
    """The default with a seal."""

    many_chunks = 100  # Batches of reports do not depend on the seal.

    @pytest.fixture(autouse=True)
    def secrets(self, monkeypatch):
        monkeypatch.setenv(SECRETS, "ab" * 32)

    def options(self, root: str) -> FsOptions:
        return FsOptions(root=root, seal="aes-256-gcm", seal_key_env=SECRETS)


class TestEncryptedFiles(TestEncryptedSegments):
    """One encrypted file a chunk."""

    def options(self, root: str) -> FsOptions:
        return FsOptions(root=root, layout="files", seal="aes-256-gcm", seal_key_env=SECRETS)


@pytest.mark.usefixtures("thorough")
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no file system in memory")
class TestSegmentsInMemoryWithEveryOptionTheOtherWay(Suites):
    """Within a capacity, because of the first segment every byte is written."""

    @pytest.fixture
    def root(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
            yield root

    def options(self, root: str) -> FsOptions:
        return FsOptions(
            root=root, layout="segments", capacity_bytes="64MiB", io="buffered", fsync=True, load_lanes=1, store_lanes=1
        )


@pytest.mark.parametrize("laid_out", LAID_OUT, ids=lambda one: next(iter(one.values())))
class TestFsCounts(CountedConformance):
    """Corrupt chunks."""

    chunk_bytes = 8_192

    @pytest.fixture
    async def backend(self, tmp_path, laid_out):
        tier = await FsBackend.open(FsOptions(root=str(tmp_path), **laid_out), tier_context(self.chunk_bytes))
        yield tier
        await tier.aclose(10)

    @pytest.fixture
    def provoke(self, tmp_path, backend):
        lender, key = Lender(self.chunk_bytes), key_of(1_000)

        async def provoke():
            await lender.keep(backend, [key])
            assert damage(tmp_path, lender.chunk(key)) == 1
            assert await lender.recall(backend, [key]) == ["ChunkCorrupt"]

        return provoke


def damage(root: Path, chunk: bytes) -> int:
    """Flip a bit in the middle of a chunk wherever it is stored; return in how many files it was."""
    found = 0
    for path in filter(Path.is_file, root.rglob("*")):
        stored = path.read_bytes()
        if (at := stored.find(chunk)) >= 0:
            found += 1
            with path.open("r+b") as file:
                file.seek(at + len(chunk) // 2)
                file.write(bytes([stored[at + len(chunk) // 2] ^ 1]))
    return found


class Small:
    """Room for 16 chunks and their folders, and for 8 more that are being written."""

    chunk_bytes = 65_536

    @pytest.fixture
    def policy(self):
        return "lru"

    @pytest.fixture
    async def small(self, tmp_path, policy, laid_out):
        room_bytes = 24 * (self.chunk_bytes + 4_096 + 4 * 4_096)
        options = FsOptions(root=str(tmp_path), capacity_bytes=room_bytes, eviction_policy=policy, **laid_out)
        tier = await FsBackend.open(options, tier_context(self.chunk_bytes))
        yield tier
        await tier.aclose(10)


@pytest.mark.parametrize(
    ("laid_out", "policy"),
    [
        *(({"naming": "vllm"}, policy) for policy in ("lru", "s3fifo", "density")),
        *(({"layout": "segments"}, policy) for policy in known_policies()),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one.values())),
)
class TestFsWithinACapacity(Small, BoundedConformance):
    """With every policy; files tell only the one from the others that orders by time of use."""


@pytest.mark.parametrize("laid_out", LAID_OUT, ids=lambda one: next(iter(one.values())))
class TestFsByRecency(Small, AdvisedConformance):
    """As it comes."""


@pytest.mark.usefixtures("thorough")
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no file system in memory")
class TestFsInMemoryWithEveryOptionTheOtherWay(Suites):
    """In memory, because thousands of fsyncs take a disk minutes."""

    @pytest.fixture
    def root(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
            yield root

    def options(self, root: str) -> FsOptions:
        return FsOptions(
            root=root, naming="flat", io="buffered", fsync=True, unverified="accept", load_lanes=1, store_lanes=1
        )


@pytest.mark.usefixtures("thorough")
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no file system in memory")
class TestFsShared(Suites):
    """As one of several processes would be."""

    @pytest.fixture
    def root(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
            yield root

    def options(self, root: str) -> FsOptions:
        return FsOptions(root=root, shared=True, capacity_bytes="1GiB", naming="flat")
