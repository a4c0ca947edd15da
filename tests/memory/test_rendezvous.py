"""Processes that meet in one file of shared memory: in races, after deaths, with different sizes."""

import fcntl
import functools
import mmap
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.memory.region import Region
from kvtier.memory.rendezvous import Apart, Meeting, SharedFile, mappings

pytestmark = pytest.mark.usefixtures("no_descriptor_left")

ROW_BYTES = 4_096


# Joins as one participant, writes its number into its row, reports it, and waits to be killed.
PARTICIPANT = """
import sys
from kvtier.errors import ConfigError
from kvtier.memory.region import Region
path, participant, participants = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
region = Region.shared(path, participants, 4096, participant=participant, participants=participants)
region.row(participant)[:] = bytes([participant + 1]) * 4096
sys.stdout.write("written\\n"); sys.stdout.flush()
sys.stdin.readline()
"""

MAPS = """
import mmap, sys
file = open(sys.argv[1], "r+b")
mapped = mmap.mmap(file.fileno(), 8_192)
sys.stdout.write("\\n"); sys.stdout.flush()
sys.stdin.readline()
"""

# Joins and leaves again and again as one of two participants, and reports each time; killed at any moment.
RESTLESS = """
import sys
from kvtier.memory.region import Region
while True:
    region = Region.shared(sys.argv[1], 64, 4096, participant=0, participants=2)
    assert bytes(region.view) == bytes(64 * 4096)
    region.view[:] = bytes([1]) * (64 * 4096)
    sys.stdout.write("met\\n"); sys.stdout.flush()
    region.close()
"""


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def joined(spawn, path, participant, participants):
    process = spawn(PARTICIPANT, path, participant, participants)
    assert process.stdout.readline() == "written\n"
    return process


def shared(path, participant, participants, *, rows=4, timeout_s=10.0):
    return Region.shared(path, rows, ROW_BYTES, participant=participant, participants=participants, timeout_s=timeout_s)


def test_many_races_make_one_memory_each_and_leave_no_name(shm_path):
    with ThreadPoolExecutor(8) as threads:
        for number in range(40):
            path, barrier = f"{shm_path}-{number}", threading.Barrier(8)

            def meet(participant, path=path, barrier=barrier):
                barrier.wait()
                with shared(path, participant, 8, rows=8) as region:
                    region.row(participant)[:] = bytes([participant]) * ROW_BYTES
                    barrier.wait()
                    return bytes(region.view)

            assert set(threads.map(meet, range(8))) == {b"".join(bytes([n]) * ROW_BYTES for n in range(8))}
            assert not os.path.exists(path)


def test_memory_that_a_peer_has_taken_for_all_counts_once(small_tmpfs):
    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            barrier = threading.Barrier(4)

            def meet(participant, barrier=barrier):
                barrier.wait()
                return shared(str(small_tmpfs / "region"), participant, 4, rows=200)

            for region in list(threads.map(meet, range(4))):
                region.close()


def test_of_participants_that_leave_at_once_one_removes_the_name(shm_path, request):
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(200):
            meetings = [Meeting(shm_path, 1, ROW_BYTES, 5, number) for number in range(4)]
            files, barrier = [SharedFile.meet(meeting, timeout_s=1.0) for meeting in meetings], threading.Barrier(4)

            def leave(file, barrier=barrier):
                barrier.wait()
                file.leave()

            list(threads.map(leave, files))
            assert not os.path.exists(shm_path)


def test_the_last_participant_to_map_or_to_leave_early_removes_the_name(shm_path):
    first, second = shared(shm_path, 0, 3), shared(shm_path, 2, 3)
    first.close()
    assert os.path.exists(shm_path)
    second.close()
    assert not os.path.exists(shm_path)
    with shared(shm_path, 0, 2):
        assert os.path.exists(shm_path)
        with shared(shm_path, 1, 2):
            assert not os.path.exists(shm_path)


def test_participants_that_find_a_dead_ones_file_at_once_meet_in_a_new_one(spawn, shm_path):
    for dead in ([1], [0, 2], [0, 1, 3]):  # Of the others, the place in the old file is free.
        for process in [joined(spawn, shm_path, number, 4) for number in dead]:
            kill(process)
        assert os.path.exists(shm_path)
        with ThreadPoolExecutor(4) as threads:
            regions = list(threads.map(lambda number: shared(shm_path, number, 4), range(4)))
        assert not os.path.exists(shm_path)
        regions[0].view[:] = b"\x08" * (4 * ROW_BYTES)
        assert all(bytes(region.view) == b"\x08" * (4 * ROW_BYTES) for region in regions)
        for region in regions:
            region.close()


def test_the_next_region_in_a_directory_removes_a_dead_ones(spawn, shm_path):
    kill(joined(spawn, f"{shm_path}-dead", 0, 2))
    other = Path(f"{shm_path}-other")
    other.write_bytes(bytes(2 * 4_096))
    with shared(f"{shm_path}-alive", 0, 2), shared(shm_path, 0, 1):
        assert not os.path.exists(f"{shm_path}-dead")
        assert os.path.exists(f"{shm_path}-alive")
        other.unlink()


@pytest.mark.parametrize("seed", range(6))
def test_a_participant_killed_at_any_moment_blocks_no_other(seed, spawn, shm_path):
    process = spawn(RESTLESS, shm_path)
    for _ in range(random.Random(seed).randrange(1, 300)):
        assert process.stdout.readline() == "met\n"
    kill(process)
    with shared(shm_path, 0, 2) as first, shared(shm_path, 1, 2) as second:
        assert bytes(first.view) == bytes(second.view) == bytes(4 * ROW_BYTES)
    assert not os.path.exists(shm_path)


def test_the_others_stay_together_when_one_is_killed(spawn, shm_path):
    with shared(shm_path, 0, 3, rows=3) as first:
        kill(joined(spawn, shm_path, 1, 3))
        with pytest.raises(ConfigError, match=r"participant 1 has mapped it already .* its own path"):
            shared(shm_path, 1, 3, rows=3, timeout_s=0.02)  # It would share no state with them: all start again.
        with shared(shm_path, 2, 3, rows=3) as third:
            third.row(2)[:] = b"\x03" * ROW_BYTES
            assert bytes(first.view) == bytes(ROW_BYTES) + b"\x02" * ROW_BYTES + b"\x03" * ROW_BYTES


def test_a_successor_waits_for_its_predecessors_end(spawn, shm_path):
    predecessor = joined(spawn, shm_path, 0, 2)  # With two rows: of another size, even.
    with ThreadPoolExecutor(1) as threads:
        successor = threads.submit(shared, shm_path, 0, 2)
        kill(predecessor)
        with successor.result() as region:
            assert bytes(region.view) == bytes(4 * ROW_BYTES)


@pytest.mark.parametrize(("rows", "row_bytes", "participants"), [(5, 4_096, 2), (2, 8_192, 2), (4, 4_096, 3)])
def test_participants_with_different_sizes_get_an_error_with_both(rows, row_bytes, participants, shm_path):
    with shared(shm_path, 0, 2) as first:
        message = (
            rf"has 4 rows of 4,096 bytes for 2 participants, but participant 1 expects {rows} of {row_bytes:,}"
            rf" for {participants}: give all participants the same configuration"
        )
        with pytest.raises(ConfigError, match=message):
            Region.shared(shm_path, rows, row_bytes, participant=1, participants=participants)
        with shared(shm_path, 1, 2) as second:
            second.row(3)[:] = b"\x09" * ROW_BYTES
            assert bytes(first.row(3)) == b"\x09" * ROW_BYTES


@pytest.mark.parametrize(("participant", "participants"), [(-1, 2), (2, 2), (0, 0), (0, 5_000)])
def test_an_impossible_participant_is_refused(participant, participants, shm_path):
    with pytest.raises(ConfigError, match=f"participant {participant} of {participants}"):
        shared(shm_path, participant, participants)


# The owner starts when all participants have met, and not at all if some see other memory.


def owned(path, participants, **fields):
    return Region.shared(path, 8, ROW_BYTES, participant=participants - 1, participants=participants, **fields)


def test_an_owner_starts_when_the_last_of_the_others_has_mapped(shm_path):
    with ThreadPoolExecutor(1) as threads, shared(shm_path, 0, 3, rows=8) as first:
        with pytest.raises(Apart, match="participants 1 to 2 of 3"):
            first.require_met()
        owner = threads.submit(owned, shm_path, 3, met_s=60.0)
        with shared(shm_path, 1, 3, rows=8) as second, owner.result() as region:
            for each in (first, second, region):
                each.require_met()


def test_an_owner_learns_which_participants_are_on_another_host(spawn, shm_path):
    """Another directory stands for another host's shared memory: the same name, other memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        far = [joined(spawn, f"{elsewhere}/region", number, 8) for number in (2, 3, 4, 6)]
        here = [joined(spawn, shm_path, number, 8) for number in (0, 1, 5)]
        with pytest.raises(Apart) as refused:
            owned(shm_path, 8, met_s=0.02)
        assert refused.value.missing == [2, 3, 4, 6]
        message = rf"^{shm_path}: participants 2 to 4, 6 of 8 have not mapped it on {socket.gethostname()}: "
        assert re.search(message, str(refused.value))
        with shared(shm_path, 6, 8, rows=8) as region:
            with pytest.raises(Apart, match="participants 2 to 4 of 8"):
                region.require_met()
            for process in (*far, *here):
                kill(process)
        os.unlink(f"{elsewhere}/region")


# Rows that other programs have mapped without participants: vLLM's.


def test_mappings_of_a_file_are_counted_in_every_process(spawn, shm_path):
    Path(shm_path).write_bytes(bytes(2 * 4_096))
    with open(shm_path, "r+b") as file:
        assert mappings(file.fileno(), 3) == 0
        with mmap.mmap(file.fileno(), 8_192), mmap.mmap(file.fileno(), 4_096, offset=4_096):
            assert mappings(file.fileno(), 3) == 1  # Each part is one; only the one with the beginning counts.
            others = [spawn(MAPS, shm_path) for _ in range(2)]
            assert [other.stdout.readline() for other in others] == ["\n", "\n"]
            assert mappings(file.fileno(), 5) == 3
            kill(others[0])
            assert mappings(file.fileno(), 5) == 2
    os.unlink(shm_path)


@pytest.mark.parametrize("content", [b"", b"other data", bytes(5 * 4_096)])
def test_any_other_file_is_left_unchanged(content, shm_path):
    Path(shm_path).write_bytes(content)
    with pytest.raises(ConfigError, match="is no region of this user's"):
        shared(shm_path, 0, 2)
    assert Path(shm_path).read_bytes() == content
    os.unlink(shm_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_region_of_another_user_is_not_joined(shm_path):
    with shared(shm_path, 0, 2):
        os.chown(shm_path, 65_534, 65_534)
        with pytest.raises(ConfigError, match="is no region of this user's"):
            shared(shm_path, 1, 2)


def test_a_path_that_cannot_hold_shared_memory_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.symlink("nowhere", tmp_path / "link")
    for path, reason in (
        (tmp_path / "missing" / "region", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "fifo", "is no region of this user's"),
        (tmp_path / "link", "Too many levels of symbolic links"),
        ("/proc/self/fd/region", "cannot make a file without a name; use a tmpfs such as /dev/shm"),
    ):
        with pytest.raises(ConfigError, match=reason):
            shared(str(path), 0, 2)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link"]


def test_the_file_is_private_to_its_user_and_not_inherited(shm_path):
    with shared(shm_path, 0, 2) as region:
        assert os.stat(shm_path).st_mode & 0o777 == 0o600
        assert fcntl.fcntl(region.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_a_participant_that_dies_before_it_has_mapped_blocks_no_other(shm_path):
    file = SharedFile.meet(Meeting(shm_path, 4, ROW_BYTES, 2, 0), timeout_s=1.0)
    os.close(file.fd)  # What the kernel does for a process that is killed here.
    assert os.path.exists(shm_path)
    with shared(shm_path, 0, 2):
        pass
