"""The runner's own process: `python -m kvtier.runner.child SOCKET_FD REGION_FD LOG_LEVEL PID NUMBER [OWNER_PIDFD]`.

It imports no torch and never forks. It ends when its socket does, or its owner, even if a fork of that lives on: its
tiers are closed in order, within `close_s`. It ignores signals to the whole process group, such as Ctrl-C: the owner
may still have chunks to store.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Sequence

import msgspec
import uvloop

from kvtier.backend import EngineId
from kvtier.config import EngineConfig
from kvtier.errors import ConfigError, KVTierError, Remedy
from kvtier.memory import GROUP_SIGNALS, Region, fill_standard_streams
from kvtier.runner import messages
from kvtier.runner.runner import Runner, RunnerTier, open_tiers

logger = logging.getLogger(__name__)


class OwnerSocket:
    """The owner's socket: messages of one turn of the loop leave in one frame."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._waiting: list[messages.Message] = []

    def post(self, message: messages.Message) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(message)

    def flush(self) -> None:
        if self._waiting and not self._writer.is_closing():
            self._writer.write(messages.frame(self._waiting))
        self._waiting = []

    async def drain(self) -> None:
        self.flush()
        try:
            await self._writer.drain()
            self._writer.close()
            await self._writer.wait_closed()
        except OSError:
            pass  # The owner is gone.


async def serve(owner_socket: socket.socket, region_fd: int, engine: EngineId, owner_fds: Sequence[int]) -> None:
    """Open the tiers, run the owner's actions, and close the tiers when it says so, or is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=owner_socket, limit=1 << 20)
    owner = OwnerSocket(writer)
    logging.getLogger().handlers = [messages.ToOwner(asyncio.get_running_loop(), owner.post)]
    for fd in owner_fds:
        asyncio.get_running_loop().add_reader(fd, _end, reader, fd)
    first = await messages.read_frame(reader)
    if first is None:
        return
    config = msgspec.msgpack.decode(first, type=EngineConfig)
    opening = asyncio.ensure_future(_opened(config, region_fd, engine))
    # The owner's end shows here while a tier hangs in opening.
    coming = asyncio.ensure_future(messages.read_frame(reader))
    await asyncio.wait({opening, coming}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        return
    try:
        region, tiers = opening.result()
    except Exception as error:  # Sent to the owner, which raises it; bugs are logged, too.
        if not isinstance(error, KVTierError):
            logger.exception("a tier broke as it was opened; see %s", Remedy.OPENING)
        owner.post(messages.OpenFailed(str(error) or repr(error), config=isinstance(error, ConfigError)))
        await owner.drain()
        return
    runner = Runner(tiers, region, owner.post)
    owner.post(messages.Opened())
    runner.start()
    beating = asyncio.ensure_future(_beat(owner, config.limits.heartbeat_s / 2))
    deadline_s = await _take(coming, reader, runner)
    abandoned = await runner.aclose(config.limits.close_s if deadline_s is None else deadline_s)
    beating.cancel()
    owner.post(messages.Closed(abandoned))
    await owner.drain()


async def _opened(config: EngineConfig, region_fd: int, engine: EngineId) -> tuple[Region, list[RunnerTier]]:
    return Region.attach(region_fd, config.rows, config.row_bytes), await open_tiers(config, engine)


def _end(reader: StreamReader, fd: int) -> None:
    """Treat the owner's end as its socket's, which a fork of the owner may keep open."""
    asyncio.get_running_loop().remove_reader(fd)
    reader.feed_eof()


async def _take(coming: Awaitable[bytes | None], reader: StreamReader, runner: Runner) -> float | None:
    """Submit actions until the owner closes; return the deadline for that, or None if the owner is gone."""
    body = await coming
    while body is not None:
        actions: list[messages.Action] = []
        for action in messages.actions_of(body):
            if isinstance(action, messages.Close):
                return action.deadline_s
            actions.append(action)
        runner.submit(actions)
        body = await messages.read_frame(reader)
    return None


async def _beat(owner: OwnerSocket, every_s: float) -> None:
    while True:
        owner.post(messages.Beat())
        await asyncio.sleep(every_s)


def main() -> None:
    for group_signal in GROUP_SIGNALS:
        signal.signal(group_signal, signal.SIG_IGN)
    fill_standard_streams()
    socket_fd, region_fd, log_level, pid, number, *owner_fds = map(int, sys.argv[1:])
    logging.basicConfig(level=log_level, format="%(asctime)s kvtier runner %(process)d: %(levelname)s %(message)s")
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(serve(socket.socket(fileno=socket_fd), region_fd, EngineId(pid, number), owner_fds))
    logging.shutdown()
    os._exit(0)  # At once: ending the loop in order would wait for calls that hang in a lane.


if __name__ == "__main__":
    main()
