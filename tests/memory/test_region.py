import ctypes
import os
import signal

import pytest

from kvtier.errors import ConfigError
from kvtier.memory.region import Region

pytestmark = pytest.mark.usefixtures("no_descriptor_left")

ROW_BYTES = 8_192

CHILD_WRITES = """
import sys
from kvtier.memory.region import Region
region = Region.attach(int(sys.argv[1]), 4, 8192)
region.row(2)[:] = b"\\x07" * 8192
print("written", flush=True)
sys.stdin.read()
"""

CHILD_WITH_LIMITS = """
import os, resource, sys
from kvtier.errors import ConfigError
from kvtier.memory.region import Region
kind, limit = sys.argv[1:3]
resource.setrlimit(getattr(resource, limit), (64 << 20, 64 << 20)) if limit == "RLIMIT_FSIZE" else None
if limit == "RLIMIT_AS":
    mapped = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (64 << 20), mapped + (64 << 20)))
make = {
    "private": lambda: Region.private(1 << 16, 4096),
    "memfd": lambda: Region.memfd(1 << 16, 4096),
    "shared": lambda: Region.shared(sys.argv[3], 1 << 16, 4096, participant=0, participants=2),
}[kind]
before = os.listdir("/proc/self/fd")
try:
    make()
except ConfigError as error:
    print(error)
assert os.listdir("/proc/self/fd") == before
"""

CHILD_WITHOUT_ADVICE = """
# seccomp refuses huge pages (14), exclusion from dumps (16) and population (23), as an old kernel does.
import ctypes, os, platform, struct, sys
from kvtier.memory.region import Region
madvise = {"x86_64": 28, "aarch64": 233}[platform.machine()]
LOAD, EQUAL, RETURN, ALLOW, REFUSE = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000 | 22
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 4, madvise), (LOAD, 0, 0, 32), (EQUAL, 3, 0, 14), (EQUAL, 2, 0, 16),
         (EQUAL, 1, 0, 23), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    print("no seccomp")
    sys.exit()
assert libc.madvise(None, 0, 23) == -1 and ctypes.get_errno() == 22
with Region.attach(int(sys.argv[1]), 4, 8192) as peer:
    peer.row(1)[:] = b"\\x05" * 8192
    own = Region.memfd(4, 8192) if sys.argv[2] == "memfd" else Region.private(4, 8192)
    pages = (ctypes.c_ubyte * 8)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(own.view))
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(4 * 8192), pages) == 0
    # Pages that were allocated for a file count as resident only once they are cleared.
    there = sum(page & 1 for page in pages) * 4096 if own.fd is None else os.fstat(own.fd).st_blocks * 512
    print("bytes there:", there, "all zero:", bytes(own.view) == bytes(4 * 8192))
"""


@pytest.fixture(params=["private", "memfd", "shared"])
def make(request, shm_path):
    if request.param == "shared":
        return lambda rows, row_bytes: Region.shared(shm_path, rows, row_bytes, participant=0, participants=1)
    return getattr(Region, request.param)


def address(view):
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def resident(region):
    pages = (ctypes.c_ubyte * (region.rows * region.row_bytes // 4096))()
    start = ctypes.c_void_p(address(region.view))
    assert ctypes.CDLL(None).mincore(start, ctypes.c_size_t(region.rows * region.row_bytes), pages) == 0
    return [page & 1 for page in pages]


def mapped(start):
    with open("/proc/self/maps") as maps:
        spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    return any(low <= start < high for low, high in spans)


def test_rows_are_zero_writable_aligned_and_separate(make):
    with make(4, ROW_BYTES) as region:
        assert bytes(region.view) == bytes(4 * ROW_BYTES)
        for index in range(4):
            row = region.row(index)
            assert (row.format, row.nbytes, row.readonly, address(row) % 4_096) == ("B", ROW_BYTES, False, 0)
            row[:] = bytes([index + 1]) * ROW_BYTES
            del row
        assert bytes(region.view) == b"".join(bytes([index + 1]) * ROW_BYTES for index in range(4))


@pytest.mark.parametrize("index", [-1, 4, 1 << 70])
def test_an_index_outside_the_region_is_an_error(index):
    with Region.private(4, ROW_BYTES) as region, pytest.raises(IndexError, match=f"row {index} of 4"):
        region.row(index)


def test_all_memory_is_allocated_at_the_start(make):
    with make(64, ROW_BYTES) as region:
        assert resident(region) == [1] * 128


@pytest.mark.parametrize("kind", ["private", "memfd"])
@pytest.mark.skipif(os.uname().machine not in {"x86_64", "aarch64"}, reason="the number of madvise is not known here")
def test_a_kernel_that_refuses_every_advice_still_prefaults(kind, spawn):
    with Region.memfd(4, ROW_BYTES) as region:
        said = spawn(CHILD_WITHOUT_ADVICE, region.fd, kind, pass_fds=(region.fd,)).communicate()[0]
        if said == "no seccomp\n":
            pytest.skip("system calls cannot be filtered here")
        assert said == "bytes there: 32768 all zero: True\n"
        assert bytes(region.row(1)) == b"\x05" * ROW_BYTES


def test_an_attached_region_outlives_the_one_it_was_attached_to():
    first = Region.memfd(4, ROW_BYTES)
    second = Region.attach(first.fd, 4, ROW_BYTES)
    first.row(1)[:] = b"\x03" * ROW_BYTES
    first.close()
    with second, Region.attach(second.fd, 4, ROW_BYTES) as third:
        assert bytes(third.row(1)) == b"\x03" * ROW_BYTES


def test_the_bytes_of_a_killed_process_stay_for_the_others(spawn):
    with Region.memfd(4, ROW_BYTES) as region:
        child = spawn(CHILD_WRITES, region.fd, pass_fds=(region.fd,))
        assert child.stdout.readline() == "written\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert bytes(region.view) == bytes(2 * ROW_BYTES) + b"\x07" * ROW_BYTES + bytes(ROW_BYTES)


def test_a_region_of_another_size_is_not_attached():
    with Region.memfd(4, ROW_BYTES) as region:
        for rows, row_bytes in ((5, ROW_BYTES), (3, ROW_BYTES), (4, 4_096)):
            with pytest.raises(ConfigError, match="expected behind a file of 32,768 bytes"):
                Region.attach(region.fd, rows, row_bytes)
        with pytest.raises(ConfigError, match="Bad file descriptor"):
            Region.attach(1_000_000, 4, ROW_BYTES)


def test_a_region_cannot_be_truncated_under_its_mappings():
    with Region.memfd(4, ROW_BYTES) as region:
        for size_bytes in (0, 5 * ROW_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size_bytes)


def test_a_closed_region_gives_its_memory_back_and_has_no_rows(make):
    region = make(4, ROW_BYTES)
    start = address(region.view)
    assert mapped(start)
    region.close()
    region.close()
    assert not mapped(start)
    assert region.fd is None
    with pytest.raises(ValueError, match="released"):
        region.row(0)
    with pytest.raises(ValueError, match="released"):
        _ = region.view


def test_memory_stays_under_a_lent_row_until_it_comes_back(make):
    region = make(4, ROW_BYTES)
    lent = region.row(1)
    start = address(lent)
    region.close()
    lent[:] = b"\x06" * ROW_BYTES
    assert bytes(lent) == b"\x06" * ROW_BYTES
    assert mapped(start)
    del lent
    assert not mapped(start)


@pytest.mark.parametrize(
    ("rows", "row_bytes"), [(0, 4_096), (-1, 4_096), (1, 0), (1, -4_096), (1, 4_095), (1, 4_097), (-2, -4_096)]
)
def test_impossible_sizes_are_refused(make, rows, row_bytes):
    with pytest.raises(ConfigError, match=r"at least one is needed|a positive multiple of 4,096 is needed"):
        make(rows, row_bytes)


@pytest.mark.parametrize("rows", [1 << 40, 1 << 52, 1 << 90])
def test_a_size_above_the_free_memory_is_refused_before_it_is_touched(make, rows):
    with pytest.raises(
        ConfigError, match=r"^[\d,]+ bytes of host memory were asked for and [\d,]+ are free in .+: ask"
    ):
        make(rows, 4_096)


@pytest.mark.parametrize(
    ("kind", "limit", "reason"),
    [
        ("private", "RLIMIT_AS", "Cannot allocate memory"),
        ("memfd", "RLIMIT_AS", "Cannot allocate memory"),
        ("shared", "RLIMIT_AS", "Cannot allocate memory"),
        ("memfd", "RLIMIT_FSIZE", "File too large"),
        ("shared", "RLIMIT_FSIZE", "File too large"),
    ],
)
def test_a_region_that_the_kernel_refuses_leaves_no_descriptor_or_file(kind, limit, reason, spawn, shm_path):
    child = spawn(CHILD_WITH_LIMITS, kind, limit, shm_path)
    assert reason in child.communicate()[0]
    assert child.returncode == 0


def test_a_region_over_the_callers_memory():
    memory = memoryview(bytearray(3 * 4_096)).cast("b", (3, 4_096))
    with Region.over(memory, 3, 4_096) as region:
        region.row(1)[:] = b"\x07" * 4_096
        assert region.row(2) == bytes(4_096)
        assert region.fd is None
    assert (memory[1, 0], memory[2, 0]) == (7, 0)
    with pytest.raises(ConfigError, match="4 rows of 4,096 bytes expected in 12,288 bytes"):
        Region.over(memory, 4, 4_096)
