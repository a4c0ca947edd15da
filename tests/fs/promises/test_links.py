"""What lies in the place of a tier's own files and is something else is refused by name, not followed or waited for.

Links that lead out of the directory, pipes that nobody writes to, and second names of files that are somebody else's;
also those that come while tiers and commands use the directory.
"""

import ast
import asyncio
import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytest

import kvtier_backends.fs
from kvtier.backend import FileMapper, Kind
from kvtier.errors import ConfigError
from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.directory import FilesDirectory
from kvtier_backends.fs.disk.below import open_beneath, open_by_parts
from tests.fs.conftest import DEADLINE_S, SLOT_BYTES, kinds, scanned, whole

TREASURE = b"not for anybody else" * 400
BESIDE = {"config.json": {}, "ledger_r0": {"shared": True}, "write-budget_r0": {"write_budget_bytes_per_day": "1GiB"}}
CHUNKS = 8
CAPACITY_BYTES = 2 * CHUNKS * (SLOT_BYTES + 16_384)
WAYS = {
    "vllm": {"naming": "vllm"},
    "flat": {"naming": "flat"},
    "shared": {"shared": True},
    "segments": {"layout": "segments"},
}


@pytest.fixture
def treasure(tmp_path):
    path = tmp_path / "treasures" / "treasure"
    path.parent.mkdir()
    path.write_bytes(TREASURE)
    return path


async def refused(open_tier, **options):
    """Open a tier that must be refused before its deadline, and return what it says."""
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ConfigError, match=r"^root: .* accepted: ") as said:
            await open_tier(**options)
    return str(said.value)


def put(kind, path, treasure):
    path.unlink(missing_ok=True)
    match kind:
        case "a symbolic link":
            path.symlink_to(treasure)
        case "a named pipe":
            os.mkfifo(path)
        case "a socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case "a directory":
            path.mkdir()
        case "a device":
            if os.geteuid() != 0:
                pytest.skip("making a device needs root")
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


@pytest.mark.promise(
    "A link, pipe or device stands in place of `config.json`, the shared page, the write budget or a folder"
)
@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a directory", "a device"])
@pytest.mark.parametrize("name", BESIDE)
async def test_others_in_a_books_place_are_refused(open_tier, stored, root, mapper, treasure, name, kind):
    await stored([], **BESIDE[name])
    path = root / mapper.folder / name
    put(kind, path, treasure)
    said = await refused(open_tier, **BESIDE[name])
    assert f"{mapper.folder}/{name} is {kind}, a regular file or nothing accepted; remove it" in said
    assert treasure.read_bytes() == TREASURE
    assert stat.S_IFMT(path.lstat().st_mode) != stat.S_IFREG, "it is left alone"


@pytest.mark.parametrize("name", ["ledger_r0", "write-budget_r0"])
async def test_a_second_name_of_a_file_is_not_written_to(open_tier, stored, root, mapper, treasure, name):
    await stored([])
    (root / mapper.folder / name).hardlink_to(treasure)
    assert f"{name} has another name, too; remove this one" in await refused(open_tier, **BESIDE[name])
    assert treasure.read_bytes() == TREASURE


@pytest.mark.parametrize("place", ["namespace", "chunks", "first"])
async def test_a_link_in_a_folders_place_is_refused(open_tier, stored, root, mapper, treasure, place, layout):
    await stored(keys_of(1), layout=layout)
    chunks = root / (mapper.chunks_folder + ("_segments" if layout == "segments" else ""))
    path = {"namespace": root / mapper.folder, "chunks": chunks, "first": next(chunks.iterdir())}[place]
    path.rename(root.parent / "elsewhere")
    path.symlink_to(treasure.parent)
    assert f"{path.relative_to(root)} is a symbolic link" in await refused(open_tier, layout=layout)
    assert os.listdir(treasure.parent) == ["treasure"]


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe"])
async def test_what_is_no_checkpoint_is_replaced(open_tier, stored, lender, root, mapper, treasure, kind):
    await stored(keys_of(2), layout="segments")
    (index,) = (root / mapper.folder).glob("index*")
    put(kind, index, treasure)
    tier = await open_tier(layout="segments")
    assert await lender.recall(tier, keys_of(2)) == whole(keys_of(2))
    await scanned(tier)  # Before that, the last checkpoint is better than one of what is known.
    assert tier.counters().checkpoints_ignored == 1
    await tier.aclose(DEADLINE_S)
    assert treasure.read_bytes() == TREASURE
    assert stat.S_ISREG(index.lstat().st_mode)


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a socket"])
async def test_what_is_no_file_at_a_chunks_name_is_no_chunk(open_tier, lender, path_of, treasure, kind):
    tier = await open_tier(holds=keys_of(4))
    path, chunk = path_of(key_of(0)), treasure.parent / "chunk"
    path.rename(chunk)
    put(kind, path, chunk)
    async with asyncio.timeout(DEADLINE_S):
        told = await lender.recall(tier, keys_of(4))
        assert told[0] == "ChunkMissing" or (kind == "a named pipe" and told[0] == "TransferFailed")
        assert told[1:] == whole(keys_of(3, 1))
        await lender.keep(tier, keys_of(1))
        assert await lender.recall(tier, keys_of(1)) == whole(keys_of(1))
        put("a symbolic link", path, chunk)
        await tier.delete(keys_of(1))
    assert not os.path.lexists(path)
    assert chunk.exists()


@pytest.mark.parametrize("naming", ["vllm", "flat"])
async def test_nothing_is_stored_through_a_link_to_a_folder(open_tier, lender, root, mapper, treasure, naming):
    tier = await open_tier(naming=naming)
    folder = (root / FileMapper(mapper.namespace, naming).name(key_of(0))).parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(treasure.parent)
    (outcome,) = await tier.store(lender.writes(keys_of(1)))
    assert f"{folder.relative_to(root)} is a symbolic link, a directory or nothing accepted" in str(outcome)
    assert os.listdir(treasure.parent) == ["treasure"]
    assert kinds(await tier.load(lender.reads(keys_of(1)))) == ["ChunkMissing"]
    await tier.delete(keys_of(1))


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a second name"])
async def test_others_in_a_segments_place_are_left_alone(open_tier, stored, root, treasure, kind):
    await stored(keys_of(2), layout="segments")
    (segment,) = root.rglob("*.seg")
    copy, content = treasure.parent / "copy", segment.read_bytes()
    if kind == "a second name":
        copy.hardlink_to(segment)
    else:
        segment.rename(copy)
        put(kind, segment, copy)
    async with asyncio.timeout(DEADLINE_S):
        if kind == "a symbolic link":
            assert f"{segment.relative_to(root)} is a symbolic link" in await refused(open_tier, layout="segments")
        else:
            tier = await open_tier(layout="segments", checkpoint_s=0, capacity_bytes="8MiB", holds=keys_of(2, 2))
            assert tier.counters().scan_failed == 1
            await tier.delete(keys_of(4))
            await tier.aclose(DEADLINE_S)
    assert copy.read_bytes() == content


def everything_in(folder):
    """Return all that is in a folder of somebody else's, as it was found."""
    found = dict[str, tuple[object, ...]]()
    for path in [folder, *folder.rglob("*")]:
        status, content = path.lstat(), path.read_bytes() if path.is_file() else b""
        found[str(path)] = status.st_mode, status.st_ino, status.st_mtime_ns, content
    return found


def folders_of(root, level, mapper):
    """Return the folders of a tier at one level: its books', its chunks', or those within them."""
    if level == "books":
        return [root / mapper.folder]
    (chunks,) = (path for path in root.iterdir() if path.is_dir() and path.name != mapper.folder)
    pattern = {"outer": "*", "inner": "*/*"}.get(level)
    return sorted(path for path in chunks.glob(pattern) if path.is_dir()) if pattern else [chunks]


LEVELS = [
    *((way, level) for way in WAYS for level in ("books", "chunks")),
    *((way, "outer") for way in ("vllm", "flat")),
    *((way, "inner") for way in ("vllm", "shared")),
]


@pytest.mark.parametrize(("way", "level"), LEVELS)
async def test_nothing_behind_a_folders_link_is_touched(open_tier, lender, root, mapper, tmp_path, way, level):
    tier = await open_tier(capacity_bytes=CAPACITY_BYTES, write_budget_bytes_per_day="10GiB", **WAYS[way])
    await lender.keep(tier, keys_of(CHUNKS))
    await scanned(tier)
    victims, away = tmp_path / "victims", tmp_path / "away"
    victims.mkdir()
    away.mkdir()
    for number, folder in enumerate(folders_of(root, level, mapper)):
        copy = shutil.copytree(folder, victims / str(number))
        folder.rename(away / str(number))
        folder.symlink_to(copy)
    before = everything_in(victims)
    lost = way != "segments" and level != "books"
    assert await lender.recall(tier, keys_of(CHUNKS)) == (["ChunkMissing"] * CHUNKS if lost else whole(keys_of(CHUNKS)))
    await tier.store(lender.writes(keys_of(CHUNKS)))
    await tier.delete(keys_of(CHUNKS // 2))
    for start in range(CHUNKS, 5 * CHUNKS, CHUNKS):
        await tier.store(lender.writes(keys_of(CHUNKS, start)))
    await tier.probe(keys_of(CHUNKS))
    await tier.aclose(DEADLINE_S)
    for_all_that_a_command_sees(root)
    assert everything_in(victims) == before


def for_all_that_a_command_sees(root):
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
def test_a_name_is_opened_in_one_call_without_a_link(tmp_path, opened):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a" / "link").symlink_to("b")
    (tmp_path / "a" / "b" / "link").symlink_to("file")
    root_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        os.close(opened(root_fd, "a/b/file", os.O_RDONLY | os.O_NOFOLLOW))
        for name in ("link/b/file", "a/link/file", "a/b/link", "a/b/file/more", "link/../../etc"):
            with pytest.raises(OSError, match=r"levels of symbolic links|Not a directory") as error:
                opened(root_fd, name, os.O_RDONLY | os.O_NOFOLLOW)
            assert error.value.errno in (errno.ELOOP, errno.ENOTDIR), name
        with pytest.raises(FileNotFoundError):
            opened(root_fd, "a/b/none", os.O_RDONLY | os.O_NOFOLLOW)
    finally:
        os.close(root_fd)


async def test_a_kernel_without_the_call_refuses_a_link_by_name_too(open_tier, lender, system_call, root, tmp_path):
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


def test_one_module_alone_gives_names_to_the_system():
    """The promise holds for calls that are yet to be written: only `below` may pass a name with a descriptor."""
    folder = Path(kvtier_backends.fs.__file__).parent
    named = {
        (path.relative_to(folder).as_posix(), node.lineno)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and {each.arg for each in node.keywords} & {"dir_fd", "src_dir_fd", "dst_dir_fd"}
    }
    assert {name for name, _ in named} == {"disk/below.py"}, named
