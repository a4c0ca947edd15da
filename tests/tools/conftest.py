"""Directories as file tiers leave them, and commands run over them."""

import asyncio
import json
from collections.abc import Callable, Sequence
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


@pytest.fixture
def store(root: Path) -> Store:
    """Have a tier keep these chunks, and return their files, or all segments."""

    async def work(
        keys: Sequence[OffloadKey], model: str, rank: int, naming: str, row_bytes: int, layout: str, **options: str
    ) -> list[Path]:
        mapper = FileMapper(Namespace(model_name=model, rank=rank))
        named = naming if layout == "files" else None
        given = FsOptions(root=str(root), layout=layout, naming=named, **options)  # type: ignore[arg-type]
        tier = await FsBackend.open(given, TierContext("0:fs", mapper, row_bytes))
        await Lender(row_bytes).keep(tier, keys)
        assert await tier.aclose(10) == (0,)
        if layout == "segments":
            return sorted(root.glob("*_segments/*.seg"))
        names = FileMapper(mapper.namespace, naming)  # type: ignore[arg-type]
        return [root / names.name(key) for key in keys]

    def store(
        keys: Sequence[OffloadKey],
        *,
        model: str = "org/model",
        rank: int = 0,
        naming: str = "vllm",
        row_bytes: int = ROW_BYTES,
        layout: str = "files",
        **options: str,
    ) -> list[Path]:
        return asyncio.run(work(keys, model, rank, naming, row_bytes, layout, **options))

    return store


@pytest.fixture(autouse=True)
def no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have lines be as long as they are: a worker of pytest-xdist says that it has 80 columns."""
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
