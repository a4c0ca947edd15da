import logging

import pytest
import torch

from kvtier.errors import Remedy
from kvtier.memory.region import Region
from kvtier_backends.cpu import CpuMemory, cuda_runtime

ROW_BYTES = 8_192
SUCCESS, OUT_OF_MEMORY, NOT_REGISTERED = 0, 2, 713

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


class HostRegistry:
    """Registers memory by CUDA's rules, up to a limit: nothing twice, and nothing freed that is not registered."""

    def __init__(self, limit_bytes=1 << 62):
        self.limit_bytes, self.ranges = limit_bytes, {}

    def cudaHostRegister(self, address, size_bytes, flags, /):  # noqa: N802
        assert not any(start < address + size_bytes and address < start + size for start, size in self.ranges.items())
        assert flags == 1  # Portable.
        if sum(self.ranges.values()) + size_bytes > self.limit_bytes:
            return OUT_OF_MEMORY
        self.ranges[address] = size_bytes
        return SUCCESS

    def cudaHostUnregister(self, address, /):  # noqa: N802
        return NOT_REGISTERED if self.ranges.pop(address, None) is None else SUCCESS


def test_a_tensor_and_its_row_are_the_same_bytes():
    with Region.private(4, ROW_BYTES) as region, CpuMemory(region) as memory:
        assert (memory.rows.shape, memory.rows.dtype, memory.rows.is_contiguous()) == ((4, ROW_BYTES), torch.int8, True)
        memory.row(1).fill_(-1)
        region.row(2)[:] = b"\x02" * ROW_BYTES
        assert (bytes(region.row(1)), memory.row(2).tolist()) == (b"\xff" * ROW_BYTES, [2] * ROW_BYTES)
        assert [memory.row(index).data_ptr() - memory.rows.data_ptr() for index in range(4)] == [
            index * ROW_BYTES for index in range(4)
        ]
        assert memory.rows.data_ptr() % 4_096 == 0
        with pytest.raises(IndexError):
            memory.row(4)


def test_memory_stays_under_a_tensor_whatever_is_closed_first():
    region = Region.memfd(2, ROW_BYTES)
    memory = CpuMemory(region)
    slots = memory.rows[:]
    region.close()
    memory.rows.fill_(3)
    for _ in range(2):
        memory.close()
    assert slots.sum().item() == 2 * ROW_BYTES * 3
    with pytest.raises(IndexError):
        memory.row(0)


def test_every_row_is_pinned_once_in_slices_of_whole_rows():
    registry = HostRegistry()
    with Region.private(7, ROW_BYTES) as region:
        with CpuMemory(region, pin_with=registry, pin_slice_bytes=3 * ROW_BYTES - 1) as memory:
            start = memory.rows.data_ptr()
            assert memory.pinned
            assert registry.ranges == {
                start: 2 * ROW_BYTES,
                start + 2 * ROW_BYTES: 2 * ROW_BYTES,
                start + 4 * ROW_BYTES: 2 * ROW_BYTES,
                start + 6 * ROW_BYTES: ROW_BYTES,
            }
        assert registry.ranges == {}
        assert not memory.pinned
        with CpuMemory(region, pin_with=registry, pin_slice_bytes=1):  # A row is larger than a slice.
            assert list(registry.ranges.values()) == [ROW_BYTES] * 7


@pytest.mark.promise("Rows cannot be pinned for the GPU")
def test_what_cannot_be_pinned_whole_is_not_pinned_at_all_and_works(caplog):
    registry = HostRegistry(limit_bytes=3 * ROW_BYTES)
    with (
        caplog.at_level(logging.WARNING, "kvtier_backends.cpu"),
        Region.private(8, ROW_BYTES) as region,
        CpuMemory(region, pin_with=registry, pin_slice_bytes=2 * ROW_BYTES) as memory,
    ):
        assert registry.ranges == {}
        assert not memory.pinned
        memory.row(7).fill_(7)
        assert bytes(region.row(7)) == b"\x07" * ROW_BYTES
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("Host memory stays unpinned, its copies slow: cudaHostRegister failed with 2 at row 2 of 8;")
    assert said.endswith(str(Remedy.UNPINNED))


def test_memory_that_cannot_be_unpinned_is_reported_and_let_go(caplog):
    registry = HostRegistry()
    with Region.private(2, ROW_BYTES) as region:
        memory = CpuMemory(region, pin_with=registry)
        registry.ranges.clear()
        with caplog.at_level(logging.WARNING, "kvtier_backends.cpu"):
            memory.close()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == f"cudaHostUnregister failed with error 713; see {Remedy.UNPINNED}"


@without_cuda
def test_without_cuda_there_is_nothing_to_pin_with():
    assert cuda_runtime() is None
    with Region.private(2, ROW_BYTES) as region, CpuMemory(region, pin_with=cuda_runtime()) as memory:
        assert not memory.pinned


@needs_cuda
def test_a_failure_to_pin_does_not_fail_the_next_kernel(caplog):
    runtime = cuda_runtime()
    with Region.memfd(2, 1 << 20) as region, CpuMemory(region, pin_with=runtime) as first:
        assert first.pinned
        with CpuMemory(region, pin_with=runtime) as second:  # The same memory twice is refused.
            assert not second.pinned
        assert torch.ones(8, device="cuda").sum().item() == 8
    assert "cudaHostRegister failed with 712" in caplog.text
