"""A corrupt file goes; a good one that has taken its place stays."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.backend.namespace import FileMapper, OffloadKey, make_offload_key
from kvtier_backends.fs.disk.footer import ChunkFault
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.files.discard import Discard, Discarded

KEY = make_offload_key(b"k" * 32)


@pytest.fixture
def path(root: Path, path_of: Callable[[OffloadKey], Path]) -> Path:
    return path_of(KEY)


@pytest.fixture
def opened(open_folder: Callable[..., Folder], path: Path) -> Callable[[], Discard]:
    """Open a folder with one bad file in it."""

    def opened() -> Discard:
        folder = open_folder()
        put(path, b"bad")
        return Discard(folder)

    return opened


def put(path: Path, content: bytes) -> None:
    """As a writer does: a new file in place of the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".new")
    aside.write_bytes(content)
    aside.replace(path)


def found_in(folder: Path) -> list[bytes]:
    return sorted(entry.read_bytes() for entry in folder.iterdir())


def test_a_file_that_was_replaced_since_it_was_read_stays(
    opened: Callable[[], Discard], mapper: FileMapper, path: Path
) -> None:
    gone = opened()
    with path.open("rb") as file:
        put(path, b"good")
        assert gone(mapper.name(KEY), file.fileno(), ChunkFault.PAYLOAD) is Discarded.REPLACED
    assert found_in(path.parent) == [b"good"]


@pytest.mark.parametrize("newer_still", [False, True])
def test_a_file_that_is_replaced_at_the_last_moment_stays(
    opened: Callable[[], Discard], mapper: FileMapper, path: Path, newer_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = opened()
    rename = os.rename

    def replaced_around(*args: str, **kwargs: int) -> None:
        monkeypatch.undo()
        put(path, b"good")
        rename(*args, **kwargs)
        if newer_still:
            put(path, b"better")

    with path.open("rb") as file:
        monkeypatch.setattr(os, "rename", replaced_around)
        assert gone(mapper.name(KEY), file.fileno(), ChunkFault.PAYLOAD) is Discarded.REPLACED
    assert found_in(path.parent) == [b"better" if newer_still else b"good"]


def test_a_file_that_somebody_else_has_discarded_is_gone(
    opened: Callable[[], Discard], mapper: FileMapper, path: Path
) -> None:
    gone = opened()
    with path.open("rb") as file:
        path.unlink()
        assert gone(mapper.name(KEY), file.fileno(), ChunkFault.PAYLOAD) is Discarded.REPLACED


def test_each_kind_is_warned_of_once(
    opened: Callable[[], Discard], mapper: FileMapper, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = opened()
    for fault in [ChunkFault.PAYLOAD, ChunkFault.PAYLOAD, ChunkFault.SWAPPED, ChunkFault.PAYLOAD]:
        put(path, b"bad")
        with path.open("rb") as file:
            gone(mapper.name(KEY), file.fileno(), fault)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split("(")[1].split(")")[0] for message in warnings] == ["payload", "swapped"]
