"""A root has one owner unless it is shared: the second is refused by name, on every mount, whatever lies there."""

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

import pytest

from kvtier.backend import EngineId, Namespace
from kvtier.errors import ConfigError
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs.disk import below, owner
from tests.fs.conftest import DEADLINE_S, whole

ENGINE = EngineId(os.getpid(), 7)


def owners_file(root):
    return json.loads((root / owner.OWNER).read_text())


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(owner, "PATIENCE_S", 0.2)


@pytest.fixture
def hold(launch):
    def hold(engine=None, *, hangs=False):
        child = launch("obey", engine=engine)
        child.begin()
        child.until("open")
        if hangs:  # As in uninterruptible I/O: it has its locks, and lets go of none.
            child.stop()
        return child

    return hold


@pytest.mark.promise("A second engine or tier uses the same root")
async def test_a_second_tier_of_one_root_is_refused_by_name(open_tier, root, layout):
    await open_tier(layout=layout)
    root.with_name("link").symlink_to(root)
    for path in (root, root.with_name("link")):
        with pytest.raises(ConfigError, match=r"^root: .*is used by") as refused:
            await open_tier(layout=layout, root=str(path))
        for name in (f"process {os.getpid()} (", " since 20", "{dp_rank}", "shared = true"):
            assert name in str(refused.value)


@pytest.mark.parametrize("other", [{"namespace": Namespace(model_name="another/model")}, {"row_bytes": 4_096}])
async def test_another_model_or_row_length_on_the_same_root_is_refused_too(open_tier, other):
    await open_tier(layout="segments")
    with pytest.raises(ConfigError, match="tier 0:fs of process"):
        await open_tier(**other)


async def test_another_mount_of_the_directory_is_the_same_root(open_tier, mount, tmp_path):
    base = mount("tmpfs", "size=8m")
    await open_tier(root=str(base / "tier"))
    (tmp_path / "again").mkdir()
    await asyncio.to_thread(subprocess.run, ["mount", "--bind", str(base), str(tmp_path / "again")], check=True)
    try:
        with pytest.raises(ConfigError, match="is used by"):
            await open_tier(root=str(tmp_path / "again" / "tier"))
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", str(tmp_path / "again")], check=True)


@pytest.mark.parametrize("first", [True, False])
async def test_a_shared_root_and_one_that_is_not_refuse_each_other(open_tier, first):
    tier = await open_tier(shared=first)
    with pytest.raises(ConfigError, match="all that use a root share it, or none"):
        await open_tier(shared=not first)
    await tier.aclose(DEADLINE_S)
    for _ in range(1 if first else 3):  # Several that share it have it together.
        await open_tier(shared=not first)


def test_of_engines_that_start_at_once_one_has_the_root(launch):
    children = [launch("hammer", keys=100, options={"capacity_bytes": 1 << 20}) for _ in range(3)]
    for child in children:
        child.begin()
    answers = [child.until("done", "refused")[-1] for child in children]
    assert sum("refused root: " in answer and "is used by tier 0:fs of process" in answer for answer in answers) == 2


async def test_a_killed_owner_leaves_the_root_at_once(open_tier, hold):
    hold().kill()
    await open_tier()


async def test_a_start_waits_for_an_owner_that_is_closing(open_tier, hold, caplog, monkeypatch):
    monkeypatch.setattr(owner, "PATIENCE_S", DEADLINE_S)
    child = hold()
    with caplog.at_level(logging.INFO):
        opening = asyncio.create_task(open_tier())
        while "waiting up to" not in caplog.text:
            await asyncio.sleep(0.01)
        child.tell("close")
        await asyncio.wait_for(opening, DEADLINE_S)
    assert caplog.text.count("waiting up to") == 1


async def test_a_replaced_runner_never_waits_for_the_one_that_hangs(open_tier, hold):
    hung = hold(ENGINE, hangs=True)
    await open_tier(engine=ENGINE)
    with pytest.raises(ConfigError, match="is used by"):
        await open_tier()
    hung.kill()
    with pytest.raises(ConfigError, match="is used by"):  # Its end changes nothing: the successor has the root.
        await open_tier()


@pytest.mark.parametrize("other", ["tier", "successor"])
async def test_a_successor_gives_way_to_who_took_the_root_just_then(root, hold, open_tier, monkeypatch, other):
    hold(ENGINE, hangs=True)
    said, rename = owners_file(root), below.rename
    theirs = json.dumps(said | {"tier": "1:theirs", "engine": 0})

    def race(root_fd, name, new):
        if new == owner.OWNER and other == "tier":
            (root / owner.OWNER).write_text(theirs)
        rename(root_fd, name, new)
        if new == owner.OWNER and other == "successor":
            (root / "later").write_text(theirs)
            (root / "later").rename(root / owner.OWNER)
            monkeypatch.setattr(below, "rename", rename)

    monkeypatch.setattr(below, "rename", race)
    if other == "tier":
        with pytest.raises(ConfigError, match="is used by tier 1:theirs"):
            await open_tier(engine=ENGINE)
    else:  # Nobody has that one's lock.
        await open_tier(engine=ENGINE)
        assert owners_file(root)["process"] != said["process"]


async def test_a_successor_takes_a_root_that_its_predecessor_leaves(root, hold, open_tier, monkeypatch):
    hold(ENGINE, hangs=True)
    temporary_name = owner.temporary_name

    def race(*args):
        (root / owner.OWNER).unlink()
        monkeypatch.setattr(owner, "temporary_name", temporary_name)
        return temporary_name(*args)

    monkeypatch.setattr(owner, "temporary_name", race)
    await open_tier(engine=ENGINE)
    assert owners_file(root)["pid"] == ENGINE.pid


async def test_two_engines_of_one_process_are_two(open_tier, hold):
    hold(EngineId(os.getpid(), 1))
    with pytest.raises(ConfigError, match="is used by"):
        await open_tier(engine=EngineId(os.getpid(), 2))


async def test_without_locks_a_root_of_ones_own_works_and_warns(open_tier, monkeypatch, caplog):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    await open_tier(holds=keys_of(1))
    assert "no locks on files" in caplog.text
    with pytest.raises(ConfigError, match="a file system with locks on files accepted"):
        await open_tier(shared=True)


async def test_a_fork_of_the_owner_neither_keeps_nor_loses_the_root(open_tier, outside):
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


async def test_something_else_in_the_owners_place_is_refused_by_name(open_tier, root):
    root.mkdir()
    victim = root.with_name("victim")
    victim.write_bytes(b"mine")
    (root / owner.OWNER).symlink_to(victim)
    with pytest.raises(ConfigError, match=re.escape(f"{owner.OWNER} is a symbolic link")):
        await open_tier()
    assert victim.read_bytes() == b"mine"


async def test_what_the_owners_file_says_is_quoted_on_one_line(open_tier, root, monkeypatch):
    await open_tier()
    monkeypatch.setattr(owner, "PATIENCE_S", 0.0)
    said = (root / owner.OWNER).read_text()
    for content in ("", "[" * 4_096, '{"tier": 1}', said.replace("0:fs", "\\u001b[2J\\u009b\\n")):
        (root / owner.OWNER).write_text(content)
        with pytest.raises(ConfigError, match="is used by") as refused:
            await open_tier()
        assert str(refused.value).isprintable()


def modes(root):
    return {stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")] if path.is_dir()}


async def test_a_directory_that_a_tier_makes_is_its_users_alone(open_tier, root, layout):
    await open_tier(layout=layout, holds=keys_of(4))
    assert modes(root) == {0o700}


@pytest.mark.parametrize("mode", [0o2770, 0o750, 0o755, 0o1777])
async def test_folders_below_a_root_that_was_there_have_its_permissions(open_tier, lender, root, mode):
    root.mkdir()
    root.chmod(mode)
    before = os.umask(0o077)
    try:
        tier = await open_tier(shared=True, capacity_bytes="8MiB", holds=keys_of(4))
    finally:
        os.umask(before)
    assert await lender.recall(tier, keys_of(4)) == whole(keys_of(4))
    private = mode & stat.S_ISVTX
    assert modes(root) == {mode, 0o700} if private else {mode}
    books = [*root.glob("*.json"), *root.glob("*/ledger*")]
    expected = 0o600 if private else mode & 0o660 | mode & 0o006
    assert {stat.S_IMODE(book.stat().st_mode) for book in books} == {expected}
