"""A remote tier in the suites: its configuration, and faults of its server and its chunks."""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

from kvtier.backend import SEAL_BYTES
from tests.remote.kit import chunk, key
from tests.remote.outcomes import IN_THE_STORE, Fault
from tests.remote.servers import Proxy

DRIP_BYTES, DRIP_S = 256, 0.02  # A chunk takes seconds, coded or not.
DISTURBANCES = (Fault.HUNG, Fault.KILLED, Fault.RESTARTED, Fault.REFUSED, Fault.RESET)
DISTURBED_S_MAX = 1.0  # Of a server that hangs or is away: about what tiers wait for it.


class Held(NamedTuple):
    row: bytes
    seal: bytes

    @classmethod
    def of(cls, value):
        return cls(value[:-SEAL_BYTES], value[-SEAL_BYTES:])


class Stored(Protocol):
    def held(self, key): ...

    def plant(self, key, held): ...


class Remote(ABC):
    """One remote tier and its service. A session's tests share it, each with its own chunks."""

    name: ClassVar[str]
    stored: Stored
    lacks: Mapping[Fault, str] = {}
    """Faults that this remote cannot have, with reasons."""

    codec = "none"
    """Of tiers that have one."""

    forgets_absences: Mapping[str, str] = {}
    """Options with which a tier soon asks again for a chunk that was absent."""

    waited_for: frozenset[Fault] = frozenset({Fault.HUNG, Fault.SLOW})
    """Faults that end with the tier's time-out."""

    @abstractmethod
    def tier(self, *, by_proxy=False, quick=True):
        """Return a tier's table; `quick`: with short time-outs, which a machine under load may miss by itself."""

    @abstractmethod
    def end(self):
        """End everything."""

    @abstractmethod
    def disturb(self, dice):
        """Apply a short fault that it survives."""

    @contextmanager
    def suffers(self, fault, numbers):
        """Apply a fault for the length of the block. A fault in the store concerns these chunks, and stays."""
        assert fault in IN_THE_STORE
        for number in numbers:
            held = self.stored.held(key(number))
            assert held is not None
            self.stored.plant(key(number), changed(fault, held, number))
        yield


class ServerRemote(Remote):
    proxy: Proxy
    server: Any

    def start(self):
        """Start the server, empty, and wait until it answers."""
        self.server.start()

    def kill(self):
        self.server.kill()

    def signal(self, number):
        self.server.signal(number)

    def fill(self):
        """Make the server reject stores for lack of room."""
        raise NotImplementedError("there is always room")

    def make_room(self):
        """Undo `fill`."""

    def end(self):
        self.proxy.end()
        self.kill()

    def disturb(self, dice):
        fault = dice.choice([fault for fault in DISTURBANCES if fault not in self.lacks])
        with self.suffers(fault, ()):
            time.sleep(dice.uniform(0, DISTURBED_S_MAX))  # Some moment, not for something.

    @contextmanager
    def suffers(self, fault, numbers):
        if fault in IN_THE_STORE:
            with super().suffers(fault, numbers):
                yield
            return
        begin, end = {
            Fault.REFUSED: (self.proxy.refuse, self.proxy.listen),
            Fault.RESET: (self._reset, self.proxy.pass_on),
            Fault.HUNG: (lambda: self.signal(signal.SIGSTOP), lambda: self.signal(signal.SIGCONT)),
            Fault.SLOW: (self._slow, self.proxy.pass_on),
            Fault.KILLED: (self.kill, self.start),
            Fault.RESTARTED: (self._restart, lambda: None),
            Fault.FULL: (self.fill, self.make_room),
        }[fault]
        begin()
        try:
            yield
        finally:
            end()

    def _restart(self):
        self.kill()
        self.start()

    def _reset(self):
        self.proxy.reply = lambda passed: None

    def _slow(self):
        self.proxy.piece_bytes, self.proxy.pause_s = DRIP_BYTES, DRIP_S


def changed(fault, held, number):
    half = len(held.row) // 2  # A coded row is shorter than a chunk.
    match fault:
        case Fault.LENGTH:
            return held._replace(row=held.row[:half])
        case Fault.FLIPPED:
            return held._replace(row=held.row[:half] + bytes([held.row[half] ^ 1]) + held.row[half + 1 :])
        case Fault.TORN:
            return held._replace(row=held.row[:half] + chunk(number + 1)[half : len(held.row)])
        case _:
            return Held(chunk(number + 1), bytes(len(held.seal)))
