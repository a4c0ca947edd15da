"""Directories as file tiers leave them, and commands run over them."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace, OffloadKey
from kvtier.testing.conformance import Lender
from kvtier.tools.cli import main
from kvtier_backends.fs import FsBackend, FsOptions

ROW_BYTES = 8_192

Store = Callable[..., list[Path]]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
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
def store(root: Path) -> Store:
    """Store these chunks in a tier; return their files, or all segments."""

    async def work(keys: Sequence[OffloadKey], **options: Any) -> None:
        async with opened(root, **options) as (tier, lender):
            await lender.keep(tier, keys)

    def store(keys: Sequence[OffloadKey], *, naming: str = "vllm", layout: str = "files", **options: Any) -> list[Path]:
        naming_option = {"naming": naming} if layout == "files" else {}
        asyncio.run(work(keys, layout=layout, **naming_option, **options))
        if layout == "segments":
            return sorted(root.glob("*_segments/*.seg"))
        namespace = Namespace(model_name=options.get("model", "org/model"), rank=options.get("rank", 0))
        return [root / FileMapper(namespace, naming).name(key) for key in keys]  # type: ignore[arg-type]

    return store


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break no lines: a worker of pytest-xdist sets 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process; return its exit status and what it wrote to stdout."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        assert isinstance(end.value.code, int)
        return end.value.code, capsys.readouterr().out

    return run


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """Run a command with --json, and return what it wrote."""

    def run_json(*args: object) -> Any:
        status, out = run(*args, "--json")
        assert status == 0
        return json.loads(out)

    return run_json
