"""Directories as file tiers leave them, and commands run over them."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from kvtier.backend import FileMapper, Namespace, TierContext
from kvtier.testing.conformance import Lender
from kvtier_backends.fs import FsBackend, FsOptions
from tests.tools.command import run as run_command

ROW_BYTES = 8_192


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "tier"
    path.mkdir()
    return path


@asynccontextmanager
async def opened(root, model="org/model", rank=0, row_bytes=ROW_BYTES, **options):
    given = FsOptions(root=str(root), **{"layout": "files", **options})
    context = TierContext("0:fs", FileMapper(Namespace(model_name=model, rank=rank)), row_bytes)
    tier = await FsBackend.open(given, context)
    yield tier, Lender(row_bytes)
    assert await tier.aclose(10) == (0,)


@pytest.fixture
def store(root):
    async def work(keys, **options):
        async with opened(root, **options) as (tier, lender):
            await lender.keep(tier, keys)

    def store(keys, *, naming="vllm", layout="files", **options):
        naming_option = {"naming": naming} if layout == "files" else {}
        asyncio.run(work(keys, layout=layout, **naming_option, **options))
        if layout == "segments":
            return sorted(root.glob("*_segments/*.seg"))
        namespace = Namespace(model_name=options.get("model", "org/model"), rank=options.get("rank", 0))
        return [root / FileMapper(namespace, naming).name(key) for key in keys]

    return store


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
    """Break no lines: a worker of pytest-xdist sets 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    return lambda *args: (run_command(*args), capsys.readouterr().out)


@pytest.fixture
def run_json(run):
    def run_json(*args, status=0):
        ended, out = run(*args, "--json")
        assert ended == status
        return json.loads(out)

    return run_json
