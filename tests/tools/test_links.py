"""Commands follow no link below the directory, and wait for no pipe: they say what lies there, or call it corrupt."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.backend.directory import Kind, StoredFile
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs.directory import FilesDirectory

COMMANDS = (("du",), ("ls",), ("verify",), ("prune", "--older-than", "0s", "--yes"), ("prune", "--leftovers", "--yes"))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere"
    path.mkdir()
    (path / "treasure").write_bytes(b"not for anybody else")
    return path


def replaced(path: Path, elsewhere: Path) -> Path:
    """Have a link be in the place of something of a tier's, which is moved away."""
    if path.exists():
        path.rename(elsewhere / path.name)
    path.symlink_to(elsewhere / path.name if (elsewhere / path.name).exists() else elsewhere)
    return path


def contents_of(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("place", ["namespace", "first", "segment"])
def test_a_command_names_a_link_goes_on_and_leaves_what_it_leads_to(
    root: Path, store: Callable[..., list[Path]], run, elsewhere: Path, place: str, command: tuple[str, ...]
) -> None:
    files = store(keys_of(3), layout="segments" if place == "segment" else "files")
    link = {"namespace": files[0].parent.parent.parent, "first": files[0].parent.parent, "segment": files[0]}[place]
    replaced(link, elsewhere)
    before = contents_of(elsewhere)
    status, _ = run(command[0], root, *command[1:])
    assert status == 1
    assert contents_of(elsewhere) == before
    (found,) = {file.fault for file in walked(root) if file.kind is Kind.UNREADABLE}
    assert re.search(f"{link.name} is a symbolic link, a .* or nothing accepted; remove it", found)


def walked(root: Path) -> list[StoredFile]:
    contents = FilesDirectory.open(str(root))
    try:
        return [
            file
            for place in contents.places()
            for part in contents.parts(place)
            for file in contents.files(place, part)
        ]
    finally:
        contents.close()


def test_a_pipe_in_the_place_of_the_configuration_holds_up_nothing(
    root: Path, store: Callable[..., list[Path]], run_json: Callable[..., Any]
) -> None:
    store(keys_of(3))
    (config,) = root.glob("*/config.json")
    config.unlink()
    os.mkfifo(config)
    (row,) = run_json("du", root)["namespaces"].values()
    assert (row["model"], row["chunks"]) == ("", 3)


def test_the_directory_itself_may_be_a_link(
    root: Path, store: Callable[..., list[Path]], run_json: Callable[..., Any], tmp_path: Path
) -> None:
    store(keys_of(3))
    (tmp_path / "link").symlink_to(root)
    assert run_json("du", tmp_path / "link")["chunks"] == 3
