import importlib.util
from pathlib import Path

import pytest

from kvtier.testing import conformance
from kvtier.testing.conformance import tier_context
from tests.testing.suites import Reopened

EXAMPLE = Path(__file__).parents[2] / "examples" / "write_a_backend.py"

spec = importlib.util.spec_from_file_location("write_a_backend", EXAMPLE)
write_a_backend = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write_a_backend)


SUITES = (conformance.BackendConformance, conformance.DurableBackendConformance, conformance.NamespacedConformance)


class TestTheExampleBackend(Reopened, *SUITES):
    @pytest.fixture
    async def open_tier(self, tmp_path):
        options = write_a_backend.SqliteOptions(path=str(tmp_path / "chunks.db"))
        opened = []

        async def open_tier(**context):
            context = tier_context(self.chunk_bytes, **context)
            opened.append(await write_a_backend.SqliteBackend.open(options, context))
            return opened[-1]

        yield open_tier
        for tier in opened:
            await tier.aclose(10)
