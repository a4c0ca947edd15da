"""The end: a closed tier refuses, waits for what is under way, and says what it leaves."""

import asyncio

import pytest

from kvtier.backend import Abandoned, Backend
from kvtier.errors import BackendClosed
from kvtier.testing.conformance.lender import Lender, key_of, keys_of, label
from kvtier.testing.conformance.promises import PATIENCE_S, Promises, begun, ended


class TheEnd(Promises):
    async def test_a_closed_tier_refuses_every_call(self, backend: Backend, lender: Lender) -> None:
        """`BackendClosed`: calling a closed tier is the caller's mistake, and never an answer about its chunks."""
        await lender.keep(backend, [key_of(0)])
        assert await backend.aclose(PATIENCE_S) == Abandoned(0)
        with pytest.raises(BackendClosed):
            await backend.probe([key_of(0)])
        with pytest.raises(BackendClosed):
            await backend.load(lender.reads([key_of(0)]))
        with pytest.raises(BackendClosed):
            await backend.store(lender.writes([key_of(0)]))
        with pytest.raises(BackendClosed):
            await backend.delete([key_of(0)])

    async def test_closing_again_is_no_error(self, backend: Backend) -> None:
        """`aclose` may be called any number of times, at once or in turn."""
        closings = await asyncio.gather(*(backend.aclose(PATIENCE_S) for _ in range(2)))
        assert closings == [Abandoned(0)] * 2
        assert await backend.aclose(0) == Abandoned(0)

    async def test_what_is_under_way_is_waited_for(self, backend: Backend, lender: Lender) -> None:
        """Calls that began before `aclose` are answered as if it had not been called."""
        keys, others = keys_of(32), keys_of(32, start=100)
        await lender.keep(backend, keys)
        reads = lender.reads(keys)
        load, store = await begun(backend.load(reads)), await begun(backend.store(lender.writes(others)))
        assert await backend.aclose(PATIENCE_S) == Abandoned(0)
        await ended(load)
        await ended(store)
        assert lender.told(reads, load.result()) == [label(key) for key in keys]
        assert list(store.result()) == [None] * 32

    async def test_new_calls_are_refused_while_closing_waits(self, backend: Backend, lender: Lender) -> None:
        """`aclose` refuses from its first step, not from its last."""
        store = await begun(backend.store(lender.writes(keys_of(32))))
        closing = await begun(backend.aclose(PATIENCE_S))
        with pytest.raises(BackendClosed):
            await backend.load(lender.reads([key_of(0)]))
        await ended(closing)
        await ended(store)
        assert (closing.result(), list(store.result())) == (Abandoned(0), [None] * 32)

    async def test_closing_without_patience_says_what_it_leaves(self, backend: Backend, lender: Lender) -> None:
        """With no time to wait `aclose` answers at once: buffers are out of use, or their calls are counted as left.

        What was left ends by itself, and the next `aclose` sees that.
        """
        keys = keys_of(32)
        await lender.keep(backend, keys)
        batches = [lender.reads(keys) for _ in range(3)]
        loads = [await begun(backend.load(reads)) for reads in batches]
        closing = asyncio.create_task(backend.aclose(0))
        await ended(closing)
        left = closing.result().transfers
        assert 0 <= left <= len(loads)
        if not left:
            await self.look_later(lender, [read.into for reads in batches for read in reads])
        for load in loads:
            await ended(load)
        assert await backend.aclose(PATIENCE_S) == Abandoned(0)

    async def test_a_cancelled_close_can_be_called_again(self, backend: Backend, lender: Lender) -> None:
        """Whoever gives up waiting has closed the tier all the same."""
        store = await begun(backend.store(lender.writes(keys_of(32))))
        closing = await begun(backend.aclose(PATIENCE_S))
        closing.cancel()
        await ended(closing)
        with pytest.raises(BackendClosed):
            await backend.probe([key_of(0)])
        assert await backend.aclose(PATIENCE_S) == Abandoned(0)
        await ended(store)
