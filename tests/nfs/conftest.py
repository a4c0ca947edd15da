"""A file server for a run, and guests that mount it."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.nfs.machines import NFS_PORT, PATIENCE_S, SERVER, FileServer, Guest, Network


@pytest.fixture(scope="session")
def network(outside: None) -> Network:
    if "KVTIER_NFS_PROGRAMS" not in os.environ:
        pytest.skip("its guests and their network are made by `tests/nfs/run`")
    return Network()


@pytest.fixture(scope="session")
def file_server(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileServer]:
    server = FileServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def guests(network: Network, file_server: FileServer, tmp_path_factory) -> Iterator[list[Guest]]:
    folder = tmp_path_factory.mktemp("guests")
    guests = [Guest(number, network, folder) for number in (1, 2)]
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Guest.boot, guests))
        yield guests
    finally:
        for guest in guests:
            guest.kill()


@pytest.fixture
def server(file_server: FileServer) -> Iterator[FileServer]:
    """Lend the server to a test that stops it, or kills it: it goes on afterwards."""
    yield file_server
    file_server.go_on()


@pytest.fixture
def folder() -> str:
    """Name a folder of the export that is not there yet."""
    return f"kv-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def on_server(file_server: FileServer, folder: str) -> Path:
    """Where that is for the server."""
    return file_server.export / folder


@pytest.fixture
def mount(guests: list[Guest]) -> Iterator[Callable[..., str]]:
    """Have guests mount the export, until the test ends; return the mount's name."""
    mounted: list[tuple[Guest, str]] = []

    def mount(guest: Guest, options: str = "soft,timeo=50,retrans=2", actimeo: int = 3) -> str:
        name = f"mnt-{uuid.uuid4().hex[:8]}"
        guest.call("mount", name, f"{SERVER}:/kv", f"port={NFS_PORT},vers=4.2,proto=tcp,actimeo={actimeo},{options}")
        mounted.append((guest, name))
        return name

    yield mount
    for guest, name in mounted:
        guest.call("unmount", name)


@pytest.fixture
def open_tier(mount, folder) -> Callable[..., str]:
    """Have a guest mount the export and open a tier in the folder; return the tier's name."""

    def open_tier(guest: Guest, row_bytes: int, *, how: dict[str, Any] | None = None, **options: Any) -> str:
        name = f"tier-{uuid.uuid4().hex[:8]}"
        guest.call("open", name, mount(guest, **(how or {})), folder, row_bytes, **options)
        return name

    return open_tier


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], object]], None]:
    """Wait until a condition holds."""

    def until(condition: Callable[[], object]) -> None:
        ends_at = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_at, condition
            time.sleep(0.05)

    return until
