"""What tests of the file tier stand on: a namespace, lent rows, tiers that are closed again, and small file systems."""

import gc
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvtier.backend import TierContext
from kvtier.keys import OffloadKey
from kvtier.namespace import FileMapper, Namespace
from kvtier.testing.conformance import Lender
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.folder import Folder

ROW_BYTES = 8_192

OpenTier = Callable[..., Awaitable[FsBackend]]
Mount = Callable[[str, str], Path]


@pytest.fixture
def row_bytes() -> int:
    return ROW_BYTES


@pytest.fixture
def mapper() -> FileMapper:
    return FileMapper(Namespace(model_name="org/model"))


@pytest.fixture
def lender() -> Iterator[Lender]:
    lender = Lender(ROW_BYTES)
    yield lender
    gc.collect()  # A test that caught an error is in a circle with its traceback, and so are the buffers in there.
    assert lender.take_back(), "somebody keeps a lent buffer"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory that is not there yet."""
    return tmp_path / "tier"


@pytest.fixture
async def open_tier(root: Path, mapper: FileMapper) -> AsyncIterator[OpenTier]:
    """Open tiers over `root`, if not told otherwise; each is closed in the end."""
    opened: list[FsBackend] = []

    async def open_tier(**options: object) -> FsBackend:
        given = FsOptions(**{"root": str(root), **options})  # type: ignore[arg-type]
        opened.append(await FsBackend.open(given, TierContext("0:fs", mapper, ROW_BYTES)))
        return opened[-1]

    yield open_tier
    for tier in opened:
        assert await tier.aclose(20) == (0,)


@pytest.fixture
def path_of(root: Path, mapper: FileMapper) -> Callable[[OffloadKey], Path]:
    """Say where a key's file is."""
    return lambda key: root / mapper.name(key)


@pytest.fixture
def open_folder(root: Path, mapper: FileMapper) -> Iterator[Callable[..., Folder]]:
    opened: list[Folder] = []

    def open_folder(**options: object) -> Folder:
        folder = Folder(FsOptions(**{"root": str(root), **options}), mapper)  # type: ignore[arg-type]
        folder.open()
        opened.append(folder)
        return folder

    yield open_folder
    for folder in opened:
        folder.close()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a small file system of a kind; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting a file system needs root")
        path = tmp_path / f"{kind}-{len(mounted)}"
        path.mkdir()
        done = subprocess.run(["mount", "-t", kind, "-o", options, "none", str(path)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount {kind}: {done.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)
