"""A root has one owner unless it is shared: the second is refused by name, and capacity holds on every node."""

import asyncio
import errno
import fcntl
import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvtier.backend import EngineId, FileMapper, Namespace, TierContext
from kvtier.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.runner.runner import open_tiers
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk import below, owner
from tests.fs.conftest import ROW_BYTES, MakeSystemCall, Mount, OpenTier, StartWriter

OpenFolder = Callable[..., object]
DEADLINE_S = 20.0
LAYOUTS = ["files", "segments"]
ENGINE = EngineId(os.getpid(), 7)

HOLDER = """
import asyncio, json, sys
from kvtier.backend import EngineId, FileMapper, Namespace, TierContext
from kvtier_backends.fs import FsBackend, FsOptions

async def main(options, engine):
    mapper = FileMapper(Namespace(model_name="org/model"))
    context = TierContext("0:fs", mapper, 8_192, engine=EngineId(*engine) if engine else None)
    tier = await FsBackend.open(FsOptions(**options), context)
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await tier.aclose(10)

asyncio.run(main(*json.loads(sys.argv[1])))
"""


def lock_of(root: Path) -> str:
    return (root / owner.OWNER).read_text()


def names_this_process(error: BaseException) -> bool:
    names = f"process {os.getpid()} (", " since 20", "{dp_rank}", "shared = true"
    return all(name in str(error) for name in names)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "PATIENCE_S", 0.2)


@pytest.fixture
def hold(outside: None, root: Path):
    """Start a process that has the root open; return it."""
    started: list[subprocess.Popen[bytes]] = []

    def hold(engine: EngineId | None = None, **options: object) -> "subprocess.Popen[bytes]":
        asked = json.dumps([{"root": str(root), **options}, engine])
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        return process

    yield hold
    for process in started:
        process.kill()
        with process:
            pass


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_second_tier_of_one_root_is_refused_by_name(open_tier: OpenTier, root: Path, layout: str) -> None:
    await open_tier(layout=layout)
    with pytest.raises(ConfigError, match=r"^root: ") as refused:
        await open_tier(layout=layout)
    assert names_this_process(refused.value)


@pytest.mark.parametrize("other", [{"model_name": "another/model"}, {"model_name": "org/model", "row_bytes": 4_096}])
async def test_another_model_or_row_length_on_the_same_root_is_refused_too(
    open_tier: OpenTier, root: Path, other: dict[str, object]
) -> None:
    await open_tier(layout="segments")
    context = TierContext("1:fs", FileMapper(Namespace(**other)), 4_096)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tier 0:fs of process"):
        await FsBackend.open(FsOptions(root=str(root)), context)


async def test_one_engine_with_two_tiers_of_one_root_is_refused_at_once(root: Path) -> None:
    given = {
        "cpu_bytes_to_use": "1MiB",
        "chunk_bytes": ROW_BYTES,
        "runner": "inline",
        "namespace": {"model_name": "org/model"},
        "secondary_tiers": [{"type": "fs", "root": str(root)}, {"type": "fs", "root": f"{root}/."}],
    }
    with pytest.raises(ConfigError, match="used by tier 0:fs of process"):
        await open_tiers(EngineConfig.from_dict(given))
    assert await relock(root)


async def relock(root: Path) -> bool:
    """Open and close the root: nobody has it any more."""
    tier = await FsBackend.open(
        FsOptions(root=str(root)), TierContext("0:fs", FileMapper(Namespace(model_name="m")), ROW_BYTES)
    )
    return await tier.aclose(DEADLINE_S) == (0,)


async def test_another_path_of_the_directory_is_the_same_root(open_tier: OpenTier, root: Path) -> None:
    await open_tier()
    link = root.with_name("link")
    link.symlink_to(root)
    with pytest.raises(ConfigError, match="is used by"):
        await open_tier(root=str(link))


def test_another_mount_of_the_directory_is_the_same_root(open_folder: OpenFolder, mount: Mount, root: Path) -> None:
    base = mount("tmpfs", "size=8m")
    open_folder(root=str(base / "tier"))
    again = root.with_name("again")
    again.mkdir()
    subprocess.run(["mount", "--bind", str(base), str(again)], check=True)
    try:
        with pytest.raises(ConfigError, match="is used by"):
            open_folder(root=str(again / "tier"))
    finally:
        subprocess.run(["umount", str(again)], check=True)


@pytest.mark.parametrize("first", [True, False])
async def test_a_shared_root_and_one_that_is_not_refuse_each_other(open_tier: OpenTier, first: bool) -> None:
    tier = await open_tier(shared=first)
    with pytest.raises(ConfigError, match="all that use a root share it, or none"):
        await open_tier(shared=not first)
    await tier.aclose(DEADLINE_S)
    await open_tier(shared=not first)


async def test_shared_tiers_have_one_root_together(open_tier: OpenTier) -> None:
    for _ in range(3):
        await open_tier(shared=True)


async def test_a_closed_tier_leaves_the_root_to_the_next(open_tier: OpenTier, lender: Lender) -> None:
    for version in range(3):
        tier = await open_tier(layout="segments")
        await lender.keep(tier, keys_of(1), version=version)
        assert await lender.recall(tier, keys_of(1)) == [label(keys_of(1)[0], version)]
        await tier.aclose(DEADLINE_S)


def test_a_killed_owner_leaves_the_root_at_once(open_folder: OpenFolder, hold) -> None:
    process = hold()
    process.kill()
    process.wait()
    open_folder()


async def test_a_start_waits_for_an_owner_that_is_closing(
    open_tier: OpenTier, hold, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "PATIENCE_S", DEADLINE_S)
    process = hold()
    with caplog.at_level(logging.INFO):
        opening = asyncio.create_task(open_tier())
        while "waiting up to" not in caplog.text:
            await asyncio.sleep(0.01)
        process.stdin.close()
        await asyncio.wait_for(opening, DEADLINE_S)
    assert caplog.text.count("waiting up to") == 1


async def test_an_owner_that_stays_is_named_after_the_wait(open_tier: OpenTier, hold) -> None:
    process = hold()
    with pytest.raises(ConfigError, match=rf"process {process.pid} \(.*python.* on .* since \d{{4}}-"):
        await open_tier()


async def test_a_replaced_runner_never_waits_for_the_one_that_hangs(root: Path, hold, mapper: FileMapper) -> None:
    """A stopped process is as one in uninterruptible I/O: it has its locks, and lets go of none."""
    hung = hold(engine=ENGINE)
    hung.send_signal(signal.SIGSTOP)
    tier = await FsBackend.open(FsOptions(root=str(root)), TierContext("0:fs", mapper, ROW_BYTES, engine=ENGINE))
    with pytest.raises(ConfigError, match="is used by"):
        await FsBackend.open(FsOptions(root=str(root)), TierContext("0:fs", mapper, ROW_BYTES))
    hung.kill()
    hung.wait()
    with pytest.raises(ConfigError, match="is used by"):  # Its end changes nothing: the successor has the root.
        await FsBackend.open(FsOptions(root=str(root)), TierContext("0:fs", mapper, ROW_BYTES))
    await tier.aclose(DEADLINE_S)


@pytest.mark.parametrize("other", ["tier", "successor"])
async def test_a_successor_gives_way_to_whoever_took_the_root_at_the_same_moment(
    root: Path, hold, mapper: FileMapper, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Another tier locks the dead predecessor's file, or a later successor replaces ours, as we replace it."""
    hung = hold(engine=ENGINE)
    hung.send_signal(signal.SIGSTOP)
    said = json.loads(lock_of(root))
    theirs, rename = json.dumps(said | {"tier": "1:theirs", "engine": 0}), below.rename

    def race(root_fd: int, name: str, new: str) -> None:
        if new == owner.OWNER and other == "tier":
            (root / owner.OWNER).write_text(theirs)
        rename(root_fd, name, new)
        if new == owner.OWNER and other == "successor":
            (root / "later").write_text(theirs)
            (root / "later").rename(root / owner.OWNER)
            monkeypatch.setattr(below, "rename", rename)

    monkeypatch.setattr(below, "rename", race)
    options, context = FsOptions(root=str(root)), TierContext("0:fs", mapper, ROW_BYTES, engine=ENGINE)
    if other == "tier":
        with pytest.raises(ConfigError, match="is used by tier 1:theirs"):
            await FsBackend.open(options, context)
    else:  # Nobody has that one's lock.
        tier = await FsBackend.open(options, context)
        assert json.loads(lock_of(root))["process"] != said["process"]
        await tier.aclose(DEADLINE_S)


async def test_a_successor_takes_the_root_if_its_predecessor_lets_go_at_the_same_moment(
    root: Path, hold, mapper: FileMapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predecessor whose start fails removes its file."""
    hung = hold(engine=ENGINE)
    hung.send_signal(signal.SIGSTOP)
    temporary_name = owner.temporary_name

    def race(*args: Any) -> str:
        (root / owner.OWNER).unlink()
        monkeypatch.setattr(owner, "temporary_name", temporary_name)
        return temporary_name(*args)

    monkeypatch.setattr(owner, "temporary_name", race)
    context = TierContext("0:fs", mapper, ROW_BYTES, engine=ENGINE)
    tier = await FsBackend.open(FsOptions(root=str(root)), context)
    assert json.loads(lock_of(root))["pid"] == ENGINE.pid
    assert await tier.aclose(DEADLINE_S) == (0,)


async def test_two_engines_of_one_process_are_two(root: Path, mapper: FileMapper, hold) -> None:
    hold(engine=EngineId(os.getpid(), 1))
    with pytest.raises(ConfigError, match="is used by"):
        await FsBackend.open(
            FsOptions(root=str(root)), TierContext("0:fs", mapper, ROW_BYTES, engine=EngineId(os.getpid(), 2))
        )


async def test_where_there_are_no_locks_a_root_of_ones_own_works_and_warns(
    open_tier: OpenTier, lender: Lender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    tier = await open_tier()
    await lender.keep(tier, keys_of(1))
    assert "no locks on files" in caplog.text
    with pytest.raises(ConfigError, match="a file system with locks on files accepted"):
        await open_tier(shared=True)


def no_locks(*args: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


async def test_a_fork_of_the_owner_neither_keeps_nor_loses_the_root(open_tier: OpenTier, outside: None) -> None:
    tier = await open_tier()
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        with pytest.raises(ConfigError, match="is used by"):
            await open_tier()
        await tier.aclose(DEADLINE_S)
        await open_tier()
    finally:
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, pid, 0)


async def test_a_failed_start_leaves_no_owner_behind(
    open_tier: OpenTier, root: Path, system_call: MakeSystemCall
) -> None:
    broken = system_call("pwritev", error=5)
    with pytest.raises(Exception, match="Input/output"):
        await open_tier()
    broken.let_go()
    assert not root.exists()


async def test_something_else_in_the_owners_place_is_refused_by_name(open_tier: OpenTier, root: Path) -> None:
    root.mkdir()
    victim = root.with_name("victim")
    victim.write_bytes(b"mine")
    (root / owner.OWNER).symlink_to(victim)
    with pytest.raises(ConfigError, match=re.escape(f"{owner.OWNER} is a symbolic link")):
        await open_tier()
    assert victim.read_bytes() == b"mine"


async def test_what_the_owners_file_says_is_quoted_on_one_line(open_tier: OpenTier, root: Path) -> None:
    await open_tier()
    said = lock_of(root)
    for content in ("", "[" * 4_096, '{"tier": 1}', said.replace("0:fs", "\\u001b[2J\\u009b\\n")):
        (root / owner.OWNER).write_text(content)
        with pytest.raises(ConfigError, match="is used by") as refused:
            await asyncio.wait_for(open_tier_soon(open_tier), DEADLINE_S)
        assert str(refused.value).isprintable()


async def open_tier_soon(open_tier: OpenTier) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "PATIENCE_S", 0.0)
        await open_tier()


# Who may read it.


def modes(root: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")] if path.is_dir()}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_directory_that_a_tier_makes_is_its_users_alone(
    open_tier: OpenTier, lender: Lender, root: Path, layout: str
) -> None:
    tier = await open_tier(layout=layout)
    await lender.keep(tier, keys_of(4))
    assert modes(root) == {0o700}


@pytest.mark.parametrize("mode", [0o2770, 0o750, 0o755])
async def test_folders_below_a_root_that_was_there_have_its_permissions(
    open_tier: OpenTier, lender: Lender, root: Path, mode: int
) -> None:
    root.mkdir()
    root.chmod(mode)
    before = os.umask(0o077)
    try:
        tier = await open_tier(shared=True, capacity_bytes="8MiB")
        await lender.keep(tier, keys_of(4))
    finally:
        os.umask(before)
    assert modes(root) == {mode}
    books = [*root.glob("*.json"), *root.glob("*/ledger*")]
    assert {stat.S_IMODE(book.stat().st_mode) for book in books} == {mode & 0o660 | mode & 0o006}


async def test_a_directory_for_everybody_has_folders_for_one(open_tier: OpenTier, lender: Lender, root: Path) -> None:
    root.mkdir()
    root.chmod(0o1777)
    tier = await open_tier()
    await lender.keep(tier, keys_of(4))
    assert modes(root) == {0o1777, 0o700}


# The run with processes, looked at from outside. `KVTIER_OWNER_S`: for how long.

CAPACITY_BYTES = 4 << 20


@pytest.mark.parametrize("engines", [1, 2, 4])
@pytest.mark.parametrize("options", [{"layout": "segments"}, {"layout": "files"}, {"layout": "files", "shared": True}])
async def test_a_root_never_holds_more_than_its_capacity_however_many_engines(
    start_writer: StartWriter, root: Path, taken_bytes: Callable[[Path], int], options: dict[str, object], engines: int
) -> None:
    root.mkdir()
    writers = [await start_writer(1_200, capacity_bytes=CAPACITY_BYTES, **options) for _ in range(engines)]
    await asyncio.gather(*(writer.begin(seed) for seed, writer in enumerate(writers)))
    ends_at = asyncio.get_running_loop().time() + float(os.environ.get("KVTIER_OWNER_S", "2"))
    most, samples = 0, 0
    hearing = asyncio.gather(*(writer.listen() for writer in writers))
    try:
        async with asyncio.timeout(60):
            while (
                asyncio.get_running_loop().time() < ends_at
                or most <= CAPACITY_BYTES // 2
                or not all(one.refused or one.done[0] for one in writers)
            ):
                most, samples = max(most, await asyncio.to_thread(taken_bytes, root)), samples + 1
                await asyncio.sleep(0.01)
    finally:
        hearing.cancel()
        with suppress(asyncio.CancelledError):
            await hearing
    logging.getLogger(__name__).info("%d engines, %s: at most %d bytes in %d samples", engines, options, most, samples)
    refused = [writer.refused for writer in writers if writer.refused]
    assert len(refused) == (0 if options.get("shared") else engines - 1)
    assert all("is used by tier 0:fs of process" in told for told in refused)
    assert [writer.wrong for writer in writers if writer.wrong] == []
    assert most <= CAPACITY_BYTES
