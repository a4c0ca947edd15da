"""Memory between rows and clients: a slot whose transfer failed is never used again, and what is lost is bounded."""

import asyncio
import ctypes
import mmap
import resource
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier.backend import BackendUnavailable, Staging


def address(view):
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


async def addresses(staging, count, *, retire=False):
    async with staging.lend(count) as slots:
        if retire:
            slots.retire()
        return {address(view) for view in slots.views}


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_slots_are_page_aligned_apart_and_used_again():
    staging = Staging("0:tested", 5_000, 4, retired_max=0)
    async with staging.lend(4) as slots:
        assert [len(view) for view in slots.views] == [5_000] * 4
        places = sorted(map(address, slots.views))
    assert all(place % mmap.PAGESIZE == 0 for place in places)
    assert all(other - one >= 5_000 for one, other in pairwise(places))
    assert (await addresses(staging, 4), staging.retired) == (set(places), 0)


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_a_block_that_fails_or_is_cancelled_has_retired_its_slots(error):
    staging, used = Staging("0:tested", 4_096, 2, retired_max=4), set()

    async def transfer():
        async with staging.lend(2) as slots:
            used.update(map(address, slots.views))
            raise error

    with pytest.raises(error):
        await transfer()
    assert staging.retired == 2
    assert not await addresses(staging, 2) & used


async def test_too_many_retired_slots_are_an_unavailable_tier_and_no_endless_memory():
    staging = Staging("0:tested", 4_096, 2, retired_max=3)
    await addresses(staging, 2, retire=True)
    await addresses(staging, 2, retire=True)
    assert staging.retired == 4
    await addresses(staging, 1)  # One could still be replaced.
    with pytest.raises(BackendUnavailable, match="0:tested: 4 slots of staging are retired, 3 accepted"):
        await addresses(staging, 2)


async def test_a_waiter_fails_when_no_slot_can_come():
    staging = Staging("0:tested", 4_096, 1, retired_max=0)
    async with staging.lend(1) as slots:
        waiting = asyncio.create_task(addresses(staging, 1))
        await turns()
        assert not waiting.done()
        slots.retire()
    with pytest.raises(BackendUnavailable):
        await waiting


async def test_slots_are_lent_first_come_first_served():
    staging, served = Staging("0:tested", 4_096, 3, retired_max=0), []

    async def use(count):
        async with staging.lend(count):
            served.append(count)

    async with staging.lend(2):
        many, few = asyncio.create_task(use(3)), asyncio.create_task(use(1))
        await turns()
        assert served == []
    await asyncio.gather(many, few)
    assert served == [3, 1]


async def test_a_waiter_that_is_cancelled_takes_nothing():
    staging = Staging("0:tested", 4_096, 1, retired_max=0)
    async with staging.lend(1):
        waiting = asyncio.create_task(addresses(staging, 1))
        await turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert len(await addresses(staging, 1)) == 1
    with pytest.raises(ValueError, match="3 slots wanted, 1 to 1 are there"):
        await addresses(staging, 3)


async def test_only_the_slots_whose_transfers_failed_are_retired():
    staging = Staging("0:tested", 4_096, 4, retired_max=4)
    async with staging.lend(4) as slots:
        places = [address(view) for view in slots.views]
        slots.retire([1, 2])
    assert staging.retired == 2
    again = await addresses(staging, 4)
    assert {places[0], places[3]} < again
    assert not {places[1], places[2]} & again


async def test_a_retired_slots_memory_is_given_back_and_its_place_is_not():
    staging = Staging("0:tested", 4_096, 1, retired_max=1)
    async with staging.lend(1) as slots:
        late = slots.views[0]
        late[:] = b"\xff" * 4_096
        slots.retire()
        slots.empty()
    assert late == bytes(4_096)
    late[:] = b"\xff" * 4_096  # Bytes that come later hit nothing.
    async with staging.lend(1) as slots:
        assert slots.views[0] == bytes(4_096)


async def test_a_waiter_fails_without_memory_and_a_later_one_is_served():
    size_bytes = 1 << 30  # More than is left, where every small thing still has room.
    staging = Staging("0:tested", size_bytes, 1, retired_max=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    async with staging.lend(1) as slots:
        waiting = asyncio.create_task(addresses(staging, 1))
        await turns()
        slots.retire()
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + size_bytes // 2, hard))
    try:
        with pytest.raises(BackendUnavailable, match="0:tested: no memory for a slot of staging of 1,073,741,"):
            await asyncio.wait_for(waiting, 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert len(await addresses(staging, 1)) == 1
