"""Threads for calls that may never end. A late thread is abandoned to its call, and another takes its place."""

import asyncio
import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from kvtier.backend import BackendUnavailable, Lanes

LATE_MAX = 64  # Abandoned calls that still run: with more, the client counts as lost.

T = TypeVar("T")


class Late(Exception):
    """The call missed its deadline. It keeps running and its result is discarded."""


class Threads:
    """One daemon thread for each call in flight. Belongs to one event loop."""

    def __init__(self, tier_name: str) -> None:
        self._tier_name = tier_name
        self._idle: list[Lanes] = []
        self._waiting: set[asyncio.Future[Any]] = set()
        self._under_way: set[Future[Any]] = set()
        self._given_up = False

    async def run(
        self, call: Callable[[], T], ends_at: Callable[[], float], *, unwanted: Callable[[T], object] | None = None
    ) -> T:
        """Return the call's result, or raise its error.

        Raises `Late` at `ends_at`, by `time.monotonic`, which may move meanwhile, or at `give_up`. Then, and if the
        waiting task is cancelled, the call goes on in its thread, and `unwanted` gets its result. Raises
        `BackendUnavailable` at once while too many calls are late.
        """
        self.check()
        if self._given_up:
            raise Late
        lanes = self._one()
        job = lanes.submit(call)
        self._under_way.add(job)
        job.add_done_callback(self._under_way.discard)
        waiting = asyncio.wrap_future(job)
        self._waiting.add(waiting)
        ended = False
        try:
            while True:
                await asyncio.wait({waiting}, timeout=max(0.0, ends_at() - time.monotonic()))
                if waiting.done() or ends_at() <= time.monotonic():
                    break
            ended = waiting.done() and not waiting.cancelled()
        finally:
            self._waiting.discard(waiting)
            if ended:
                self._idle.append(lanes)
            else:
                lanes.shutdown(wait=False)  # The thread ends with the call.
                waiting.cancel()
                if unwanted is not None:
                    job.add_done_callback(partial(_hand_over, unwanted))
        if not ended:
            raise Late
        try:
            return waiting.result()
        finally:
            del job, waiting  # An error's traceback keeps this frame, which must not keep the error.

    def check(self) -> None:
        """Raise `BackendUnavailable` if too many calls are late."""
        if len(self._under_way) - len(self._waiting) >= LATE_MAX:
            why = f"{self._tier_name}: {LATE_MAX} calls of its client are late and still running"
            raise BackendUnavailable(why) from TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def give_up(self) -> None:
        """Raise `Late` in every waiting and later call."""
        self._given_up = True
        for waiting in list(self._waiting):
            waiting.cancel()

    async def ended(self, ends_at: float) -> bool:
        """Wait until no call is in flight; return False at the deadline."""
        left = {asyncio.wrap_future(job) for job in list(self._under_way)}
        if left:
            await asyncio.wait(left, timeout=max(0.0, ends_at - time.monotonic()))
        for waiting in left:
            waiting.cancel()
        return not self._under_way

    def shutdown(self) -> None:
        """End the idle threads."""
        while self._idle:
            self._idle.pop().shutdown(wait=False)

    def _one(self) -> Lanes:
        if self._idle:
            return self._idle.pop()
        try:
            return Lanes(1, f"kvtier-{self._tier_name}")
        except RuntimeError as error:
            raise BackendUnavailable(f"{self._tier_name}: no thread for a call of its client: {error}") from error


def _hand_over(unwanted: Callable[[T], object], job: "Future[T]") -> None:
    with suppress(Exception):  # Its error is discarded, too.
        unwanted(job.result())
