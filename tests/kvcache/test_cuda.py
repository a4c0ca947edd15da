"""What a CUDA device is told, and what happens without batched copies. The order of copies is proved in `tests/gpu`."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch

from kvtier.kvcache.transfer import cuda
from kvtier.kvcache.transfer.jobs import CopyJob
from kvtier.kvcache.transfer.pages import Direction, GroupBlocks, Piece, Sides, pages_of
from tests.gpu.modelled import Stream, current, model, on

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def modelled(monkeypatch):
    model(monkeypatch)


def test_loads_have_the_more_urgent_stream(monkeypatch):
    priorities = list[int]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: priorities.append(priority))
    for direction in (Direction.LOAD, Direction.STORE):
        assert cuda.CudaCopier(direction, HOST, lambda job: None).directions == (direction,)
    assert priorities == [-1, 0]


def test_a_transfer_that_fails_to_begin_has_let_go_of_its_rows_when_it_says_so():
    """Its first batch may be under way when the second is refused; its rows are another's once the failure is told."""
    moved = list[str]()

    def copy(job):
        current().tell(lambda: moved.append("first batch"))
        raise RuntimeError("cuMemcpyBatchAsync of 2 copies: error 1 at copy 1")

    copier = cuda.CudaCopier(Direction.STORE, HOST, copy)
    with pytest.raises(RuntimeError, match="of 2 copies"):
        copier.begin(CopyJob(1, Direction.STORE, (), mark=copier.mark()))
    assert moved == ["first batch"]


class FakeDriver:
    """A driver's functions, on host memory: called as C, so with the arguments that a driver would get; notes them."""

    def __init__(self, answer=0, *, copies=True, able=(0, 1), missing=False):
        self.calls = []

        def attribute(found, number, device):
            assert (number, device) == (91, 0)
            found[0] = able[1]
            return able[0]

        def batch(targets, sources, sizes, count, attributes, first, kinds, failed, stream):
            assert (first[0], kinds, list(attributes[1:6])) == (0, 1, [0] * 5)
            self.calls.append((count, attributes[0], stream))
            for number in range(count):
                ctypes.memmove(targets[number], sources[number], sizes[number] if copies else 0)
            return answer

        def find(name, found, version, flags, status):
            assert (name, version, flags, status) == (b"cuMemcpyBatchAsync", 12_080, 0, None)
            found[0] = None if missing else ctypes.cast(self.cuMemcpyBatchAsync, ctypes.c_void_p).value
            return 0

        c_int, ints, sizes = ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_size_t)
        self.cuDeviceGet = ctypes.CFUNCTYPE(c_int, ints, c_int)(lambda found, ordinal: 0)
        self.cuDeviceGetAttribute = ctypes.CFUNCTYPE(c_int, ints, c_int, c_int)(attribute)
        self.cuMemcpyBatchAsync = ctypes.CFUNCTYPE(
            c_int, *[sizes] * 3, ctypes.c_size_t, ints, sizes, ctypes.c_size_t, sizes, ctypes.c_size_t
        )(batch)
        self.cuGetProcAddress_v2 = ctypes.CFUNCTYPE(
            c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), c_int, ctypes.c_uint64, ctypes.c_void_p
        )(find)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (None, "cannot open shared object file"),
        (SimpleNamespace(), "has no attribute 'cuGetProcAddress_v2'"),  # Older than CUDA 12.
        (FakeDriver(missing=True), "no cuMemcpyBatchAsync in a driver older than CUDA 12.8"),
        (FakeDriver(answer=35), "cuMemcpyBatchAsync of 1 copies: error 35 at copy 0"),
        (FakeDriver(copies=False), "says that it copied, and did not"),
        # Batches fault there; single copies are translated.
        (FakeDriver(able=(0, 0)), "takes no addresses of registered host memory"),
        (FakeDriver(able=(35, 0)), "cuDeviceGetAttribute: 35"),
    ],
)
def test_without_batched_copies_pages_are_copied_one_by_one_and_the_log_says_why(driver, reason, monkeypatch, caplog):
    find(driver, monkeypatch)
    assert cuda.batched_copy(HOST) is None
    assert re.search(reason, caplog.text)


def test_batched_copies_are_tried_once_before_they_are_relied_on(monkeypatch):
    driver = FakeDriver()
    find(driver, monkeypatch)
    assert cuda.batched_copy(HOST) is not None
    assert [(count, order) for count, order, _ in driver.calls] == [(1, 1)]


def find(driver, patch):
    """Let this driver be found; None: there is none."""
    patch.setattr(cuda, "_DRIVER", "libnone.so.1")
    if driver is not None:
        patch.setattr(ctypes, "CDLL", lambda name: driver)
    patch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.fixture
def sides():
    cache, slots = torch.arange(80, dtype=torch.int8).view(5, 16), torch.zeros((5, 16), dtype=torch.int8)
    return Sides(((Piece(cache, 0, 16, 0, 16, 16, ()),),), slots, 1, 5)


def test_many_copies_are_several_batches_on_the_stream_of_the_transfer(sides, monkeypatch):
    monkeypatch.setattr(cuda, "BATCH_COPIES_MAX", 2)
    driver, stream = FakeDriver(), Stream()
    cache, slots = sides.pieces[0][0].memory, sides.slots
    begin = cuda.batched(sides, cuda._through(driver))
    blocks, rows = [4, 2, 0, 3, 1], [0, 2, 4, 1, 3]
    pages = pages_of(GroupBlocks(blocks, rows), 1, num_blocks=5, num_rows=5)
    kept = cache.clone()
    with on(stream):
        begin(CopyJob(1, Direction.STORE, (pages,)))
        assert torch.equal(slots[rows], kept[blocks])
        cache.zero_()
        begin(CopyJob(2, Direction.LOAD, (pages,)))
    assert torch.equal(cache, kept)
    in_stream_order, any_time = 1, 3  # A store's source may still be written to; rows do not change.
    handle = stream.cuda_stream
    assert driver.calls == [(count, order, handle) for order in (in_stream_order, any_time) for count in (2, 2, 1)]


def test_rows_that_could_not_be_pinned_are_copied_one_by_one_and_the_log_says_why(sides, monkeypatch, caplog):
    """Not every device takes a batch of addresses that are not pinned; torch's own copies are right on all of them."""
    driver = FakeDriver()
    monkeypatch.setattr(cuda, "batched_copy", lambda device: cuda._through(driver))
    store = cuda.cuda_copiers(sides, HOST)[1]
    pages = pages_of(GroupBlocks([4, 2], [0, 3]), 1, num_blocks=5, num_rows=5)
    store.begin(CopyJob(1, Direction.STORE, (pages,), mark=store.mark()))()
    assert torch.equal(sides.slots[[0, 3]], sides.pieces[0][0].memory[[4, 2]])
    assert driver.calls == []
    assert "rows are not pinned" in caplog.text
