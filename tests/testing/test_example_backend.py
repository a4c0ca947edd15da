import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.conformance import (
    BackendConformance,
    DurableBackendConformance,
    NamespacedConformance,
    tier_context,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "write_a_backend.py"

spec = importlib.util.spec_from_file_location("write_a_backend", EXAMPLE)
write_a_backend = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write_a_backend)


class TestTheExampleBackend(BackendConformance, DurableBackendConformance, NamespacedConformance):
    @pytest.fixture
    async def reopen(self, open_tier):
        opened = []

        async def reopen():
            if opened:
                await opened[-1].aclose(10)
            opened.append(await open_tier("conformance"))
            return opened[-1]

        yield reopen
        for tier in opened:
            await tier.aclose(10)

    @pytest.fixture
    def open_tier(self, tmp_path):
        options = write_a_backend.SqliteOptions(path=str(tmp_path / "chunks.db"))

        async def open_tier(model_name):
            return await write_a_backend.SqliteBackend.open(
                options, tier_context(self.chunk_bytes, model_name=model_name)
            )

        return open_tier

    @pytest.fixture
    async def backend(self, reopen):
        return await reopen()

    @pytest.fixture
    async def neighbour(self, open_tier):
        tier = await open_tier("other")
        yield tier
        await tier.aclose(10)


@pytest.mark.usefixtures("outside")
def test_the_example_runs():
    ended = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True)
    assert "stored: [None, None]\nprobed: [True, True, False]\nloaded: [None, None, ChunkMissing(" in ended.stdout
