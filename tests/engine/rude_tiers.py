"""Tiers that break their contract: what they do may cost their hits, never the engine."""

import asyncio
import os
import threading
import time

from kvtier.backend import Abandoned, Lanes, in_thread
from kvtier.errors import BackendClosed, BackendUnavailable, ConfigError
from kvtier.runner import runner
from kvtier_backends.dummy import DummyBackend


def tier(**calls):
    return type("Tier", (DummyBackend,), calls)


def opening(call):
    """Make a tier that does something else first as it opens."""

    class Opening(DummyBackend):
        @classmethod
        async def open(cls, options, context):
            await call(options)
            return await super().open(options, context)

    return Opening


def raising(error):
    async def call(*_):
        raise error

    return call


async def never(*_):
    await asyncio.Event().wait()


async def block_the_loop(_):
    threading.Event().wait()


async def block_the_loop_once(options):
    """Block if the file that `store` names exists; it is removed, so that the next start does not block."""
    if os.path.exists(options.store):
        os.unlink(options.store)
        time.sleep(3_600)  # noqa: ASYNC251  # As a tier may that is not ours.


async def hurry_others(_):
    runner.OPEN_S = 0.2


async def hang_in_a_thread(_):
    await in_thread(Lanes(1, "hung"), time.sleep, 3_600)


async def end_the_thread(*_):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.1)


Unreachable = opening(raising(BackendUnavailable("not today")))
RefusesRows = opening(raising(ConfigError("chunk_bytes: rows of 1 byte accepted")))
EndsItsThread = opening(raising(GeneratorExit()))
Blocks = opening(block_the_loop)  # Until its process is killed.
BlocksOnce = opening(block_the_loop_once)
Hurries = opening(hurry_others)
NeverOpens = opening(never)
HangsAtOpening = opening(hang_in_a_thread)
NeverCloses = tier(aclose=never)
FailsToClose = tier(aclose=raising(OSError("of a kind that no tier may raise")))
EndsItsThreadAsItCloses = tier(aclose=end_the_thread)
Cancels = tier(load=raising(asyncio.CancelledError()), store=raising(asyncio.CancelledError()))


class EndsItsThreadLater(DummyBackend):
    """Ends the loop that it runs on, once a chunk was stored."""

    async def store(self, writes):
        asyncio.get_running_loop().stop()
        return await super().store(writes)


class GivesUpItsQueue(DummyBackend):
    """Not rude at all: stores wait for a turn, which never comes before the tier is closed."""

    async def store(self, writes):
        self.closing = asyncio.Event()
        await self.closing.wait()
        raise BackendClosed("closed before the call's turn came")

    async def aclose(self, deadline_s):
        self.closing.set()
        return await super().aclose(deadline_s)


def answering(change):
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


def failing(error):
    """Make a tier whose calls raise what no tier may raise, some even before there is anything to wait for."""

    def at_once(*_):
        raise error

    return tier(probe=at_once, load=at_once, store=raising(error), delete=raising(error))


Raises, Exits = failing(ZeroDivisionError), failing(SystemExit)


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


class GoesOnReporting(DummyBackend):
    """Reports what it holds, and does not take the first cancel for an answer."""

    async def watch(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()
        yield
