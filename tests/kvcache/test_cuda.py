"""What a CUDA device is told, and what happens without batched copies. The order of copies is proved in `tests/gpu`."""

import ctypes
import importlib
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
        raise RuntimeError("cudaMemcpyBatchAsync of 2 copies: (1, 1)")

    copier = cuda.CudaCopier(Direction.STORE, HOST, copy)
    with pytest.raises(RuntimeError, match="of 2 copies"):
        copier.begin(CopyJob(1, Direction.STORE, (), mark=copier.mark()))
    assert moved == ["first batch"]


class FakeRuntime:
    """What cuda-python's runtime module offers, on host memory; it notes its calls."""

    class cudaMemcpyAttributes:  # noqa: N801
        srcAccessOrder: int  # noqa: N815

    cudaMemcpySrcAccessOrder = int  # noqa: N815

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrCanUseHostPointerForRegisteredMem=91)  # noqa: N815

    def __init__(self, answer=0, *, copies=True, able=(0, 1)):
        self.answer, self.copies, self.able = answer, copies, able
        self.calls = []

    def cudaDeviceGetAttribute(self, attribute, device):  # noqa: N802
        assert (attribute, device) == (91, 0)
        return self.able

    def cudaMemcpyBatchAsync(  # noqa: N802
        self, targets, sources, sizes, count, attributes, starts, kinds, stream
    ):
        assert (starts, kinds, len(attributes)) == ([0], 1, 1)
        self.calls.append((count, attributes[0].srcAccessOrder, stream))
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size if self.copies else 0)
        return (self.answer,)


@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        (None, "No module named 'cuda"),
        (SimpleNamespace(), "has no attribute 'cudaMemcpyAttributes'"),  # cuda-bindings older than 12.8.
        (FakeRuntime(answer=35), r"cudaMemcpyBatchAsync of 1 copies: \(35,\)"),
        (FakeRuntime(copies=False), "says that it copied, and did not"),
        # Batches fault there; single copies are translated.
        (FakeRuntime(able=(0, 0)), "takes no addresses of registered host memory"),
        (FakeRuntime(able=(35, None)), "cudaDeviceGetAttribute: 35"),
    ],
)
def test_without_batched_copies_pages_are_copied_one_by_one_and_the_log_says_why(runtime, reason, monkeypatch, caplog):
    find(runtime, monkeypatch)
    assert cuda.batched_copy(HOST) is None
    assert re.search(reason, caplog.text)


def test_batched_copies_are_tried_once_before_they_are_relied_on(monkeypatch):
    runtime = FakeRuntime()
    find(runtime, monkeypatch)
    assert cuda.batched_copy(HOST) is not None
    assert [(count, order) for count, order, _ in runtime.calls] == [(1, 1)]


def find(runtime, patch):
    """Let cuda-python's runtime be found; None: it is not installed."""

    def find_module(name):
        if runtime is None:
            raise ModuleNotFoundError("No module named 'cuda'")
        return runtime

    patch.setattr(importlib, "import_module", find_module)
    patch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.fixture
def sides():
    cache, slots = torch.arange(80, dtype=torch.int8).view(5, 16), torch.zeros((5, 16), dtype=torch.int8)
    return Sides(((Piece(cache, 0, 16, 0, 16, 16, ()),),), slots, 1, 5)


def test_many_copies_are_several_batches_on_the_stream_of_the_transfer(sides, monkeypatch):
    monkeypatch.setattr(cuda, "BATCH_COPIES_MAX", 2)
    runtime, stream = FakeRuntime(), Stream()
    cache, slots = sides.pieces[0][0].memory, sides.slots
    begin = cuda.batched(sides, cuda._through(runtime))
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
    assert runtime.calls == [(count, order, handle) for order in (in_stream_order, any_time) for count in (2, 2, 1)]


def test_rows_that_could_not_be_pinned_are_copied_one_by_one_and_the_log_says_why(sides, monkeypatch, caplog):
    """Not every device takes a batch of addresses that are not pinned; torch's own copies are right on all of them."""
    runtime = FakeRuntime()
    monkeypatch.setattr(cuda, "batched_copy", lambda device: cuda._through(runtime))
    store = cuda.cuda_copiers(sides, HOST)[1]
    pages = pages_of(GroupBlocks([4, 2], [0, 3]), 1, num_blocks=5, num_rows=5)
    store.begin(CopyJob(1, Direction.STORE, (pages,), mark=store.mark()))()
    assert torch.equal(sides.slots[[0, 3]], sides.pieces[0][0].memory[[4, 2]])
    assert runtime.calls == []
    assert "rows are not pinned" in caplog.text
