"""Errors that end a CUDA context, each in a child: a transfer then fails and says so, or the driver ends the process.

A transfer that is reported as made, or hangs, is a fault. So is the end of a process by Python.
"""

import ctypes
import os
from contextlib import suppress
from functools import partial

import pytest
import torch

from kvtier.kvcache.transfer import Direction, GroupBlocks, TransferWorker
from kvtier.kvcache.transfer.cuda import batched_copy, copiers_with
from kvtier.memory import Region
from kvtier.tools.selftest_checks import (
    NotHere,
    TorchDevice,
    host,
    plain_caches,
    random_bytes,
    require_same,
    submit,
    transfer,
)
from tests.gpu.children import Child

PAGES, PAGE_BYTES = 24, 64 << 10
EVERYTHING = [GroupBlocks(range(PAGES), range(PAGES))]
WAIT_S = 60.0  # A transfer takes milliseconds.
FAR = 1 << 46  # An address this much further on is in no allocation.
DEVICE_BYTES = 256 << 20  # A child without memory gets this much of the device: its caches, and little more.

pytestmark = [
    pytest.mark.usefixtures("outside"),
    pytest.mark.skipif(os.environ.get("KVTIER_DEVICE") != "cuda", reason="only a CUDA device has a context"),
]


def in_a_child(parent, work):
    """Do the work, send its result, and end at once: a context that has ended cannot be taken down in order."""
    try:
        parent.send(work(TorchDevice("cuda")))
    except NotHere as reason:
        parent.send(f"skip: {reason}")
    except BaseException as error:  # noqa: BLE001  # The parent reports it.
        parent.send(f"wrong: {type(error).__name__}: {error}")
    os._exit(0)


def failure(spoil, device):
    caches = plain_caches(1, PAGES, PAGE_BYTES, device.place)
    with Region.private(PAGES, PAGE_BYTES) as region, host.CpuMemory(region, pin_with=device.pin_with) as memory:
        worker = TransferWorker(caches, memory.rows, copiers=device.copiers)
        try:
            spoil(device)
            submit(worker, Direction.STORE, EVERYTHING)
        except RuntimeError as error:
            return f"refused: {error}"
        assert worker.wait([1], WAIT_S), "the transfer hangs"
        (result,) = worker.poll()
        assert result.error is not None, "a transfer that could not be made is reported as made"
        return f"failed: {result.error}"


def fail_in_a_kernel(device):
    torch._assert_async(torch.zeros(1, device=device.place))  # As compiled models call it.


def reset(device):
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:  # A torch that has it linked in.
        raise NotHere(f"no shared CUDA runtime: {error}") from error
    runtime.cudaDeviceReset()


def copy_astray(device):
    batches = batched_copy(device.place)

    def astray(copies, stream, stable):
        batches(copies._replace(targets=copies.targets + FAR), stream, stable)

    device.copiers = partial(copiers_with, device=device.place, copy=astray)
    return failure(lambda device: None, device)


def without_memory(device):
    """Take all memory that torch may have of the device, store, give it back, and store again."""
    cuda = torch.cuda
    total = cuda.get_device_properties(device.place).total_memory
    cuda.set_per_process_memory_fraction(DEVICE_BYTES / total, device.place)
    caches, right = plain_caches(1, PAGES, PAGE_BYTES, device.place), random_bytes((PAGES, PAGE_BYTES), 1)
    caches.tensors[0].copy_(right)
    with (
        Region.private(PAGES, PAGE_BYTES) as region,
        host.CpuMemory(region, pin_with=device.pin_with) as memory,
        TransferWorker(caches, memory.rows, copiers=device.copiers) as worker,
    ):
        taken = list[torch.Tensor]()
        for size_bytes in (32 << 20, 4 << 20, 1 << 20):
            with suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size_bytes, dtype=torch.int8, device=device.place))
        submit(worker, Direction.STORE, EVERYTHING)
        assert worker.wait([1], WAIT_S), "the transfer hangs"
        (first,) = worker.poll()
        taken.clear()
        cuda.empty_cache()
        memory.rows.zero_()
        transfer(worker, Direction.STORE, EVERYTHING)
        require_same("rows of a store after memory ran out", memory.rows, right)
    return "made" if first.error is None else f"failed: {first.error}"


@pytest.mark.parametrize(
    "work",
    [copy_astray, partial(failure, fail_in_a_kernel), partial(failure, reset), without_memory],
    ids=["a bad address", "a kernel that fails", "a reset", "no memory"],
)
def test_a_transfer_after_an_error_is_never_reported_as_made_and_does_not_hang(work, device, request):
    may_be_ended = request.node.callspec.id in ("a bad address", "a reset")  # The driver may touch what is gone.
    may_be_made = work is without_memory
    if work is copy_astray and device.way != "batched":
        pytest.skip("only batches are given addresses")
    with Child(in_a_child, work) as made:
        try:
            result = str(made.answer())
        except EOFError:
            made.process.join()
            assert may_be_ended
            assert (made.process.exitcode or 0) < 0, "ended by Python"
            return
    if result.startswith("skip: "):
        pytest.skip(result)
    assert result.startswith(("failed: ", "refused: ")) or (may_be_made and result == "made"), result
