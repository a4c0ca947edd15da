"""Tiers that break their contract: what they do may cost their hits, never the engine."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvtier.backend.contract import Abandoned
from kvtier.backend.lending import Lanes, in_thread
from kvtier.errors import BackendClosed, BackendUnavailable
from kvtier.runner import runner
from kvtier_backends.dummy import DummyBackend


def raising(error: BaseException) -> type[DummyBackend]:
    """Make a tier that raises as it opens."""

    class Raising(DummyBackend):
        @classmethod
        async def open(cls, options: msgspec.Struct, context):
            raise error

    return Raising


Unreachable = raising(BackendUnavailable("not today"))
EndsItsThread = raising(GeneratorExit())


class EndsItsThreadLater(DummyBackend):
    """Ends the loop that it runs on, once a chunk was stored."""

    async def store(self, writes):
        asyncio.get_running_loop().stop()
        return await super().store(writes)


class EndsItsThreadAsItCloses(DummyBackend):
    async def aclose(self, deadline_s: float) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.1)


class Blocks(DummyBackend):
    """Blocks its loop as it opens, until its process is killed."""

    @classmethod
    async def open(cls, options: msgspec.Struct, context):
        threading.Event().wait()
        raise AssertionError


class BlocksOnce(DummyBackend):
    """Blocks its loop for good as it opens, but only once: what its store is called after is a file, and then none."""

    @classmethod
    async def open(cls, options: msgspec.Struct, context):
        if os.path.exists(options.store):
            os.unlink(options.store)
            time.sleep(3_600)  # noqa: ASYNC251  # As a tier may that is not ours.
        return await super().open(options, context)


class Hurries(DummyBackend):
    """Lets the tiers after it have only 0.2 s to open."""

    @classmethod
    async def open(cls, options: msgspec.Struct, context):
        runner.OPEN_S = 0.2
        return await super().open(options, context)


class NeverOpens(DummyBackend):
    @classmethod
    async def open(cls, options: msgspec.Struct, context):
        await asyncio.Event().wait()


class NeverCloses(DummyBackend):
    async def aclose(self, deadline_s):
        await asyncio.Event().wait()


class GivesUpItsQueue(DummyBackend):
    """Not rude at all: stores wait for a turn, which never comes before the tier is closed."""

    async def store(self, writes):
        self.closing = asyncio.Event()
        await self.closing.wait()
        raise BackendClosed("closed before the call's turn came")

    async def aclose(self, deadline_s):
        self.closing.set()
        return await super().aclose(deadline_s)


class FailsToClose(DummyBackend):
    async def aclose(self, deadline_s):
        raise OSError("of a kind that no tier may raise")


def answering(change: Callable[[Any], Any]) -> type[DummyBackend]:
    """Make a tier that moves chunks, and changes its answers."""

    class Answering(DummyBackend):
        async def probe(self, keys):
            return change(await super().probe(keys))

        async def load(self, reads):
            return change(await super().load(reads))

        async def store(self, writes):
            return change(await super().store(writes))

    return Answering


class Nonsense:
    def __bool__(self):
        raise ZeroDivisionError


AnswersNothing = answering(lambda answer: None)  # It forgets to return.
AnswersTooLittle = answering(lambda answer: answer[1:])
AnswersANumber = answering(lambda answer: 1)
AnswersNonsense = answering(lambda answer: [Nonsense() for _ in answer])


def failing(error: type[BaseException]) -> type[DummyBackend]:
    """Make a tier whose calls raise what no tier may raise, some even before there is anything to wait for."""

    class Failing(DummyBackend):
        def probe(self, keys):
            raise error

        def load(self, reads):
            raise error

        async def store(self, writes):
            raise error

        async def delete(self, keys):
            raise error

    return Failing


Raises, Exits = failing(ZeroDivisionError), failing(SystemExit)


class Cancels(DummyBackend):
    """Cancels itself."""

    async def load(self, reads):
        raise asyncio.CancelledError

    async def store(self, writes):
        raise asyncio.CancelledError


class HangsInAThread(DummyBackend):
    """Its stores hang in a thread, which nothing can end but the end of the process."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._lanes = Lanes(1, "hung")

    async def store(self, writes):
        await in_thread(self._lanes, time.sleep, 3_600)
        return await super().store(writes)

    async def aclose(self, deadline_s):
        await super().aclose(0)
        return Abandoned(await self._lanes.aclose(deadline_s))


class HangsAtOpening(DummyBackend):
    @classmethod
    async def open(cls, options: msgspec.Struct, context):
        return await in_thread(Lanes(1, "hung"), time.sleep, 3_600)


class GoesOnReporting(DummyBackend):
    """Reports what it holds, and does not take the first cancel for an answer."""

    async def watch(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()
        yield
