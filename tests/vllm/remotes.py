"""Services that hosts share, each as a tier's configuration, with what can become of it while engines serve.

A service is begun by its fixture on free ports of this machine, and ended by it. Its time-outs are short: tests wait
for them.
"""

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from tests.redis.servers import RedisServer

LIMITS = {"deadline_s": 2.0, "breaker_failures": 2, "breaker_cooldown_s": 0.2, "answer_ttl_s": 0.2}


class Fault(NamedTuple):
    """What becomes of a service, and how it comes back."""

    strike: Callable[[], None]
    mend: Callable[[], None]


class Remote(ABC):
    """A service, and the tier that uses it: the same configuration on every host."""

    faults: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def options(self) -> Mapping[str, Any]:
        """Return the tier's own options, with its type."""

    def fault(self, name: str) -> Fault:
        """Return what happens, by its name: one of `faults`."""
        raise KeyError(name)

    def end(self) -> None:  # noqa: B027  # A folder needs none.
        """Stop the service."""

    def empty(self) -> None:
        """Take everything away that the service has, as somebody else would."""
        raise NotImplementedError

    def tier(self, **changes: Any) -> dict[str, Any]:
        return {**self.options(), "limits": LIMITS, **changes}


class Folder(Remote):
    """A directory that every host has mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def options(self) -> Mapping[str, Any]:
        return {"type": "fs", "root": str(self._folder / "filer"), "shared": True, "locality": "REMOTE"}


class Redis(Remote):
    """A server that forgets everything when it ends."""

    faults = ("hangs", "is killed")

    def __init__(self, folder: Path) -> None:
        self._server = RedisServer(folder).start()

    def options(self) -> Mapping[str, Any]:
        times = {"timeout_s": 0.5, "connect_timeout_s": 0.5, "retry_s": 0.05}
        return {"type": "redis", "servers": [self._server.address], **times}

    def fault(self, name: str) -> Fault:
        signalled = self._server.signal
        return {
            "hangs": Fault(lambda: signalled(signal.SIGSTOP), lambda: signalled(signal.SIGCONT)),
            "is killed": Fault(self._server.kill, lambda: self._server.start() and None),
        }[name]

    def empty(self) -> None:
        self._server.ask("FLUSHALL")

    def end(self) -> None:
        self._server.kill()


REMOTES: dict[str, type[Remote]] = {"fs": Folder, "redis": Redis}
"""The tiers that hosts can share, by type."""

FAULTS = [(name, fault) for name, remote in REMOTES.items() for fault in remote.faults]
