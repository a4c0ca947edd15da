"""What a tier promises that says what it holds."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import ClassVar

from kvtier.backend import INVENTORY_BATCH_KEYS, Added, Backend, Inventory, InventoryEvent, Removed, ScanDone, Write
from kvtier.keys import OffloadKey
from kvtier.testing.conformance.lender import Lender, key_of, keys_of
from kvtier.testing.conformance.promises import PATIENCE_S, Promises, ended


class InventoryConformance(Promises):
    """Needs no further fixture. What goes unasked, because room was needed, is `BoundedConformance`'s."""

    many_chunks: ClassVar[int] = INVENTORY_BATCH_KEYS + 1
    """How many chunks are stored to see that a report comes in batches."""

    async def test_what_is_there_is_reported_before_the_scan_is_done(self, backend: Backend, lender: Lender) -> None:
        """Every chunk that is there at the start is `Added` before `ScanDone`, and nothing else is."""
        keys = keys_of(20)
        await lender.keep(backend, keys)
        await backend.delete(keys[15:])
        events = await _scan(_watch(backend))
        assert _added(events) == set(keys[:15])

    async def test_an_empty_tier_reports_that_the_scan_is_done(self, backend: Backend) -> None:
        """`ScanDone` comes although there was nothing to report."""
        assert [type(event) for event in await _scan(_watch(backend))] == [ScanDone]

    async def test_reports_come_in_batches(self, backend: Backend, lender: Lender) -> None:
        """No event has more than `INVENTORY_BATCH_KEYS` keys: one of them is a millisecond of an engine's step."""
        keys = keys_of(self.many_chunks)
        row = lender.rows(1)[0]
        for start in range(0, len(keys), 256):
            batch = [Write(key, row) for key in keys[start : start + 256]]
            assert list(await backend.store(batch)) == [None] * len(batch)
        events = await _scan(_watch(backend))
        assert _added(events) == set(keys)
        assert all(len(event.keys) <= INVENTORY_BATCH_KEYS for event in events if not isinstance(event, ScanDone))

    async def test_the_report_ends_with_the_tier(self, backend: Backend, lender: Lender) -> None:
        """Closing ends the iteration, with one `ScanDone` in all of it."""
        await lender.keep(backend, keys_of(5))
        follower = Follower(backend)
        await lender.keep(backend, keys_of(5, start=10))
        await follower.until(lambda: follower.scanned)
        await backend.aclose(PATIENCE_S)
        await ended(follower.task)
        follower.task.result()
        assert [type(event) for event in follower.events].count(ScanDone) == 1

    async def test_what_is_there_is_not_reported_as_removed(self, backend: Backend, lender: Lender) -> None:
        """An event is true when it is yielded; what `store` and `delete` were asked to do needs none."""
        keys = keys_of(6)
        follower = Follower(backend)
        await follower.until(lambda: follower.scanned)
        for version in range(4):
            await lender.keep(backend, keys, version)
            await backend.delete(keys[:3])
            await lender.keep(backend, keys, version)
        follower.held.update(keys)
        await asyncio.sleep(self.settle_s)
        assert follower.held == set(keys)
        await backend.aclose(PATIENCE_S)
        await ended(follower.task)
        assert follower.held == set(keys)

    async def test_a_consumer_may_go_away(self, backend: Backend, lender: Lender) -> None:
        """Cancelling whoever listens costs the tier nothing."""
        await lender.keep(backend, keys_of(3))
        follower = Follower(backend)
        await follower.until(lambda: follower.scanned)
        follower.task.cancel()
        await ended(follower.task)
        assert follower.task.cancelled()
        await lender.keep(backend, keys_of(3, start=10))
        assert list(await backend.probe([key_of(0), key_of(10), key_of(20)])) == [True, True, False]


class Follower:
    """Listens to a tier's report in a task of its own, and keeps what it heard."""

    def __init__(self, backend: Backend) -> None:
        self.events: list[InventoryEvent] = []
        self.held: set[OffloadKey] = set()
        """What was reported as added and not as removed since; whoever stores and deletes keeps it up to date."""
        self.scanned = self.complete = False
        self._heard = asyncio.Event()
        self.task = asyncio.create_task(self._follow(_watch(backend)))

    async def _follow(self, events: AsyncIterator[InventoryEvent]) -> None:
        async for event in events:
            self.events.append(event)
            match event:
                case Added(keys):
                    self.held.update(keys)
                case Removed(keys):
                    self.held.difference_update(keys)
                case ScanDone(complete):
                    self.scanned, self.complete = True, complete
            self._heard.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is true that the next events make so; a report that falls silent is a failure."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not true():
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            raise AssertionError(f"the report fell silent after {self.events}, with more to come") from None


def _watch(backend: Backend) -> AsyncIterator[InventoryEvent]:
    assert isinstance(backend, Inventory), f"{type(backend).__name__} has no watch()"
    return backend.watch()


async def _scan(events: AsyncIterator[InventoryEvent]) -> list[InventoryEvent]:
    """Collect events up to `ScanDone`."""
    seen: list[InventoryEvent] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            async for event in events:
                seen.append(event)
                if isinstance(event, ScanDone):
                    return seen
    raise AssertionError(f"no ScanDone after {seen}")


def _added(events: list[InventoryEvent]) -> set[OffloadKey]:
    """Return all keys that were reported before the scan was done; nothing may have been taken back."""
    assert not any(isinstance(event, Removed) for event in events)
    return {key for event in events if isinstance(event, Added) for key in event.keys}
