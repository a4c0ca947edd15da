"""A runner's log, both ends: what its process logs comes out in its owner's log, under the same names.

So the owner's program alone decides what is shown, where and how; a runner's stderr is for what ends a process.
"""

import asyncio
import logging
from collections.abc import Callable
from logging.handlers import QueueHandler
from queue import SimpleQueue

from kvtier.runner.messages import Logged, Message

LOGGERS = ("kvtier", "kvtier_backends")


def wanted_level() -> int:
    """Return the least level that kvtier's loggers let through here: what a runner need not send."""
    return min(logging.getLogger(name).getEffectiveLevel() for name in LOGGERS)


class ToOwner(QueueHandler):
    """Posts records, from any thread; what comes after the loop's end is lost."""

    def __init__(self, loop: asyncio.AbstractEventLoop, post: Callable[[Message], None]) -> None:
        """`post` belongs to the loop's thread."""
        super().__init__(SimpleQueue())  # Not used: it is the way in which records are made ready that is.
        self._loop = loop
        self._post = post

    def enqueue(self, record: logging.LogRecord) -> None:
        message = Logged(
            record.name,
            record.levelno,
            record.getMessage(),
            record.created,
            record.process or 0,
            record.pathname,
            record.lineno,
            record.funcName or "",
        )
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._post, message)


def log_again(message: Logged) -> None:
    """Have the owner's loggers handle what a runner has logged."""
    logger = logging.getLogger(message.name)
    if not logger.isEnabledFor(message.level):
        return
    record = logger.makeRecord(
        message.name, message.level, message.path, message.line, message.text, (), None, message.function
    )
    record.created, record.process, record.processName = message.at, message.process, "kvtier-runner"
    logger.handle(record)
