"""What tests of a host's shared tiers stand on: pools and roots of their own, and keepers in a thread or a process."""

import asyncio
import os
import secrets
import threading

import pytest

from kvtier_backends.fs.host import meeting
from kvtier_backends.fs.host.keeper import Keeper
from kvtier_backends.fs.host.meeting import Place

LINGER_S = 0.5


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Let keepers' processes end soon after their last session."""
    monkeypatch.setattr(meeting, "LINGER_S", LINGER_S)


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """The name of a pool of memory that nobody else uses."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return f"test-{os.getpid()}-{secrets.token_hex(4)}"


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "tier"
    root.mkdir()
    return root


class KeeperThread:
    """A keeper of this process, on a loop of its own."""

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

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self.keeper.end)
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def keep():
    """Return a function that starts a keeper at a place."""
    kept = []

    def keep(place: Place) -> KeeperThread:
        kept.append(KeeperThread(place))
        return kept[-1]

    yield keep
    for keeper in kept:
        keeper.end()
