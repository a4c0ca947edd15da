"""What a tier promises that hears of the requests that are over."""

from typing import ClassVar

from kvtier.backend import Backend, Ranked
from kvtier.keys import OffloadKey
from kvtier.testing.conformance.lender import Lender, key_of, keys_of, label
from kvtier.testing.conformance.measured import occupancy
from kvtier.testing.conformance.promises import Promises


class RankedConformance(Promises):
    """Needs the fixture `small`: an empty tier that evicts by recency and has room for about `room_chunks` chunks."""

    room_chunks: ClassVar[int] = 16

    async def test_a_request_that_is_over_leaves_its_head_newest(self, small: Backend, lender: Lender) -> None:
        """Its chunks came one by one, the tail last; when others need their room, the tail goes first."""
        prefix = keys_of(self.room_chunks // 2)
        for key in prefix:
            await lender.keep(small, [key])
        rank(small, prefix)
        newer = 1_000
        while (run := list(await small.probe(prefix)).count(True)) == len(prefix):
            await lender.keep(small, [key_of(newer)])
            newer += 1
        assert list(await small.probe(prefix)) == [True] * run + [False] * (len(prefix) - run)

    async def test_what_was_ranked_goes_after_what_was_not(self, small: Backend, lender: Lender) -> None:
        """The primary served all of a prefix: in the tier it counts as used all the same."""
        prefix, others = keys_of(4), keys_of(self.room_chunks // 4, start=100)
        await lender.keep(small, prefix)
        await lender.keep(small, others)
        rank(small, prefix)
        newer = 1_000
        while all(await small.probe(others)):
            await lender.keep(small, [key_of(newer)])
            newer += 1
        assert all(await small.probe(prefix))

    async def test_ranking_changes_nothing_that_is_there(self, small: Backend, lender: Lender) -> None:
        """Unknown keys, and keys that come twice, are no matter."""
        keys = keys_of(4)
        await lender.keep(small, keys)
        before = occupancy(small)
        rank(small, [*keys, *keys_of(4, start=100), keys[0]])
        rank(small, [])
        assert occupancy(small) == before
        assert await lender.recall(small, [*keys, key_of(100)]) == [*map(label, keys), "BlockMissing"]


def rank(tier: Backend, keys: list[OffloadKey]) -> None:
    """Say that a request is over that used these keys."""
    assert isinstance(tier, Ranked), f"{type(tier).__name__} has no rank()"
    tier.rank(keys)
