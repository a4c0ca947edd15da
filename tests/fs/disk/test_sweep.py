"""Temporaries of the dead are removed at the start; those of the living, and all else, are left alone."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.backend.contract import ScanDone
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsBackend
from kvtier_backends.fs.disk.temporaries import ABANDONED_S, TemporarySweep, Writer, started_at, temporary_name

DEADLINE_S = 20.0
NOW_S = 1_700_000_000.0


@pytest.fixture
def sleeper(outside) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def sweep(tmp_path) -> Iterator[Callable[[str], bool]]:
    """Put a file there, 1 hour old, sweep over it, and say whether it is gone."""
    root_fd = os.open(tmp_path, os.O_RDONLY)
    sweep = TemporarySweep(root_fd, Writer.this_process(), NOW_S)

    def swept(name: str, age_s: float = 3_600.0) -> bool:
        path = tmp_path / name
        path.write_bytes(b"half")
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
        sweep(".", name)
        return not path.exists()

    yield swept
    os.close(root_fd)


def test_a_live_processs_temporary_is_left_alone(sweep, sleeper) -> None:
    here = Writer.this_process()
    started = started_at(sleeper.pid)
    assert started is not None
    assert not sweep(temporary_name(here))
    assert not sweep(temporary_name(Writer(here.boot, sleeper.pid, started)))


def test_a_dead_processs_temporary_is_swept(sweep, sleeper) -> None:
    here = Writer.this_process()
    started = started_at(sleeper.pid)
    assert started is not None
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # Nobody has collected it: dead all the same.
    assert sweep(temporary_name(Writer(here.boot, sleeper.pid, started)), age_s=0.0)
    sleeper.wait()
    assert sweep(temporary_name(Writer(here.boot, sleeper.pid, started)), age_s=0.0)


def test_a_process_of_the_same_id_is_not_the_one_that_wrote(sweep) -> None:
    here = Writer.this_process()
    assert sweep(temporary_name(here._replace(started=here.started - 1)), age_s=0.0)


def test_of_another_machine_or_container_only_the_old_is_swept(sweep) -> None:
    """Its process table is not ours: nobody of that id lives here, and yet the writer may."""
    elsewhere = Writer("00000000", os.getpid(), 1)
    assert not sweep(temporary_name(elsewhere), age_s=0.0)
    assert not sweep(temporary_name(elsewhere), age_s=ABANDONED_S - 1)
    assert sweep(temporary_name(elsewhere), age_s=ABANDONED_S + 1)


@pytest.mark.parametrize("name", ["chunk.bin", "config.json", "chunk.bin_123.tmp", "notes.tmp", ".hidden", ".tmp"])
def test_what_is_no_temporary_of_ours_is_left_alone(sweep, name) -> None:
    assert not sweep(name)


def test_one_that_cannot_be_removed_is_left(tmp_path) -> None:
    name = temporary_name(Writer(Writer.this_process().boot, os.getpid(), 1))
    (tmp_path / name).mkdir()
    root_fd = os.open(tmp_path, os.O_RDONLY)
    sweep = TemporarySweep(root_fd, Writer.this_process(), NOW_S)
    assert sweep(".", name)
    assert sweep.removed == 0
    os.close(root_fd)


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob(".*.tmp"))


async def scan(tier: FsBackend) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for event in tier.watch():
            if isinstance(event, ScanDone):
                return


async def test_the_tier_sweeps_what_it_finds_at_its_start(open_tier, lender, root, mapper, path_of) -> None:
    before = await open_tier()
    await lender.keep(before, keys_of(2))
    await before.aclose(DEADLINE_S)
    here = Writer.this_process()
    dead, live = here._replace(started=here.started - 1), here
    for folder in (path_of(key_of(0)).parent, path_of(key_of(1)).parent, root / mapper.folder):
        for writer in (dead, live):
            (folder / temporary_name(writer)).write_bytes(b"half")
    tier = await open_tier()
    await scan(tier)
    assert tier.counters().scan_swept == 3
    assert len(temporaries(root)) == 3
    assert await lender.recall(tier, keys_of(2)) == [label(key) for key in keys_of(2)]


@pytest.mark.usefixtures("outside")
async def test_what_a_killed_writer_left_is_swept(open_tier, root, mapper, path_of) -> None:
    """Killed between the making of a file and its rename."""
    path_of(key_of(0)).parent.mkdir(parents=True)
    program = """
import os, signal, sys
from kvtier_backends.fs.disk.temporaries import Writer, temporary_name
open(os.path.join(sys.argv[1], temporary_name(Writer.this_process())), "wb").write(bytes(9000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", program, str(path_of(key_of(0)).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = await asyncio.to_thread(subprocess.run, command, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(temporaries(root)) == 1
    tier = await open_tier()
    await scan(tier)
    assert temporaries(root) == []
    assert tier.counters().scan_swept == 1
