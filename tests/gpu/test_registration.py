"""Host memory on the device: registered by several processes, in slices, and refused."""

import os
from contextlib import ExitStack

from kvtier.kvcache.transfer import Direction, GroupBlocks, TransferWorker
from kvtier.memory import Region
from kvtier.tools.selftest_checks import TorchDevice, host, plain_caches, random_bytes, require_same, transfer
from tests.gpu.children import Child

PROCESSES = 3
PAGES, PAGE_BYTES = 24, 64 << 10
SLICE_BYTES = 1 << 20  # Several rows.
ROW_BYTES = PROCESSES * PAGE_BYTES
BACKWARDS = [GroupBlocks(range(PAGES), list(reversed(range(PAGES))))]
HUGE_BYTES = {"cpu": 256 << 20, "cuda": 32 << 30}
HUGE_ROW_BYTES = 2 << 20
HUGE_SHARE = 0.4  # Of the memory that is free now: the rest is the machine's.


def slots_of(memory, rank):
    return memory.rows[:, rank * PAGE_BYTES : (rank + 1) * PAGE_BYTES]


def there_and_back(device, slots, right, groups):
    caches = plain_caches(1, len(right), right.shape[1], device.place)
    (cache,) = caches.tensors
    (group,) = groups
    with TransferWorker(caches, slots) as worker:
        cache.copy_(right)
        transfer(worker, Direction.STORE, groups)
        require_same("rows", slots[list(map(int, group.rows))], right)
        cache.zero_()
        transfer(worker, Direction.LOAD, groups)
        require_same("blocks", cache, right)


def share(parent, memory_file, rank, device_name):
    """Use one slot of every row, in a process of its own, before and after another process is killed."""
    device = TorchDevice(device_name)
    with (
        Region.attach(os.open(memory_file, os.O_RDWR), PAGES, ROW_BYTES) as region,
        host.CpuMemory(region, pin_with=device.pin_with, pin_slice_bytes=SLICE_BYTES) as memory,
    ):
        for number in range(2):
            right = random_bytes((PAGES, PAGE_BYTES), PROCESSES * number + rank)
            there_and_back(device, slots_of(memory, rank), right, BACKWARDS)
            parent.send(memory.pinned)
            parent.recv()


def test_several_processes_register_one_region_and_one_that_is_killed_costs_the_others_nothing(outside, device):
    with Region.memfd(PAGES, ROW_BYTES) as region, ExitStack() as stack:
        memory_file = f"/proc/{os.getpid()}/fd/{region.fd}"
        made = [stack.enter_context(Child(share, memory_file, rank, device.name)) for rank in range(PROCESSES)]
        assert [each.answer() for each in made] == [device.has_streams] * PROCESSES
        with host.CpuMemory(region, pin_with=device.pin_with, pin_slice_bytes=SLICE_BYTES) as memory:  # And a fourth.
            assert memory.pinned == device.has_streams
            for rank in range(PROCESSES):
                right = random_bytes((PAGES, PAGE_BYTES), rank).flip(0)
                require_same(f"slots of process {rank}", slots_of(memory, rank), right)
        made[-1].process.kill()
        for each in made[:-1]:
            each.tell("again")
        assert [each.answer() for each in made[:-1]] == [device.has_streams] * (PROCESSES - 1)


def free_bytes():
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1_024


def test_a_huge_region_is_registered_in_slices_and_rows_at_their_edges_come_back(device):
    size_bytes = int(min(HUGE_BYTES[device.name], HUGE_SHARE * free_bytes()))
    rows, slice_bytes = size_bytes // HUGE_ROW_BYTES, min(4 << 30, size_bytes // 4)
    slice_rows = slice_bytes // HUGE_ROW_BYTES
    edges = sorted({0, rows - 1, *(edge + side for edge in range(slice_rows, rows, slice_rows) for side in (-1, 0))})
    with (
        Region.private(rows, HUGE_ROW_BYTES) as region,
        host.CpuMemory(region, pin_with=device.pin_with, pin_slice_bytes=slice_bytes) as memory,
    ):
        assert memory.pinned == device.has_streams
        right = random_bytes((len(edges), HUGE_ROW_BYTES), 1)
        there_and_back(device, memory.rows, right, [GroupBlocks(range(len(edges)), edges)])
