"""The inventory's queue, as an author of a tier uses it."""

import asyncio

from kvtier.backend import Added, InventoryEvent, InventoryQueue, OffloadKey, Removed, ScanDone, make_offload_key

A, B = (make_offload_key(name) for name in (b"a", b"b"))
DEADLINE_S = 20.0


async def test_a_consumer_receives_the_keys_the_changes_and_the_end():
    held: dict[OffloadKey, int] = {A: 1}
    queue, told = InventoryQueue(held), list[InventoryEvent]()

    async def listen():
        async for event in queue.watch():
            told.append(event)

    async def heard(events):
        while len(told) < events:
            await asyncio.sleep(0)

    async with asyncio.timeout(DEADLINE_S):
        consumer = asyncio.create_task(listen())
        await heard(1)
        queue.scan_ended(complete=True)
        await heard(2)
        held[B] = 2
        queue.added(B)
        await heard(3)
        del held[A]
        queue.lost(A)
        await heard(4)
        queue.close()
        await consumer
    assert told == [Added([A]), ScanDone(complete=True), Added([B]), Removed([A])]


async def test_a_queue_that_is_closed_has_nothing_to_tell():
    queue = InventoryQueue({A: 1})
    queue.close()
    assert [event async for event in queue.watch()] == []
