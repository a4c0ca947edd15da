"""What tests of a host's shared tiers stand on: pools and roots of their own, and keepers in a thread or a process."""

import asyncio
import fcntl
import os
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from kvtier.backend import Namespace, pack_keys
from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier_backends.fs import FsBackend, MemoryBackend
from kvtier_backends.fs.host import meeting
from kvtier_backends.fs.host.keeper import Keeper
from kvtier_backends.fs.host.meeting import Place
from kvtier_backends.fs.segments import wire
from tests.fs.conftest import ROW_BYTES
from tests.own import until_end

LINGER_S = 0.5
CAPACITY_BYTES = 4 << 20  # One segment, so that its slots can be counted.
PATIENCE_S = 20.0


def keepers(place):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if str(place).encode() in Path("/proc", pid, "cmdline").read_bytes().split(b"\0"):
                found.append(int(pid))
    return found


def until(true):
    ends_at = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends_at
        time.sleep(0.005)


def is_unlocked(place):
    fd = os.open(f"{place}.lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


async def filled(tier, start=1_000_000):
    """Store twice what there is room for; return how many chunks are there at once."""
    lender, keys = Lender(ROW_BYTES), keys_of(2 * CAPACITY_BYTES // ROW_BYTES, start)
    for at in range(0, len(keys), 64):
        await lender.keep(tier, keys[at : at + 64])
        assert lender.take_back()
    return sum(await tier.probe(keys))


async def until_filled(tier, chunks):
    async with asyncio.timeout(PATIENCE_S):
        while await filled(tier) != chunks:
            await asyncio.sleep(0.01)


class Peer:
    """The engine's end of a session by hand. Descriptors that come are dropped."""

    def __init__(self, place):
        self.socket = place.connect()
        self.socket.settimeout(PATIENCE_S)
        self._stream = self.socket.makefile("rb")
        self._decode = msgspec.msgpack.Decoder(wire.ToEngine).decode

    def send(self, message):
        self.socket.sendall(wire.framed(message))

    def hello(self, options, *, protocol=wire.PROTOCOL, model="org/model"):
        self.send(wire.Hello(protocol, "memory", options, Namespace(model_name=model), ROW_BYTES, 0.5, "by hand"))
        return self.until(wire.Welcome)

    def call(self, number, kind, keys=()):
        self.send(wire.Call(number, kind, pack_keys(keys)))
        return self.until(wire.Answer)

    def until(self, kind):
        """Return the next message of a kind, and pass over others."""
        while size := int.from_bytes(self._stream.read(wire.LENGTH_BYTES), "little"):
            if isinstance(message := self._decode(self._stream.read(size)), kind):
                return message
        raise EOFError

    def is_ended(self):
        """Return True when the keeper has ended the session; waits for that."""
        with suppress(ConnectionError):
            while self._stream.read(1 << 16):
                pass
        return True

    def close(self):
        self._stream.close()
        self.socket.close()


@pytest.fixture
async def join(root, pool):
    """Return a function that opens a tier of this process, at the root or in the pool; all are closed in the end."""
    opened = []

    async def join(kind="fs", row_bytes=ROW_BYTES, model_name="org/model", **options):
        given = {"shared": True, "capacity_bytes": CAPACITY_BYTES, **options}
        context = tier_context(row_bytes, model_name=model_name)
        own = {"root": str(root), "layout": "segments"} if kind == "fs" else {"pool": pool}
        backend = FsBackend if kind == "fs" else MemoryBackend
        opened.append(await backend.open(backend.options_type(**own | given), context))
        return opened[-1]

    yield join
    for tier in opened:
        assert await tier.aclose(PATIENCE_S) == (0,)


@pytest.fixture
def peer(request):
    """Return a function that begins a session by hand."""

    return lambda place: until_end(request, made := Peer(place), made.close)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(meeting, "LINGER_S", LINGER_S)


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return f"test-{os.getpid()}-{secrets.token_hex(4)}"


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "tier"
    root.mkdir()
    return root


class KeeperThread:
    def __init__(self, place: Place) -> None:
        os.makedirs(place.directory, exist_ok=True)
        self._place, self._listener = place, place.listen()
        self._listener.setblocking(False)
        self.keeper: Keeper | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True)
        self._thread.start()
        assert self._begun.wait(10)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.keeper = Keeper(self._place, self._listener, None)
        self._begun.set()
        await self.keeper.run()

    @contextmanager
    def stopped(self):
        entered, go_on = threading.Event(), threading.Event()
        self._loop.call_soon_threadsafe(lambda: entered.set() or go_on.wait(PATIENCE_S))
        assert entered.wait(PATIENCE_S)
        try:
            yield
        finally:
            go_on.set()

    def ended(self):
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    def end(self) -> None:
        with suppress(RuntimeError):  # It has ended.
            self._loop.call_soon_threadsafe(self.keeper.end)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def keep():
    kept = []

    def keep(place: Place) -> KeeperThread:
        kept.append(KeeperThread(place))
        return kept[-1]

    yield keep
    for keeper in kept:
        keeper.end()
