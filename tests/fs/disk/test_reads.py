"""Several reads under way at once: whatever becomes of them, each is told once, and none outlasts the call."""

import asyncio
import errno
import itertools
import mmap
import os
import random
import signal
import threading

import pytest

from kvtier.errors import BackendClosed
from kvtier.testing.conformance.lender import keys_of
from kvtier_backends.fs.disk import footer
from kvtier_backends.fs.disk import reads as reads_module
from kvtier_backends.fs.disk.reads import ONE_BY_ONE, PLACES, Context, Reads, Wanted, has_queue
from tests.fs.conftest import DEADLINE_S, whole

PAGE = mmap.PAGESIZE
PAGES = 200


def refuse(*args):
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def is_queued():
    try:
        Context(1)
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not is_queued(), reason="this kernel does not queue reads")


class Watched(Context):
    """One that sees what is under way, and may take less than it is given."""

    def __init__(self, places=PLACES):
        super().__init__(places)
        self.under_way, self.most, self.takes = 0, 0, places
        self.error = 0  # With which all that is not taken is refused.

    def start(self, places):
        if not self.takes:
            raise OSError(self.error, os.strerror(self.error))
        started = super().start(places[: self.takes])
        self.under_way += started
        self.most = max(self.most, self.under_way)
        return started

    def wait(self, under_way):
        ended = super().wait(under_way)
        self.under_way -= len(ended)
        return ended


@pytest.fixture
def watched(monkeypatch):
    context = Watched()
    monkeypatch.setattr(reads_module, "_idle", reads_module.deque([context]))
    return context


@pytest.fixture
def file(tmp_path):
    content, path = random.Random(0).randbytes(PAGES * PAGE), tmp_path / "file"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    yield fd, content
    os.close(fd)


class Asked:
    def __init__(self, fd, pages, page_bytes=PAGE):
        memory = memoryview(mmap.mmap(-1, max(1, len(pages)) * page_bytes))[: len(pages) * page_bytes]
        self.rows = [memory[at : at + page_bytes] for at in range(0, len(memory), page_bytes)]
        self.told = [[] for _ in pages]
        half = page_bytes // 2
        self.wanted = [
            Wanted(fd, [row[:half], row[half:]], page * PAGE, page_bytes, told.append)
            for page, row, told in zip(pages, self.rows, self.told, strict=True)
        ]


@pytest.mark.parametrize(("queue_bytes", "most"), [(PAGE, 0), (PAGE + 1, 2), (3 * PAGE, 6), (1 << 30, PLACES)])
@pytest.mark.parametrize("count", [0, 1, 2, 3, PAGES])
def test_each_read_brings_its_bytes_and_is_told_once(file, watched, queue_bytes, most, count):
    fd, content = file
    pages = random.Random(count).sample(range(PAGES), count)
    asked = Asked(fd, pages)
    Reads(queue_bytes)(iter(asked.wanted))
    assert asked.told == [[PAGE]] * count
    assert [bytes(row) for row in asked.rows] == [content[page * PAGE :][:PAGE] for page in pages]
    assert watched.under_way == 0
    assert watched.most <= most
    assert watched.most >= min(2, most) or count < PAGES


def test_a_read_beyond_the_end_brings_what_there_is(file):
    asked = Asked(file[0], [PAGES - 1, PAGES, PAGES + 1], 2 * PAGE)
    Reads(1 << 20)(asked.wanted)
    assert asked.told == [[PAGE], [0], [0]]


@pytest.mark.parametrize("takes", [0, 1, 3])
def test_what_the_kernel_does_not_take_is_read_all_the_same(file, watched, takes):
    watched.takes, watched.error = takes, errno.EAGAIN
    asked = Asked(file[0], list(range(PAGES)))
    Reads(1 << 20)(asked.wanted)
    assert (asked.told, b"".join(asked.rows)) == ([[PAGE]] * PAGES, file[1])


def test_a_read_that_cannot_be_says_why_and_costs_no_other(file):
    asked = Asked(file[0], list(range(8)))
    asked.wanted[3] = asked.wanted[3]._replace(fd=-1)
    Reads(1 << 20)(asked.wanted)
    told = asked.told.pop(3)[0]
    assert isinstance(told, OSError)
    assert (told.errno, asked.told) == (errno.EBADF, [[PAGE]] * 7)


def test_without_a_context_reads_are_done_one_by_one(file, monkeypatch):
    monkeypatch.setattr(reads_module, "_idle", reads_module.deque())
    monkeypatch.setattr(reads_module, "Context", refuse)
    asked = Asked(file[0], list(range(PAGES)))
    Reads(1 << 20)(asked.wanted)
    assert asked.told == [[PAGE]] * PAGES
    assert not has_queue()


@pytest.mark.parametrize("fails", [2, 7, 40, "telling"])
def test_nothing_is_under_way_when_asking_or_telling_fails(file, watched, fails):
    wanted = Asked(file[0], list(range(PAGES))).wanted

    def fail(result):
        assert watched.under_way
        raise LookupError

    def asking():
        yield from wanted[:fails]
        raise LookupError

    failing = [*wanted[:20], *(each._replace(done=fail) for each in wanted[20:])] if fails == "telling" else asking()
    with pytest.raises(LookupError):
        Reads(1 << 20)(failing)
    assert watched.most
    assert watched.under_way == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_contexts_of_its_own(outside, file, monkeypatch):
    results, asked = spoiled(monkeypatch, lambda result: result), Asked(file[0], list(range(PAGES)))
    Reads(1 << 20)(asked.wanted)
    if not (child := os.fork()):
        Reads(1 << 20)(asked.wanted)
        os._exit(asked.told != [[PAGE, PAGE]] * PAGES or results != [PAGE] * 2 * PAGES)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_signal_does_not_end_the_waiting(file):
    context, row = Context(1), memoryview(mmap.mmap(-1, PAGE))
    context.prepare(0, file[0], [row], PAGE)
    before = signal.signal(signal.SIGALRM, lambda *_: context.start([0]))  # Until then there is nothing to wait for.
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert context.wait(1) == [(0, PAGE)]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert row == file[1][PAGE : 2 * PAGE]


def test_reads_are_queued_only_with_direct_io(open_folder):
    assert open_folder(io="buffered").reads is ONE_BY_ONE


def test_reads_are_queued_on_a_disk_unless_the_kernel_refuses(open_folder, monkeypatch):
    folder = open_folder()
    if not folder.direct or not os.major(os.fstat(folder.root_fd).st_dev):
        pytest.skip("chunks are not on a disk with direct I/O here")
    assert folder.reads.queue_bytes
    folder.close()
    monkeypatch.setattr(reads_module, "_idle", reads_module.deque())
    monkeypatch.setattr(reads_module, "Context", refuse)
    assert open_folder().reads is ONE_BY_ONE


def test_reads_of_what_is_no_disk_are_not_queued(open_folder, mount):
    assert open_folder(root=str(mount("tmpfs", "size=1m") / "tier")).reads is ONE_BY_ONE


def spoiled(monkeypatch, spoil):
    results, wait = [], Context.wait

    def changed(self, under_way):
        ended = wait(self, under_way)
        results.extend(result for _, result in ended)
        return [(place, spoil(result)) for place, result in ended]

    monkeypatch.setattr(Context, "wait", changed)
    return results


def needs_queue(results):
    if not results:
        pytest.skip("chunks are not on a disk with direct I/O here")


async def scattered(open_tier, lender, layout, **options):
    tier = await open_tier(layout=layout, load_lanes=1, **options)
    for start in range(40):
        await lender.keep(tier, keys_of(1, start=start))
    return tier, keys_of(40)[::2]


async def test_an_error_of_a_queued_read_is_its_chunks_alone(open_tier, lender, layout, monkeypatch):
    tier, keys = await scattered(open_tier, lender, layout)
    with monkeypatch.context() as patch:
        ended = itertools.count()
        results = spoiled(patch, lambda result: -errno.EIO if next(ended) == len(keys) // 2 else result)
        got = await lender.recall(tier, keys)
        needs_queue(results)
    failed = got.index("TransferFailed")
    assert failed
    assert got == [*whole(keys[:failed]), "TransferFailed", *whole(keys[failed + 1 :])]
    assert await lender.recall(tier, keys) == whole(keys)


async def test_a_queued_read_that_comes_short_is_gone_on_with(open_tier, lender, layout, monkeypatch):
    tier, keys = await scattered(open_tier, lender, layout)
    prepare = Context.prepare

    def shortened(self, place, fd, buffers, offset):
        prepare(self, place, fd, [buffers[0][:PAGE]], offset)

    monkeypatch.setattr(Context, "prepare", shortened)
    results = spoiled(monkeypatch, lambda result: result)
    assert await lender.recall(tier, keys) == whole(keys)
    needs_queue(results)
    assert set(results) == {PAGE}


async def test_a_hung_queued_read_is_left_and_its_buffer_stays_lent(open_tier, lender, layout, monkeypatch):
    tier, keys = await scattered(open_tier, lender, layout)
    waiting, go_on, wait = threading.Event(), threading.Event(), Context.wait

    def stuck(self, under_way):
        waiting.set()
        assert go_on.wait(DEADLINE_S)
        return wait(self, under_way)

    monkeypatch.setattr(Context, "wait", stuck)
    load = asyncio.create_task(tier.load(lender.reads(keys)))
    if not await asyncio.to_thread(waiting.wait, 1.0) and load.done():
        pytest.skip("chunks are not on a disk with direct I/O here")
    load.cancel()
    assert await tier.aclose(0) == (1,)
    assert not load.done()
    with pytest.raises(BackendClosed):
        await tier.load([])
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert await tier.aclose(DEADLINE_S) == (0,)


async def test_files_are_closed_whatever_becomes_of_their_reads(open_tier, lender, monkeypatch):
    tier, keys = await scattered(open_tier, lender, "files")
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(footer, "read_footer", _no_memory)
        with pytest.raises(MemoryError):
            await tier.load(lender.reads(keys))
    with monkeypatch.context() as patch:
        spoiled(patch, lambda result: -errno.EIO)
        await tier.load(lender.reads(keys))
    assert len(os.listdir("/proc/self/fd")) == before
    assert await lender.recall(tier, keys) == whole(keys)


def _no_memory(*args):
    raise MemoryError
