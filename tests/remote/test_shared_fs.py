"""The suites of remote tiers on a directory that several processes share."""

import pytest

from tests.remote.faults import Faults
from tests.remote.mixed import Mixed
from tests.remote.shared import Shared
from tests.remote.shared_fs import SharedFsRemote


@pytest.fixture(scope="session")
def remote(outside: None, tmp_path_factory: pytest.TempPathFactory) -> SharedFsRemote:
    return SharedFsRemote(tmp_path_factory.mktemp("fs"))


class TestSharedFs(Faults, Mixed, Shared):
    pass
