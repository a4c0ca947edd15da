"""What was there before the tier is found beside its work; temporaries of the dead go, and all else is left alone."""

import errno
import os
import subprocess
import sys
from itertools import count

import pytest

from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.disk.remains import Remains
from kvtier_backends.fs.disk.temporaries import (
    ABANDONED_S,
    TemporarySweep,
    Writer,
    started_at,
    temporary_name,
    writer_of,
)
from tests.fs.conftest import ROW_BYTES, scanned, temporaries, whole

NOW_S = 1_700_000_000.0


async def test_strangers_temporaries_and_links_are_no_chunks(open_tier, stored, lender, path_of):
    await stored(keys_of(1))
    path = path_of(key_of(0))
    content = path.read_bytes()
    for name in (".0-1-2-3.tmp", "notes.txt", f"{path.name}_123.tmp", "zz.bin", path.name.upper()):
        path.with_name(name).write_bytes(content)
    path.with_name(key_of(7)[:32].hex() + ".bin").write_bytes(content)  # In a folder that is not its own.
    (path.parent / "again").symlink_to(path.parent.parent)  # A circle.
    tier = await open_tier()
    assert await scanned(tier, complete=True) == {key_of(0)}
    assert await lender.recall(tier, keys_of(1)) == whole(keys_of(1))


@pytest.mark.parametrize(("unverified", "found"), [("accept", {1}), ("refuse", set())])
async def test_files_that_no_load_would_take_are_skipped_and_counted(open_tier, path_of, unverified, found):
    lengths = {0: 0, 1: ROW_BYTES, 2: ROW_BYTES - 1, 3: ROW_BYTES + 1, 4: ROW_BYTES + 4_097}
    for number, length in lengths.items():
        path_of(key_of(number)).parent.mkdir(parents=True)
        path_of(key_of(number)).write_bytes(bytes(length))
    tier = await open_tier(unverified=unverified)
    assert await scanned(tier, complete=True) == {key_of(number) for number in found}
    assert tier.counters().scan_skipped == len(lengths) - len(found)
    assert all(path_of(key_of(number)).exists() for number in lengths)


async def test_the_tier_answers_while_it_is_scanned(open_tier, stored, lender, hurry, system_call):
    await stored(keys_of(3))
    hurry()
    listing, tier = system_call("scandir", sticks=True), await open_tier()
    await listing.wait_entered()
    assert list(await tier.probe(keys_of(5))) == [True, True, True, False, False]
    assert await lender.recall(tier, keys_of(4)) == [*whole(keys_of(3)), "ChunkMissing"]
    await lender.keep(tier, [key_of(9)])
    assert list(await tier.probe([key_of(9), key_of(8)])) == [True, False]
    listing.let_go()
    assert await scanned(tier, complete=True) == {*keys_of(3), key_of(9)}


async def test_what_is_deleted_beside_the_scan_stays_deleted(open_tier, stored, lender, hurry, system_call):
    await stored(keys_of(2))
    folders = count(1)  # The namespace, then one folder of the last key's two: the first key's have been seen.
    hurry()
    listing = system_call("scandir", sticks=True, only=lambda folder: next(folders) > 4)
    tier = await open_tier()
    await listing.wait_entered()
    await tier.delete(keys_of(2))
    await lender.keep(tier, [key_of(1)])
    listing.let_go()
    assert await scanned(tier, complete=True) == {key_of(1)}
    assert list(await tier.probe(keys_of(2))) == [False, True]


async def test_an_index_that_is_whole_answers_without_a_system_call(open_tier, system_call):
    tier, asked = await open_tier(holds=keys_of(2), scanned=True), system_call("stat")
    assert (list(await tier.probe(keys_of(3))), asked.times) == ([True, True, False], 0)


async def test_an_unreadable_folder_leaves_the_tier_asking(open_tier, stored, lender, path_of, system_call):
    await stored(keys_of(2))
    hidden = path_of(key_of(0)).parent.name
    lists_it = lambda name, flags, *_, **__: flags & os.O_DIRECTORY and name.endswith(hidden)  # noqa: E731
    system_call("open", error=errno.EACCES, only=lists_it)
    tier = await open_tier()
    assert (await scanned(tier, complete=False), tier.counters().scan_failed) == ({key_of(1)}, 1)
    assert list(await tier.probe(keys_of(3))) == [True, True, False]
    assert await lender.recall(tier, keys_of(1)) == whole(keys_of(1))


# Temporaries: of this machine's dead processes, and of others' when they are old.


@pytest.fixture
def sleeper(outside):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def sweep(tmp_path):
    root_fd = os.open(tmp_path, os.O_RDONLY)
    sweep = TemporarySweep(root_fd, Writer.this_process(), NOW_S, Remains(root_fd))

    def swept(name, age_s=3_600.0):
        path = tmp_path / name
        path.write_bytes(b"half")
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
        assert sweep(".", name) == (writer_of(name) is not None)
        return not path.exists()

    yield swept
    os.close(root_fd)


def test_temporaries_have_names_of_their_own_that_say_whose_they_are():
    writer = Writer.this_process()
    assert (writer.pid, writer) == (os.getpid(), Writer.this_process())
    names = {temporary_name(writer) for _ in range(100)}
    assert (len(names), {writer_of(name) for name in names}) == (100, {writer})


def test_a_live_processs_temporary_is_left_alone(sweep, sleeper):
    assert not sweep(temporary_name(Writer(Writer.this_process().boot, sleeper.pid, started_at(sleeper.pid) or 0)))


def test_a_dead_processs_temporary_is_swept(sweep, sleeper):
    name = temporary_name(Writer(Writer.this_process().boot, sleeper.pid, started_at(sleeper.pid) or 0))
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # Nobody has collected it: dead all the same.
    assert sweep(name, age_s=0.0)
    sleeper.wait()
    assert sweep(name, age_s=0.0)


def test_a_process_of_the_same_id_is_not_the_one_that_wrote(sweep):
    here = Writer.this_process()
    assert sweep(temporary_name(here._replace(started=here.started - 1)), age_s=0.0)
    assert not sweep(temporary_name(here), age_s=2 * ABANDONED_S)


def test_of_another_machine_or_container_only_the_old_is_swept(sweep):
    """Nobody of that id lives here, and yet the writer may. A temporary from the future is old."""
    elsewhere = temporary_name(Writer("00000000", os.getpid(), 1))
    ages_s = [0.0, ABANDONED_S - 1, ABANDONED_S + 1, -ABANDONED_S / 2, -2 * ABANDONED_S]
    assert [sweep(elsewhere, age_s) for age_s in ages_s] == [False, False, True, False, True]


@pytest.mark.parametrize(
    "name",
    ["chunk.bin", "config.json", "chunk.bin_123.tmp", ".hidden", ".tmp", ".0-1-2-3.tmp", ".01234567-1-2-3.tmp.bin"],
)
def test_what_is_no_temporary_of_ours_is_left_alone(sweep, name):
    assert writer_of(name) is None
    assert not sweep(name)


async def test_the_tier_sweeps_what_it_finds_at_its_start(open_tier, stored, lender, root, mapper, path_of):
    await stored(keys_of(2))
    here = Writer.this_process()
    dead = here._replace(started=here.started - 1)
    for folder in (path_of(key_of(0)).parent, path_of(key_of(1)).parent, root / mapper.folder):
        for writer in (dead, here):
            (folder / temporary_name(writer)).write_bytes(b"half")
    (root / mapper.folder / temporary_name(dead)).mkdir()
    tier = await open_tier(scanned=True)
    assert (tier.counters().scan_swept, len(temporaries(root))) == (3, 3)
    assert await lender.recall(tier, keys_of(2)) == whole(keys_of(2))
