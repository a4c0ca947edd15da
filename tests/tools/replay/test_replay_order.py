import asyncio

import pytest

from kvtier.tools.replay.replay import BlockClaims


class Watched:
    def __init__(self):
        self.order, self.through, self.turns = BlockClaims(), [], {}
        self.tasks = {}

    async def admit(self, name, blocks):
        self.turns[name] = self.order.admit(blocks)
        self.tasks[name] = asyncio.create_task(self._wait(name))
        await self.settle()

    async def _wait(self, name):
        await self.order.wait(self.turns[name])
        self.through.append(name)

    async def looked_up(self, name, hits):
        self.order.looked_up(self.turns[name], hits)
        await self.settle()

    async def leave(self, name):
        self.order.leave(self.turns[name])
        await self.settle()

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)


SCRIPTS = {
    "without a common prefix nobody waits": [("admit", ("a", (1, 2)), "a"), ("admit", ("b", (3, 4)), "ab")],
    "a request waits for the one that computes its prefix": [
        ("admit", ("a", (1, 2)), "a"),
        ("looked_up", ("a", 0), "a"),
        ("admit", ("b", (1, 2, 3)), "a"),
        ("leave", ("a",), "ab"),
    ],
    "one that failed before its look-up is not waited for": [
        ("admit", ("a", (1, 2)), "a"),
        ("admit", ("b", (1, 2, 3)), "a"),
        ("leave", ("a",), "ab"),
    ],
    "a prefix that was computed before is no reason to wait": [
        ("admit", ("a", (1, 2)), "a"),
        ("looked_up", ("a", 0), "a"),
        ("leave", ("a",), "a"),
        ("admit", ("b", (1, 2, 3)), "ab"),
        ("looked_up", ("b", 2), "ab"),
        ("admit", ("c", (1, 2, 4)), "abc"),
    ],
    "a lost block that is computed again is waited for again": [
        ("admit", ("a", (1, 2)), "a"),
        ("looked_up", ("a", 0), "a"),
        ("leave", ("a",), "a"),
        ("admit", ("b", (1, 2, 3)), "ab"),
        ("looked_up", ("b", 1), "ab"),  # Block 2 is gone.
        ("admit", ("c", (1, 2, 4)), "ab"),
        ("leave", ("b",), "abc"),
    ],
    "no request waits for a later one: otherwise two could wait for each other": [
        ("admit", ("a", (1, 2)), "a"),
        ("looked_up", ("a", 0), "a"),
        ("leave", ("a",), "a"),
        ("admit", ("b", (9,)), "ab"),
        ("admit", ("c", (9, 1, 2)), "ab"),
        ("admit", ("d", (1, 2)), "abd"),
        ("looked_up", ("d", 0), "abd"),  # A lost block is computed by a later one.
        ("leave", ("b",), "abdc"),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
async def test_requests_are_let_through_in_an_order_that_no_concurrency_changes(script):
    watched = Watched()
    for step, given, through in script:
        await getattr(watched, step)(*given)
        assert watched.through == list(through)
