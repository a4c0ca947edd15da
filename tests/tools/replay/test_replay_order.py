"""The order of concurrent requests that share blocks."""

import asyncio
from collections.abc import Sequence

import pytest

from kvtier.tools.replay.replay import BlockClaims, ClaimTurn


class Watched:
    """Claims whose requests run as tasks; records those that were let through."""

    def __init__(self) -> None:
        self.order = BlockClaims()
        self.through: list[str] = []
        self.turns: dict[str, ClaimTurn] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def admit(self, name: str, blocks: Sequence[int]) -> None:
        self.turns[name] = self.order.admit(blocks)
        self.tasks[name] = asyncio.create_task(self._wait(name))
        await self.settle()

    async def _wait(self, name: str) -> None:
        await self.order.wait(self.turns[name])
        self.through.append(name)

    async def looked_up(self, name: str, hits: int) -> None:
        self.order.looked_up(self.turns[name], hits)
        await self.settle()

    async def leave(self, name: str) -> None:
        self.order.leave(self.turns[name])
        await self.settle()

    async def settle(self) -> None:
        """Let every task run until it waits."""
        for _ in range(5):
            await asyncio.sleep(0)


async def test_requests_without_a_common_prefix_do_not_wait() -> None:
    watched = Watched()
    await watched.admit("a", (1, 2))
    await watched.admit("b", (3, 4))
    assert watched.through == ["a", "b"]


@pytest.mark.parametrize("looked_up_first", [True, False])
async def test_a_request_waits_for_the_one_that_computes_its_prefix(looked_up_first: bool) -> None:
    watched = Watched()
    await watched.admit("a", (1, 2))
    if looked_up_first:
        await watched.looked_up("a", 0)
    await watched.admit("b", (1, 2, 3))
    assert watched.through == ["a"]
    await watched.leave("a")  # Without a look-up it has failed.
    assert watched.through == ["a", "b"]


async def test_a_prefix_that_was_computed_before_is_no_reason_to_wait() -> None:
    watched = Watched()
    await watched.admit("a", (1, 2))
    await watched.looked_up("a", 0)
    await watched.leave("a")
    await watched.admit("b", (1, 2, 3))
    await watched.looked_up("b", 2)
    await watched.admit("c", (1, 2, 4))
    assert watched.through == ["a", "b", "c"]


async def test_a_lost_block_that_is_computed_again_is_waited_for_again() -> None:
    watched = Watched()
    await watched.admit("a", (1, 2))
    await watched.looked_up("a", 0)
    await watched.leave("a")
    await watched.admit("b", (1, 2, 3))
    await watched.looked_up("b", 1)  # Block 2 is gone.
    await watched.admit("c", (1, 2, 4))
    assert watched.through == ["a", "b"]
    await watched.leave("b")
    assert watched.through == ["a", "b", "c"]


async def test_each_request_of_a_series_waits_for_the_one_before() -> None:
    watched = Watched()
    for name, blocks in (("a", (1,)), ("b", (1, 2)), ("c", (1, 2, 3))):
        await watched.admit(name, blocks)
    assert watched.through == ["a"]
    for name, hits, through in (("a", 0, "ab"), ("b", 1, "abc"), ("c", 2, "abc")):
        await watched.looked_up(name, hits)
        await watched.leave(name)
        assert watched.through == list(through)


async def test_no_request_waits_for_a_later_one() -> None:
    """Even if a later one computes a lost block: otherwise two could wait for each other."""
    watched = Watched()
    await watched.admit("first", (1, 2))
    await watched.looked_up("first", 0)
    await watched.leave("first")
    await watched.admit("a", (9,))
    await watched.admit("b", (9, 1, 2))
    await watched.admit("c", (1, 2))
    await watched.looked_up("c", 0)
    assert watched.through == ["first", "a", "c"]
    await watched.leave("a")
    assert watched.through == ["first", "a", "c", "b"]
