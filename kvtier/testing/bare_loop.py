"""What asyncio asks of every event loop whatever it waits for, and a clear refusal of all that reaches outside."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, NoReturn
from weakref import WeakSet

from kvtier.errors import KVTierError

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]

logger = logging.getLogger("asyncio")


class VirtualTimeError(KVTierError):
    """The code under test did something that virtual time cannot go on from: mend what the message names."""


class NotVirtual(VirtualTimeError):
    """The code under test reached for a thread, a socket, a process or a signal: use a fake, or a real loop."""


class BareLoop(asyncio.AbstractEventLoop):
    """Settings, exception handling and asynchronous generators; scheduling and running are the subclass's."""

    def __init__(self) -> None:
        self._debug = False
        self._task_factory: Any = None
        self._exception_handler: ExceptionHandler | None = None
        self._generators: WeakSet[AsyncGenerator[Any, Any]] = WeakSet()

    def get_debug(self) -> bool:
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        self._debug = enabled

    def set_task_factory(self, factory: Any) -> None:
        self._task_factory = factory

    def get_task_factory(self) -> Any:
        return self._task_factory

    def get_exception_handler(self) -> ExceptionHandler | None:
        return self._exception_handler

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        self._exception_handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._exception_handler is not None:
            self._exception_handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log the message, what else is known, and the traceback."""
        known = {key: value for key, value in context.items() if key not in {"message", "exception"}}
        logger.error("%s %r", context.get("message"), known, exc_info=context.get("exception"))

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that were left half-way."""
        generators = list(self._generators)
        self._generators.clear()
        await asyncio.gather(*(generator.aclose() for generator in generators), return_exceptions=True)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there is no executor to wait for."""

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self.is_closed():
            self.call_soon(self.create_task, generator.aclose())


REFUSED = {
    "a thread": ("run_in_executor", "set_default_executor"),
    "a file descriptor": (
        *("add_reader", "remove_reader", "add_writer", "remove_writer"),
        *("connect_read_pipe", "connect_write_pipe"),
    ),
    "a socket": (
        *("sock_recv", "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto"),
        *("sock_connect", "sock_accept", "sock_sendfile", "sendfile", "start_tls", "getaddrinfo", "getnameinfo"),
        *("create_connection", "create_server", "create_unix_connection", "create_unix_server"),
        *("create_datagram_endpoint", "connect_accepted_socket"),
    ),
    "a process": ("subprocess_exec", "subprocess_shell"),
    "a signal": ("add_signal_handler", "remove_signal_handler"),
}


def _refusal(name: str, what: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotVirtual(f"loop.{name} was called: virtual time has no use for {what}; use a fake, or a real loop")

    return refuse


for _what, _names in REFUSED.items():
    for _name in _names:
        setattr(BareLoop, _name, _refusal(_name, _what))
