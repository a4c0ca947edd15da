"""A folder below the root that becomes a link while tiers and commands use it: nothing behind the link is touched."""

import ast
import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

import kvtier_backends.fs
from kvtier.backend.directory import Kind
from kvtier.backend.namespace import FileMapper
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsBackend
from kvtier_backends.fs.directory.files import FilesDirectory
from kvtier_backends.fs.disk.below import open_beneath, open_by_parts
from tests.fs.conftest import scanned

DEADLINE_S = 20.0
CHUNKS = 12
CAPACITY_BYTES = 2 * CHUNKS * (8_192 + 4_096 + 16_384)
WAYS = {
    "vllm": {"naming": "vllm"},
    "flat": {"naming": "flat"},
    "shared": {"shared": True},
    "segments": {"layout": "segments"},
}


Opened = Callable[[int, str, int], int]


class Seen(NamedTuple):
    """A file or folder as it was found."""

    mode: int
    inode: int
    modified_ns: int
    content: bytes


def everything_in(folder: Path) -> dict[str, Seen]:
    """Return all that is in a folder of somebody else's."""
    found = dict[str, Seen]()
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = Seen(status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return found


def replace_by_a_link(folder: Path, victims: Path, away: Path) -> None:
    """Move a folder away, and put a link to somebody's copy of it in its place."""
    copy = shutil.copytree(folder, victims / str(len(os.listdir(victims))))
    folder.rename(away / copy.name)
    folder.symlink_to(copy)


def folders_of(root: Path, level: str, mapper: FileMapper) -> list[str]:
    """Return the folders of a tier at one level: its books', its chunks', or those within them."""
    beside = [mapper.folder]
    chunks = [path.name for path in root.iterdir() if path.is_dir() and path.name != mapper.folder]
    match level:
        case "books":
            return beside
        case "chunks":
            return chunks
    depth = {"outer": 1, "inner": 2}[level]
    below = root.glob("/".join([chunks[0], *"*" * depth]))
    return sorted(str(path.relative_to(root)) for path in below if path.is_dir())


LEVELS = [
    *((way, level) for way in WAYS for level in ("books", "chunks")),
    *((way, "outer") for way in ("vllm", "flat", "shared")),
    *((way, "inner") for way in ("vllm", "shared")),
]


@pytest.mark.parametrize(("way", "level"), LEVELS)
async def test_nothing_behind_a_link_in_the_place_of_a_folder_is_read_written_or_removed(
    open_tier, lender, root, mapper, tmp_path, way, level
) -> None:
    """By loads, stores, deletes, evictions, stamps, checkpoints, or any command."""
    tier: FsBackend = await open_tier(capacity_bytes=CAPACITY_BYTES, write_budget_bytes_per_day="10GiB", **WAYS[way])
    await lender.keep(tier, keys_of(CHUNKS))
    await scanned(tier)
    victims, away = tmp_path / "victims", tmp_path / "away"
    victims.mkdir()
    away.mkdir()
    for name in folders_of(root, level, mapper):
        replace_by_a_link(root / name, victims, away)
    before = everything_in(victims)
    told = await lender.recall(tier, keys_of(CHUNKS))
    if way != "segments" and level in ("chunks", "outer", "inner"):
        assert told == ["ChunkMissing"] * CHUNKS
    else:
        assert told == [label(key) for key in keys_of(CHUNKS)]
    await tier.store(lender.writes(keys_of(CHUNKS)))
    await tier.delete(keys_of(CHUNKS // 2))
    for start in range(CHUNKS, 8 * CHUNKS, CHUNKS):
        await tier.store(lender.writes(keys_of(CHUNKS, start)))
    await tier.probe(keys_of(CHUNKS))
    await tier.aclose(DEADLINE_S)
    for_all_that_a_command_sees(root)
    assert everything_in(victims) == before


def for_all_that_a_command_sees(root: Path) -> None:
    """Look at every file, remove all that may go, and then clear their namespaces."""
    contents = FilesDirectory.open(str(root))
    try:
        for place in contents.places():
            for part in contents.parts(place):
                for file in contents.files(place, part):
                    contents.check(place, file)
                    if file.kind is not Kind.BESIDE:
                        with suppress(OSError):
                            contents.remove(file)
            contents.clear(place)
    finally:
        contents.close()


@pytest.mark.parametrize("opened", [open_beneath, open_by_parts])
def test_a_name_is_opened_without_a_link_in_one_call_and_on_any_kernel(tmp_path, opened) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a" / "link").symlink_to("b")
    (tmp_path / "a" / "b" / "link").symlink_to("file")
    root_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        os.close(opened(root_fd, "a/b/file", os.O_RDONLY | os.O_NOFOLLOW))
        for name in ("link/b/file", "a/link/file", "a/b/link", "a/b/file/more", "link/../../etc"):
            with pytest.raises(OSError, match=r"levels of symbolic links|Not a directory") as refused:
                opened(root_fd, name, os.O_RDONLY | os.O_NOFOLLOW)
            assert refused.value.errno in (errno.ELOOP, errno.ENOTDIR), name
        with pytest.raises(FileNotFoundError):
            opened(root_fd, "a/b/none", os.O_RDONLY | os.O_NOFOLLOW)
    finally:
        os.close(root_fd)


async def test_a_kernel_without_the_call_refuses_a_link_by_name_too(
    open_tier, lender, system_call, root, tmp_path
) -> None:
    several = system_call(
        "open", error=errno.ENOSYS, only=lambda name, *_, **how: not how and "/" in name[1:-1] and name[0] != "/"
    )
    tier = await open_tier()
    await lender.keep(tier, keys_of(2))
    assert several.times, "it was asked first"
    for folder in root.glob("*_r0/*"):
        folder.rename(tmp_path / folder.name)
        folder.symlink_to(tmp_path / folder.name)
    assert await lender.recall(tier, keys_of(2)) == ["ChunkMissing"] * 2
    assert all("is a symbolic link" in str(outcome) for outcome in await tier.store(lender.writes(keys_of(2))))


def test_one_module_alone_gives_names_to_the_system() -> None:
    """The promise holds for calls that are yet to be written: only `below` may pass a name with a descriptor."""
    folder = Path(kvtier_backends.fs.__file__).parent
    named = {
        (path.relative_to(folder).as_posix(), node.lineno)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and {each.arg for each in node.keywords} & {"dir_fd", "src_dir_fd", "dst_dir_fd"}
    }
    assert {name for name, _ in named} == {"disk/below.py"}, named
