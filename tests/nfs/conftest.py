import os
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.nfs.machines import NFS_PORT, SERVER, FileServer, Guest, Network


@pytest.fixture(scope="session")
def network(outside):
    if "KVTIER_NFS_PROGRAMS" not in os.environ:
        pytest.skip("its guests and their network are made by `tests/nfs/run`")
    return Network()


@pytest.fixture(scope="session")
def file_server(network, tmp_path_factory):
    server = FileServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def guests(network, file_server, tmp_path_factory):
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
def server(file_server):
    """Lend the server to a test that stops it, or kills it: it goes on afterwards."""
    yield file_server
    file_server.go_on()


@pytest.fixture
def folder():
    return f"kv-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def on_server(file_server, folder):
    return file_server.export / folder


@pytest.fixture
def mount(request, guests):
    def mount(guest, options="soft,timeo=50,retrans=2", actimeo=3):
        name = f"mnt-{uuid.uuid4().hex[:8]}"
        guest.call("mount", name, f"{SERVER}:/kv", f"port={NFS_PORT},vers=4.2,proto=tcp,actimeo={actimeo},{options}")
        request.addfinalizer(lambda: guest.call("unmount", name))
        return name

    return mount


@pytest.fixture
def open_tier(mount, folder):
    def open_tier(guest, row_bytes, *, how=None, **options):
        name = f"tier-{uuid.uuid4().hex[:8]}"
        guest.call("open", name, mount(guest, **(how or {})), folder, row_bytes, **options)
        return name

    return open_tier
