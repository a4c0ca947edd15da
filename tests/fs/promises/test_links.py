"""What lies in the place of a tier's own files and is something else is refused by name, not followed or waited for.

Links that lead out of the directory, pipes that nobody writes to, and second names of files that are somebody else's.
"""

import asyncio
import os
import stat
from pathlib import Path

import pytest

from kvtier.backend.namespace import FileMapper
from kvtier.errors import ChunkMissing, ConfigError
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend
from tests.fs.conftest import scanned

DEADLINE_S = 20.0
TREASURE = b"not for anybody else" * 400
BESIDE = {"config.json": {}, "ledger_r0": {"shared": True}, "write-budget_r0": {"write_budget_bytes_per_day": "1GiB"}}


@pytest.fixture
def treasure(tmp_path) -> Path:
    """Somebody's file outside of the tier's directory."""
    path = tmp_path / "treasures" / "treasure"
    path.parent.mkdir()
    path.write_bytes(TREASURE)
    return path


async def left_by_a_tier(open_tier, **options: object) -> None:
    tier = await open_tier(**options)
    assert await tier.aclose(DEADLINE_S) == (0,)


async def refused(open_tier, **options: object) -> str:
    """Open a tier that must be refused before its deadline, and return what it says."""
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ConfigError, match=r"^root: .* accepted: ") as said:
            await open_tier(**options)
    return str(said.value)


def put(kind: str, path: Path, treasure: Path) -> None:
    """Put something else in the place of a tier's file."""
    path.unlink(missing_ok=True)
    match kind:
        case "a symbolic link":
            path.symlink_to(treasure)
        case "a named pipe":
            os.mkfifo(path)
        case "a directory":
            path.mkdir()
        case "a device":
            if os.geteuid() != 0:
                pytest.skip("making a device needs root")
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a directory", "a device"])
@pytest.mark.parametrize("name", BESIDE)
async def test_what_is_no_file_in_the_place_of_a_tiers_own_is_refused_by_name(
    open_tier, root, mapper, treasure, name, kind
) -> None:
    await left_by_a_tier(open_tier, **BESIDE[name])
    path = root / mapper.folder / name
    put(kind, path, treasure)
    said = await refused(open_tier, **BESIDE[name])
    assert f"{mapper.folder}/{name} is {kind}, a regular file or nothing accepted; remove it" in said
    assert treasure.read_bytes() == TREASURE
    assert stat.S_IFMT(path.lstat().st_mode) != stat.S_IFREG, "it is left alone"


@pytest.mark.parametrize("name", ["ledger_r0", "write-budget_r0"])
async def test_a_second_name_of_somebodys_file_is_not_written_to(open_tier, root, mapper, treasure, name) -> None:
    await left_by_a_tier(open_tier)
    (root / mapper.folder / name).hardlink_to(treasure)
    assert f"{name} has another name, too; remove this one" in await refused(open_tier, **BESIDE[name])
    assert treasure.read_bytes() == TREASURE


@pytest.mark.parametrize("layout", ["files", "segments"])
@pytest.mark.parametrize("place", ["namespace", "chunks", "first"])
async def test_a_link_in_the_place_of_a_folder_is_refused_by_name(
    open_tier, lender, root, mapper, treasure, place, layout
) -> None:
    tier = await open_tier(layout=layout)
    await lender.keep(tier, keys_of(1))
    await tier.aclose(DEADLINE_S)
    chunks = root / (mapper.chunks_folder + ("_segments" if layout == "segments" else ""))
    first = next(chunks.iterdir())
    path = {"namespace": root / mapper.folder, "chunks": chunks, "first": first}[place]
    if path.exists():
        path.rename(root.parent / "elsewhere")
    path.symlink_to(treasure.parent)
    said = await refused(open_tier, layout=layout)
    assert f"{path.relative_to(root)} is a symbolic link" in said
    assert os.listdir(treasure.parent) == ["treasure"]


async def test_the_root_itself_may_be_a_link(open_tier, lender, tmp_path, root) -> None:
    (tmp_path / "disk").mkdir()
    root.symlink_to(tmp_path / "disk")
    await lender.keep(await open_tier(), keys_of(2))
    assert list((tmp_path / "disk").rglob("*.bin"))


async def test_a_link_in_the_place_of_the_checkpoint_is_not_read_and_is_replaced(
    open_tier, lender, root, mapper, treasure
) -> None:
    before = await open_tier(layout="segments")
    await lender.keep(before, keys_of(2))
    await before.aclose(DEADLINE_S)
    (index,) = (root / mapper.folder).glob("index*")
    put("a symbolic link", index, treasure)
    tier = await open_tier(layout="segments")
    assert await lender.recall(tier, keys_of(2)) == [label(key) for key in keys_of(2)]
    await scanned(tier)  # Before that, the last checkpoint is better than one of what is known.
    assert tier.counters().checkpoints_ignored == 1
    await tier.aclose(DEADLINE_S)
    assert treasure.read_bytes() == TREASURE
    assert not index.is_symlink()


async def test_a_pipe_in_the_place_of_the_checkpoint_holds_up_nothing(
    open_tier, lender, root, mapper, treasure
) -> None:
    before = await open_tier(layout="segments")
    await lender.keep(before, keys_of(2))
    await before.aclose(DEADLINE_S)
    (index,) = (root / mapper.folder).glob("index*")
    put("a named pipe", index, treasure)
    tier = await open_tier(layout="segments")
    async with asyncio.timeout(DEADLINE_S):
        await lender.keep(tier, keys_of(2))
        while not tier.counters().checkpoints_ignored:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a socket"])
async def test_what_is_no_file_at_a_chunks_name_is_no_chunk(open_tier, lender, path_of, treasure, kind) -> None:
    """Even if the link leads to the chunk itself; a store replaces it, and a delete removes it."""
    tier = await open_tier()
    await lender.keep(tier, keys_of(4))
    path = path_of(key_of(0))
    chunk = treasure.parent / "chunk"
    path.rename(chunk)
    if kind == "a socket":
        bound_socket(path)
    else:
        put(kind, path, chunk)
    async with asyncio.timeout(DEADLINE_S):
        told = await lender.recall(tier, keys_of(4))
        assert told[0] in ("ChunkMissing", "TransferFailed")
        assert told[0] == "ChunkMissing" or kind == "a named pipe"
        assert told[1:] == [label(key) for key in keys_of(3, 1)]
        await lender.keep(tier, keys_of(1))
        assert await lender.recall(tier, keys_of(1)) == [label(key_of(0))]
        path.unlink()
        path.symlink_to(chunk)
        await tier.delete(keys_of(1))
    assert not os.path.lexists(path)
    assert chunk.exists()


def bound_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("naming", ["vllm", "flat"])
async def test_nothing_is_left_where_a_folder_of_chunks_leads_that_is_a_link(
    open_tier, lender, root, mapper, treasure, naming
) -> None:
    """One that has come since the tier was opened: the store fails, by name, and what it had made is removed."""
    tier: FsBackend = await open_tier(naming=naming)
    named = FileMapper(mapper.namespace, naming)  # type: ignore[arg-type]
    folder = (root / named.name(key_of(0))).parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(treasure.parent)
    (outcome,) = await tier.store(lender.writes(keys_of(1)))
    assert f"{folder.relative_to(root)} is a symbolic link, a directory or nothing accepted" in str(outcome)
    assert os.listdir(treasure.parent) == ["treasure"]
    assert isinstance((await tier.load(lender.reads(keys_of(1))))[0], ChunkMissing)
    await tier.delete(keys_of(1))


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a second name"])
async def test_what_is_no_file_of_its_own_in_the_place_of_a_segment_is_not_written_to(
    open_tier, lender, root, mapper, treasure, kind
) -> None:
    """A pipe, or a file that has another name, is a segment that cannot be opened; a link is refused by name."""
    before = await open_tier(layout="segments")
    await lender.keep(before, keys_of(2))
    await before.aclose(DEADLINE_S)
    (segment,) = root.rglob("*.seg")
    copy = treasure.parent / "copy"
    content = segment.read_bytes()
    if kind == "a second name":
        copy.hardlink_to(segment)
    else:
        segment.rename(copy)
        put(kind, segment, copy)
    async with asyncio.timeout(DEADLINE_S):
        if kind == "a symbolic link":
            assert f"{segment.relative_to(root)} is a symbolic link" in await refused(open_tier, layout="segments")
        else:
            tier = await open_tier(layout="segments", checkpoint_s=0, capacity_bytes="8MiB")
            await lender.keep(tier, keys_of(2, 2))
            assert tier.counters().scan_failed == 1
            await tier.delete(keys_of(4))
            await tier.aclose(DEADLINE_S)
    assert copy.read_bytes() == content
