"""What a tier promises that has a capacity: never more, and what went for room is told."""

import asyncio
from typing import ClassVar

from kvtier.backend import Backend, Inventory
from kvtier.keys import OffloadKey
from kvtier.testing.conformance.inventory import Follower
from kvtier.testing.conformance.lender import Lender, keys_of, label
from kvtier.testing.conformance.measured import occupancy
from kvtier.testing.conformance.promises import PATIENCE_S, Promises, ended


class BoundedConformance(Promises):
    """Needs the fixture `small`: an empty tier with room for at least `room_chunks` chunks, and for less than twice."""

    room_chunks: ClassVar[int] = 16

    async def test_the_capacity_is_never_exceeded(self, small: Backend, lender: Lender) -> None:
        """However much is stored, one after the other or at once, the tier stays within its capacity."""
        for start in range(0, 8 * self.room_chunks, self.room_chunks // 2):
            batches = [keys_of(self.room_chunks // 4, start=1_000 * number + start) for number in range(3)]
            stores = [asyncio.create_task(small.store(lender.writes(batch))) for batch in batches]
            pending = set(stores)
            while pending:
                assert 0 <= occupancy(small).used_bytes <= (occupancy(small).capacity_bytes or 0)
                _, pending = await asyncio.wait(pending, timeout=0.001)
            assert {type(outcome).__name__ for store in stores for outcome in store.result()} <= {"NoneType", "NoSpace"}
        assert occupancy(small).chunks <= 2 * self.room_chunks

    async def test_the_newest_chunks_are_there(self, small: Backend, lender: Lender) -> None:
        """A full tier makes room: what it says it has stored just now can be loaded."""
        for start in range(0, 4 * self.room_chunks, self.room_chunks // 4):
            keys = keys_of(self.room_chunks // 4, start)
            outcomes = await small.store(lender.writes(keys))
            told = await lender.recall(small, keys)
            assert outcomes.count(None) > 0, "a full tier must make room"
            for key, outcome, chunk in zip(keys, outcomes, told, strict=True):
                assert chunk == (label(key) if outcome is None else "BlockMissing")

    async def test_a_batch_that_does_not_fit_is_stored_in_part(self, small: Backend, lender: Lender) -> None:
        """Chunks without room are answered `NoSpace`, or were let go for later ones; nothing fails but they."""
        keys = keys_of(4 * self.room_chunks)
        outcomes = await small.store(lender.writes(keys))
        assert {type(outcome).__name__ for outcome in outcomes} <= {"NoneType", "NoSpace"}
        told = await lender.recall(small, keys)
        assert {label(key) for key in keys} | {"BlockMissing"} >= set(told)
        assert self.room_chunks // 2 <= len(keys) - told.count("BlockMissing") <= 2 * self.room_chunks

    async def test_deleting_makes_room(self, small: Backend, lender: Lender) -> None:
        """What was deleted leaves its room to others, for ever."""
        for round_number in range(6):
            keys = keys_of(self.room_chunks, start=1_000 * round_number)
            await lender.keep(small, keys)
            assert await lender.recall(small, keys) == [label(key) for key in keys]
            await small.delete(keys)
        assert occupancy(small)[:2] == (0, 0)

    async def test_storing_again_takes_no_second_place(self, small: Backend, lender: Lender) -> None:
        """A tier full of chunks takes new versions of them all without losing one."""
        keys = keys_of(self.room_chunks)
        for version in range(4):
            for start in range(0, len(keys), 4):
                await lender.keep(small, keys[start : start + 4], version)
        assert await lender.recall(small, keys) == [label(key, 3) for key in keys]

    async def test_what_went_for_room_is_reported(self, small: Backend, lender: Lender) -> None:
        """A tier whose scan is complete reports all that goes unasked: what it still claims to hold it has."""
        if not isinstance(small, Inventory):
            return
        follower = Follower(small)
        await follower.until(lambda: follower.scanned)
        every: list[OffloadKey] = []
        for start in range(0, 4 * self.room_chunks, 4):
            keys = keys_of(4, start)
            outcomes = await small.store(lender.writes(keys))
            follower.held.update(key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None)
            every += keys
        if follower.complete:
            present = {key for key, there in zip(every, await small.probe(every), strict=True) if there}
            await follower.until(lambda: follower.held == present)
        await small.aclose(PATIENCE_S)
        await ended(follower.task)
