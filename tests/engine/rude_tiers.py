"""Tiers that break their contract: what they do may cost their hits, never the engine."""

import asyncio
import os
import threading
import time

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
CancelsItsOpening = raising(asyncio.CancelledError())
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


class AnswersNothing(DummyBackend):
    """Forgets to return."""

    async def probe(self, keys):
        await super().probe(keys)

    async def load(self, reads):
        await super().load(reads)

    async def store(self, writes):
        await super().store(writes)


class AnswersTooLittle(DummyBackend):
    async def probe(self, keys):
        return (await super().probe(keys))[1:]

    async def load(self, reads):
        return (await super().load(reads))[1:]

    async def store(self, writes):
        return (await super().store(writes))[1:]


class Raises(DummyBackend):
    """Raises what no tier may raise, even before there is anything to wait for."""

    def probe(self, keys):
        raise ZeroDivisionError

    def load(self, reads):
        raise ZeroDivisionError

    async def store(self, writes):
        raise ZeroDivisionError

    def delete(self, keys):
        raise ZeroDivisionError


class Cancels(DummyBackend):
    """Cancels itself."""

    async def load(self, reads):
        raise asyncio.CancelledError

    async def store(self, writes):
        raise asyncio.CancelledError


class Exits(DummyBackend):
    """Ends the program, or tries to."""

    async def probe(self, keys):
        raise SystemExit(1)

    async def load(self, reads):
        raise SystemExit(1)

    async def store(self, writes):
        raise SystemExit("no more")

    async def delete(self, keys):
        raise SystemExit


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


class Nonsense:
    def __bool__(self):
        raise ZeroDivisionError


class AnswersNonsense(DummyBackend):
    """Answers with invalid values."""

    async def probe(self, keys):
        return [Nonsense() for _ in keys]

    async def load(self, reads):
        return 1

    async def store(self, writes):
        return [Nonsense() for _ in writes]


class GoesOnReporting(DummyBackend):
    """Reports what it holds, and does not take the first cancel for an answer."""

    async def watch(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()
        yield
