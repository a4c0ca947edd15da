"""The page of a shared directory: no two processes are promised the same room, whoever dies, whatever is damaged."""

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtier.errors import BackendUnavailable
from kvtier.memory import PAGE_BYTES
from kvtier_backends.fs.disk.shared_page import SLOTS, SharedPage, read_page
from tests.fs.conftest import DEADLINE_S

BOOT = b"8 bytes."


@pytest.fixture
def open_page(request, tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)

    def open_page(boot=BOOT):
        page = SharedPage(fd, "ledger", boot)
        request.addfinalizer(page.close)
        return page

    yield open_page
    os.close(fd)


@pytest.fixture
def one_and_other(open_page):
    return counted(open_page(), 0), open_page()


@pytest.fixture
def ledger(tmp_path):
    return tmp_path / "ledger"


def counted(page, seen_bytes):
    page.end_count(page.begin_count(), seen_bytes)
    return page


def test_nothing_is_promised_before_the_directory_was_counted(open_page):
    page = open_page()
    assert page.reserve(10, 100) is None
    counted(page, 40)
    assert (page.reserve(100, 100), page.taken()) == (60, (40, 60))


def test_what_one_promises_the_other_cannot(one_and_other):
    one, two = one_and_other
    assert (one.reserve(70, 100), two.reserve(70, 100)) == (70, 30)
    one.settle(70, 50)
    assert (two.taken(), two.exchange(20, 15)) == ((50, 30), 15)
    assert two.taken() == (30, 45)


def test_what_the_dead_had_promised_counts_as_written_until_it_is_counted(one_and_other):
    dead, alive = one_and_other
    assert dead.reserve(60, 100) == 60
    dead.close()  # As the kernel does.
    assert alive.reserve(60, 100) == 40
    alive.settle(40, 40)
    assert alive.reserve(10, 100) == 0
    counted(alive, 40 + 20)  # Of the dead one's sixty, twenty had been written.
    assert alive.taken() == (60, 0)


def test_a_count_beside_stores_is_at_least_what_is_there(one_and_other):
    one, two = one_and_other
    began = one.begin_count()
    two.settle(two.reserve(50, 1_000), 50)  # May have been seen, or not.
    one.end_count(began, 50)
    assert 50 <= one.taken()[0] <= 100
    counted(one, 50)
    assert one.taken()[0] == 50


def test_a_damaged_page_says_that_nothing_is_known(open_page, ledger):
    page, whole = counted(open_page(), 10), ledger.read_bytes()
    for damage in (b"", b"?" * PAGE_BYTES, whole[:-1] + b"!", whole[:-1], whole[:8] + b"\2" + whole[9:]):
        ledger.write_bytes(damage)
        assert page.reserve(10, 100) is None
        page.settle(0, 5)
        counted(page, 40)
        assert page.taken() == (40, 0)


def test_every_flipped_bit_is_seen(open_page, ledger):
    page, old = counted(open_page(), 10), ledger.read_bytes()
    page.settle(page.reserve(77, 100) or 0, 33)
    new = ledger.read_bytes()
    for bit in range(8 * PAGE_BYTES):
        flipped = bytearray(new)
        flipped[bit // 8] ^= 1 << bit % 8
        assert read_page(bytes(flipped)) is None, bit
    for end in range(PAGE_BYTES):
        assert (torn := new[:end] + old[end:]) in (old, new) or read_page(torn) is None, end


@given(bits=st.lists(st.integers(0, 8 * PAGE_BYTES - 1), min_size=1, max_size=8, unique=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_room_that_was_promised_stays_promised_on_a_new_page(bits, open_page, ledger):
    one, two = counted(open_page(), 10), open_page()
    assert (one.reserve(60, 100), two.reserve(5, 100)) == (60, 5)
    page = bytearray(ledger.read_bytes())
    for bit in bits:
        page[bit // 8] ^= 1 << bit % 8
    ledger.write_bytes(page)
    counted(two, 10)
    assert two.reserve(5, 100) is None, "the first has not said what it has promised"
    assert two.taken() is None
    assert (one.taken(), two.reserve(50, 100)) == ((10, 65), 25)
    one.settle(60, 0)
    two.settle(30, 0)
    assert one.taken() == two.taken() == (10, 0)
    one.close()
    two.close()


def test_whoever_dies_before_it_says_what_it_has_promised_is_not_waited_for(open_page, ledger):
    dead, alive = counted(open_page(), 10), open_page()
    assert dead.reserve(60, 100) == 60
    ledger.write_bytes(b"")
    assert alive.reserve(1, 100) is None
    dead.close()
    counted(alive, 40)
    assert alive.reserve(100, 100) == 60


def test_a_count_that_began_before_the_page_was_lost_is_not_taken(one_and_other, ledger):
    one, two = one_and_other
    one.settle(0, 80)
    began = one.begin_count()
    ledger.write_bytes(b"")
    assert two.taken() is None
    one.end_count(began, 80)
    assert one.taken() is None
    counted(two, 80)
    assert one.taken() == (80, 0)


def test_a_page_that_is_older_than_one_that_was_seen_is_not_taken(open_page, ledger):
    page, old = counted(open_page(), 10), ledger.read_bytes()
    page.settle(0, 80)
    ledger.write_bytes(old)
    assert page.reserve(90, 100) is None
    counted(page, 90)
    assert page.reserve(90, 100) == 10


def test_a_page_is_what_was_published(open_page, ledger):
    """Zeros where it says when it was begun are taken, too; processes that write them may still be at it."""
    head = struct.pack("<8sII8sQQQ64Q", b"\x89kvledg\n", 1, 1, BOOT, 30, 70, 40, *bytes(64))
    body = head.ljust(PAGE_BYTES - 8, b"\0")
    former = body + xxh3_64_intdigest(body).to_bytes(8, "little")
    ledger.write_bytes(former)
    page = open_page()
    assert (page.taken(), page.reserve(50, 100)) == ((30, 0), 50)
    ledger.write_bytes(former)  # As one of its processes does that has seen nothing of ours.
    assert page.taken() == (30, 50)


@pytest.mark.parametrize("alone", [False, True])
def test_after_another_boot_the_directory_is_counted_again_unless_somebody_was_there(open_page, alone):
    first = counted(open_page(), 10)
    if alone:
        first.close()
    assert open_page(b"another.").reserve(1, 100) == (None if alone else 1)


def test_there_are_only_so_many_slots(open_page):
    for _ in range(SLOTS):
        open_page()
    with pytest.raises(BackendUnavailable, match="64 processes"):
        open_page()


# On a file server, which forgets the locks of a machine that was cut off for longer than its lease.


def forget_locks(page, ledger):
    fd = os.open(ledger, os.O_RDWR)
    os.dup2(fd, page._fd, inheritable=False)
    os.close(fd)


def test_a_lock_that_is_free_again_is_had_though_nobody_is_woken(one_and_other, monkeypatch):
    """A kernel that waits for a lock of a file server's sleeps for a second, then for two, up to thirty."""
    real = fcntl.fcntl

    def wakes_nobody(fd, command, lock=b""):
        assert command != fcntl.F_OFD_SETLKW, "this would sleep"
        return real(fd, command, lock)

    monkeypatch.setattr(fcntl, "fcntl", wakes_nobody)
    one, other = one_and_other
    had = threading.Event()

    def evict():
        with other.evicting():
            had.set()

    waiting = threading.Thread(target=evict)
    with one.evicting():
        waiting.start()
        assert other.taken() == (0, 0)
        assert not had.is_set()
    assert had.wait(DEADLINE_S)
    waiting.join()


def test_a_process_that_lost_its_locks_takes_a_new_slot_and_keeps_its_promise(one_and_other, ledger, system_call):
    one, other = one_and_other
    assert one.reserve(60, 100) == 60
    forget_locks(one, ledger)
    assert other.reserve(10, 100) == 10
    failing = system_call("pread", error=errno.EIO, only=lambda fd, *_: fd == one._fd)
    with pytest.raises(BackendUnavailable, match="ledger: the shared page is away: Input/output error"):
        one.taken()
    failing.let_go()
    assert one.taken() == (60, 70)  # What was promised counts as written, and is promised still.
    one.settle(60, 50)
    assert other.taken() == (110, 10)
    counted(one, 50)
    assert other.taken() == (50, 10)


def test_a_slot_that_another_process_has_had_meanwhile_stays_its(one_and_other, open_page, ledger, system_call):
    one, other = one_and_other
    assert one.reserve(30, 100) == 30
    forget_locks(one, ledger)
    third = open_page()  # It has the slot that the first has lost, and what that had promised counts as written.
    assert third.reserve(20, 100) == 20
    failing = system_call("pread", error=errno.EIO, only=lambda fd, *_: fd == one._fd)
    with pytest.raises(BackendUnavailable):
        one.settle(30, 30)
    failing.let_go()
    assert one.taken() == (30, 50)
    third.settle(20, 20)
    one.settle(30, 30)
    assert other.taken() == (80, 0)


def test_who_waits_behind_a_call_that_fails_fails_with_it(one_and_other, system_call):
    page, _ = one_and_other
    hanging, told = system_call("pread", error=errno.EIO, sticks=True), []

    def ask():
        try:
            page.taken()
        except BackendUnavailable as error:
            told.append(error)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    asking[0].start()
    assert hanging._entered.acquire(timeout=DEADLINE_S)
    for thread in asking[1:]:
        thread.start()
    while sum(b"futex" in Path(f"/proc/self/task/{each.native_id}/wchan").read_bytes() for each in asking) < 4:
        pass  # Until all of them wait.
    hanging._opened.set()
    for thread in asking:
        thread.join()
    assert (len(told), hanging.times) == (4, 1)
