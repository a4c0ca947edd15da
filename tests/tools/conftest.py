"""Directories as file tiers leave them, and commands run over them."""

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.testing.conformance import Lender
from kvtier.tools.cli import main
from kvtier_backends.fs import FsBackend, FsOptions

ROW_BYTES = 8_192

Store = Callable[..., list[Path]]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def root(tmp_path):
    """A tier's directory; empty."""
    path = tmp_path / "tier"
    path.mkdir()
    return path


@asynccontextmanager
async def opened(root, model="org/model", rank=0, row_bytes=ROW_BYTES, **options):
    """Open a tier in this directory, by default of files, and give it a lender."""
    given = FsOptions(root=str(root), **{"layout": "files", **options})  # type: ignore[arg-type]
    context = TierContext("0:fs", FileMapper(Namespace(model_name=model, rank=rank)), row_bytes)
    tier = await FsBackend.open(given, context)
    yield tier, Lender(row_bytes)
    assert await tier.aclose(10) == (0,)


@pytest.fixture
def store(root):
    """Store these chunks in a tier; return their files, or all segments."""

    async def work(keys, **options):
        async with opened(root, **options) as (tier, lender):
            await lender.keep(tier, keys)

    def store(keys, *, naming="vllm", layout="files", **options):
        naming_option = {"naming": naming} if layout == "files" else {}
        asyncio.run(work(keys, layout=layout, **naming_option, **options))
        if layout == "segments":
            return sorted(root.glob("*_segments/*.seg"))
        namespace = Namespace(model_name=options.get("model", "org/model"), rank=options.get("rank", 0))
        return [root / FileMapper(namespace, naming).name(key) for key in keys]  # type: ignore[arg-type]

    return store


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
    """Break no lines: a worker of pytest-xdist sets 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command in this process; return its exit status and what it wrote to stdout."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args):
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        assert isinstance(end.value.code, int)
        return end.value.code, capsys.readouterr().out

    return run


@pytest.fixture
def run_json(run):
    """Run a command with --json, and return what it wrote."""

    def run_json(*args):
        status, out = run(*args, "--json")
        assert status == 0
        return json.loads(out)

    return run_json
