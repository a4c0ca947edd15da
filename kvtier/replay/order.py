"""What lets open requests overlap and still find what a replay one by one would have found.

A request whose prefix an earlier open one is about to compute waits for that one; all others go on. Without it the
hits of a replay would depend on how many requests are open: those that look before a chunk is stored would miss it.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """One open request's place in the order."""

    number: int
    block_ids: Sequence[int]
    claimed: set[int]  # Blocks that only this request computes.
    ended: asyncio.Event


class Order:
    """Which open request computes which blocks. Belongs to one event loop."""

    def __init__(self) -> None:
        self._claims: dict[int, Turn] = {}  # Block -> the request that computes it.
        self._computed: set[int] = set()  # Blocks that some request has computed; a tier may have lost them since.
        self._admitted = 0

    def admit(self, block_ids: Sequence[int]) -> Turn:
        """Enter a request behind all others, as the one that computes every block that no other has or does."""
        self._admitted += 1
        turn = Turn(self._admitted, block_ids, set(), asyncio.Event())
        self._claim(turn, [block for block in block_ids if block not in self._computed])
        return turn

    async def wait(self, turn: Turn) -> None:
        """Wait until no earlier open request computes a block of this one."""
        while earlier := next(filter(None, (self._earlier(block, turn) for block in turn.block_ids)), None):
            await earlier.ended.wait()

    def looked_up(self, turn: Turn, hits: int) -> None:
        """Say how many leading blocks were there: those are to be had, and all others are computed now."""
        self._drop(turn, turn.block_ids[:hits])
        self._computed.update(turn.block_ids[:hits])
        self._claim(turn, turn.block_ids[hits:])

    def leave(self, turn: Turn) -> None:
        """Say that what the request computed can be had, as far as it was kept, and that it is over."""
        self._computed.update(turn.claimed)
        self._drop(turn, tuple(turn.claimed))
        turn.ended.set()

    def _earlier(self, block: int, turn: Turn) -> Turn | None:
        # Only earlier ones: so nobody waits for one that waits for him.
        holder = self._claims.get(block)
        return holder if holder is not None and holder.number < turn.number else None

    def _claim(self, turn: Turn, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if self._claims.setdefault(block, turn) is turn:
                turn.claimed.add(block)

    def _drop(self, turn: Turn, block_ids: Sequence[int]) -> None:
        for block in turn.claimed.intersection(block_ids):
            del self._claims[block]
            turn.claimed.discard(block)
